//! Protection that was lost, asked for again: as it was wished, and to the host that its operator names.

use crate::host::Host;
use crate::repair;
use crate::vm::Vm;
use std::iter::once;
use std::sync::Arc;
use understudy_protocol::VmName;
use understudy_report::VmStatus;
use understudy_report::error::{ErrorKind, HostError};

impl Host {
    /// Starts protecting a VM, and all of its group, to this host as its operator wished it last; returns as
    /// [`Host::protect`] does.
    pub fn protect_as_wished(
        self: &Arc<Self>,
        name: &VmName,
        to: &str,
    ) -> Result<VmStatus, HostError> {
        let vm = self.going_primary(name)?;
        if vm.repairer().wish().is_none() {
            let message = format!(
                "nobody wants {name} to be protected: say how it is to be, `understudy protect {name} --to {to}`"
            );
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        let all: Vec<_> = once(vm.clone()).chain(self.wanted_fellows(&vm)).collect();
        // The operator decides: nothing else is tried meanwhile.
        for vm in &all {
            vm.repairer().ended();
            vm.repairer().trust_lockstep();
        }
        if let Err(error) = self.protect_again(&vm, to) {
            for vm in all.iter().filter(|vm| vm.is_degraded()) {
                repair::restore(self, vm, &error.to_string(), None);
            }
            return Err(error);
        }
        Ok(Vm::Primary(vm).status())
    }
}
