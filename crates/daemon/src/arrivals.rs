//! Arrivals: VMs that this host is about to back up. Name, MAC addresses and memory are theirs
//! before there is a machine, so that nobody waits for a primary that takes its time to send the
//! rest.

use crate::host::Host;
use crate::sync::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use understudy_qemu::VmDefinition;

/// The VMs that are about to be backed up here.
#[derive(Debug, Default)]
pub struct Arrivals(Mutex<BTreeMap<String, Expected>>);

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
        lock(&self.0).values().cloned().collect()
    }
}

impl Arrival {
    /// Keeps the place of a VM that nothing speaks against. To be called under the lock `adding`,
    /// under which that was found out.
    pub fn expect(host: &Arc<Host>, primary: &str, definition: &VmDefinition) -> Arrival {
        let vm = definition.name.to_string();
        let expected = Expected { primary: primary.to_owned(), definition: definition.clone() };
        lock(&host.arrivals.0).insert(vm.clone(), expected);
        Arrival { host: host.clone(), vm }
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        lock(&self.host.arrivals.0).remove(&self.vm);
    }
}
