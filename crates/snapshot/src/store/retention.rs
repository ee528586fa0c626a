//! The choice of a schedule's snapshots that are kept.

use crate::SnapshotNumber;
use crate::format::Manifest;
use std::time::{Duration, Instant};

/// Step of a clock that makes it another one, in seconds.
const STEP: u64 = 60;
/// Time for a host's clock to be set after its start: it may be days ahead until then.
const SET_WITHIN: Duration = Duration::from_secs(3_600);

/// The clock by which snapshots are old: what it says counts once it has gone on without a step for a while.
#[derive(Clone, Copy, Debug)]
pub struct SteadyClock {
    since: Instant,
    /// Its word then, in seconds since 1970.
    said: u64,
    steady_for: Duration,
}

/// Seconds since 1970, by a steady clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SteadyTime(u64);

impl SteadyClock {
    /// A clock of a schedule with this period, which says this now.
    pub fn new(every: Duration, now: Instant, says: u64) -> SteadyClock {
        SteadyClock { since: now, said: says, steady_for: every.min(SET_WITHIN) }
    }

    /// The time, if it is known.
    pub fn time(&mut self, now: Instant, says: u64) -> Option<SteadyTime> {
        let went_on = now.saturating_duration_since(self.since);
        if says.abs_diff(self.said.saturating_add(went_on.as_secs())) > STEP {
            (self.since, self.said) = (now, says);
            return None;
        }
        (went_on >= self.steady_for).then_some(SteadyTime(says))
    }
}

/// The retention of a group's snapshots. Those with a label are kept until they are deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// Number of the newest to keep, at least one.
    pub newest: usize,
    /// Age in seconds up to which all others are kept, too.
    pub seconds: u64,
}

impl Retention {
    /// The numbers of those to be deleted.
    pub fn expired(&self, snapshots: &[Manifest], now: SteadyTime) -> Vec<SnapshotNumber> {
        let mut unlabelled: Vec<&Manifest> =
            snapshots.iter().filter(|manifest| manifest.label.is_none()).collect();
        unlabelled.sort_by_key(|manifest| std::cmp::Reverse(manifest.number));
        let old = |manifest: &&&Manifest| manifest.taken_at.saturating_add(self.seconds) <= now.0;
        let beyond = unlabelled.iter().skip(self.newest.max(1));
        beyond.filter(old).map(|manifest| manifest.number).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Incarnation;
    use crate::format::Compression;
    use understudy_protocol::literal;

    #[test]
    fn the_newest_the_young_and_the_labelled_are_kept() {
        let snapshot = |number, label: Option<&str>| Manifest {
            group: literal("shop"),
            number: SnapshotNumber(number),
            label: label.map(str::to_owned),
            taken_at: number * 100,
            incarnation: Incarnation(0),
            compression: Compression::Lz4,
            members: vec![],
            crossings: vec![],
        };
        let all: Vec<_> = (1..=9).map(|n| snapshot(n, (n == 2).then_some("before"))).collect();
        let expired = |newest, seconds| -> Vec<u64> {
            let retention = Retention { newest, seconds };
            retention.expired(&all, SteadyTime(1000)).into_iter().map(|number| number.0).collect()
        };
        assert_eq!(expired(3, 0), [6, 5, 4, 3, 1]);
        assert_eq!(expired(3, 500), [5, 4, 3, 1]);
        assert_eq!(expired(0, 0), [8, 7, 6, 5, 4, 3, 1], "never the last one");
        assert_eq!(expired(100, 0), Vec::<u64>::new());
    }

    // Before, the first snapshot after the start of a host whose clock was ahead deleted what was to be kept for days.
    #[test]
    fn by_a_clock_that_has_yet_to_be_set_nothing_is_old() {
        const NOW: u64 = 1_790_000_000;
        const AHEAD: u64 = 30 * 86_400;
        let (start, day) = (Instant::now(), Duration::from_secs(86_400));
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut clock = SteadyClock::new(day, start, NOW + AHEAD);
        assert_eq!(clock.time(after(60), NOW + AHEAD + 60), None);
        assert_eq!(clock.time(after(300), NOW + 300), None, "it is set");
        assert_eq!(clock.time(after(3_800), NOW + 3_800), None, "an hour has not passed since");
        assert_eq!(clock.time(after(3_900), NOW + 3_901), Some(SteadyTime(NOW + 3_901)));
        assert_eq!(clock.time(after(9_000), NOW + 9_000), Some(SteadyTime(NOW + 9_000)));
        assert_eq!(clock.time(after(9_001), NOW + AHEAD), None, "it is set wrong");
        let minute = Duration::from_secs(60);
        let mut often = SteadyClock::new(minute, start, NOW);
        assert_eq!(often.time(after(59), NOW + 59), None);
        assert_eq!(often.time(after(60), NOW + 60), Some(SteadyTime(NOW + 60)));
    }
}
