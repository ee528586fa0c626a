//! A limit in time for all that leaves a port, whatever its gate says: a sole owner's lease.
//!
//! It is kept here, and not by whoever renews it: a host that was stopped, or a daemon whose other
//! threads wait, lets nothing out after it all the same.

use nix::time::{ClockId, clock_gettime};
use std::time::Duration;
use understudy_protocol::Time;

/// The time since this host was started, that in which it slept included.
pub fn boot_time() -> Time {
    match clock_gettime(ClockId::CLOCK_BOOTTIME) {
        Ok(time) => Time(Duration::from(time)),
        // It is there since Linux 2.6.39; without it nothing leaves that has a limit.
        Err(_) => Time(Duration::MAX),
    }
}

/// The time until which output may leave; for good if none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Limit(pub Option<Time>);

impl Limit {
    /// Whether nothing leaves any more. The clock is read only where there is a limit.
    pub fn is_over(self, now: impl FnOnce() -> Time) -> bool {
        self.0.is_some_and(|end| now() >= end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_over_when_it_says_and_none_never_is() {
        let end = Time(Duration::from_secs(9));
        assert!(!Limit(Some(end)).is_over(|| Time(Duration::from_millis(8_999))));
        assert!(Limit(Some(end)).is_over(|| end));
        assert!(!Limit(None).is_over(|| panic!("nobody asks the clock")));
        assert!(boot_time() > Time::default() && boot_time() < Time(Duration::MAX));
    }
}
