//! The one clock that the protocol core is driven with.

use std::sync::OnceLock;
use std::time::{Duration, Instant};
use understudy_protocol::Time;

/// The monotonic time since the daemon's first call.
pub fn now() -> Time {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    // A minute of head start, so that times before the first call can be said.
    Time(ORIGIN.get_or_init(Instant::now).elapsed() + Duration::from_secs(60))
}
