//! Whether this machine's clock was set while something was measured: `ab`, `tbench`, `pgbench` and `redis-benchmark` take
//! their times by it.

use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Difference that it may have by then: no figure of a workload shows that.
const STEP: Duration = Duration::from_millis(10);
/// A clock that is corrected little by little runs wrong by a 2000th at most; this part of the time is borne.
const SLEWED: u32 = 1000;
/// A thread that loses its processor between the two clocks would look like a step.
const READINGS: usize = 10;

/// The clock and the time that nobody sets, at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    wall: Duration,
    steady: Instant,
}

impl Clock {
    /// Reads both clocks now.
    pub fn look() -> Result<Clock> {
        let read = |_| {
            let steady = Instant::now();
            let wall = SystemTime::now().duration_since(UNIX_EPOCH).ok();
            (steady.elapsed(), steady, wall)
        };
        let closest = (0..READINGS).map(read).min_by_key(|(apart, ..)| *apart);
        let (_, steady, wall) = closest.context("no reading")?;
        Ok(Clock { wall: wall.context("this machine's clock is before 1970")?, steady })
    }

    /// An error if it was set since: what programs measured by it meanwhile is no figure.
    pub fn check(&self) -> Result<()> {
        self.compare(&Clock::look()?)
    }

    fn compare(&self, later: &Clock) -> Result<()> {
        let passed = later.steady.saturating_duration_since(self.steady);
        let off = later.wall.abs_diff(self.wall + passed);
        ensure!(
            off <= STEP + passed / SLEWED,
            "this machine's clock was set by {} ms meanwhile: what was measured by it is no figure",
            off.as_millis()
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_was_set_is_found_out_and_one_that_is_corrected_is_not() {
        let milliseconds = Duration::from_millis;
        let before = Clock { wall: Duration::from_secs(1_000_000), steady: Instant::now() };
        let later = |passed: Duration, wall: Duration| {
            before.compare(&Clock { wall: before.wall + wall, steady: before.steady + passed })
        };
        later(milliseconds(10_000), milliseconds(10_005)).unwrap();
        later(milliseconds(10_000), milliseconds(9_995)).unwrap();
        later(milliseconds(200_000), milliseconds(200_100)).unwrap();
        let forth = later(milliseconds(10_000), milliseconds(10_500)).unwrap_err();
        assert!(forth.to_string().contains("set by 500 ms"), "{forth}");
        assert!(later(milliseconds(10_000), milliseconds(9_900)).is_err());
        let back = Clock { wall: before.wall - milliseconds(3_600_000), steady: before.steady };
        assert!(before.compare(&back).is_err());
    }
}
