//! A VM whose last keeper is gone: before its guest goes on in the next one, the arbiter says that it is still this
//! host's, and what another host would count from is renewed.

use super::tending::renewal;
use crate::host::Host;
use crate::vm::PrimaryVm;
use std::sync::Arc;
use understudy_arbiter::Arbiter;
use understudy_network::boot_time;
use understudy_protocol::{
    Generation, HostName, Lease, LeaseAction, LeaseAnswer, LeaseErrand, Ownership, Renewal, VmName,
};

impl Host {
    /// Whether this host still owns a VM at this generation.
    pub(crate) fn ask_for_owner(&self, vm: &VmName, of: Generation) -> LeaseAnswer {
        owner(self.arbiter.as_ref(), &self.config.name, vm, of)
    }

    /// [`Host::ask_for_owner`] of a VM whose guest is to go on now; if another host has a copy, its lease begins
    /// with that. If none begins, none stays: the last keeper's would look as if it were over.
    pub(crate) fn resume_lease(self: &Arc<Self>, vm: &Arc<PrimaryVm>) -> LeaseAnswer {
        // The lease counts from before the first word to the arbiter.
        let (asked, stake) = (boot_time(), self.stake(vm));
        let mut is_due = false;
        vm.tend_lease(
            |lease| lease.tick(asked, stake),
            |machine, actions| {
                is_due = actions.contains(&LeaseAction::Ask(LeaseErrand::Renew));
                self.carry_out(vm, machine, actions, None);
            },
        );
        let renewal = renewal(self, vm.lease(Lease::length), asked);
        let errand = if is_due { LeaseErrand::Renew } else { LeaseErrand::Withdraw };
        let (name, generation) = (vm.name(), vm.generation());
        let answer = tend(self.arbiter.as_ref(), (name, generation), errand, &renewal);
        if is_due && answer == LeaseAnswer::Own {
            vm.tend_lease(
                |lease| lease.answered(boot_time(), asked, answer.clone()),
                |machine, actions| self.carry_out(vm, machine, actions, None),
            );
        }
        answer
    }
}

/// Does the errand of a VM that this host owned at `of`, and says whether it still does.
fn tend(
    arbiter: Option<&Arbiter>,
    (vm, of): (&VmName, Generation),
    errand: LeaseErrand,
    renewal: &Renewal,
) -> LeaseAnswer {
    let known = owner(arbiter, &renewal.host, vm, of);
    match arbiter.filter(|_| known == LeaseAnswer::Own && of != Generation(0)) {
        Some(arbiter) => arbiter.tend(vm, of, errand, renewal),
        None => known,
    }
}

/// Whether host `here` owns a VM at this generation.
fn owner(arbiter: Option<&Arbiter>, here: &HostName, vm: &VmName, of: Generation) -> LeaseAnswer {
    // Without a generation it was started without an arbiter, and nobody else could own it.
    if of == Generation(0) {
        return LeaseAnswer::Own;
    }
    let Some(arbiter) = arbiter else {
        let why =
            format!("it was started with an arbiter (generation {of}), and this host has none now");
        return LeaseAnswer::Unreachable(why);
    };
    match arbiter.current(vm) {
        Err(error) => LeaseAnswer::Unreachable(error.to_string()),
        Ok(Some(Ownership { host: Some(host), generation }))
            if host == *here && generation == of =>
        {
            LeaseAnswer::Own
        }
        Ok(Some(Ownership { host: to, generation })) if generation >= of => {
            let why = match &to {
                Some(host) => format!("host {host} has it in generation {generation}"),
                None => format!("nobody has it since generation {generation}"),
            };
            LeaseAnswer::Moved { to, why }
        }
        // Lost data is no word.
        Ok(_) => LeaseAnswer::Unreachable(format!("the arbiter has no record of generation {of}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use understudy_arbiter::ArbiterConfig;
    use understudy_protocol::{Verdict, literal};

    const FIRST: Generation = Generation(1);

    fn arbiter(path: &Path, host: &'static str) -> Arbiter {
        Arbiter::new(&ArbiterConfig::File { path: path.to_owned() }, &literal(host)).unwrap()
    }

    fn by(host: &'static str) -> Renewal {
        Renewal { host: literal(host), length_ms: 15_000, mark: 7 }
    }

    // Before, the lease of the last keeper stayed where the next one keeps none: 15 s later it looked like that of a host
    // that lets nothing out any more.
    #[test]
    fn where_no_lease_begins_none_stays() {
        let directory = tempfile::tempdir().unwrap();
        let (a, db): (_, VmName) = (arbiter(directory.path(), "a"), literal("db"));
        assert_eq!(a.acquire(&db, Generation(0)), Verdict::Granted(FIRST));
        let tend = |errand| tend(Some(&a), (&db, FIRST), errand, &by("a"));
        assert_eq!(tend(LeaseErrand::Renew), LeaseAnswer::Own);
        assert_eq!(a.renewal(&db, FIRST), Ok(Some(by("a"))));
        assert_eq!(tend(LeaseErrand::Withdraw), LeaseAnswer::Own);
        assert_eq!(a.renewal(&db, FIRST), Ok(None));
    }

    #[test]
    fn nothing_is_changed_for_a_vm_that_is_not_this_hosts() {
        let directory = tempfile::tempdir().unwrap();
        let (a, b) = (arbiter(directory.path(), "a"), arbiter(directory.path(), "b"));
        let db: VmName = literal("db");
        let answer = |arbiter, of| tend(arbiter, (&db, of), LeaseErrand::Renew, &by("a"));
        a.identify().unwrap();
        // Before, a restored guest was ended for it.
        let lost = answer(Some(&a), FIRST);
        assert!(matches!(lost, LeaseAnswer::Unreachable(_)), "lost data is no word: {lost:?}");
        a.acquire(&db, Generation(0));
        b.acquire(&db, FIRST);
        let to = Some(literal("b"));
        assert!(matches!(answer(Some(&a), FIRST), LeaseAnswer::Moved { to: it, .. } if it == to));
        let newer = answer(Some(&a), Generation(3));
        assert!(matches!(newer, LeaseAnswer::Unreachable(_)), "an old record: {newer:?}");
        for of in [FIRST, Generation(2)] {
            assert_eq!(a.renewal(&db, of), Ok(None));
        }
    }

    // Before, it was this host's as if there had never been one.
    #[test]
    fn a_vm_of_an_arbiter_that_was_taken_away_is_nobodys_to_go_on_with() {
        let db: VmName = literal("db");
        let owner = |of| owner(None, &literal("a"), &db, of);
        assert!(matches!(owner(FIRST), LeaseAnswer::Unreachable(_)));
        assert_eq!(owner(Generation(0)), LeaseAnswer::Own);
    }
}
