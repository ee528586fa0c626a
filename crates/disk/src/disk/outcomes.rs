//! How QEMU's requests that change a disk went, in numbers.

use super::Disk;
use std::sync::atomic::Ordering;

/// The guest's requests that changed a disk, or tried to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestWrites {
    /// How many came.
    pub count: u64,
    /// How many of them failed.
    pub failed: u64,
}

impl Disk {
    /// What the guest has changed so far, through the NBD server. None is under way: those that
    /// are counted are in the image.
    pub fn guest_writes(&self) -> GuestWrites {
        self.lock_order().guest_writes
    }

    /// The guest's last write could not be carried out.
    pub(crate) fn note_failed_write(&self) {
        self.lock_order().guest_writes.failed += 1;
        self.note_failure();
    }

    /// QEMU is about to be told that a change, or a flush, failed.
    pub(crate) fn note_failure(&self) {
        self.failures.fetch_add(1, Ordering::AcqRel);
    }

    /// How many changes and flushes of QEMU's have failed so far: counted before it is told.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Acquire)
    }
}
