//! The time of the next sign of life: one end of a session leads, the other beats as soon as it hears that.
//!
//! Either end beats at least every [`HEARTBEAT_INTERVAL`], whatever comes. The one that follows is woken once for
//! both: the leader beats a little sooner than the follower's own time runs out.

use crate::{HEARTBEAT_INTERVAL, Time};
use std::time::Duration;

/// The leader's beats come so much sooner: more than a thread is late and a way takes now more, now less time.
const LEAD: Duration = Duration::from_millis(1);

/// The beats of one end.
#[derive(Clone, Debug)]
pub struct Beating {
    interval: Duration,
    follows: bool,
    next: Time,
}

impl Beating {
    /// The end that leads, whose first beat is due at `now`.
    pub fn leading(now: Time) -> Beating {
        Beating { interval: HEARTBEAT_INTERVAL - LEAD, follows: false, next: now }
    }

    /// The end that follows, whose first beat is due at `now`.
    pub fn following(now: Time) -> Beating {
        Beating { interval: HEARTBEAT_INTERVAL, follows: true, next: now }
    }

    /// The time of the next beat, if nothing is heard before.
    pub fn due(&self) -> Time {
        self.next
    }

    /// The peer was heard. Not each time: where there are several paths, or it does the same, beats would come faster
    /// and faster.
    pub fn heard(&mut self, now: Time) {
        if self.follows && self.next - now <= self.interval / 2 {
            self.next = self.next.min(now);
        }
    }

    /// Begins a beat if one is due; gives how late it is.
    pub fn begin(&mut self, now: Time) -> Option<Duration> {
        let late = (now >= self.next).then(|| now - self.next)?;
        self.next = now + self.interval;
        Some(late)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    fn at(micros: u64) -> Time {
        Time(Duration::from_micros(micros))
    }

    struct End {
        beating: Beating,
        /// Times at which the peer's beats come.
        coming: VecDeque<Time>,
        beats: Vec<Time>,
        wakes: u32,
    }

    impl End {
        fn new(beating: Beating) -> End {
            End { beating, coming: VecDeque::new(), beats: Vec::new(), wakes: 0 }
        }

        /// What the heart does at `now`, whose thread is always so late. Whether it beats.
        fn turn(&mut self, now: Time, late: Duration) -> bool {
            let comes = self.coming.front().is_some_and(|at| *at + late <= now);
            if !comes && now < self.beating.due() + late {
                return false;
            }
            self.wakes += 1;
            while self.coming.pop_front_if(|at| *at <= now).is_some() {
                self.beating.heard(now);
            }
            let beats = self.beating.begin(now).is_some();
            self.beats.extend(beats.then_some(now));
            beats
        }

        fn longest_gap(&self) -> Duration {
            self.beats.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap()
        }
    }

    /// Two ends for ten seconds, over a way that takes 0.1 ms and up to `jitter` more.
    fn play(mut ends: [End; 2], jitter: u64) -> [End; 2] {
        let late = Duration::from_micros(80);
        for now in (0..10_000_000).step_by(10) {
            for (one, other) in [(0, 1), (1, 0)] {
                if ends[one].turn(at(now), late) {
                    ends[other].coming.push_back(at(now + 100 + now / 10 * 7 % (jitter + 1)));
                }
            }
        }
        ends
    }

    #[test]
    fn the_end_that_follows_is_woken_once_for_both() {
        let [leader, follower] =
            play([End::new(Beating::leading(at(0))), End::new(Beating::following(at(7_000)))], 300);
        let beats = leader.beats.len() as u32;
        assert!(follower.beats.len() as u32 <= beats + 2, "{}", follower.beats.len());
        assert!(follower.wakes <= beats + beats / 20, "{} for {beats}", follower.wakes);
        // It was twice for each end.
        let [one, other] = [Beating::following(at(0)), Beating::following(at(7_000))]
            .map(|end| End::new(Beating { follows: false, ..end }));
        let [_, deaf] = play([one, other], 300);
        assert!(deaf.wakes > beats * 18 / 10, "{}", deaf.wakes);
    }

    /// The detector of either end counts on it.
    #[test]
    fn no_end_beats_more_rarely_than_it_has_to() {
        let longest = HEARTBEAT_INTERVAL + Duration::from_micros(100);
        for (jitter, begin) in [(0, 0), (300, 7_000), (5_000, 13_000), (15_000, 0)] {
            let ends = [Beating::leading(at(0)), Beating::following(at(begin))];
            let ends = play(ends.map(End::new), jitter);
            for end in &ends {
                assert!(end.longest_gap() <= longest, "{:?} with {jitter} µs", end.longest_gap());
            }
        }
        // A peer that says nothing changes nothing.
        let mut alone = End::new(Beating::following(at(0)));
        for now in (0..1_000_000).step_by(10) {
            alone.turn(at(now), Duration::ZERO);
        }
        assert_eq!(alone.longest_gap(), HEARTBEAT_INTERVAL);
    }

    #[test]
    fn two_that_hear_each_other_do_not_beat_faster_and_faster() {
        let mut follower = Beating::following(at(0));
        assert_eq!(follower.begin(at(0)), Some(Duration::ZERO));
        let mut beats = 0;
        for now in (0..1_000_000).step_by(100) {
            follower.heard(at(now));
            beats += u32::from(follower.begin(at(now)).is_some());
        }
        assert!(beats <= 100, "{beats}");
    }

    /// A heart that was not scheduled must know it, whatever came meanwhile.
    #[test]
    fn what_is_heard_late_hides_no_stall_of_this_end() {
        let mut follower = Beating::following(at(0));
        follower.begin(at(0));
        follower.heard(at(500_000));
        assert_eq!(follower.begin(at(500_000)), Some(Duration::from_millis(480)));
    }
}
