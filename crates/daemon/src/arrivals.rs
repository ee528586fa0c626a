//! Arrivals: VMs that this host is about to back up, or to bring up in a keeper. Name, MAC addresses
//! and memory are theirs before there is a machine, so that nobody waits for a primary that takes its
//! time to send the rest.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use understudy_protocol::VmName;
use understudy_qemu::VmDefinition;
use understudy_threads::Common;

/// The VMs that are about to be here.
#[derive(Clone, Debug, Default)]
pub struct Arrivals(Arc<Common<BTreeMap<VmName, Arc<Expected>>>>);

/// A VM that is about to be here.
#[derive(Debug)]
pub struct Expected {
    /// The host that offered it; this one, if it is about to be brought up here.
    pub primary: String,
    /// Definition of the VM.
    pub definition: VmDefinition,
    /// Whether a keeper has it, which keeps its name; the rest is known from here.
    in_keeper: AtomicBool,
}

/// Keeps a VM's place until the VM is here, or is not to be, or for as long as its keeper has it; given up when
/// dropped.
pub struct Arrival {
    arrivals: Arrivals,
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

    /// Whether a VM is among them that no keeper has.
    pub fn is_expected(&self, vm: &VmName) -> bool {
        self.0.lock().get(vm).is_some_and(|expected| !expected.is_in_keeper())
    }

    /// Definition of a VM that a keeper has.
    pub fn kept(&self, vm: &VmName) -> Option<VmDefinition> {
        let arrivals = self.0.lock();
        let expected = arrivals.get(vm).filter(|expected| expected.is_in_keeper());
        expected.map(|expected| expected.definition.clone())
    }

    /// A VM's keeper has ended: what the VM was is not known of the next one.
    pub fn forget_kept(&self, vm: &VmName) {
        let mut arrivals = self.0.lock();
        if arrivals.get(vm).is_some_and(|expected| expected.is_in_keeper()) {
            arrivals.remove(vm);
        }
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
    pub fn expect(arrivals: &Arrivals, primary: &str, definition: &VmDefinition) -> Arrival {
        let expected = Arc::new(Expected {
            primary: primary.to_owned(),
            definition: definition.clone(),
            in_keeper: AtomicBool::new(false),
        });
        arrivals.0.lock().insert(definition.name.clone(), expected.clone());
        Arrival { arrivals: arrivals.clone(), expected }
    }

    /// The VM's name.
    pub fn vm(&self) -> &VmName {
        &self.expected.definition.name
    }

    /// Whether a keeper has the VM.
    pub fn is_in_keeper(&self) -> bool {
        self.expected.is_in_keeper()
    }

    /// A keeper has the VM from now on.
    pub fn goes_to_keeper(&self) {
        self.expected.in_keeper.store(true, Ordering::Release);
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        let mut arrivals = self.arrivals.0.lock();
        // The VM may have come once more while its last keeper ended.
        if arrivals.get(self.vm()).is_some_and(|there| Arc::ptr_eq(there, &self.expected)) {
            arrivals.remove(self.vm());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use understudy_protocol::literal;

    #[test]
    fn a_vm_has_its_place_until_its_last_arrival_is_over() {
        let disk = "[[disk]]\npath = '/dev/zero'\nformat = 'raw'";
        let text = format!("name = 'db'\nmemory = '64M'\nvcpus = 1\n{disk}");
        let definition = VmDefinition::from_toml(&text, Path::new("/vm.toml")).unwrap();
        let (arrivals, db) = (Arrivals::default(), literal("db"));
        let first = Arrival::expect(&arrivals, "b", &definition);
        assert_eq!((arrivals.all().len(), arrivals.kept(&db)), (1, None));
        first.goes_to_keeper();
        assert_eq!((arrivals.all().len(), arrivals.kept(&db)), (0, Some(definition.clone())));
        assert!(arrivals.has(&db) && !arrivals.is_expected(&db));
        // Its keeper has ended, and it is offered again before that was noticed.
        let second = Arrival::expect(&arrivals, "b", &definition);
        drop(first);
        assert_eq!((arrivals.all().len(), arrivals.kept(&db)), (1, None));
        arrivals.forget_kept(&db);
        assert!(arrivals.is_expected(&db), "no keeper has it yet");
        second.goes_to_keeper();
        arrivals.forget_kept(&db);
        assert!(!arrivals.has(&db));
        drop(second);
        assert!(!arrivals.has(&db));
    }
}
