//! How far the first synchronisation has come.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Bytes to copy and copied, and the time that left an estimate.
#[derive(Debug)]
pub struct Progress {
    started: Instant,
    done: AtomicU64,
    total: AtomicU64,
}

impl Progress {
    /// Nothing copied, nothing known.
    pub fn new() -> Progress {
        Progress { started: Instant::now(), done: AtomicU64::new(0), total: AtomicU64::new(0) }
    }

    /// More to copy became known.
    pub fn expect(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// `bytes` more were copied.
    pub fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes copied so far, and bytes in all as known now.
    pub fn bytes(&self) -> (u64, u64) {
        let done = self.done.load(Ordering::Relaxed);
        (done, self.total.load(Ordering::Relaxed).max(done))
    }

    /// Seconds left at the speed so far; none before there is a speed.
    pub fn remaining_seconds(&self) -> Option<f64> {
        let (done, total) = self.bytes();
        let elapsed = self.started.elapsed().as_secs_f64();
        (done > 0).then(|| (total - done) as f64 * elapsed / done as f64)
    }
}
