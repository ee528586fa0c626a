//! The one clock that the protocol core is driven with.

use understudy_network::boot_time;
use understudy_protocol::Time;

/// The time since this host was started, that in which it slept included: one that slept stood still, and must notice
/// it before an acknowledgement that waited meanwhile releases anything.
pub fn now() -> Time {
    boot_time()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::time::{ClockId, clock_gettime};
    use std::time::Duration;

    // It was that of `Instant`, which stands still in sleep: no stall was noticed then.
    #[test]
    fn sleep_counts() {
        let boot_clock = || Time(Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME).unwrap()));
        let before = boot_clock();
        let now = now();
        assert!(before <= now && now <= boot_clock(), "{now:?}");
    }
}
