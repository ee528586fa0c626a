//! A guest is made to do what its lease says, stand still or go on, until it does: its QEMU may not answer for as long as
//! a disk does not, and there may be no thread for it at that moment.

use std::sync::atomic::{AtomicU8, Ordering};

/// It may not do so.
const DUE: u8 = 1;
/// A thread sees to it.
const HAS_THREAD: u8 = 2;

/// Whether a guest does what its lease says.
#[derive(Debug, Default)]
pub(super) struct Settling(AtomicU8);

impl Settling {
    /// The lease says something else from now on; returns whether that takes a thread.
    pub fn begin(&self) -> bool {
        self.0.fetch_or(DUE | HAS_THREAD, Ordering::AcqRel) & HAS_THREAD == 0
    }

    /// Returns whether a thread is to be started, for want of one until now.
    pub fn begin_again(&self) -> bool {
        let begun =
            self.0.compare_exchange(DUE, DUE | HAS_THREAD, Ordering::AcqRel, Ordering::Acquire);
        begun.is_ok()
    }

    /// No thread could be started.
    pub fn has_no_thread(&self) {
        self.0.fetch_and(!HAS_THREAD, Ordering::AcqRel);
    }

    /// Returns whether its thread is to look what the lease says; that ends otherwise.
    pub fn goes_on(&self) -> bool {
        let next = |state| Some(if state & DUE == 0 { 0 } else { HAS_THREAD });
        self.0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, next)
            .is_ok_and(|state| state & DUE != 0)
    }

    /// The guest does not do so: its thread tries again.
    pub fn failed(&self) {
        self.0.fetch_or(DUE, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_does_not_go_on_is_told_again() {
        let settling = Settling::default();
        assert!(!settling.begin_again(), "nothing is due");
        assert!(settling.begin());
        assert!(settling.goes_on());
        settling.failed();
        assert!(!settling.begin_again(), "its thread is there");
        assert!(settling.goes_on(), "before, that was all");
        assert!(!settling.goes_on());
        assert!(!settling.begin_again(), "it goes on");
    }

    #[test]
    fn what_the_lease_says_meanwhile_is_done_by_the_same_thread() {
        let settling = Settling::default();
        assert!(settling.begin() && settling.goes_on());
        assert!(!settling.begin(), "it has run out again");
        assert!(settling.goes_on() && !settling.goes_on());
    }

    #[test]
    fn what_had_no_thread_gets_one() {
        let settling = Settling::default();
        assert!(settling.begin());
        settling.has_no_thread();
        assert!(settling.begin_again(), "before, it was lost");
        assert!(settling.goes_on() && !settling.goes_on());
    }
}
