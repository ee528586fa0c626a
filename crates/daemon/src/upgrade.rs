//! Fate of this host's VMs when its daemon is restarted for an upgrade, as `closing` will treat
//! them and `autostart` will find them.

use crate::autostart;
use crate::host::Host;
use crate::keeper::Keeper;
use crate::probe::ProbeAnswer;
use crate::vm::Vm;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;
use understudy_protocol::wire::{Kind, SPOKEN};
use understudy_protocol::{HostName, VmName};
use understudy_qemu::release::StateLayout;
use understudy_qemu::{Release, build_id, cache};
use understudy_replication::handshake::Purpose;
use understudy_report::upgrade::{
    KeeperProgram, NextQemu, UpgradeOutcome, UpgradePeer, UpgradePlan, UpgradeStep, Versions,
};
use understudy_report::{Protection, Role, VmStatus};

/// Time for a host to say what it is.
const PATIENCE: Duration = Duration::from_secs(2);

impl Host {
    /// Plan of what an upgrade of this host would do now.
    pub fn upgrade_plan(self: &Arc<Self>) -> UpgradePlan {
        let running = self.versions();
        let next_qemu = self.next_qemu();
        let peers = self.upgrade_peers(&running, next_qemu.as_ref());
        let vms = self.vms.all();
        let step = |(name, vm): (VmName, Vm)| {
            let status = vm.status();
            let facts = Facts {
                comes_up_again: self.comes_up_again(&name),
                being_loaded: self.snapshots.filling(&name).is_some(),
                kept: matches!(&vm, Vm::Primary(vm) if vm.kept().is_some()),
            };
            let outcome = decide(&status, &facts, &peers);
            UpgradeStep { vm: name, group: status.group, outcome }
        };
        let kept = self.keepers().into_iter().map(|keeper| UpgradeStep {
            outcome: UpgradeOutcome::GoesOn { keeper: self.program_of(&keeper) },
            vm: keeper.vm,
            group: None,
        });
        let still = self.orphans.end_with_daemon();
        let still = still.into_iter().filter(|vm| !vms.iter().any(|(known, _)| known == vm));
        let still: Vec<_> =
            still.filter_map(|vm| Some(stands_still(self.orphans.why(&vm)?, vm))).collect();
        UpgradePlan {
            host: self.config.name.clone(),
            running,
            next_qemu,
            vms: vms.into_iter().map(step).chain(kept).chain(still).collect(),
            peers,
        }
    }

    /// All other hosts, asked as [`Host::ask_known`] does.
    fn upgrade_peers(&self, running: &Versions, next: Option<&NextQemu>) -> Vec<UpgradePeer> {
        self.ask_known(|host, addresses| {
            peer(running, next, host.clone(), self.ask_versions(host, addresses))
        })
    }

    /// The QEMU that the next daemon runs VMs with, if another was installed since this one began.
    fn next_qemu(&self) -> Option<NextQemu> {
        self.installed.obstacle()?;
        let found = self.config.qemu_path().map_err(|error| error.to_string());
        let asked = found.and_then(|qemu| {
            cache::capabilities(&qemu, cache::directory().as_deref()).map_err(|it| it.to_string())
        });
        Some(match asked {
            Err(problem) => NextQemu { problem: Some(problem), ..NextQemu::default() },
            Ok(capabilities) => {
                let Release { version, layout } = capabilities.release();
                NextQemu {
                    version: Some(version.to_string()),
                    build: build_id(&capabilities.binary).ok().flatten(),
                    layout: layout.map(String::from),
                    problem: None,
                }
            }
        })
    }

    /// Versions of this daemon.
    pub(crate) fn versions(&self) -> Versions {
        let Release { version, layout } = self.capabilities.release();
        Versions {
            qemu: Some(version.to_string()),
            qemu_build: build_id(&self.capabilities.binary).ok().flatten(),
            qemu_layout: layout.map(String::from),
            ..Versions::of_this_program()
        }
    }

    fn comes_up_again(&self, name: &VmName) -> bool {
        let record = self.records.read(name).ok().flatten();
        record.is_some_and(|record| autostart::comes_up(&record))
    }

    /// Program that a keeper runs, and whether it could be replaced, if it is not what this daemon
    /// runs.
    fn program_of(&self, keeper: &Keeper) -> Option<KeeperProgram> {
        let pid = keeper.pid?;
        let file = |process: &str| {
            let program = fs::metadata(format!("/proc/{process}/exe")).ok()?;
            Some((program.dev(), program.ino()))
        };
        let theirs = file(&pid.to_string());
        let is_daemons = theirs.is_some() && theirs == file("self");
        let obstacle = if is_daemons { None } else { keeper.replacement_obstacle() };
        let version = keeper.program.as_ref().map(|program| program.version.clone());
        let backs_up_for = self.backs_up_for(&keeper.vm);
        Some(KeeperProgram { pid, version, is_daemons, obstacle, backs_up_for })
    }

    fn ask_versions(&self, host: &HostName, addresses: &[SocketAddr]) -> Result<Versions, String> {
        let ask = || -> anyhow::Result<ProbeAnswer> {
            let (link, _) = self.identity.dial_first(host, addresses, |_| Purpose::Probe)?;
            link.set_read_timeout(Some(PATIENCE))?;
            link.expect_json(Kind::Welcome)
        };
        let answer = ask().map_err(|error| format!("{error:#}"))?;
        match answer.host == *host {
            true => Ok(answer.versions()),
            false => Err(format!("its address is that of host {}", answer.host)),
        }
    }
}

fn peer(
    running: &Versions,
    next: Option<&NextQemu>,
    host: HostName,
    answer: Result<Versions, String>,
) -> UpgradePeer {
    let versions = match answer {
        Ok(versions) => versions,
        Err(problem) => {
            let problem = Some(problem);
            return UpgradePeer {
                host,
                versions: None,
                wire: None,
                device_state_fits: None,
                next_device_state_fits: None,
                problem,
            };
        }
    };
    let wire = SPOKEN.agree(versions.spoken());
    let remedy = || SPOKEN.remedy(versions.spoken(), &host);
    let problem =
        wire.is_none().then(|| format!("no wire version is spoken by both: {}", remedy()));
    let takes = |ours: &Release| Some(ours.compare(&release(&versions)?).is_ok());
    UpgradePeer {
        device_state_fits: release(running).as_ref().and_then(takes),
        next_device_state_fits: next.and_then(next_release).as_ref().and_then(takes),
        host,
        wire,
        problem,
        versions: Some(versions),
    }
}

/// The QEMU that a host runs VMs with, if it says so.
fn release(versions: &Versions) -> Option<Release> {
    release_of(versions.qemu.as_ref(), versions.qemu_layout.as_ref())
}

fn next_release(next: &NextQemu) -> Option<Release> {
    release_of(next.version.as_ref(), next.layout.as_ref())
}

fn release_of(version: Option<&String>, layout: Option<&String>) -> Option<Release> {
    let layout = layout.cloned().map(StateLayout::from);
    Some(Release { version: version?.parse().ok()?, layout })
}

/// The step for a guest that the last daemon has left, and that ends with this one.
fn stands_still(why: String, vm: VmName) -> UpgradeStep {
    let outcome = UpgradeOutcome::NeedsPerson {
        reason: format!("it {why}; it would be ended"),
        remedy: format!("wait until it goes on (`understudy status {vm}`)"),
    };
    UpgradeStep { vm, group: None, outcome }
}

/// Facts that are known of a VM beside its status.
struct Facts {
    comes_up_again: bool,
    being_loaded: bool,
    kept: bool,
}

fn decide(status: &VmStatus, facts: &Facts, peers: &[UpgradePeer]) -> UpgradeOutcome {
    let needs_person =
        |reason: String, remedy: String| UpgradeOutcome::NeedsPerson { reason, remedy };
    let name = &status.name;
    match (status.role, &status.protection) {
        (Role::Fenced, _) if facts.kept => needs_person(
            "another host has won it, and may not run it yet: this copy would end".to_owned(),
            format!("wait until the other host runs it (`understudy status {name}`)"),
        ),
        (Role::Fenced, _) => UpgradeOutcome::Nothing,
        (
            Role::Backup,
            Protection::Syncing { peer, .. }
            | Protection::Protected { peer }
            | Protection::Unheld { peer },
        ) => UpgradeOutcome::LosesBackup { primary: peer.clone() },
        (Role::Backup, Protection::Degraded { reason }) => needs_person(
            format!("it could not take over now: {reason}"),
            format!("look at {name} on the host that runs it, and wait until that is over"),
        ),
        (Role::Backup, Protection::Off) => UpgradeOutcome::Nothing,
        (Role::Primary, _) if facts.being_loaded => needs_person(
            "it is still being loaded from a snapshot".to_owned(),
            "wait until all of it is there".to_owned(),
        ),
        (Role::Primary, Protection::Protected { peer } | Protection::Unheld { peer }) => {
            handed_over(peer, peers)
        }
        (Role::Primary, Protection::Syncing { peer, .. }) => needs_person(
            format!("it is being copied to {peer}, and cannot be handed over yet"),
            "wait until it is protected".to_owned(),
        ),
        (Role::Primary, _) if let Some(error) = still(status) => needs_person(
            format!("the guest stands still, and would not power off: {error}"),
            format!("look at `understudy status {name}`"),
        ),
        (Role::Primary, Protection::Degraded { reason }) if status.lapse.is_some() => needs_person(
            format!("{reason}: it is handed over if that ends in time, and shut down if not"),
            "wait until it is protected".to_owned(),
        ),
        (Role::Primary, Protection::Degraded { reason }) => needs_person(
            format!("it should be protected and is not, so that it would be shut down: {reason}"),
            format!("wait until it is protected, or `understudy unprotect {name}`"),
        ),
        (Role::Primary, Protection::Off) => {
            UpgradeOutcome::ShutDown { comes_up_again: facts.comes_up_again }
        }
    }
}

fn still(status: &VmStatus) -> Option<&String> {
    status.lease_over.as_ref().or(status.disk_error.as_ref())
}

fn handed_over(to: &HostName, peers: &[UpgradePeer]) -> UpgradeOutcome {
    let problem = match peers.iter().find(|peer| peer.host == *to) {
        Some(UpgradePeer { problem: Some(problem), .. }) => problem.clone(),
        Some(_) => return UpgradeOutcome::HandedOver { to: to.clone() },
        None => "it is not among the hosts that this one knows".to_owned(),
    };
    UpgradeOutcome::NeedsPerson {
        reason: format!("its backup, host {to}, does not answer as it should: {problem}"),
        remedy: format!("see to host {to} first"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;

    const FACTS: Facts = Facts { comes_up_again: false, being_loaded: false, kept: false };

    fn versions(wire: (u32, u32), qemu: &str) -> Versions {
        let qemu_layout = Some("alike".to_owned());
        let ours = Versions { qemu_layout, ..Versions::of_this_program() };
        let qemu = Some(qemu.to_owned());
        Versions { wire_least: wire.0, wire_highest: wire.1, qemu, ..ours }
    }

    fn b(answer: Result<Versions, String>) -> UpgradePeer {
        let ours = versions((SPOKEN.least, SPOKEN.highest), "10.0.2");
        peer(&ours, None, literal("b"), answer)
    }

    fn status(role: Role, protection: Protection) -> VmStatus {
        VmStatus { protection, ..VmStatus::new(&literal("db"), role) }
    }

    fn protected() -> Protection {
        Protection::Protected { peer: literal("b") }
    }

    #[test]
    fn a_protected_vm_is_handed_to_a_backup_that_answers() {
        let db = status(Role::Primary, protected());
        let fits = b(Ok(versions((17, 17), "10.0.2")));
        assert_eq!((fits.wire, fits.device_state_fits), (Some(17), Some(true)));
        let outcome = decide(&db, &FACTS, &[fits]);
        assert_eq!(outcome, UpgradeOutcome::HandedOver { to: literal("b") });
        for (answer, words) in [
            (Ok(versions((9, 10), "10.0.2")), "upgrade host b first"),
            (Err("silent".to_owned()), "silent"),
        ] {
            match decide(&db, &FACTS, &[b(answer)]) {
                UpgradeOutcome::NeedsPerson { reason, .. } => {
                    assert!(reason.contains(words), "{reason}")
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(matches!(decide(&db, &FACTS, &[]), UpgradeOutcome::NeedsPerson { .. }));
    }

    #[test]
    fn another_qemu_does_not_take_the_device_state() {
        assert_eq!(b(Ok(versions((17, 18), "10.1.0"))).device_state_fits, Some(false));
        let patched = versions((17, 18), "10.0.13");
        assert_eq!(b(Ok(patched.clone())).device_state_fits, Some(true));
        let unlike = Versions { qemu_layout: None, ..patched };
        assert_eq!(b(Ok(unlike)).device_state_fits, Some(false));
        let silent = Versions { qemu: None, ..versions((17, 17), "") };
        assert_eq!(b(Ok(silent)).device_state_fits, None);
    }

    // Before, the QEMU that the daemon had asked was compared: the next daemon runs another.
    #[test]
    fn a_qemu_that_was_installed_meanwhile_is_compared_too() {
        let ours = versions((SPOKEN.least, SPOKEN.highest), "10.0.2");
        let with = |version: Option<&str>| {
            let version = version.map(str::to_owned);
            let next =
                NextQemu { version, layout: ours.qemu_layout.clone(), ..NextQemu::default() };
            peer(&ours, Some(&next), literal("b"), Ok(ours.clone()))
        };
        let fits = |version| with(version).next_device_state_fits;
        assert_eq!(fits(Some("10.0.13")), Some(true));
        assert_eq!((fits(Some("10.1.0")), fits(None)), (Some(false), None));
        assert_eq!(with(Some("10.1.0")).device_state_fits, Some(true), "that which runs");
        assert!(with(Some("10.1.0")).is_lost_to_qemu() && !with(Some("10.0.13")).is_lost_to_qemu());
    }

    #[test]
    fn an_unprotected_vm_is_shut_down_and_comes_up_by_autostart_alone() {
        let db = status(Role::Primary, Protection::Off);
        for comes_up_again in [false, true] {
            let outcome = decide(&db, &Facts { comes_up_again, ..FACTS }, &[]);
            assert_eq!(outcome, UpgradeOutcome::ShutDown { comes_up_again });
        }
    }

    #[test]
    fn what_would_lose_something_needs_a_person() {
        let degraded = || Protection::Degraded { reason: "b is gone".to_owned() };
        let still = VmStatus {
            disk_error: Some("full".to_owned()),
            ..status(Role::Primary, Protection::Off)
        };
        let kept = Facts { kept: true, ..FACTS };
        let loading = Facts { being_loaded: true, ..FACTS };
        for (status, facts) in [
            (status(Role::Primary, degraded()), FACTS),
            (status(Role::Primary, Protection::Off), loading),
            (status(Role::Fenced, degraded()), kept),
            (still, FACTS),
        ] {
            let outcome = decide(&status, &facts, &[]);
            assert!(matches!(outcome, UpgradeOutcome::NeedsPerson { .. }), "{outcome:?}");
        }
    }

    #[test]
    fn other_hosts_vms_lose_their_backup() {
        let outcome = decide(&status(Role::Backup, protected()), &FACTS, &[]);
        assert_eq!(outcome, UpgradeOutcome::LosesBackup { primary: literal("b") });
        let fenced = status(Role::Fenced, Protection::Degraded { reason: "gone".to_owned() });
        assert_eq!(decide(&fenced, &FACTS, &[]), UpgradeOutcome::Nothing);
    }
}
