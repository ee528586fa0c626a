//! Whether this host stood still: a look that comes much later than it should, by the clock that
//! counts sleep, too; and where its clocks stood still with it, a peer for which more time passed.

use crate::Time;
use std::time::Duration;

/// Time by which a busy host may be late.
const LATENESS: Duration = Duration::from_secs(2);

/// A look every so often.
#[derive(Clone, Debug)]
pub struct Stillness {
    last: Time,
    interval: Duration,
}

impl Stillness {
    /// Looks come every `interval` from `now` on.
    pub fn new(now: Time, interval: Duration) -> Stillness {
        Stillness { last: now, interval }
    }

    /// The next look comes so long after the last.
    pub fn expect_within(&mut self, interval: Duration) {
        self.interval = interval;
    }

    /// Looks. For how long this host stood still since the last look, if it did.
    pub fn look(&mut self, now: Time) -> Option<Duration> {
        let late = (now - self.last).saturating_sub(self.interval);
        self.last = now;
        (late > LATENESS).then_some(late)
    }
}

/// A peer's time beside this host's own.
#[derive(Clone, Debug, Default)]
pub struct PeerClock {
    /// The time at which it was asked last, and what it said.
    last: Option<(Time, Time)>,
}

impl PeerClock {
    /// The peer was asked at `asked`, and its answer, `theirs`, was here at `answered`. For how long
    /// this host and its clocks stood still, if more time has passed for the peer since the last
    /// question than can have passed here.
    pub fn look(&mut self, asked: Time, answered: Time, theirs: Time) -> Option<Duration> {
        let last = self.last.replace((asked, theirs));
        let (asked_before, before) = last?;
        let ahead = (theirs - before).saturating_sub(answered - asked_before);
        (ahead > LATENESS).then_some(ahead)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK: Duration = Duration::from_millis(100);

    #[test]
    fn a_late_look_is_a_standstill_and_a_busy_host_is_none() {
        let mut stillness = Stillness::new(Time::default(), LOOK);
        assert_eq!(stillness.look(Time(LOOK)), None);
        assert_eq!(stillness.look(Time(LOOK * 11)), None, "a second late");
        let after = Time(LOOK * 12 + Duration::from_secs(60));
        assert_eq!(stillness.look(after), Some(Duration::from_secs(60)));
        assert_eq!(stillness.look(after + LOOK), None, "told once");
        stillness.expect_within(LOOK * 50);
        assert_eq!(stillness.look(after + LOOK * 51), None, "it was to come that late");
    }

    #[test]
    fn a_peer_for_which_more_time_passed_tells_of_clocks_that_stood_still() {
        let at = |seconds| Time(Duration::from_secs(seconds));
        let mut peer = PeerClock::default();
        assert_eq!(peer.look(at(10), at(10), at(5_000)), None);
        assert_eq!(peer.look(at(11), at(11), at(5_001)), None);
        assert_eq!(peer.look(at(12), at(12), at(5_062)), Some(Duration::from_secs(60)));
        assert_eq!(peer.look(at(13), at(13), at(5_063)), None, "told once");
        // Whatever else takes long takes long here, too.
        assert_eq!(peer.look(at(14), at(44), at(5_094)), None, "a late answer");
        assert_eq!(peer.look(at(104), at(104), at(5_124)), None, "the peer stood still");
        assert_eq!(peer.look(at(105), at(105), at(3)), None, "the peer was started anew");
    }
}
