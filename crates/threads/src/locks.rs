//! The locks of all crates of the daemon. With the feature `lock-order`, as the tests build it, each
//! notes which locks its thread holds already: two that were ever taken in both orders end the
//! process, whether or not their threads met this time.

#[cfg(not(feature = "lock-order"))]
pub use std::sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
#[cfg(feature = "lock-order")]
pub use tracing_mutex::stdsync::tracing::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
};

/// The words with which `tracing_mutex` begins to say that locks were taken in both orders.
#[cfg(feature = "lock-order")]
pub(crate) const BOTH_ORDERS: &str = "Found cycle in mutex dependency graph";
