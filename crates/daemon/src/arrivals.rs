//! Arrivals: VMs that this host is about to back up, or to bring up in a keeper. Name, MAC addresses and memory are theirs
//! before there is a machine, so that nobody waits for a primary that takes its time to send the
//! rest.

use crate::host::Host;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use understudy_protocol::VmName;
use understudy_qemu::VmDefinition;
use understudy_threads::Common;

/// The VMs that are about to be backed up here.
#[derive(Debug, Default)]
pub struct Arrivals(Common<BTreeMap<VmName, Arc<Expected>>>);

/// A VM that is about to be backed up here.
#[derive(Debug)]
pub struct Expected {
    /// The host that offered it; this one, if it is about to be brought up here.
    pub primary: String,
    /// What it is.
    pub definition: VmDefinition,
    /// Whether a keeper has it, which keeps its name; the rest is known from here.
    in_keeper: AtomicBool,
}

/// Keeps a VM's place until it is a backup, or is not to be one; given up when dropped.
pub struct Arrival {
    host: Weak<Host>,
    expected: Arc<Expected>,
}

impl Arrivals {
    /// All that no keeper has.
    pub fn all(&self) -> Vec<Arc<Expected>> {
        let arrivals = self.0.lock();
        arrivals.values().filter(|expected| !expected.is_in_keeper()).cloned().collect()
    }

    /// Whether a VM is among them.
    pub fn has(&self, vm: &VmName) -> bool {
        self.0.lock().contains_key(vm)
    }

    /// What a VM is that a keeper has.
    pub fn kept(&self, vm: &VmName) -> Option<VmDefinition> {
        let arrivals = self.0.lock();
        let expected = arrivals.get(vm).filter(|expected| expected.is_in_keeper());
        expected.map(|expected| expected.definition.clone())
    }
}

impl Expected {
    fn is_in_keeper(&self) -> bool {
        self.in_keeper.load(Ordering::Acquire)
    }
}

impl Arrival {
    /// Keeps the place of a VM that nothing speaks against. To be called under the lock `adding`,
    /// under which that was found out.
    pub fn expect(host: &Arc<Host>, primary: &str, definition: &VmDefinition) -> Arrival {
        let expected = Arc::new(Expected {
            primary: primary.to_owned(),
            definition: definition.clone(),
            in_keeper: AtomicBool::new(false),
        });
        host.arrivals.0.lock().insert(definition.name.clone(), expected.clone());
        Arrival { host: Arc::downgrade(host), expected }
    }

    /// The VM's name.
    pub fn vm(&self) -> &VmName {
        &self.expected.definition.name
    }

    /// A keeper has the VM from now on.
    pub fn goes_to_keeper(&self) {
        self.expected.in_keeper.store(true, Ordering::Release);
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        let Some(host) = self.host.upgrade() else { return };
        let mut arrivals = host.arrivals.0.lock();
        // The VM may have come once more while its last keeper ended.
        if arrivals.get(self.vm()).is_some_and(|there| Arc::ptr_eq(there, &self.expected)) {
            arrivals.remove(self.vm());
        }
    }
}
