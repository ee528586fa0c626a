//! The progress of the first synchronisation.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes to copy and copied, and the time that left an estimate.
#[derive(Debug)]
pub struct Progress {
    started: Instant,
    done: AtomicU64,
    total: AtomicU64,
    disk_bytes: AtomicU64,
    disk_micros: AtomicU64,
}

impl Progress {
    /// A progress with nothing copied, and nothing known.
    pub fn new() -> Progress {
        Progress {
            started: Instant::now(),
            done: AtomicU64::new(0),
            total: AtomicU64::new(0),
            disk_bytes: AtomicU64::new(0),
            disk_micros: AtomicU64::new(0),
        }
    }

    /// Adds more to copy, which became known.
    pub fn expect(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    /// `bytes` more were copied.
    pub fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Another disk is copied, which took so many bytes; so long for all until now.
    pub fn copied_of_disks(&self, bytes: u64, elapsed: Duration) {
        self.disk_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.disk_micros.store(elapsed.as_micros() as u64, Ordering::Relaxed);
    }

    /// Bytes sent to bring the disks up to date, without what the guest wrote meanwhile,
    /// and how long it took.
    pub fn disks(&self) -> (u64, Duration) {
        let elapsed = Duration::from_micros(self.disk_micros.load(Ordering::Relaxed));
        (self.disk_bytes.load(Ordering::Relaxed), elapsed)
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
