//! A VM whose last keeper is gone: before its guest goes on in the next one, the arbiter says that it is still this
//! host's, and what another host would count from is renewed.

use super::tending::renewal;
use crate::host::Host;
use crate::vm::PrimaryVm;
use std::sync::Arc;
use understudy_network::boot_time;
use understudy_protocol::{Generation, LeaseAction, LeaseAnswer, LeaseErrand, Ownership, VmName};
use understudy_threads::lock;

impl Host {
    /// Whether this host still owns a VM at this generation. Without an arbiter nobody else could.
    pub(crate) fn ask_for_owner(&self, vm: &VmName, of: Generation) -> LeaseAnswer {
        // Without a generation it was started without the arbiter.
        let Some(arbiter) = self.arbiter.as_ref().filter(|_| of != Generation(0)) else {
            return LeaseAnswer::Own;
        };
        match arbiter.current(vm) {
            Err(error) => LeaseAnswer::Unreachable(error.to_string()),
            Ok(Some(Ownership { host: Some(host), generation }))
                if host == self.config.name && generation == of =>
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
            Ok(_) => {
                LeaseAnswer::Unreachable(format!("the arbiter has no record of generation {of}"))
            }
        }
    }

    /// [`Host::ask_for_owner`] of a VM whose guest is to go on now; if another host has a copy, its lease begins
    /// with that.
    pub(crate) fn resume_lease(self: &Arc<Self>, vm: &Arc<PrimaryVm>) -> LeaseAnswer {
        // The lease counts from before the first word to the arbiter.
        let (asked, stake) = (boot_time(), self.stake(vm));
        let is_due = {
            let mut lease = lock(&vm.tenure.lease);
            let actions = lease.tick(asked, stake);
            let is_due = actions.contains(&LeaseAction::Ask(LeaseErrand::Renew));
            self.carry_out(vm, &lease, actions, None);
            is_due
        };
        let Some(arbiter) = self.arbiter.as_ref().filter(|_| is_due) else {
            return self.ask_for_owner(vm.name(), vm.generation());
        };
        let renewal = renewal(self, vm.tenure.length(), asked);
        let answer = arbiter.tend(vm.name(), vm.generation(), LeaseErrand::Renew, &renewal);
        if answer == LeaseAnswer::Own {
            let mut lease = lock(&vm.tenure.lease);
            let actions = lease.answered(boot_time(), asked, answer.clone());
            self.carry_out(vm, &lease, actions, None);
        }
        answer
    }
}
