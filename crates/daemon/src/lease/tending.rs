//! Renewals, brought to the arbiter one after the other: one that does not answer holds this
//! thread, and nothing else.

use crate::host::Host;
use crate::vm::PrimaryVm;
use crossbeam_channel::Receiver;
use std::sync::Weak;
use std::time::Duration;
use understudy_network::boot_time;
use understudy_protocol::{Lease, LeaseAnswer, LeaseErrand, Renewal, Time};

/// Renewal that is written at this moment.
pub(super) fn renewal(host: &Host, length: Duration, asked: Time) -> Renewal {
    Renewal {
        host: host.config.name.clone(),
        length_ms: length.as_millis() as u64,
        mark: asked.0.as_nanos() as u64,
    }
}

/// Errand, and the VM that it is for.
pub(super) type Errand = (Weak<PrimaryVm>, LeaseErrand);

pub(super) fn run(host: &Weak<Host>, errands: &Receiver<Errand>) {
    for (vm, errand) in errands {
        let Some(host) = host.upgrade() else { return };
        let (Some(vm), Some(arbiter)) = (vm.upgrade(), host.arbiter.clone()) else { continue };
        let (length, generation) = (vm.lease(Lease::length), vm.generation());
        // The lease counts from before the first word to the arbiter.
        let asked = boot_time();
        let renewal = renewal(&host, length, asked);
        // A fail point, for a host whose renewals are a long time on their way.
        fail::fail_point!("renew-lease");
        let answer = arbiter.tend(vm.name(), generation, errand, &renewal);
        if answer == LeaseAnswer::Own {
            vm.tenure.tell(vm.name(), errand == LeaseErrand::Renew);
        }
        // In this order: a contest that is won meanwhile leaves another generation.
        let contests = vm.stance().is_some_and(|stance| stance.contests);
        let answer = answer.beside_contest(contests || vm.generation() != generation);
        let partners = vm.deciding_peer().map(|peer| [peer, host.config.name.clone()]);
        let answer = answer.beside_session(partners.as_ref().map_or(&[], |hosts| hosts));
        vm.tend_lease(
            |lease| lease.answered(boot_time(), asked, answer),
            |machine, actions| host.carry_out(&vm, machine, actions, None),
        );
    }
}
