//! Whether epochs still get to the backup: the deadline of the oldest that it has not acknowledged.
//!
//! A backup may live and be of no use: its process swaps or hangs, or the way to it carries
//! heartbeats and nothing larger. Heartbeats do not tell, and output waits meanwhile. So the oldest
//! epoch that is not acknowledged has a deadline, which begins anew only when something of it moves:
//! bytes that arrive at the backup's host, until all of it has; or the backup's own work. A large epoch
//! on a slow link is no failure; silence is one, and so is what moves for ever.

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
}

impl Headway {
    /// The headway of two whose epochs are wholly there when both have them.
    pub fn beside(self, other: Headway) -> Headway {
        Headway {
            bytes: self.bytes + other.bytes,
            whole: self.whole.min(other.whole),
            done: self.done + other.done,
        }
    }
}

/// An epoch that is past its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Late {
    /// Time for which the epoch has been on its way.
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
    /// Time at which that moved last.
    moved: Time,
    /// An epoch has been acknowledged.
    begun: bool,
}

impl Delivery {
    /// A delivery that gives an epoch so long without any movement.
    pub fn new(bound: Duration, now: Time) -> Delivery {
        let (captured, headway) = (VecDeque::new(), Headway::default());
        Delivery { bound, captured, headway, moved: now, begun: false }
    }

    /// An epoch is on its way.
    pub fn captured(&mut self, now: Time) {
        self.captured.push_back(now);
    }

    /// Notes that so many epochs are on the backup.
    pub fn acknowledged(&mut self, epochs: usize) {
        self.captured.drain(..epochs.min(self.captured.len()));
        self.begun = true;
    }

    /// Notes that so much has got there, while `oldest` is the oldest epoch that is not
    /// acknowledged. Once all of that is there no more bytes tell of it: they are of later ones.
    pub fn headway(&mut self, now: Time, headway: Headway, oldest: Epoch) {
        let bytes = headway.bytes.saturating_sub(self.headway.bytes);
        let travels = headway.whole < oldest || planted!(LaterBytesCount);
        let moved = (travels && bytes >= LEAST_BYTES) || headway.done > self.headway.done;
        if moved || planted!(EveryLookIsHeadway) {
            self.headway = headway;
            self.moved = now;
        }
    }

    /// Notes that this host stood still for so long, which is not the backup's fault.
    pub fn stood_still(&mut self, span: Duration) {
        self.captured.iter_mut().for_each(|at| *at = *at + span);
        self.moved = self.moved + span;
    }

    /// The oldest epoch, if it is past its deadline.
    pub fn late(&self, now: Time) -> Option<Late> {
        let oldest = *self.captured.front()?;
        let bound = self.patience();
        let (age, quiet) = (now - oldest, now - oldest.max(self.moved));
        (quiet > bound || age > bound * MOST_BOUNDS).then_some(Late { age, quiet })
    }

    /// Whether nothing has moved for half of the oldest epoch's time: another path may carry it.
    pub fn is_stuck(&self, now: Time) -> bool {
        let is_quiet = |oldest: &Time| now - (*oldest).max(self.moved) > self.patience() / 2;
        self.captured.front().is_some_and(is_quiet)
    }

    /// The time for which the oldest epoch has been on its way, if that is longer than the bound,
    /// whatever moves.
    pub fn overdue(&self, now: Time) -> Option<Duration> {
        let age = now - *self.captured.front()?;
        (self.begun && age > self.bound).then_some(age)
    }

    /// The time at which the oldest epoch will be past its deadline, if nothing moves.
    pub fn deadline(&self) -> Option<Time> {
        let oldest = *self.captured.front()?;
        let bound = self.patience();
        Some((oldest.max(self.moved) + bound).min(oldest + bound * MOST_BOUNDS))
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
        delivery.acknowledged(1);
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
        delivery.acknowledged(1);
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
            let headway = Headway { bytes: tenth << 20, whole, done: 0 };
            delivery.headway(at(tenth * 100), headway, OLDEST);
        }
        assert_eq!(delivery.late(at(1_400)), None);
        let late = delivery.late(at(1_401)).unwrap();
        assert_eq!((late.age.as_millis(), late.quiet.as_millis()), (1_401, 1_001));
        // The next one is on its way.
        delivery.acknowledged(1);
        let headway = Headway { bytes: 21 << 20, whole: OLDEST, done: 0 };
        delivery.headway(at(1_500), headway, OLDEST.next());
        assert_eq!(delivery.late(at(2_500)), None);
    }

    #[test]
    fn an_epoch_of_two_is_there_when_both_have_theirs() {
        let one = Headway { bytes: 5, whole: Epoch(7), done: 1 };
        let other = Headway { bytes: 6, whole: Epoch(4), done: 2 };
        assert_eq!(one.beside(other), Headway { bytes: 11, whole: Epoch(4), done: 3 });
    }

    #[test]
    fn a_first_synchronisation_is_no_epoch_and_an_own_stall_no_silence() {
        let mut delivery = Delivery::new(EPOCH_BOUND, at(0));
        delivery.captured(at(0));
        assert_eq!(delivery.late(at(10_000)), None);
        assert!(delivery.late(at(10_001)).is_some());
        delivery.stood_still(Duration::from_secs(60));
        assert_eq!(delivery.late(at(70_000)), None);
        assert!(delivery.late(at(70_001)).is_some());
    }
}
