//! `understudy upgrade`.

mod keepers;

use super::lapse;
use crate::cli::UpgradeArgs;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt::Write;
use understudy_client::{Client, Exit, Failure, output};
use understudy_protocol::{GroupName, VmName};
use understudy_report::upgrade::{
    KeeperProgram, NextQemu, UpgradeOutcome, UpgradePeer, UpgradePlan, UpgradeStep, Versions,
};
use understudy_report::{HostStatus, Protection, Role, VmStatus};

/// Says what a restart would do, or does what must come before it, or after.
pub fn run(client: &Client, args: &UpgradeArgs, json: bool) -> Result<Exit, Failure> {
    if let Some(vms) = &args.keepers {
        return keepers::replace(client, vms, json);
    }
    let handed_over = match args.evacuate {
        true => evacuate(client, json)?,
        false => Vec::new(),
    };
    // On another machine the next daemon is another program than this.
    let next = client.is_local().then(Versions::of_this_program);
    let kept_here = match args.evacuate {
        true => kept_here(&client.status()?).map(|vm| vm.name.clone()).collect(),
        false => Vec::new(),
    };
    let report = Report { plan: client.upgrade_plan()?, next, handed_over, kept_here };
    let ready = report.is_ready(args.evacuate);
    output::show(json, &report, |report| describe(report, args.evacuate))?;
    Ok(if ready { Exit::Ok } else { Exit::Error })
}

/// The report that is printed.
#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    plan: UpgradePlan,
    /// Versions of the daemon after a restart: those of this program.
    next: Option<Versions>,
    /// VMs that were handed over just now.
    handed_over: Vec<VmName>,
    /// VMs that keepers still run here after that: they outlive the daemon, and not the host.
    kept_here: Vec<VmName>,
}

impl Report {
    fn is_ready(&self, evacuated: bool) -> bool {
        let fits = |peer: &UpgradePeer| self.next_wire(peer) != Some(None);
        let is_in_the_way = match evacuated {
            true => !self.left_here().is_empty(),
            false => self.plan.stay_off().next().is_some(),
        };
        self.plan.need_person().count() == 0
            && self.plan.peers.iter().all(fits)
            && !is_in_the_way
            && self.has_qemu(evacuated)
    }

    /// Whether the next daemon has a QEMU, and one that others share: what was evacuated may wait there for that.
    fn has_qemu(&self, evacuated: bool) -> bool {
        let works = self.plan.next_qemu.as_ref().is_none_or(|next| next.problem.is_none());
        works && (evacuated || self.plan.lost_to_qemu().next().is_none())
    }

    /// The VMs that run here, and would be handed over, or shut down, or goes on in keepers.
    fn left_here(&self) -> Vec<&str> {
        let of_daemon = self.plan.handed_over().chain(self.plan.shut_down()).map(|step| &step.vm);
        of_daemon.chain(&self.kept_here).map(VmName::as_str).collect()
    }

    /// The wire version that the next daemon will speak with a host: none if there is none; nothing
    /// if one of them is not known.
    fn next_wire(&self, peer: &UpgradePeer) -> Option<Option<u32>> {
        let theirs = peer.versions.as_ref()?.spoken();
        Some(self.next.as_ref()?.spoken().agree(theirs))
    }
}

/// Hands over what can be; with a VM go all others of its group.
fn evacuate(client: &Client, quiet: bool) -> Result<Vec<VmName>, Failure> {
    let (plan, status) = (client.upgrade_plan()?, client.status()?);
    let of_daemon = plan.handed_over().map(|step| (&step.vm, step.group.as_ref(), false));
    let planned: BTreeSet<&VmName> = plan.handed_over().map(|step| &step.vm).collect();
    // A VM whose protection has lapsed needs a person, as the plan says, who waits; so does this.
    let here = status.vms.iter().filter(|vm| vm.role == Role::Primary && may_be_handed_over(vm));
    let others = here.filter(|vm| vm.keeper_pid.is_some() || vm.lapse.is_some());
    let others = others.filter(|vm| !planned.contains(&vm.name));
    let others = others.map(|vm| (&vm.name, vm.group.as_ref(), vm.lapse.is_some()));
    let mut others: Vec<_> = others.collect();
    others.sort_by_key(|(.., has_lapsed)| *has_lapsed);
    let mut groups: BTreeSet<&GroupName> = BTreeSet::new();
    let mut handed_over = Vec::new();
    for (vm, group, has_lapsed) in of_daemon.chain(others) {
        let goes_along = group.is_some_and(|group| groups.contains(group));
        if !goes_along {
            match lapse::hand_over(client, vm, quiet) {
                Ok(()) => groups.extend(group),
                // The plan names it, which is made anew behind this.
                Err(failure) if has_lapsed => {
                    eprintln!("{vm} is not handed over: {}", failure.message);
                    continue;
                }
                Err(failure) => return Err(failure),
            }
            if !quiet {
                println!("{} is handed over", whom(vm, group));
            }
        }
        handed_over.push(vm.clone());
    }
    Ok(handed_over)
}

/// The VMs that keepers run here.
fn kept_here(status: &HostStatus) -> impl Iterator<Item = &VmStatus> {
    status.vms.iter().filter(|vm| vm.keeper_pid.is_some() && vm.role == Role::Primary)
}

/// Whether it has a backup, which may only have to be waited for.
fn may_be_handed_over(vm: &VmStatus) -> bool {
    let followed =
        matches!(vm.protection, Protection::Protected { .. } | Protection::Unheld { .. });
    followed || vm.lapse.is_some()
}

fn whom(vm: &VmName, group: Option<&GroupName>) -> String {
    match group {
        Some(group) => format!("{vm}, with all others of group {group},"),
        None => vm.to_string(),
    }
}

fn describe(report: &Report, evacuated: bool) -> String {
    let plan = &report.plan;
    let mut text = format!("host {} runs {}\n", plan.host, versions(&plan.running));
    if let Some(next) = &report.next {
        text += &format!("a restart runs {}\n", versions(next));
    }
    if let Some(next) = &plan.next_qemu {
        text += &format!("QEMU was upgraded: {}\n", next_qemu(next));
    }
    for peer in &plan.peers {
        text += &format!("host {}: {}\n", peer.host, describe_peer(report, peer));
    }
    for step in &plan.vms {
        // Writing to a string cannot fail.
        let whom = whom(&step.vm, step.group.as_ref());
        let _ = writeln!(text, "{}: {}", whom.trim_end_matches(','), outcome(step));
    }
    if plan.vms.is_empty() {
        text += "no VMs\n";
    }
    text += &conclusion(report, evacuated);
    text
}

fn versions(versions: &Versions) -> String {
    let mut text = format!("understudy {}, {}", versions.product, versions.spoken());
    if let Some(qemu) = &versions.qemu {
        text += &format!(", QEMU {qemu}");
    }
    if let Some(build) = &versions.qemu_build {
        text += &format!(" (build {build})");
    }
    text
}

fn next_qemu(next: &NextQemu) -> String {
    if let Some(problem) = &next.problem {
        return format!("WRONG: a restart does not run with it: {problem}");
    }
    let version = next.version.as_deref().unwrap_or("unknown");
    let build = next.build.as_ref().map_or(String::new(), |build| format!(" (build {build})"));
    format!("a restart runs QEMU {version}{build}")
}

fn describe_peer(report: &Report, peer: &UpgradePeer) -> String {
    let Some(theirs) = &peer.versions else {
        let problem = peer.problem.as_deref().unwrap_or("nothing is known");
        return format!("DOES NOT ANSWER: {problem}");
    };
    let mut text = versions(theirs);
    if let Some(wire) = peer.wire {
        text += &format!("; wire version {wire} is spoken with it");
    }
    match report.next_wire(peer) {
        Some(Some(wire)) if Some(wire) != peer.wire => {
            text += &format!(", {wire} after a restart");
        }
        Some(None) => {
            let remedy = "upgrade one release after the other";
            text += &format!("; DOES NOT FIT after a restart: {remedy}");
        }
        _ => {}
    }
    text += match peer.device_state_fits {
        Some(true) => "; its QEMU takes the state of this host's devices",
        Some(false) => {
            "; its QEMU DOES NOT TAKE the state of this host's devices: install the same release"
        }
        None => "; it does not say which QEMU it has, and is asked when a VM is protected",
    };
    if peer.is_lost_to_qemu() {
        text += ", and DOES NOT TAKE it after a restart: VMs there are not protected here, nor those here there, \
                 until it has the same QEMU";
    }
    if let Some(problem) = &peer.problem {
        text += &format!("; WRONG: {problem}");
    }
    text
}

fn outcome(step: &UpgradeStep) -> String {
    match &step.outcome {
        UpgradeOutcome::HandedOver { to } => {
            format!("is handed to host {to} first, and loses nothing")
        }
        UpgradeOutcome::ShutDown { comes_up_again: true } => {
            "is asked to power off, and comes up again (autostart)".to_owned()
        }
        UpgradeOutcome::ShutDown { comes_up_again: false } => {
            "is asked to power off, and STAYS OFF: start it again with `understudy vm start`, or \
             protect it before"
                .to_owned()
        }
        UpgradeOutcome::LosesBackup { primary } => format!(
            "runs on at host {primary}, which is without this backup until the daemon is back"
        ),
        UpgradeOutcome::GoesOn { keeper } => goes_on(&step.vm, keeper.as_ref()),
        UpgradeOutcome::Nothing => "is not this host's any more: nothing happens".to_owned(),
        UpgradeOutcome::NeedsPerson { reason, remedy } => {
            format!("NEEDS YOU: {reason}. To do: {remedy}")
        }
    }
}

fn goes_on(vm: &VmName, keeper: Option<&KeeperProgram>) -> String {
    let text = "goes on in its keeper, which stays of its release".to_owned();
    let Some(keeper) = keeper.filter(|keeper| !keeper.is_daemons) else { return text };
    let version = keeper.version.as_ref().map_or(String::new(), |it| format!(", understudy {it}"));
    let (pid, replaces) =
        (keeper.pid, "`understudy upgrade --keepers` replaces it while the guest runs");
    let then = match (&keeper.backs_up_for, &keeper.obstacle) {
        (Some(primary), _) => format!("the VM {}", keepers::comes_later(vm, primary)),
        (None, None) => replaces.to_owned(),
        (None, Some(obstacle)) => format!("it cannot be replaced now: {obstacle}"),
    };
    format!("{text}: process {pid}{version}, is another program than the daemon; {then}")
}

fn conclusion(report: &Report, evacuated: bool) -> String {
    if report.is_ready(evacuated) {
        let restart = "`systemctl restart understudy`";
        return match evacuated {
            true => format!("nothing runs here: the daemon may be restarted ({restart})\n"),
            false => format!("the daemon may be restarted ({restart})\n"),
        };
    }
    let left = report.left_here();
    match evacuated && !left.is_empty() {
        true => format!("NOT YET: {} run here, and are no other host's to run\n", left.join(", ")),
        false => "NOT YET: see above\n".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::tests::host_of;
    use understudy_protocol::literal;

    fn step(vm: &str, outcome: UpgradeOutcome) -> UpgradeStep {
        UpgradeStep { vm: vm.parse().unwrap(), group: None, outcome }
    }

    fn report(vms: Vec<UpgradeStep>, wire: (u32, u32)) -> Report {
        let [qemu, qemu_build] = ["10.0.2", "c0ffee"].map(|text| Some(text.to_owned()));
        let running = Versions { qemu, qemu_build, ..Versions::of_this_program() };
        let (wire_least, wire_highest) = wire;
        let theirs = Versions { wire_least, wire_highest, ..running.clone() };
        let peer = UpgradePeer {
            host: literal("b"),
            versions: Some(theirs),
            wire: Some(17),
            device_state_fits: Some(true),
            next_device_state_fits: None,
            problem: None,
        };
        let next_qemu = None;
        let plan = UpgradePlan { host: literal("a"), running, next_qemu, peers: vec![peer], vms };
        let next = Some(Versions::of_this_program());
        Report { plan, next, handed_over: Vec::new(), kept_here: Vec::new() }
    }

    fn handed_over() -> UpgradeOutcome {
        UpgradeOutcome::HandedOver { to: literal("b") }
    }

    #[test]
    fn a_plan_says_what_becomes_of_each_vm_and_which_versions_meet() {
        let off = UpgradeOutcome::ShutDown { comes_up_again: true };
        let report = report(vec![step("db", handed_over()), step("web", off)], (17, 17));
        let text = describe(&report, false);
        for words in [
            "host a runs understudy",
            "QEMU 10.0.2 (build c0ffee)",
            "wire version 17 is spoken with it",
            "takes the state of this host's devices",
            "db: is handed to host b first",
            "web: is asked to power off, and comes up again",
            "may be restarted",
        ] {
            assert!(text.contains(words), "{words:?} is missing:\n{text}");
        }
        assert!(report.is_ready(false));
        // After an evacuation nothing is to run here.
        assert!(!report.is_ready(true));
        assert!(describe(&report, true).contains("NOT YET: db, web run here"));
    }

    /// What is said of a plan that one VM is in the way of.
    fn not_yet(vm: &str, outcome: UpgradeOutcome) -> String {
        let report = report(vec![step(vm, outcome)], (17, 18));
        assert!(!report.is_ready(false));
        let text = describe(&report, false);
        assert!(text.contains("NOT YET"), "{text}");
        text
    }

    /// Scripts went on, and the VM was off until somebody noticed.
    #[test]
    fn a_vm_that_would_stay_off_is_no_less_than_one_that_needs_a_person() {
        let text = not_yet("web", UpgradeOutcome::ShutDown { comes_up_again: false });
        assert!(text.contains("web: is asked to power off, and STAYS OFF"), "{text}");
    }

    #[test]
    fn a_qemu_that_the_next_daemon_cannot_use_or_share_is_told() {
        let mut report = report(Vec::new(), (17, 18));
        let version = Some("10.1.0".to_owned());
        report.plan.next_qemu = Some(NextQemu { version, ..NextQemu::default() });
        report.plan.peers[0].next_device_state_fits = Some(true);
        assert!(report.is_ready(false));
        report.plan.peers[0].next_device_state_fits = Some(false);
        assert!(!report.is_ready(false));
        assert!(report.is_ready(true), "what is elsewhere by now may wait");
        let text = describe(&report, false);
        assert!(text.contains("a restart runs QEMU 10.1.0"), "{text}");
        assert!(text.contains("DOES NOT TAKE it after a restart"), "{text}");
        // It is no worse than now.
        report.plan.peers[0].device_state_fits = Some(false);
        assert!(report.is_ready(false));
        let problem = Some("it is gone".to_owned());
        report.plan.next_qemu = Some(NextQemu { problem, ..NextQemu::default() });
        assert!(!report.is_ready(true));
        assert!(describe(&report, false).contains("does not run with it: it is gone"));
    }

    #[test]
    fn whoever_must_act_first_is_told() {
        let outcome =
            UpgradeOutcome::NeedsPerson { reason: "copied".into(), remedy: "wait".into() };
        let text = not_yet("db", outcome);
        assert!(text.contains("db: NEEDS YOU: copied. To do: wait"), "{text}");
    }

    #[test]
    fn a_keeper_of_another_program_is_told_with_what_becomes_of_it() {
        let text =
            |is_daemons: bool, obstacle: Option<&str>, backs_up_for: Option<&'static str>| {
                let obstacle = obstacle.map(str::to_owned);
                let version = Some("0.9.0".to_owned());
                let backs_up_for = backs_up_for.map(literal);
                let keeper =
                    Some(KeeperProgram { pid: 7, version, is_daemons, obstacle, backs_up_for });
                let report = report(vec![step("db", UpgradeOutcome::GoesOn { keeper })], (17, 18));
                assert!(report.is_ready(false));
                describe(&report, false)
            };
        assert!(!text(true, None, None).contains("process 7"), "{}", text(true, None, None));
        for (text, words) in [
            (text(false, None, None), "`understudy upgrade --keepers` replaces it"),
            (text(false, Some("in lockstep"), None), "cannot be replaced now: in lockstep"),
            (text(false, None, Some("a")), "a new keeper here when that on host a is replaced"),
        ] {
            assert!(text.contains("process 7, understudy 0.9.0, is another program"), "{text}");
            assert!(text.contains(words), "{text}");
        }
        // A daemon of an older release says nothing of it.
        let step = r#"{"vm":"db","outcome":"goes-on"}"#;
        let step: UpgradeStep = serde_json::from_str(step).unwrap();
        assert_eq!(step.outcome, UpgradeOutcome::GoesOn { keeper: None });
    }

    /// The command once said that nothing ran here.
    #[test]
    fn what_keepers_run_here_is_not_evacuated() {
        let goes_on = step("db", UpgradeOutcome::GoesOn { keeper: None });
        let mut report = report(vec![goes_on], (17, 18));
        assert!(report.is_ready(true), "it is backed up here");
        report.kept_here = vec![literal("db")];
        assert!(!report.is_ready(true));
        assert!(describe(&report, true).contains("NOT YET: db run here"));
    }

    #[test]
    fn a_keeper_hands_over_what_has_a_backup() {
        let vm = |role, keeper_pid, protection| VmStatus {
            keeper_pid,
            protection,
            ..VmStatus::new(&literal("db"), role)
        };
        let protected = || Protection::Protected { peer: literal("b") };
        let lapse = VmStatus {
            lapse: Some("could not take over now: its disk is slow".to_owned()),
            ..vm(Role::Primary, Some(7), Protection::Degraded { reason: "slow".to_owned() })
        };
        assert!(may_be_handed_over(&lapse));
        assert!(may_be_handed_over(&vm(Role::Primary, Some(7), protected())));
        assert!(!may_be_handed_over(&vm(Role::Primary, Some(7), Protection::Off)));
        let vms = vec![
            vm(Role::Primary, Some(7), protected()),
            vm(Role::Primary, None, protected()),
            vm(Role::Backup, Some(7), protected()),
        ];
        assert_eq!(kept_here(&host_of(vms)).count(), 1);
    }

    #[test]
    fn a_host_that_the_next_daemon_will_not_understand_is_told() {
        let report = report(Vec::new(), (9, 16));
        assert!(!report.is_ready(false));
        let text = describe(&report, false);
        assert!(text.contains("DOES NOT FIT after a restart"), "{text}");
    }
}
