//! Arrivals: VMs that this host is about to back up. Name, MAC addresses and memory are theirs
//! before there is a machine, so that nobody waits for a primary that takes its time to send the
//! rest.

use crate::host::Host;
use std::collections::BTreeMap;
use std::sync::Arc;
use understudy_qemu::VmDefinition;
use understudy_threads::Common;

/// The VMs that are about to be backed up here.
#[derive(Debug, Default)]
pub struct Arrivals(Common<BTreeMap<String, Expected>>);

/// A VM that is about to be backed up here.
#[derive(Clone, Debug)]
pub struct Expected {
    /// The host that offered it.
    pub primary: String,
    /// What it is.
    pub definition: VmDefinition,
}

/// Keeps a VM's place until it is a backup, or is not to be one; given up when dropped.
pub struct Arrival {
    host: Arc<Host>,
    vm: String,
}

impl Arrivals {
    /// All of them.
    pub fn all(&self) -> Vec<Expected> {
        self.0.lock().values().cloned().collect()
    }
}

impl Arrival {
    /// Keeps the place of a VM that nothing speaks against. To be called under the lock `adding`,
    /// under which that was found out.
    pub fn expect(host: &Arc<Host>, primary: &str, definition: &VmDefinition) -> Arrival {
        let vm = definition.name.to_string();
        let expected = Expected { primary: primary.to_owned(), definition: definition.clone() };
        host.arrivals.0.lock().insert(vm.clone(), expected);
        Arrival { host: host.clone(), vm }
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        self.host.arrivals.0.lock().remove(&self.vm);
    }
}
