//! Threads that belong to something, and what a panic in one of them ends.
//!
//! A thread belongs to what the thread that started it belongs to ([`spawn`]), or to what it has
//! entered ([`within`]): a VM, say, or a peer's connection. Once [`contain_panics`] was called,
//! a panic is told to the [`Owner`] of its thread, which ends what it owns, and nothing else. A
//! panic in a thread that belongs to nothing ends the process.
//!
//! Locks decide how far the damage may reach:
//!
//! | lock | is taken by threads of | after a panic of a thread that held it |
//! |------|------------------------|----------------------------------------|
//! | [`lock`], [`Waitable`] | one owner, and by those that only look | threads of an owner panic, too: nobody acts on what was left half done. Others see it as it is, and it is about to end |
//! | [`Common`] | several owners | the process ends: what they share may be wrong |

mod common;
mod crew;
mod locks;
mod scope;
mod waitable;

pub use common::Common;
pub use crew::{Crew, Worker};
pub use locks::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
pub use scope::{Owner, Scope, contain_panics, current, inherit, spawn, within};
pub use waitable::Waitable;

use std::sync::PoisonError;
use std::thread;

/// Locks what the threads of one owner share; see the module's table.
///
/// # Panics
/// If a thread has panicked while it held the lock, and this one does not
/// [only look](Owner::only_looks).
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(poisoned)
}

/// The content that a poisoned lock guards, if this thread may see it; see the module's table. For
/// waits.
///
/// # Panics
/// If this thread does not [only look](Owner::only_looks).
pub fn poisoned<G>(error: PoisonError<G>) -> G {
    // A second panic while the first one unwinds would end the process.
    let may_see = scope::only_looks() || thread::panicking();
    assert!(may_see, "another thread panicked while it held a lock that this one needs");
    error.into_inner()
}

#[cfg(test)]
mod crew_tests;
#[cfg(test)]
mod tests;
