//! How far the backup is behind (VMware FT, 3.2), and what the primary does about it.

use std::collections::VecDeque;
use std::time::Duration;
use understudy_protocol::Time;

/// How many of the latest measurements count.
const SAMPLES: usize = 1_000;

/// A backup that is further behind slows the primary down.
const TARGET: Duration = Duration::from_millis(100);

/// Below this the primary gets some of its CPU back.
const COMFORT: Duration = Duration::from_millis(40);

/// The primary's share changes once in this time: slower than the backup catches up.
const STEP_INTERVAL: Duration = Duration::from_millis(250);

/// What a guest always keeps.
const LEAST_SHARE: f64 = 0.1;

/// Measurements of the execution lag.
#[derive(Clone, Debug, Default)]
pub struct Lag {
    samples: VecDeque<Duration>,
}

impl Lag {
    /// None yet.
    pub fn new() -> Lag {
        Lag::default()
    }

    /// A measurement: what [`crate::Feed::behind_since`] says was so long ago.
    pub fn measured(&mut self, lag: Duration) {
        if self.samples.len() == SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(lag);
    }

    /// The lag that this part (0 to 1) of the latest measurements does not exceed.
    pub fn quantile(&self, part: f64) -> Option<Duration> {
        let mut sorted: Vec<_> = self.samples.iter().copied().collect();
        sorted.sort_unstable();
        let last = sorted.len().checked_sub(1)?;
        sorted.get((last as f64 * part.clamp(0.0, 1.0)).round() as usize).copied()
    }
}

/// The primary's share of its CPU, so that the backup keeps up.
///
/// A slow loop: the share falls with how far the lag is over the target, by a fifth at most
/// a step, and returns by a tenth a step when the lag is small.
#[derive(Clone, Debug)]
pub struct Pace {
    share: f64,
    changed: Time,
    worst: Duration,
}

impl Pace {
    /// A primary at full speed.
    pub fn new(now: Time) -> Pace {
        Pace { share: 1.0, changed: now, worst: Duration::ZERO }
    }

    /// The part of its CPU that the primary may use, 0.1 to 1.
    pub fn share(&self) -> f64 {
        self.share
    }

    /// The backup reported this lag. True if the share changed.
    pub fn reported(&mut self, lag: Duration, now: Time) -> bool {
        self.worst = self.worst.max(lag);
        if now - self.changed < STEP_INTERVAL {
            return false;
        }
        let worst = std::mem::take(&mut self.worst);
        self.changed = now;
        let before = self.share;
        if worst > TARGET {
            let over = worst.as_secs_f64() / TARGET.as_secs_f64();
            self.share = (self.share * (1.0 / over).max(0.8)).max(LEAST_SHARE);
        } else if worst < COMFORT {
            self.share = (self.share * 1.1).min(1.0);
        }
        self.share != before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A backup of this speed (the primary's full speed is 1) against a busy primary.
    fn lag_after(speed: f64, seconds: u64) -> (f64, f64) {
        let mut pace = Pace::new(Time::default());
        let mut behind = 0.0f64;
        for tick in 0..seconds * 100 {
            behind = (behind + (pace.share() - speed) * 0.01).max(0.0);
            let lag = Duration::from_secs_f64(behind / speed);
            pace.reported(lag, Time(Duration::from_millis(tick * 10)));
        }
        (behind / speed, pace.share())
    }

    #[test]
    fn a_slow_backup_slows_the_primary_to_its_own_speed() {
        for speed in [0.3, 0.6, 0.9] {
            let (lag, share) = lag_after(speed, 60);
            assert!(lag < 0.3, "a backup of speed {speed} is {lag} s behind");
            assert!(share > speed * 0.7, "speed {speed}: the primary has {share}");
        }
    }

    #[test]
    fn a_primary_whose_backup_keeps_up_is_not_slowed() {
        assert_eq!(lag_after(1.0, 10).1, 1.0);
    }

    #[test]
    fn quantiles() {
        let mut lag = Lag::new();
        assert_eq!(lag.quantile(0.5), None);
        (0..=100).for_each(|ms| lag.measured(Duration::from_millis(ms)));
        assert_eq!(lag.quantile(0.99), Some(Duration::from_millis(99)));
    }
}
