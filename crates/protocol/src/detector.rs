//! Failure detection: has the peer been silent for too long?
//!
//! A wrong suspicion costs redundancy, never correctness (ARCHITECTURE.md, "The two invariants"),
//! so the time-out may be short. It grows with the silence that is normal here.

use crate::Time;
use std::time::Duration;

/// Time between two looks of a session at the time that has passed. No heartbeat is due earlier, and those of hosts with
/// the shipped time-out are sent as often.
pub const TICK: Duration = Duration::from_millis(20);

/// The longest time between two heartbeats.
const LONGEST_INTERVAL: Duration = Duration::from_millis(200);

/// So many heartbeats are due in a time-out, where that is long enough: one that comes late is not to look like a
/// silence.
const BEATS: u32 = 10;

/// The time-out is at least this many times the longest recent gap.
const JITTER_FACTOR: u32 = 3;

/// The length of silence that is a failure, however bad the jitter.
const CEILING: Duration = Duration::from_secs(2);

/// The shortest silence that counts before the first synchronisation has ended: nobody can take
/// over until then, so suspecting earlier saves nothing, and a false alarm throws the copy away.
pub(crate) const SYNC_PATIENCE: Duration = CEILING;

/// Time between two heartbeats of a session, the same on both hosts: a tenth of the time-out of the less patient one. A
/// host that does not say how patient it is may be as impatient as any.
pub fn heartbeat_interval(ours: Duration, theirs: Option<Duration>) -> Duration {
    let shorter = theirs.unwrap_or_default().min(ours);
    (shorter / BEATS).clamp(TICK, LONGEST_INTERVAL)
}

/// The heartbeats of a session, which leave with its ticks.
#[derive(Clone, Debug)]
pub struct Beats {
    interval: Duration,
    next: Time,
}

impl Beats {
    /// The first is due at once, the others `interval` one after the other.
    pub fn new(interval: Duration, now: Time) -> Beats {
        Beats { interval, next: now }
    }

    /// Whether one is due at this tick, which is sent then.
    pub fn are_due(&mut self, now: Time) -> bool {
        // Not a tick later for a tick that comes a little too soon.
        let due = now + TICK / 2 > self.next;
        if due {
            self.next = now + self.interval;
        }
        due
    }
}

/// Watches the peer's signs of life.
#[derive(Clone, Debug)]
pub struct Detector {
    floor: Duration,
    last_heard: Time,
    typical_worst_gap: Duration,
}

impl Detector {
    /// A detector that suspects after `floor` at the earliest; the peer counts
    /// as heard at `now`.
    pub fn new(floor: Duration, now: Time) -> Detector {
        Detector { floor, last_heard: now, typical_worst_gap: TICK }
    }

    /// Suspects after `floor` at the earliest from now on.
    pub fn set_floor(&mut self, floor: Duration) {
        self.floor = floor;
    }

    /// The peer was heard.
    pub fn heard(&mut self, now: Time) {
        let gap = now - self.last_heard;
        // Rises at once, decays slowly: about 10 s to forget a burst of jitter, be it by few heartbeats of patient hosts.
        let ticks = (gap.as_nanos() / TICK.as_nanos()).clamp(1, 100) as i32;
        let decayed = self.typical_worst_gap.mul_f64(0.995_f64.powi(ticks));
        self.typical_worst_gap = decayed.max(gap).max(TICK);
        self.last_heard = now;
    }

    /// Silence longer than this is suspicious.
    pub fn timeout(&self) -> Duration {
        self.floor.max(self.typical_worst_gap * JITTER_FACTOR).min(CEILING.max(self.floor))
    }

    /// Time at which the peer will be suspected if it stays silent.
    pub fn deadline(&self) -> Time {
        self.last_heard + self.timeout()
    }

    /// The silence so far, when it is longer than the time-out.
    pub fn suspicion(&self, now: Time) -> Option<Duration> {
        let late = now > self.deadline() && !planted!(NeverSuspect);
        late.then(|| now - self.last_heard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Time {
        Time(Duration::from_millis(ms))
    }

    #[test]
    fn hosts_that_are_patient_beat_less_often_and_none_too_seldom_for_the_other() {
        let ms = Duration::from_millis;
        assert_eq!(heartbeat_interval(ms(100), Some(ms(100))), ms(20));
        assert_eq!(heartbeat_interval(ms(500), Some(ms(700))), ms(50));
        assert_eq!(heartbeat_interval(ms(10_000), Some(ms(300))), ms(30));
        assert_eq!(heartbeat_interval(ms(10_000), Some(ms(10_000))), ms(200));
        assert_eq!(heartbeat_interval(ms(10_000), Some(ms(0))), ms(20));
        // A host of an earlier release.
        assert_eq!(heartbeat_interval(ms(10_000), None), ms(20));
    }

    #[test]
    fn a_heartbeat_is_due_with_the_tick_next_to_its_time() {
        let mut beats = Beats::new(TICK * 3, at(0));
        let due = [0, 20, 40, 55, 75, 95, 116].map(|ms| beats.are_due(at(ms)));
        assert_eq!(due, [true, false, false, true, false, false, true]);
        let mut beats = Beats::new(TICK, at(0));
        assert!([0, 20, 39, 60].iter().all(|ms| beats.are_due(at(*ms))));
    }

    #[test]
    fn suspects_after_the_floor_when_heartbeats_are_regular() {
        let mut detector = Detector::new(Duration::from_millis(100), at(0));
        for beat in 1..50 {
            detector.heard(at(beat * 20));
        }
        assert_eq!(detector.suspicion(at(49 * 20 + 100)), None);
        assert!(detector.suspicion(at(49 * 20 + 101)).is_some());
    }

    #[test]
    fn jitter_widens_the_timeout_and_is_forgotten() {
        let mut detector = Detector::new(Duration::from_millis(100), at(0));
        detector.heard(at(80));
        assert_eq!(detector.timeout(), Duration::from_millis(240));
        let mut now = 80;
        for _ in 0..1000 {
            now += 20;
            detector.heard(at(now));
        }
        assert_eq!(detector.timeout(), Duration::from_millis(100));
    }

    #[test]
    fn distance_alone_is_no_reason_for_suspicion() {
        let (beat, distance) = (TICK, Duration::from_millis(50));
        let mut detector = Detector::new(Duration::from_millis(100), at(0));
        for sent in 0..500 {
            let arrives = at(0) + beat * sent + distance;
            assert_eq!(detector.suspicion(arrives), None, "at beat {sent}");
            detector.heard(arrives);
        }
        let last = at(0) + beat * 499 + distance;
        assert!(detector.timeout() <= 3 * (distance + beat), "{:?}", detector.timeout());
        assert!(detector.suspicion(last + detector.timeout() * 2).is_some());
    }

    #[test]
    fn jitter_never_switches_detection_off() {
        let mut detector = Detector::new(Duration::from_millis(100), at(0));
        detector.heard(at(60_000));
        assert_eq!(detector.timeout(), CEILING);
    }
}
