//! Time as the core sees it: handed in, never read from a clock.

use std::ops::{Add, Sub};
use std::time::Duration;

/// A monotonic instant: the time since an origin that the caller chose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(pub Duration);

impl Add<Duration> for Time {
    type Output = Time;
    fn add(self, span: Duration) -> Time {
        Time(self.0 + span)
    }
}

impl Sub for Time {
    type Output = Duration;
    /// The span since `earlier`; zero when it lies in the future.
    fn sub(self, earlier: Time) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}
