//! Counters of what the guest does to its disk.

use std::sync::atomic::{AtomicU64, Ordering};

/// Traffic that one NBD server has served since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// READ requests answered.
    pub reads: u64,
    /// Bytes sent in answer to them.
    pub read_bytes: u64,
    /// WRITE requests carried out.
    pub writes: u64,
    /// Bytes written by them.
    pub written_bytes: u64,
    /// TRIM and WRITE_ZEROES requests carried out.
    pub zeroes: u64,
    /// FLUSH requests and FUA flags answered.
    pub flushes: u64,
}

/// The running counters.
#[derive(Debug, Default)]
pub(super) struct Counters {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    zeroes: AtomicU64,
    flushes: AtomicU64,
}

impl Counters {
    pub(super) fn read(&self, bytes: u32) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(bytes.into(), Ordering::Relaxed);
    }

    pub(super) fn wrote(&self, bytes: u32) {
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.written_bytes.fetch_add(bytes.into(), Ordering::Relaxed);
    }

    pub(super) fn zeroed(&self) {
        self.zeroes.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn flushed(&self) {
        self.flushes.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn now(&self) -> Traffic {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Traffic {
            reads: load(&self.reads),
            read_bytes: load(&self.read_bytes),
            writes: load(&self.writes),
            written_bytes: load(&self.written_bytes),
            zeroes: load(&self.zeroes),
            flushes: load(&self.flushes),
        }
    }
}
