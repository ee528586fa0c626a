//! The inventory of a host: what it knows of each VM, by name. It runs it, backs it up or has lost it;
//! or the VM is about to come, is to come up, or has been left by a process before this one. With it is what those find
//! who look after the host, and what it knows for snapshots.
//!
//! One lock for all of that. Whoever has it looks something up or puts something in, and waits for
//! nothing; what comes out is dropped without it, for that may be the last of a machine.

use crate::arrivals::Expected;
use crate::findings::Findings;
use crate::keeper::note::Note;
use crate::orphans::Waiting;
use crate::snapshot;
use crate::vm::{PrimaryVm, Vm};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use understudy_protocol::VmName;
use understudy_replication::backup;
use understudy_report::AwaitedStart;
use understudy_threads::Common;

/// See the module. Clones are the same one.
#[derive(Clone, Default)]
pub(crate) struct Inventory(Arc<Common<Entries>>);

/// The entries, by VM.
#[derive(Default)]
pub(crate) struct Entries {
    /// Those that this host runs, backs up or has lost.
    vms: BTreeMap<VmName, Vm>,
    /// Whether the last machine of each name is still there, or on its way out.
    presences: BTreeMap<VmName, Weak<()>>,
    /// Groups that this host backs up, or did, by the session of their leader.
    backed_groups: Vec<Weak<backup::Group>>,
    /// Those that have a place ([`Arrivals`](crate::arrivals::Arrivals)).
    pub expected: BTreeMap<VmName, Arc<Expected>>,
    /// Those that are about to be claimed.
    pub claimed: BTreeSet<VmName>,
    /// Those that are to come up with this host ([`Awaited`](crate::autostart::Awaited)).
    pub awaited: BTreeMap<VmName, AwaitedStart>,
    /// Times at which one was to come up again after its keeper had been killed
    /// ([`autostart::again`](crate::autostart::again)).
    pub come_again: BTreeMap<VmName, Instant>,
    /// Those that are not taken back yet ([`Orphans`](crate::orphans::Orphans)).
    pub orphans: BTreeMap<VmName, Waiting>,
    /// Those that ran here, and that nothing brings up again.
    pub lost: BTreeSet<VmName>,
    /// What last keepers have said that cannot be cleared ([`KnownEnds`](crate::keeper::KnownEnds)).
    pub known_ends: BTreeMap<VmName, Note>,
    /// Number of times that a keeper was noticed to have begun, to have ended, or to be about to get a VM.
    pub turns_of_keepers: u64,
    /// Findings of those who look after this host.
    pub findings: Findings,
    /// What it knows for snapshots and restores.
    pub snapshots: snapshot::Known,
}

impl Inventory {
    /// Looks something up.
    pub fn look<T>(&self, look: impl FnOnce(&Entries) -> T) -> T {
        look(&self.0.lock())
    }

    /// Changes something; whatever comes out is to be returned, so that it is dropped without the lock.
    pub fn change<T>(&self, change: impl FnOnce(&mut Entries) -> T) -> T {
        let changed = change(&mut self.0.lock());
        self.0.wake();
        changed
    }

    /// Changes something that nobody waits for.
    pub fn note<T>(&self, change: impl FnOnce(&mut Entries) -> T) -> T {
        change(&mut self.0.lock())
    }

    /// Tells whoever looks after keepers that there is something to look at.
    pub fn tell_of_keepers(&self) {
        self.change(|all| all.turns_of_keepers += 1);
    }

    /// Looks something up once `waits` does not hold any more, or after so long.
    pub fn look_after<T>(
        &self,
        longest: Duration,
        waits: impl Fn(&Entries) -> bool,
        look: impl FnOnce(&Entries) -> T,
    ) -> T {
        look(&self.0.wait_while_for(longest, |all| waits(all)))
    }

    /// A VM that this host runs, backs up or has lost.
    pub fn get(&self, name: &VmName) -> Option<Vm> {
        self.look(|all| all.vms.get(name).cloned())
    }

    /// Whether there is such a VM.
    pub fn has(&self, name: &VmName) -> bool {
        self.look(|all| all.vms.contains_key(name))
    }

    /// Looks at all such VMs.
    pub fn look_at_all<T>(&self, look: impl FnOnce(&BTreeMap<VmName, Vm>) -> T) -> T {
        self.look(|all| look(&all.vms))
    }

    /// All such VMs; each lives on for as long as whoever asked has it.
    pub fn all(&self) -> BTreeMap<VmName, Vm> {
        self.look(|all| all.vms.clone())
    }

    /// Waits while this host runs or backs up all of these and no keeper gets another one, and for so long at most.
    pub fn await_absence(&self, vms: impl FnOnce() -> Vec<VmName>, longest: Duration) {
        let turns = self.look(|all| all.turns_of_keepers);
        let vms = vms();
        let is_here = |vm: Option<&Vm>| matches!(vm, Some(Vm::Primary(_) | Vm::Backup(_)));
        let are_here = |all: &Entries| {
            all.turns_of_keepers == turns && vms.iter().all(|vm| is_here(all.vms.get(vm)))
        };
        self.look_after(longest, are_here, |_| ());
    }

    /// The number of these.
    pub fn count(&self) -> usize {
        self.look(|all| all.vms.len())
    }

    /// Those that run here.
    pub fn primaries(&self) -> Vec<Arc<PrimaryVm>> {
        let primary = |vm: &Vm| match vm {
            Vm::Primary(vm) => Some(vm.clone()),
            Vm::Backup(_) | Vm::Fenced(_) => None,
        };
        self.look_at_all(|vms| vms.values().filter_map(primary).collect())
    }

    /// Looks at a VM, which nobody puts there or takes away meanwhile.
    pub fn look_at<T>(&self, name: &VmName, look: impl FnOnce(Option<&Vm>) -> T) -> T {
        self.look(|all| look(all.vms.get(name)))
    }

    /// Puts a VM there, in the place of what this host was for it.
    pub fn put(&self, name: &VmName, vm: Vm) {
        drop(self.change(|all| all.vms.insert(name.clone(), vm)));
    }

    /// Puts a VM there if what is there now is meant.
    pub fn put_if(&self, name: &VmName, vm: Vm, is_meant: impl FnOnce(Option<&Vm>) -> bool) {
        drop(self.change(|all| match is_meant(all.vms.get(name)) {
            true => all.vms.insert(name.clone(), vm),
            false => Some(vm),
        }));
    }

    /// This host has nothing to do with the VM any more.
    pub fn remove(&self, name: &VmName) {
        self.remove_if(name, |_| true);
    }

    /// The same if what is there now is meant.
    pub fn remove_if(&self, name: &VmName, is_meant: impl FnOnce(&Vm) -> bool) {
        drop(self.change(|all| match all.vms.get(name) {
            Some(vm) if is_meant(vm) => all.vms.remove(name),
            _ => None,
        }));
    }

    /// The last machine of that name is this one.
    pub fn note_presence(&self, name: &VmName, presence: Weak<()>) {
        self.change(|all| all.presences.insert(name.clone(), presence));
    }

    /// Whether the last machine of that name is gone with all that it had; it is forgotten then.
    pub fn has_former_gone(&self, name: &VmName) -> bool {
        self.change(|all| {
            let is_there = all.presences.get(name).is_some_and(|it| it.strong_count() > 0);
            if !is_there {
                all.presences.remove(name);
            }
            !is_there
        })
    }

    /// The groups that this host backs up, with this one if it is new. To be asked without the lock:
    /// each has one of its own.
    pub fn backed_groups(&self, new: Option<&Arc<backup::Group>>) -> Vec<Arc<backup::Group>> {
        self.change(|all| {
            all.backed_groups.retain(|group| group.strong_count() > 0);
            all.backed_groups.extend(new.map(Arc::downgrade));
            all.backed_groups.iter().filter_map(Weak::upgrade).collect()
        })
    }
}
