//! Whether epochs still get to the backup: the deadline of the oldest that it has not acknowledged.
//!
//! A backup may live and be of no use: its process swaps or hangs, or the way to it carries
//! heartbeats and nothing larger. Heartbeats do not tell, and output waits meanwhile. So the oldest
//! epoch that is not acknowledged has a deadline, which begins anew only when something of it moves:
//! bytes that arrive at the backup's host, until all of it has; or the backup's own work. A large epoch
//! on a slow link is no failure; silence is one, and so is what moves for ever.
//!
//! Much of an epoch is sent while it runs. Where none is on its way, and what is to be sent waits for
//! room, the epoch that runs is as good as captured: it cannot be, before there is room.

use crate::{Epoch, Time};
use std::collections::VecDeque;
use std::time::Duration;

/// The usual bound.
pub const EPOCH_BOUND: Duration = Duration::from_secs(1);

/// The fewest bytes that are movement: a link that carries no more in the bound carries no VM.
const LEAST_BYTES: u64 = 16 << 10;

/// The number of bounds after which an epoch is given up, however much moves.
const MOST_BOUNDS: u32 = 30;

/// The number of bounds for the first epoch, that of the first synchronisation, before which nobody
/// is protected: behind it lies all that is still on its way of memory and disks.
const FIRST_BOUNDS: u32 = 10;

/// The measure of what has got to the backup since protection began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Headway {
    /// Bytes that have arrived at its host, of whatever.
    pub bytes: u64,
    /// The last epoch of which all has arrived there, as far as that is known.
    pub whole: Epoch,
    /// Progress that it has made with what it has: a count of its own, which only grows.
    pub done: u64,
    /// What waits here meanwhile.
    pub behind: Behind,
}

/// What waits to be sent to the backup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Behind {
    /// Time since which something has waited for room in the queue, and nothing got any.
    pub held_up: Option<Time>,
    /// Time at which the epoch that runs was to end at the latest, for the sake of its output.
    pub output_due: Option<Time>,
}

impl Behind {
    /// What waits of two: the one that waits longer.
    fn beside(self, other: Behind) -> Behind {
        let earlier = |one: Option<Time>, other| one.into_iter().chain(other).min();
        Behind {
            held_up: earlier(self.held_up, other.held_up),
            output_due: earlier(self.output_due, other.output_due),
        }
    }
}

impl Headway {
    /// The headway of two whose epochs are wholly there when both have them.
    pub fn beside(self, other: Headway) -> Headway {
        Headway {
            bytes: self.bytes + other.bytes,
            whole: self.whole.min(other.whole),
            done: self.done + other.done,
            behind: self.behind.beside(other.behind),
        }
    }
}

/// An epoch that is past its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Late {
    /// Whether it was captured; else it waits for room.
    pub captured: bool,
    /// Time for which the epoch has been on its way, or has waited.
    pub age: Duration,
    /// Time for which nothing has moved.
    pub quiet: Duration,
}

/// The epochs on their way to the backup.
#[derive(Clone, Debug)]
pub struct Delivery {
    bound: Duration,
    /// Times at which they were captured, oldest first. Time in which this host stood still is not
    /// counted.
    captured: VecDeque<Time>,
    headway: Headway,
    /// The last epoch of which all was there at the last look.
    whole: Epoch,
    /// Time at which that moved last.
    moved: Time,
    /// An epoch has been acknowledged.
    begun: bool,
    behind: Behind,
    /// Time from which on what is held up counts, whenever it began to wait: this host has stood still
    /// until then, or an epoch before it was on its way.
    counts_from: Time,
}

impl Delivery {
    /// A delivery that gives an epoch so long without any movement.
    pub fn new(bound: Duration, now: Time) -> Delivery {
        let (captured, headway) = (VecDeque::new(), Headway::default());
        Delivery {
            bound,
            captured,
            headway,
            whole: Epoch(0),
            moved: now,
            begun: false,
            behind: Behind::default(),
            counts_from: now,
        }
    }

    /// An epoch is on its way.
    pub fn captured(&mut self, now: Time) {
        self.captured.push_back(now);
    }

    /// Notes that so many epochs are on the backup.
    pub fn acknowledged(&mut self, now: Time, epochs: usize) {
        self.captured.drain(..epochs.min(self.captured.len()));
        self.begun = true;
        self.counts_from = now;
    }

    /// Notes that so much has got there, while `oldest` is the oldest epoch that is not
    /// acknowledged. Once all of that is there no more bytes tell of it: they are of later ones. The last of
    /// it came since the look before.
    pub fn headway(&mut self, now: Time, headway: Headway, oldest: Epoch) {
        let behind = headway.behind;
        self.behind = if planted!(ForgetWhatWaits) { Behind::default() } else { behind };
        let bytes = headway.bytes.saturating_sub(self.headway.bytes);
        let before = std::mem::replace(&mut self.whole, headway.whole);
        let travels = before < oldest || planted!(LaterBytesCount);
        let moved = (travels && bytes >= LEAST_BYTES) || headway.done > self.headway.done;
        if moved || planted!(EveryLookIsHeadway) {
            self.headway = headway;
            self.moved = now;
        }
    }

    /// Notes that this host stood still for so long until now, which is not the backup's fault.
    pub fn stood_still(&mut self, now: Time, span: Duration) {
        self.captured.iter_mut().for_each(|at| *at = *at + span);
        self.moved = self.moved + span;
        self.counts_from = self.held_up().map_or(now, |since| since + span);
    }

    /// The oldest epoch, if it is past its deadline.
    pub fn late(&self, now: Time) -> Option<Late> {
        let (oldest, captured) = (self.oldest()?, !self.captured.is_empty());
        let bound = self.patience();
        let (age, quiet) = (now - oldest, now - oldest.max(self.moved));
        (quiet > bound || age > bound * MOST_BOUNDS).then_some(Late { captured, age, quiet })
    }

    /// Whether nothing has moved for half of the oldest epoch's time: another path may carry it.
    pub fn is_stuck(&self, now: Time) -> bool {
        let is_quiet = |oldest: Time| now - oldest.max(self.moved) > self.patience() / 2;
        self.oldest().is_some_and(is_quiet)
    }

    /// The time for which the oldest epoch has been on its way, if that is longer than the bound,
    /// whatever moves. Of the epoch that runs the time counts for which its output should have been on
    /// its way, if there is no room for it.
    pub fn overdue(&self, now: Time) -> Option<Duration> {
        let output_due = self.behind.output_due;
        let held_up = || self.held_up().map(|since| output_due.map_or(since, |due| due.min(since)));
        let age = now - self.captured.front().copied().or_else(held_up)?;
        (self.begun && age > self.bound).then_some(age)
    }

    /// The time at which the oldest epoch will be past its deadline, if nothing moves.
    pub fn deadline(&self) -> Option<Time> {
        let oldest = self.oldest()?;
        let bound = self.patience();
        Some((oldest.max(self.moved) + bound).min(oldest + bound * MOST_BOUNDS))
    }

    /// The time of the oldest epoch on its way: at which it was captured, or since which the one that
    /// runs has been held up.
    fn oldest(&self) -> Option<Time> {
        self.captured.front().copied().or_else(|| self.held_up())
    }

    fn held_up(&self) -> Option<Time> {
        self.behind.held_up.map(|since| since.max(self.counts_from))
    }

    fn patience(&self) -> Duration {
        if self.begun { self.bound } else { self.bound * FIRST_BOUNDS }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Time {
        Time(Duration::from_millis(ms))
    }

    fn bytes(bytes: u64) -> Headway {
        Headway { bytes, ..Headway::default() }
    }

    /// An epoch behind the first one.
    const OLDEST: Epoch = Epoch(2);

    /// A delivery beyond the first epoch, with nothing on its way.
    fn begun() -> Delivery {
        let mut delivery = Delivery::new(EPOCH_BOUND, at(0));
        delivery.captured(at(0));
        delivery.acknowledged(at(0), 1);
        delivery
    }

    #[test]
    fn an_epoch_that_does_not_move_is_late_after_the_bound() {
        let mut delivery = begun();
        assert_eq!((delivery.late(at(9_000)), delivery.deadline()), (None, None));
        delivery.captured(at(9_000));
        delivery.captured(at(9_500));
        assert_eq!(delivery.deadline(), Some(at(10_000)));
        assert_eq!(delivery.late(at(10_000)), None);
        let late = delivery.late(at(10_001)).unwrap();
        assert_eq!((late.age.as_millis(), late.quiet.as_millis()), (1_001, 1_001));
        // The one behind it has a deadline of its own, which an acknowledgement does not move.
        delivery.acknowledged(at(10_001), 1);
        assert_eq!(delivery.deadline(), Some(at(10_500)));
    }

    #[test]
    fn an_epoch_is_stuck_at_half_of_its_time() {
        let mut delivery = begun();
        assert!(!delivery.is_stuck(at(5_000)), "nothing is on its way");
        delivery.captured(at(9_000));
        assert!(!delivery.is_stuck(at(9_500)));
        assert!(delivery.is_stuck(at(9_501)));
        delivery.headway(at(9_501), bytes(LEAST_BYTES), OLDEST);
        assert!(!delivery.is_stuck(at(9_600)));
        assert!(delivery.is_stuck(at(10_002)));
    }

    #[test]
    fn a_large_epoch_on_a_slow_link_moves() {
        let mut delivery = begun();
        delivery.captured(at(0));
        for second in 1..=20 {
            delivery.headway(at(second * 900), bytes(second * LEAST_BYTES), OLDEST);
            assert_eq!(delivery.late(at(second * 900 + 950)), None);
        }
        assert!(delivery.late(at(19_001)).is_some(), "it has stopped");
        assert_eq!(delivery.overdue(at(1_000)), None);
        assert_eq!(delivery.overdue(at(1_001)), Some(Duration::from_millis(1_001)));
    }

    #[test]
    fn a_trickle_is_no_movement_and_nothing_moves_for_ever() {
        let mut delivery = begun();
        delivery.captured(at(0));
        for tenth in 1..=10 {
            delivery.headway(at(tenth * 100), bytes(tenth * 1_000), OLDEST);
        }
        assert!(delivery.late(at(1_001)).is_some());
        for second in 1..=30 {
            delivery.headway(at(second * 1_000), bytes(second << 20), OLDEST);
            assert_eq!(delivery.late(at(second * 1_000)), None);
        }
        let late = delivery.late(at(30_001)).unwrap();
        assert_eq!((late.age.as_millis(), late.quiet.as_millis()), (30_001, 1));
    }

    #[test]
    fn a_backup_that_works_is_waited_for() {
        let mut delivery = begun();
        delivery.captured(at(0));
        delivery.headway(at(800), Headway { done: 1, ..Headway::default() }, OLDEST);
        assert_eq!(delivery.late(at(1_800)), None);
        delivery.headway(at(1_801), Headway { done: 1, ..Headway::default() }, OLDEST);
        assert!(delivery.late(at(1_801)).is_some(), "it says the same again");
    }

    /// Bytes that a guest wrote behind its epoch were once taken for headway of that, for 30 s.
    #[test]
    fn bytes_behind_an_epoch_that_is_there_say_nothing_of_it() {
        let mut delivery = begun();
        delivery.captured(at(0));
        delivery.captured(at(100));
        for tenth in 1..=20 {
            let whole = if tenth >= 5 { OLDEST } else { Epoch(1) };
            let headway = Headway { bytes: tenth << 20, whole, ..Headway::default() };
            delivery.headway(at(tenth * 100), headway, OLDEST);
        }
        assert_eq!(delivery.late(at(1_500)), None);
        let late = delivery.late(at(1_501)).unwrap();
        assert_eq!((late.age.as_millis(), late.quiet.as_millis()), (1_501, 1_001));
        // The next one is on its way.
        delivery.acknowledged(at(1_501), 1);
        let headway = Headway { bytes: 21 << 20, whole: OLDEST, ..Headway::default() };
        delivery.headway(at(1_600), headway, OLDEST.next());
        assert_eq!(delivery.late(at(2_600)), None);
    }

    /// A backup to which nothing had got for nearly its time was given up when all of an epoch had just come.
    #[test]
    fn the_last_of_an_epoch_is_movement_too() {
        let mut delivery = begun();
        delivery.captured(at(0));
        let all = Headway { bytes: 1 << 20, whole: OLDEST, ..Headway::default() };
        delivery.headway(at(980), all, OLDEST);
        assert_eq!(delivery.late(at(1_980)), None);
        assert!(delivery.late(at(1_981)).is_some());
        delivery.headway(at(1_981), Headway { bytes: 2 << 20, ..all }, OLDEST);
        assert!(delivery.late(at(1_981)).is_some(), "that is of later ones");
    }

    #[test]
    fn an_epoch_of_two_is_there_when_both_have_theirs() {
        let behind = |held_up, output_due| Behind { held_up, output_due };
        let (one, other) = (behind(None, Some(at(3))), behind(Some(at(4)), Some(at(2))));
        let one = Headway { bytes: 5, whole: Epoch(7), done: 1, behind: one };
        let other = Headway { bytes: 6, whole: Epoch(4), done: 2, behind: other };
        let behind = behind(Some(at(4)), Some(at(2)));
        assert_eq!(one.beside(other), Headway { bytes: 11, whole: Epoch(4), done: 3, behind });
    }

    /// A delivery of which it is known at `now` that something has been held up, and so much moved.
    fn held_up(delivery: &mut Delivery, now: u64, since: Option<u64>, moved: u64) {
        let behind = Behind { held_up: since.map(at), output_due: None };
        delivery.headway(at(now), Headway { behind, ..bytes(moved) }, OLDEST);
    }

    /// A backup whose disk hung was once called one for 30 s: it had acknowledged all epochs, and the
    /// next one could not be captured for want of room.
    #[test]
    fn what_is_held_up_before_an_epoch_is_captured_is_as_late_as_the_epoch() {
        let mut delivery = begun();
        held_up(&mut delivery, 5_000, Some(5_000), 0);
        assert_eq!(delivery.deadline(), Some(at(6_000)));
        assert!(!delivery.is_stuck(at(5_500)) && delivery.is_stuck(at(5_501)));
        assert_eq!((delivery.late(at(6_000)), delivery.overdue(at(6_000))), (None, None));
        let late = Late { captured: false, age: EPOCH_BOUND, quiet: EPOCH_BOUND };
        let late = Late { age: late.age + at(1).0, quiet: late.quiet + at(1).0, ..late };
        assert_eq!(delivery.late(at(6_001)), Some(late));
        assert_eq!(delivery.overdue(at(6_001)), Some(late.age));
        // There is room again.
        held_up(&mut delivery, 6_001, None, 0);
        assert_eq!((delivery.late(at(99_000)), delivery.deadline()), (None, None));
    }

    #[test]
    fn what_is_held_up_and_moves_is_slow_and_no_more() {
        let mut delivery = begun();
        for second in 1..=100 {
            // One piece after the other gets room.
            held_up(
                &mut delivery,
                second * 900,
                Some((second * 900).saturating_sub(5_000)),
                second * LEAST_BYTES,
            );
            assert_eq!(delivery.late(at(second * 900 + 950)), None);
        }
        // Its output waits for it, however fast the pieces come.
        let due = |since, due| Behind { held_up: Some(at(since)), output_due: Some(at(due)) };
        let headway = Headway { behind: due(89_999, 88_000), ..bytes(101 * LEAST_BYTES) };
        delivery.headway(at(90_000), headway, OLDEST);
        assert_eq!(delivery.overdue(at(90_000)), Some(Duration::from_secs(2)));
        let headway = Headway { behind: due(89_999, 90_100), ..headway };
        delivery.headway(at(90_000), headway, OLDEST);
        assert_eq!(delivery.overdue(at(90_000)), None, "its output is not due yet");
    }

    #[test]
    fn neither_an_epoch_on_its_way_nor_an_own_stall_is_held_against_what_follows() {
        let mut delivery = begun();
        delivery.captured(at(1_000));
        held_up(&mut delivery, 1_100, Some(1_050), 1 << 20);
        assert_eq!(delivery.deadline(), Some(at(2_100)), "that of the epoch");
        delivery.acknowledged(at(2_050), 1);
        assert_eq!(delivery.late(at(3_050)), None);
        delivery.stood_still(at(9_050), Duration::from_secs(6));
        assert_eq!(delivery.late(at(9_050)), None);
        assert!(delivery.late(at(9_051)).is_some(), "1 s of its own and a little");
        // What is first seen after a stall.
        held_up(&mut delivery, 9_060, None, 0);
        delivery.stood_still(at(20_000), Duration::from_secs(10));
        held_up(&mut delivery, 20_010, Some(10_000), 0);
        assert_eq!(delivery.late(at(21_000)), None);
        assert!(delivery.late(at(21_001)).is_some());
    }

    #[test]
    fn a_first_copy_that_is_held_up_has_the_first_epochs_time() {
        let mut delivery = Delivery::new(EPOCH_BOUND, at(0));
        for time in [1_000, 10_900, 20_800] {
            held_up(&mut delivery, time, Some(1_000), time * 1_000);
            assert_eq!(
                (delivery.late(at(time + 10_000)), delivery.overdue(at(99_000))),
                (None, None)
            );
        }
        assert!(delivery.late(at(30_801)).is_some());
    }

    #[test]
    fn a_first_synchronisation_is_no_epoch_and_an_own_stall_no_silence() {
        let mut delivery = Delivery::new(EPOCH_BOUND, at(0));
        delivery.captured(at(0));
        assert_eq!(delivery.late(at(10_000)), None);
        assert!(delivery.late(at(10_001)).is_some());
        delivery.stood_still(at(70_000), Duration::from_secs(60));
        assert_eq!(delivery.late(at(70_000)), None);
        assert!(delivery.late(at(70_001)).is_some());
    }
}
