//! The one clock that the protocol core is driven with.

use std::sync::OnceLock;
use std::time::{Duration, Instant};
use understudy_protocol::Time;

/// Time before the first call that can be told.
const HEAD_START: Duration = Duration::from_secs(60);

/// The monotonic time since the daemon's first call.
pub fn now() -> Time {
    at(Instant::now())
}

/// The same of another instant.
pub fn at(instant: Instant) -> Time {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    Time((instant + HEAD_START).saturating_duration_since(*ORIGIN.get_or_init(|| instant)))
}
