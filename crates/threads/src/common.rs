//! Locks that threads of several owners take.

use crate::locks::{Condvar, Mutex, MutexGuard};
use std::process;
use std::sync::{PoisonError, TryLockError};
use std::time::Duration;

/// A lock around what threads of several owners share. Whoever takes it after a thread has
/// panicked with it ends the process: nobody can say whom that harms.
#[derive(Debug, Default)]
pub struct Common<T: ?Sized> {
    changed: Condvar,
    value: Mutex<T>,
}

impl<T> Common<T> {
    /// A lock around `value`.
    pub const fn new(value: T) -> Common<T> {
        Common { changed: Condvar::new(), value: Mutex::new(value) }
    }

    /// Waits while `waits` says so, which it is asked after each [`wake`](Common::wake), and for so long at most.
    pub fn wait_while_for(
        &self,
        longest: Duration,
        waits: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'_, T> {
        let waited = self.changed.wait_timeout_while(self.lock(), longest, waits);
        waited.unwrap_or_else(commonly_poisoned).0
    }
}

impl<T: ?Sized> Common<T> {
    /// Wakes all that wait for a change.
    pub fn wake(&self) {
        self.changed.notify_all();
    }

    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(commonly_poisoned)
    }

    /// The lock, if nobody has it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.value.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::WouldBlock) => None,
            Err(TryLockError::Poisoned(poisoned)) => Some(commonly_poisoned(poisoned)),
        }
    }
}

fn commonly_poisoned<G>(_: PoisonError<G>) -> G {
    // Not through a log, whose locks may be the ones in question.
    eprintln!("a thread has panicked with what several VMs share: ending");
    process::abort();
}
