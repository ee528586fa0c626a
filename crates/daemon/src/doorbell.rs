//! Waking a thread that waits for any of many changes.

use crate::sync::lock;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// Counts rings. A waiter looks at the world after it took the count, so that
/// no change is missed; whoever rings may hold any lock.
#[derive(Debug, Default)]
pub struct Doorbell {
    rings: Mutex<u64>,
    rung: Condvar,
}

impl Doorbell {
    /// Something changed.
    pub fn ring(&self) {
        *lock(&self.rings) += 1;
        self.rung.notify_all();
    }

    /// Rings so far.
    pub fn count(&self) -> u64 {
        *lock(&self.rings)
    }

    /// Waits until there are more rings than `seen`, or for `timeout`.
    pub fn wait(&self, seen: u64, timeout: Duration) {
        let rings = lock(&self.rings);
        let _unused = self
            .rung
            .wait_timeout_while(rings, timeout, |rings| *rings == seen)
            .expect("no thread panics while it holds a lock");
    }
}
