//! Locks that threads of several owners take.

use crate::locks::{Mutex, MutexGuard};
use std::process;
use std::sync::{PoisonError, TryLockError};

/// A lock around what threads of several owners share. Whoever takes it after a thread has
/// panicked with it ends the process: nobody can say whom that harms.
#[derive(Debug, Default)]
pub struct Common<T: ?Sized>(Mutex<T>);

impl<T> Common<T> {
    /// A lock around `value`.
    pub const fn new(value: T) -> Common<T> {
        Common(Mutex::new(value))
    }
}

impl<T: ?Sized> Common<T> {
    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(commonly_poisoned)
    }

    /// The lock, if nobody has it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
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
