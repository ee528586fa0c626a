//! VMs that ran here when the last daemon ended, and that nothing brings up again: they had no backup, or it has not
//! taken them over, and they have no `autostart`. Until they run somewhere, or nobody wants them, they are what is wrong
//! with this host.

use crate::autostart;
use crate::host::Host;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;
use tracing::{info, warn};
use understudy_protocol::autostart::Knowledge;
use understudy_protocol::validity::{Finding, ImageRole};
use understudy_protocol::{HostName, VmName};
use understudy_replication::records::Record;

/// Time between two looks at who has them by now.
const AGAIN: Duration = Duration::from_secs(10);

/// Looks for them among what is on record, for as long as there are any.
pub(crate) fn start(host: &Arc<Host>, records: &[Record]) -> std::io::Result<()> {
    let is_here = |vm: &VmName| host.orphans.why(vm).is_some() || host.keeper_of(vm).is_some();
    let lost = records.iter().filter(|record| ran_without_autostart(record));
    let lost = lost.map(|record| record.definition.name.clone()).filter(|vm| !is_here(vm));
    let lost: Vec<VmName> = lost.collect();
    if lost.is_empty() {
        return Ok(());
    }
    let host = Arc::downgrade(host);
    // The arbiter may take its time.
    thread::Builder::new().name("lost".to_owned()).spawn(move || look_after(&host, lost)).map(drop)
}

fn ran_without_autostart(record: &Record) -> bool {
    record.image.role == ImageRole::Active && !autostart::comes_up(record)
}

fn look_after(host: &Weak<Host>, mut lost: Vec<VmName>) {
    while let Some(host) = host.upgrade().filter(|host| !host.is_closing()) {
        lost.retain(|vm| host.is_still_lost(vm));
        drop(host);
        if lost.is_empty() {
            return;
        }
        thread::sleep(AGAIN);
    }
}

impl Host {
    fn is_still_lost(&self, vm: &VmName) -> bool {
        let since = self.had_since(vm);
        if let Some(since) = &since {
            info!(%vm, "ran here when this host's daemon ended; {since}");
        }
        if since.is_some() || self.is_settled(vm) {
            self.forget_lost_vm(vm);
            return false;
        }
        if self.vms.change(|all| all.lost.insert(vm.clone())) {
            warn!(%vm, "{}", what_to_do(vm));
        }
        true
    }

    /// Host that has, or has had, the VM since it ran here.
    fn had_since(&self, vm: &VmName) -> Option<String> {
        let owner = self.arbiter.as_ref()?.current(vm).ok()??;
        match &owner.host {
            // Whoever claimed it may not have come to start it.
            Some(host) if *host == self.config.name => None,
            Some(_) => has_since(&self.config.name, &self.inquire(vm).ok()?.knowledge()),
            None => {
                let own = self.records.read(vm).ok()??.image;
                own.is_behind(owner.generation).then(|| {
                    format!("another host had it since, at generation {}", owner.generation)
                })
            }
        }
    }

    fn is_lost(&self, vm: &VmName) -> bool {
        self.vms.look(|all| all.lost.contains(vm))
    }

    fn forget_lost_vm(&self, vm: &VmName) {
        self.vms.change(|all| all.lost.remove(vm));
    }

    /// Whether it is here again, or nobody wants it any more.
    fn is_settled(&self, vm: &VmName) -> bool {
        if self.has_guest(vm) || self.keeper_of(vm).is_some() {
            return true;
        }
        // What cannot be read is nothing to be silent about.
        let record = self.records.read(vm);
        record.is_ok_and(|record| record.is_none_or(|it| it.image.role != ImageRole::Active))
    }

    /// All of them.
    pub(crate) fn lost_vms(&self) -> Vec<VmName> {
        let lost = self.vms.look(|all| all.lost.clone());
        lost.into_iter().filter(|vm| !self.is_settled(vm)).collect()
    }

    /// Reason why a VM is not here that this host ran, as the end of a sentence.
    pub(crate) fn why_lost(&self, vm: &VmName) -> Option<String> {
        (self.is_lost(vm) && !self.is_settled(vm)).then(|| what_to_do(vm))
    }

    /// Nobody wants it any more; whether it was lost.
    pub(crate) fn forget_the_lost(&self, vm: &VmName) -> bool {
        if self.why_lost(vm).is_none() {
            return false;
        }
        self.forget_lost_vm(vm);
        // It ended as by a power failure.
        if let Err(error) = self.records.change(vm, |record| record.image.role = ImageRole::Cut) {
            warn!(%vm, "{error}");
        }
        true
    }
}

/// Host that has run a VM since it ran `here`, for certain.
fn has_since(here: &HostName, known: &Knowledge) -> Option<String> {
    match (&known.runner, &known.finding) {
        (Some(other), _) => Some(format!("host {other} runs it")),
        (None, Finding::Valid { host, why, .. }) if host != here => {
            Some(format!("its valid images are on host {host}: {why}"))
        }
        (None, _) => None,
    }
}

/// Problems of the host for want of these.
pub(crate) fn problems(lost: &[VmName]) -> impl Iterator<Item = String> {
    lost.iter().map(|vm| format!("{vm} {}", what_to_do(vm)))
}

fn what_to_do(vm: &VmName) -> String {
    format!(
        "ran here when this host's daemon ended, and has not been started again: `understudy recover {vm}`; \
         `understudy vm stop {vm}` if it is not to run"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::validity::{ArbiterWord, Evidence, ImageRecord, judge};
    use understudy_protocol::{Generation, Ownership, literal};

    /// What host a finds of a VM that ran there at generation 3, and that host b has claimed since.
    fn found(records: &[(&'static str, ImageRole, u64)], answers: bool) -> Knowledge {
        let record = |(host, role, generation): &(&'static str, _, _)| ImageRecord {
            host: literal(host),
            role: *role,
            generation: Generation(*generation),
            claimed_from: None,
        };
        let owner = Ownership { host: Some(literal("b")), generation: Generation(4) };
        let other = || vec![literal("b")];
        let evidence = Evidence {
            records: records.iter().map(record).collect(),
            without: if answers { other() } else { Vec::new() },
            silent: if answers { Vec::new() } else { other() },
            arbiter: ArbiterWord::Says(Some(owner)),
        };
        Knowledge { finding: judge(&evidence), runner: None, busy: None }
    }

    // Before, it was forgotten for good, and ran nowhere.
    #[test]
    fn a_vm_that_another_host_has_merely_claimed_is_still_lost() {
        let has_since = |known| has_since(&literal("a"), &known);
        let ours = ("a", ImageRole::Active, 3);
        assert_eq!(has_since(found(&[ours], true)), None, "it has not run it");
        assert_eq!(has_since(found(&[ours], false)), None, "it may have run it");
        let ran = found(&[ours, ("b", ImageRole::Cut, 4)], true);
        assert!(has_since(ran).unwrap().contains("host b"));
        let runs = Knowledge { runner: Some(literal("b")), ..found(&[ours], true) };
        assert_eq!(has_since(runs).as_deref(), Some("host b runs it"));
    }
}
