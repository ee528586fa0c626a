//! The names of guests that stand still until somebody has hold of them.

use super::LOOK;
use crate::inventory::Inventory;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;
use tracing::warn;
use understudy_protocol::VmName;

/// The names of those that are not taken back yet, or are between two keepers. Nobody may start them meanwhile.
#[derive(Clone)]
pub(crate) struct Orphans(Inventory);

/// A guest of which nobody has hold yet.
pub(crate) struct Waiting {
    why: String,
    of: Former,
    /// Whether nobody wants it any more.
    given_up: Arc<AtomicBool>,
}

/// Former holder of a guest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Former {
    /// Daemon that this host had last.
    Daemon,
    /// A keeper.
    Keeper,
    /// A daemon that has left of it what this one cannot read.
    Other,
    /// A daemon, whose custodian of it does not answer for now.
    Silent,
}

/// A VM is between two keepers, until this is dropped.
pub(crate) struct Between {
    vm: VmName,
    orphans: Orphans,
    given_up: Arc<AtomicBool>,
}

impl Between {
    /// Whether nobody wants it any more.
    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }
}

impl Drop for Between {
    fn drop(&mut self) {
        self.orphans.0.change(|all| {
            // It may be between two others by now.
            let own = |it: &Waiting| Arc::ptr_eq(&it.given_up, &self.given_up);
            all.orphans.get(&self.vm).is_some_and(own).then(|| all.orphans.remove(&self.vm))
        });
    }
}

impl Orphans {
    /// Those of this inventory.
    pub fn of_inventory(inventory: &Inventory) -> Orphans {
        Orphans(inventory.clone())
    }

    /// Reason why a guest of that name stands still, as the end of a sentence; none if there is
    /// none.
    pub fn why(&self, vm: &VmName) -> Option<String> {
        let known = self.0.look(|all| all.orphans.get(vm).map(|it| (it.why.clone(), it.of)));
        let (why, of) = known?;
        Some(match of {
            Former::Daemon | Former::Silent => {
                format!("outlived this host's last daemon, and is being taken back: {why}")
            }
            Former::Keeper => format!("stands still between two keepers: {why}"),
            Former::Other => format!("outlived this host's last daemon, and stands still: {why}"),
        })
    }

    /// Those of which this daemon cannot read what there is.
    pub(super) fn unread(&self) -> Vec<VmName> {
        self.of(|former| former == Former::Other)
    }

    /// Those that stand still until they are taken back, or somebody does something about it.
    pub(super) fn problems(&self) -> Vec<VmName> {
        self.of(|former| former != Former::Keeper)
    }

    /// All of them: each may stand still for long.
    pub fn untold(&self) -> Vec<VmName> {
        self.of(|_| true)
    }

    /// Those that end with this daemon if it ends now, or may soon.
    pub fn end_with_daemon(&self) -> Vec<VmName> {
        self.of(|former| matches!(former, Former::Daemon | Former::Silent))
    }

    /// Those between two keepers.
    pub fn between_keepers(&self) -> Vec<VmName> {
        self.of(|former| former == Former::Keeper)
    }

    /// Those of such former holders.
    fn of(&self, is_meant: impl Fn(Former) -> bool) -> Vec<VmName> {
        self.0.look(|all| {
            let meant = all.orphans.iter().filter(|(_, waiting)| is_meant(waiting.of));
            meant.map(|(vm, _)| vm.clone()).collect()
        })
    }

    /// A VM is between two keepers from now on.
    pub fn expect_keeper(&self, vm: &VmName) -> Between {
        let given_up = self.insert(vm, "the next one is about to have it", Former::Keeper);
        Between { vm: vm.clone(), orphans: self.clone(), given_up }
    }

    /// The same, for this reason, unless somebody else has it there already.
    pub fn claim_between(&self, vm: &VmName, why: &str) -> Option<Between> {
        let given_up = Arc::<AtomicBool>::default();
        let (why, of) = (why.to_owned(), Former::Keeper);
        let waiting = Waiting { why, of, given_up: given_up.clone() };
        let is_first = self.0.change(|all| match all.orphans.contains_key(vm) {
            true => Err(waiting),
            false => Ok(all.orphans.insert(vm.clone(), waiting)),
        });
        is_first.is_ok().then(|| Between { vm: vm.clone(), orphans: self.clone(), given_up })
    }

    /// Ends one, if there is one; returns when it has ended.
    pub fn give_up(&self, vm: &VmName) -> bool {
        let mut found = false;
        while self.mark_given_up(vm) {
            found = true;
            thread::sleep(LOOK);
        }
        found
    }

    fn mark_given_up(&self, vm: &VmName) -> bool {
        self.0.look(|all| {
            let orphan = all.orphans.get(vm);
            orphan.map(|orphan| orphan.given_up.store(true, Ordering::Release)).is_some()
        })
    }

    /// Nobody wants what the last daemon had any more; returns before it has ended. What a keeper had is not the daemon's
    /// to end.
    pub fn give_up_all(&self) {
        for vm in self.of(|former| former == Former::Daemon) {
            self.mark_given_up(&vm);
        }
    }

    /// Waits until all those have ended; returns those that have not by then.
    pub fn await_given_up(&self, until: Instant) -> Vec<VmName> {
        loop {
            let left = self.of(|former| former == Former::Daemon);
            if left.is_empty() || Instant::now() >= until {
                return left;
            }
            thread::sleep(LOOK);
        }
    }

    pub(super) fn add(&self, vm: &VmName) {
        self.insert(vm, "its owner is being asked for", Former::Daemon);
    }

    /// Returns what tells that nobody wants it any more.
    pub(super) fn insert(&self, vm: &VmName, why: &str, of: Former) -> Arc<AtomicBool> {
        let given_up = Arc::<AtomicBool>::default();
        let waiting = Waiting { why: why.to_owned(), of, given_up: given_up.clone() };
        self.0.change(|all| all.orphans.insert(vm.to_owned(), waiting));
        given_up
    }

    pub(super) fn remove(&self, vm: &VmName) {
        self.0.change(|all| all.orphans.remove(vm));
    }

    pub fn is_given_up(&self, vm: &VmName) -> bool {
        let given_up = |it: &Waiting| it.given_up.load(Ordering::Acquire);
        self.0.look(|all| all.orphans.get(vm).is_none_or(given_up))
    }

    /// Notes why one was not taken back by now.
    pub fn note(&self, vm: &VmName, why: String) {
        let is_new = self.0.change(|all| {
            let orphan = all.orphans.get_mut(vm).filter(|orphan| orphan.why != why);
            orphan.map(|orphan| orphan.why.clone_from(&why)).is_some()
        });
        if is_new {
            warn!(%vm, "it stands still: {why}");
        }
    }
}

#[cfg(test)]
#[path = "register_tests.rs"]
mod tests;
