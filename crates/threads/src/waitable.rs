//! A value whose changes can be waited for.

use crate::locks::{Condvar, Mutex, MutexGuard};
use crate::{lock, poisoned};
use std::time::Duration;

/// A value that threads of one owner share, and wait for changes of: a lock as [`lock`] takes it,
/// and who waits is woken by [`change`](Waitable::change). For what no queue can be: several
/// threads look at it, or wait for different things.
#[derive(Debug, Default)]
pub struct Waitable<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Waitable<T> {
    /// Makes one that has this value.
    pub fn new(value: T) -> Waitable<T> {
        Waitable { value: Mutex::new(value), changed: Condvar::new() }
    }

    /// Locks it, to be looked at, or for a change that nobody waits for.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        lock(&self.value)
    }

    /// Changes it, and wakes all that wait.
    pub fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        result
    }

    /// Wakes all that wait, after a change.
    pub fn wake(&self) {
        self.changed.notify_all();
    }

    /// Waits for a change; it may be none.
    pub fn wait<'a>(&'a self, value: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.changed.wait(value).unwrap_or_else(poisoned)
    }

    /// The same, for so long at most.
    pub fn wait_for<'a>(
        &'a self,
        value: MutexGuard<'a, T>,
        longest: Duration,
    ) -> MutexGuard<'a, T> {
        self.changed.wait_timeout(value, longest).unwrap_or_else(poisoned).0
    }

    /// Waits until `waits` says no more.
    pub fn wait_while<'a>(
        &'a self,
        value: MutexGuard<'a, T>,
        waits: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        self.changed.wait_while(value, waits).unwrap_or_else(poisoned)
    }

    /// The same, for so long at most.
    pub fn wait_while_for<'a>(
        &'a self,
        value: MutexGuard<'a, T>,
        longest: Duration,
        waits: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        self.changed.wait_timeout_while(value, longest, waits).unwrap_or_else(poisoned).0
    }
}
