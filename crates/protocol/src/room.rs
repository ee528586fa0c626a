//! Room, in bytes, for what is to go to the backup: in the queue to it, and in the epoch that runs.
//!
//! What a guest writes to its disks goes to the backup at once, which keeps it in memory until the
//! epoch is whole. So over a bound a checkpoint is due. While none can be taken, since epochs before it
//! are on their way, writes wait: that ends when the backup acknowledges them, without the guest's
//! help. Once one can be taken they pass, for QEMU waits for its writes when it stops.

use crate::Time;

/// The place of somebody who waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Turn(u64);

/// The room of a queue, and who waits for some: whoever came first gets it first. Else many who want
/// little would keep one from it for good who wants much.
#[derive(Clone, Debug)]
pub struct QueueRoom {
    limit: u64,
    used: u64,
    /// The turn that is next, of those who wait.
    next: Turn,
    /// The turn of who comes then.
    last: Turn,
    /// Time since which there are any, and none of them got some.
    waits_since: Option<Time>,
}

impl QueueRoom {
    /// Room for so many bytes.
    pub fn new(limit: u64) -> QueueRoom {
        QueueRoom { limit, used: 0, next: Turn(0), last: Turn(0), waits_since: None }
    }

    /// Whether there is room for so many more, and nobody waits.
    pub fn has(&self, bytes: u64) -> bool {
        self.fits(bytes) && (self.next == self.last || planted!(JumpTheQueue))
    }

    /// Whether there is room for so many more by whoever waits, and whose turn this is.
    pub fn is_for(&self, turn: Turn, bytes: u64) -> bool {
        self.fits(bytes) && (self.next == turn || planted!(JumpTheQueue))
    }

    /// One request alone always does.
    fn fits(&self, bytes: u64) -> bool {
        self.used == 0 || self.used + bytes <= self.limit
    }

    /// Whether there is more in it than there should be, by those who do not wait.
    pub fn is_over(&self) -> bool {
        self.used > self.limit
    }

    /// Takes room, whether there is some or not.
    pub fn take(&mut self, bytes: u64) {
        self.used += bytes;
    }

    /// Gives room back.
    pub fn give_back(&mut self, bytes: u64) {
        self.used = self.used.saturating_sub(bytes);
    }

    /// Somebody begins to wait.
    pub fn wait(&mut self, now: Time) -> Turn {
        self.waits_since.get_or_insert(now);
        let turn = self.last;
        self.last = Turn(turn.0 + 1);
        turn
    }

    /// Somebody who waited gets room.
    pub fn waited(&mut self, now: Time) {
        self.next = Turn(self.next.0 + 1);
        self.waits_since = (self.next < self.last).then_some(now);
    }

    /// The time since which somebody has waited, and nobody who did has got any.
    pub fn waits_since(&self) -> Option<Time> {
        self.waits_since
    }
}

/// The room of the epoch that runs.
#[derive(Clone, Debug)]
pub struct EpochRoom {
    limit: u64,
    used: u64,
    /// No checkpoint can be taken before an earlier epoch is acknowledged.
    blocked: bool,
}

impl EpochRoom {
    /// Room for so many bytes.
    pub fn new(limit: u64) -> EpochRoom {
        EpochRoom { limit, used: 0, blocked: false }
    }

    /// Whether a checkpoint is due for want of room.
    pub fn is_full(&self) -> bool {
        self.used >= self.limit
    }

    /// Whether a write has to wait: no checkpoint can make room.
    pub fn must_wait(&self) -> bool {
        self.is_full() && (self.blocked || planted!(WaitForOnesOwnEpoch))
    }

    /// Takes room. Returns whether it was the last: a checkpoint is due.
    pub fn take(&mut self, bytes: u64) -> bool {
        let was_full = self.is_full();
        self.used += bytes;
        !was_full && self.is_full()
    }

    /// The next epoch has begun.
    pub fn empty(&mut self) {
        self.used = 0;
    }

    /// Whether as many epochs are on their way as there may be. Returns whether they were, and are not any more.
    pub fn set_blocked(&mut self, blocked: bool) -> bool {
        std::mem::replace(&mut self.blocked, blocked) && !blocked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn at(ms: u64) -> Time {
        Time(Duration::from_millis(ms))
    }

    #[test]
    fn a_queue_has_room_for_what_fits_and_for_one_request_alone() {
        let mut room = QueueRoom::new(10);
        assert!(room.has(11));
        room.take(4);
        assert!(room.has(6) && !room.has(7));
        room.take(7);
        assert!(room.is_over(), "who must not wait");
        room.give_back(11);
        assert!(room.has(99) && !room.is_over());
    }

    #[test]
    fn who_gets_room_shows_that_there_is_some_for_those_who_wait_on() {
        let mut room = QueueRoom::new(10);
        let turns = [room.wait(at(1)), room.wait(at(5))];
        assert_eq!(room.waits_since(), Some(at(1)));
        assert!(room.is_for(turns[0], 99) && !room.is_for(turns[1], 1));
        room.waited(at(9));
        assert!(room.is_for(turns[1], 1));
        assert_eq!(room.waits_since(), Some(at(9)));
        room.waited(at(12));
        assert_eq!(room.waits_since(), None);
    }

    /// Small writes of a guest once kept the pieces of a first copy from their room for good.
    #[test]
    fn who_wants_little_waits_behind_who_wants_much() {
        let mut room = QueueRoom::new(10);
        room.take(9);
        let much = room.wait(at(1));
        assert!(!room.has(1), "somebody waits");
        let little = room.wait(at(2));
        for left in (0..9).rev() {
            room.give_back(1);
            assert_eq!(room.is_for(much, 8), left <= 2);
            assert!(!room.is_for(little, 1));
        }
        room.waited(at(3));
        room.take(8);
        assert!(room.is_for(little, 1) && !room.has(1));
        room.waited(at(4));
        assert!(room.has(1));
    }

    #[test]
    fn a_full_epoch_says_so_once_and_holds_writes_up_only_while_none_can_end() {
        let mut room = EpochRoom::new(300);
        assert_eq!([(); 4].map(|()| room.take(100)), [false, false, true, false]);
        assert!(room.is_full() && !room.must_wait());
        assert!(!room.set_blocked(true));
        assert!(room.must_wait());
        assert!(room.set_blocked(false) && !room.must_wait());
        room.set_blocked(true);
        room.empty();
        assert!(!room.is_full() && !room.must_wait());
    }
}
