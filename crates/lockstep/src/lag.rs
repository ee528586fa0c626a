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

/// A backup whose lag falls by so much a step catches up.
const CATCHING_UP: Duration = Duration::from_millis(25);

/// What a guest always keeps.
const LEAST_SHARE: f64 = 0.1;

/// A backup begins behind: it loads the machine while the primary runs on. For so long it is
/// not slow.
const GRACE: Duration = Duration::from_secs(5);

/// A backup that is further behind than this is waited for: a fail-over would take as long.
pub const MOST_LAG: Duration = Duration::from_secs(2);

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
/// a step, and returns by a tenth a step when the lag is small. While the backup catches up it
/// stays: what a burst left behind (a reboot's log, say) is no reason to slow down more.
#[derive(Clone, Debug)]
pub struct Pace {
    share: f64,
    changed: Time,
    worst: Duration,
    /// The step before's.
    before: Duration,
    began: Time,
}

impl Pace {
    /// A primary at full speed, whose log begins now.
    pub fn new(now: Time) -> Pace {
        let (worst, before) = (Duration::ZERO, Duration::ZERO);
        Pace { share: 1.0, changed: now, worst, before, began: now }
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
        let caught_up = std::mem::replace(&mut self.before, worst).saturating_sub(worst);
        self.changed = now;
        if now - self.began < GRACE {
            return false;
        }
        let before = self.share;
        if worst > TARGET && caught_up < CATCHING_UP {
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
    fn what_a_burst_left_behind_slows_nobody() {
        let mut pace = Pace::new(Time::default());
        let at = |ms| Time(Duration::from_millis(ms));
        // The start.
        for ms in (0..5_000).step_by(50) {
            assert!(!pace.reported(Duration::from_secs(1), at(ms)));
        }
        // Two seconds' worth, executed at twice the speed at which it came.
        for ms in 0..2_000 {
            pace.reported(Duration::from_millis(2_000 - ms), at(6_000 + 2 * ms));
        }
        assert!(pace.share() > 0.6, "{}", pace.share());
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
