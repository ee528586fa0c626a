//! Outcomes of QEMU's requests that change a disk, in numbers.

use super::Disk;
use std::sync::atomic::Ordering;

/// The guest's requests that changed a disk, or tried to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestWrites {
    /// Number of requests that came.
    pub count: u64,
    /// Number of them that failed.
    pub failed: u64,
}

impl Disk {
    /// Changes that the guest has made so far, through the NBD server. None is under way: those
    /// that are counted are in the image.
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

    /// Number of changes and flushes of QEMU's that have failed so far: counted before it is told.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Acquire)
    }
}
