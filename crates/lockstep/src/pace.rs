//! The primary's pace, which it lowers for a backup that is behind (VMware FT, 3.2).

use std::time::Duration;
use understudy_protocol::Time;

/// A backup that is as far behind as this is left alone.
const TARGET: Duration = Duration::from_millis(30);

/// Share of its processor that the primary loses for each second of lag over the target. With what a
/// report is late (some 80 ms, the control group's period included) far from oscillating.
const GAIN: f64 = 4.0;

/// The most that a lag takes at once: a burst that the backup is about to have executed is no
/// reason to stand still.
const MOST_AT_ONCE: f64 = 0.5;

/// Rate at which the share that the backup keeps up with is learnt, per second of lag and second.
const LEARNING: f64 = 2.0;

/// A lag further off the target than this teaches no more: it may be a burst.
const MOST_LEARNT_FROM: f64 = 0.05;

/// The share that a guest always keeps.
const LEAST_SHARE: f64 = 0.1;

/// A share that differs less from the last one is not worth a change.
const STEP: f64 = 0.02;

/// A primary is at full speed when it could have been for so long. Until then it keeps just less.
const SETTLED: Duration = Duration::from_secs(5);
const NEARLY_ALL: f64 = 0.99;

/// Reports further apart than this count as so far apart.
const LONGEST_GAP: Duration = Duration::from_millis(250);

/// The primary's share of its CPU, so that the backup keeps up.
///
/// A backup that was held up for a moment never catches up with a busy primary by itself, since
/// both execute at the same speed. So the share falls with the lag at once, just so far and so
/// long that the backup catches up without waiting for log, and slowly to what a slower
/// backup keeps up with for good (a proportional and an integral part).
#[derive(Clone, Debug)]
pub struct Pace {
    /// The share that the backup keeps up with, as far as is known: the integral part.
    steady: f64,
    share: f64,
    reported: Time,
    /// Time at which the primary was slowed down last.
    slowed: Option<Time>,
}

impl Pace {
    /// A primary at full speed, whose log begins now.
    pub fn new(now: Time) -> Pace {
        Pace { steady: 1.0, share: 1.0, reported: now, slowed: None }
    }

    /// The part of its CPU that the primary may use, 0.1 to 1.
    pub fn share(&self) -> f64 {
        self.share
    }

    /// The backup reported this lag. True if the share changed.
    pub fn reported(&mut self, lag: Duration, now: Time) -> bool {
        let passed = (now - self.reported).min(LONGEST_GAP).as_secs_f64();
        self.reported = now;
        let over = lag.as_secs_f64() - TARGET.as_secs_f64();
        let taught = over.clamp(-MOST_LEARNT_FROM, MOST_LEARNT_FROM);
        self.steady = (self.steady - LEARNING * taught * passed).clamp(LEAST_SHARE, 1.0);
        let wanted = self.steady - (GAIN * over).min(MOST_AT_ONCE);
        self.change(wanted.clamp(LEAST_SHARE, 1.0), now)
    }

    fn change(&mut self, wanted: f64, now: Time) -> bool {
        if wanted < 1.0 {
            self.slowed = Some(now);
        }
        let settled = self.slowed.is_none_or(|slowed| now - slowed >= SETTLED);
        let share = if settled { 1.0 } else { wanted.min(NEARLY_ALL) };
        let is_limit = share == 1.0 || share == NEARLY_ALL || share == LEAST_SHARE;
        if share == self.share || (!is_limit && (share - self.share).abs() < STEP) {
            return false;
        }
        self.share = share;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    const TICK: f64 = 0.01;
    /// Reports come every so many ticks.
    const REPORT: u32 = 5;

    /// A busy primary, and a backup that executes what has come.
    struct Pair {
        pace: Pace,
        now: f64,
        /// Work that the primary has done in each tick and the backup has not done yet, in seconds
        /// at full speed; the latest last.
        behind: VecDeque<f64>,
        worked: f64,
        lags: Vec<f64>,
    }

    impl Pair {
        fn new() -> Pair {
            let pace = Pace::new(Time::default());
            Pair { pace, now: 0.0, behind: VecDeque::new(), worked: 0.0, lags: Vec::new() }
        }

        /// The backup executes at this speed for so long; the primary's full speed is 1.
        fn run(&mut self, seconds: f64, speed: f64) {
            for tick in 0..(seconds / TICK).round() as u32 {
                self.now += TICK;
                let share = self.pace.share();
                self.worked += share * TICK;
                self.behind.push_back(share * TICK);
                self.execute(speed * TICK);
                let lag = self.behind.len() as f64 * TICK;
                self.lags.push(lag);
                if tick % REPORT == 0 {
                    let now = Time(Duration::from_secs_f64(self.now));
                    self.pace.reported(Duration::from_secs_f64(lag), now);
                }
            }
        }

        fn execute(&mut self, mut work: f64) {
            while let Some(oldest) = self.behind.front_mut() {
                *oldest -= work;
                if *oldest > 1e-9 {
                    return;
                }
                work = -*oldest;
                self.behind.pop_front();
            }
        }

        fn lag(&self, part: f64) -> f64 {
            let mut sorted = self.lags.clone();
            sorted.sort_by(f64::total_cmp);
            sorted[((sorted.len() - 1) as f64 * part) as usize]
        }
    }

    #[test]
    fn a_slow_backup_slows_the_primary_to_its_own_speed() {
        for speed in [0.3, 0.6, 0.9] {
            let mut pair = Pair::new();
            pair.run(30.0, speed);
            (pair.worked, pair.lags) = (0.0, Vec::new());
            pair.run(30.0, speed);
            let lag = pair.lag(0.99);
            assert!(lag < 0.1, "a backup of speed {speed} is {lag} s behind");
            let worked = pair.worked / 30.0;
            assert!(worked > speed * 0.97, "speed {speed}: the primary worked {worked}");
        }
    }

    #[test]
    fn moments_in_which_the_backup_stands_still_cost_hardly_more_than_they_last() {
        let mut pair = Pair::new();
        for _ in 0..20 {
            pair.run(0.15, 0.0);
            pair.run(1.85, 1.0);
        }
        let worked = pair.worked / pair.now;
        assert!(worked > 0.89, "a primary with a backup of 0.925 worked {worked}");
        assert!(
            pair.lag(0.5) < 0.06 && pair.lag(0.99) < 0.2,
            "{} {}",
            pair.lag(0.5),
            pair.lag(0.99)
        );
    }

    #[test]
    fn what_a_burst_left_behind_does_not_slow_the_primary_for_long() {
        let mut pair = Pair::new();
        pair.behind = std::iter::repeat_n(TICK, 200).collect();
        pair.run(3.0, 2.0);
        assert!(pair.lags.last().unwrap() < &0.01);
        assert!(pair.pace.share() > 0.95, "{}", pair.pace.share());
        assert!(pair.worked > 2.0, "{}", pair.worked);
    }

    #[test]
    fn a_primary_whose_backup_keeps_up_is_not_slowed() {
        let mut pair = Pair::new();
        pair.run(10.0, 1.0);
        assert_eq!((pair.pace.share(), pair.worked.round()), (1.0, 10.0));
    }

    #[test]
    fn a_primary_gets_all_of_its_processor_back_only_after_a_while() {
        let at = |seconds| Time(Duration::from_secs(seconds));
        let mut pace = Pace::new(at(0));
        assert!(pace.reported(Duration::from_millis(100), at(1)));
        assert!(pace.share() < 0.8);
        assert!(pace.reported(Duration::ZERO, at(2)));
        assert_eq!(pace.share(), NEARLY_ALL);
        assert!(!pace.reported(Duration::ZERO, at(5)));
        assert!(pace.reported(Duration::ZERO, at(6)));
        assert_eq!(pace.share(), 1.0);
    }
}
