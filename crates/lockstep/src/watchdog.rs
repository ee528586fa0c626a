//! Has the backup's QEMU stopped replaying? A divergence shows as a silent hang.

use crate::{END, LogPosition};
use std::time::Duration;
use understudy_protocol::Time;

/// The signs of its work that QEMU shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signs {
    /// The log that it has taken.
    pub taken: LogPosition,
    /// The instructions that it has executed.
    pub instructions: u64,
    /// Backup waits for one of its disks.
    pub awaits_disk: bool,
}

/// A QEMU that has made no progress for too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stuck {
    /// It diverged: it has been stuck for so long.
    Diverged(Duration),
    /// A disk has not answered for so long: that is no fault of the log's.
    Disk(Duration),
}

/// The rest that a QEMU has before it whose log has ended: bytes that it has not taken, and the
/// last event, which it takes whole before it executes it. `event` is the one that it waits to
/// execute.
pub fn left_of_ended_log(pending: u64, event: u64) -> u64 {
    if event == u64::from(END) { pending } else { pending.max(1) }
}

/// Watches for a QEMU that has log and makes nothing of it.
#[derive(Clone, Debug)]
pub struct Watchdog {
    patience: Duration,
    disk_patience: Duration,
    last: Signs,
    since: Time,
}

impl Watchdog {
    /// A QEMU diverged when it had log for `patience` without any progress. It must be
    /// longer than any pause of the host: a false alarm costs a backup. While it waits for a
    /// disk, that has `disk_patience` to answer.
    pub fn new(patience: Duration, disk_patience: Duration, now: Time) -> Watchdog {
        Watchdog { patience, disk_patience, last: Signs::default(), since: now }
    }

    /// Looks: `pending` bytes of whole events wait for QEMU.
    pub fn look(&mut self, signs: Signs, pending: u64, now: Time) -> Option<Stuck> {
        let progress = signs.taken > self.last.taken
            || signs.instructions > self.last.instructions
            || self.last.awaits_disk && !signs.awaits_disk
            || pending == 0;
        if progress {
            (self.last, self.since) = (signs, now);
            return None;
        }
        self.last.awaits_disk = signs.awaits_disk;
        let stuck = now - self.since;
        if signs.awaits_disk {
            (stuck > self.disk_patience).then_some(Stuck::Disk(stuck))
        } else {
            (stuck > self.patience).then_some(Stuck::Diverged(stuck))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time(Duration::from_secs(seconds))
    }

    fn dog() -> Watchdog {
        Watchdog::new(Duration::from_secs(5), Duration::from_secs(30), at(0))
    }

    #[test]
    fn only_log_without_any_progress_is_a_divergence() {
        let mut dog = dog();
        let mut signs = Signs { taken: LogPosition(10), instructions: 10, ..Default::default() };
        assert_eq!(dog.look(signs, 5, at(1)), None);
        // Instructions of one long event, without another.
        signs.instructions += 1;
        assert_eq!(dog.look(signs, 5, at(6)), None);
        // Nothing to do.
        assert_eq!(dog.look(signs, 0, at(60)), None);
        assert_eq!(dog.look(signs, 7, at(64)), None);
        assert_eq!(dog.look(signs, 7, at(66)), Some(Stuck::Diverged(Duration::from_secs(6))));
    }

    #[test]
    fn the_last_event_of_a_log_is_executed_in_time_too() {
        let mut dog = dog();
        let signs = Signs { taken: LogPosition(10), instructions: 10, ..Default::default() };
        let waits_for_disk = 8;
        for seconds in [1, 6] {
            assert_eq!(dog.look(signs, left_of_ended_log(0, waits_for_disk), at(seconds)), None);
        }
        let stuck = dog.look(signs, left_of_ended_log(0, waits_for_disk), at(7));
        assert_eq!(stuck, Some(Stuck::Diverged(Duration::from_secs(6))));
        assert_eq!(dog.look(signs, left_of_ended_log(0, END.into()), at(60)), None);
        assert_eq!(left_of_ended_log(3, END.into()), 3);
    }

    #[test]
    fn a_disk_has_longer_to_answer_and_that_is_no_divergence() {
        let mut dog = dog();
        let mut signs = Signs { taken: LogPosition(10), instructions: 10, awaits_disk: true };
        assert_eq!(dog.look(signs, 5, at(1)), None);
        assert_eq!(dog.look(signs, 5, at(30)), None);
        // It has answered: QEMU has its usual time again.
        signs.awaits_disk = false;
        assert_eq!(dog.look(signs, 5, at(31)), None);
        assert_eq!(dog.look(signs, 5, at(35)), None);
        signs.awaits_disk = true;
        assert_eq!(dog.look(signs, 5, at(60)), None);
        assert_eq!(dog.look(signs, 5, at(62)), Some(Stuck::Disk(Duration::from_secs(31))));
    }
}
