//! A guest is made to do what its lease says, stand still or go on, until it does: its QEMU may not answer for as long as
//! a disk does not, and there may be no thread for it at that moment.

/// Whether a guest does what its lease says.
#[derive(Debug, Default)]
pub(super) struct Settling {
    /// Whether it may not do so.
    is_due: bool,
    /// Whether a thread sees to it.
    has_thread: bool,
}

impl Settling {
    /// The lease says something else from now on; returns whether that takes a thread.
    pub fn begin(&mut self) -> bool {
        self.is_due = true;
        self.begin_again()
    }

    /// Returns whether a thread is to be started, for want of one until now.
    pub fn begin_again(&mut self) -> bool {
        self.is_due && !std::mem::replace(&mut self.has_thread, true)
    }

    /// No thread could be started.
    pub fn has_no_thread(&mut self) {
        self.has_thread = false;
    }

    /// Returns whether its thread is to look what the lease says; that ends otherwise.
    pub fn goes_on(&mut self) -> bool {
        self.has_thread = std::mem::take(&mut self.is_due);
        self.has_thread
    }

    /// The guest does not do so: its thread tries again.
    pub fn failed(&mut self) {
        self.is_due = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_does_not_go_on_is_told_again() {
        let mut settling = Settling::default();
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
        let mut settling = Settling::default();
        assert!(settling.begin() && settling.goes_on());
        assert!(!settling.begin(), "it has run out again");
        assert!(settling.goes_on() && !settling.goes_on());
    }

    #[test]
    fn what_had_no_thread_gets_one() {
        let mut settling = Settling::default();
        assert!(settling.begin());
        settling.has_no_thread();
        assert!(settling.begin_again(), "before, it was lost");
        assert!(settling.goes_on() && !settling.goes_on());
    }
}
