//! Arrivals: VMs that this host is about to back up, or to bring up in a keeper. Name, MAC addresses
//! and memory are theirs before there is a machine, so that nobody waits for a primary that takes its
//! time to send the rest. And those that it is about to claim.

use crate::inventory::Inventory;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use understudy_protocol::VmName;
use understudy_qemu::VmDefinition;

/// The VMs that are about to be here.
#[derive(Clone, Default)]
pub struct Arrivals(Inventory);

/// A VM is about to be claimed here, until this is dropped.
pub struct Claim {
    arrivals: Arrivals,
    vm: VmName,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.arrivals.0.change(|all| all.claimed.remove(&self.vm));
    }
}

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
    /// Those of this inventory.
    pub(crate) fn of(inventory: &Inventory) -> Arrivals {
        Arrivals(inventory.clone())
    }

    /// All that no keeper has.
    pub fn all(&self) -> Vec<Arc<Expected>> {
        let mut all = self.0.look(|all| all.expected.values().cloned().collect::<Vec<_>>());
        all.retain(|expected| !expected.is_in_keeper());
        all
    }

    /// Whether a VM is among them.
    pub fn has(&self, vm: &VmName) -> bool {
        self.expected(vm).is_some()
    }

    /// Whether a VM is among them that no keeper has.
    pub fn is_expected(&self, vm: &VmName) -> bool {
        self.expected(vm).is_some_and(|expected| !expected.is_in_keeper())
    }

    /// Definition of a VM that a keeper has.
    pub fn kept(&self, vm: &VmName) -> Option<VmDefinition> {
        let expected = self.expected(vm).filter(|expected| expected.is_in_keeper());
        expected.map(|expected| expected.definition.clone())
    }

    /// Whether any is about to be here of which no keeper is known yet.
    pub fn are_any_to_come(&self) -> bool {
        self.0.look(|all| all.expected.values().any(|expected| !expected.is_in_keeper()))
    }

    fn expected(&self, vm: &VmName) -> Option<Arc<Expected>> {
        self.0.look(|all| all.expected.get(vm).cloned())
    }

    /// A VM's keeper has ended: what the VM was is not known of the next one.
    pub fn forget_kept(&self, vm: &VmName) {
        self.0.change(|all| match all.expected.get(vm) {
            Some(expected) if expected.is_in_keeper() => all.expected.remove(vm),
            _ => None,
        });
    }

    /// Has whoever asks this host about a VM hear that it is about to claim it, until it runs or comes to nothing: a host
    /// that finds the claim at the arbiter, and nobody who runs the VM, would claim it in its turn.
    pub fn begin_claim(&self, vm: &VmName) -> Claim {
        self.0.change(|all| all.claimed.insert(vm.to_owned()));
        Claim { arrivals: self.clone(), vm: vm.to_owned() }
    }

    /// Whether a VM is about to be claimed here.
    pub fn is_claimed(&self, vm: &VmName) -> bool {
        self.0.look(|all| all.claimed.contains(vm))
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
        let (name, placed) = (definition.name.clone(), expected.clone());
        arrivals.0.change(|all| all.expected.insert(name, placed));
        arrivals.0.tell_of_keepers();
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
        self.arrivals.0.change(|all| match all.expected.get(self.vm()) {
            // The VM may have come once more while its last keeper ended.
            Some(there) if Arc::ptr_eq(there, &self.expected) => all.expected.remove(self.vm()),
            _ => None,
        });
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
