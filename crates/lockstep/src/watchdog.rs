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
    looked: Time,
    still: Duration,
}

/// Longest time between two looks that counts: in more than that this host stood still itself, and
/// QEMU with it.
const LONGEST_LOOK: Duration = Duration::from_millis(200);

impl Watchdog {
    /// A QEMU diverged when it had log for `patience` without any progress, in time in which it was
    /// looked at: a false alarm costs a backup. While it waits for a disk, that has `disk_patience`
    /// to answer.
    pub fn new(patience: Duration, disk_patience: Duration, now: Time) -> Watchdog {
        let (last, still) = (Signs::default(), Duration::ZERO);
        Watchdog { patience, disk_patience, last, looked: now, still }
    }

    /// Looks: `pending` bytes of whole events wait for QEMU.
    pub fn look(&mut self, signs: Signs, pending: u64, now: Time) -> Option<Stuck> {
        let passed = now - std::mem::replace(&mut self.looked, now);
        let progress = signs.taken > self.last.taken
            || signs.instructions > self.last.instructions
            || self.last.awaits_disk && !signs.awaits_disk
            || pending == 0;
        if progress {
            (self.last, self.still) = (signs, Duration::ZERO);
            return None;
        }
        self.last.awaits_disk = signs.awaits_disk;
        self.still += passed.min(LONGEST_LOOK);
        let stuck = self.still;
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

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// A watchdog that is looked at every 100 ms.
    struct Watched {
        dog: Watchdog,
        now: Time,
    }

    impl Watched {
        fn new() -> Watched {
            let now = Time(Duration::ZERO);
            Watched { dog: Watchdog::new(seconds(5), seconds(30), now), now }
        }

        fn look_after(&mut self, passed: Duration, signs: Signs, pending: u64) -> Option<Stuck> {
            self.now = self.now + passed;
            self.dog.look(signs, pending, self.now)
        }

        /// The last of the looks of so much time.
        fn look(&mut self, time: Duration, signs: Signs, pending: u64) -> Option<Stuck> {
            let step = Duration::from_millis(100);
            let looks = (time.as_millis() / step.as_millis()).max(1);
            (0..looks).map(|_| self.look_after(step, signs, pending)).last().unwrap()
        }
    }

    fn signs() -> Signs {
        Signs { taken: LogPosition(10), instructions: 10, ..Default::default() }
    }

    #[test]
    fn only_log_without_any_progress_is_a_divergence() {
        let mut dog = Watched::new();
        let mut signs = signs();
        assert_eq!(dog.look(seconds(5), signs, 5), None);
        // Instructions of one long event, without another.
        signs.instructions += 1;
        assert_eq!(dog.look(seconds(5), signs, 5), None);
        // Nothing to do.
        assert_eq!(dog.look(seconds(60), signs, 0), None);
        assert_eq!(dog.look(seconds(5), signs, 7), None);
        assert_eq!(dog.look(seconds(1), signs, 7), Some(Stuck::Diverged(seconds(6))));
    }

    #[test]
    fn the_last_event_of_a_log_is_executed_in_time_too() {
        let mut dog = Watched::new();
        let waits_for_disk = 8;
        assert_eq!(dog.look(seconds(5), signs(), left_of_ended_log(0, waits_for_disk)), None);
        let stuck = dog.look(seconds(1), signs(), left_of_ended_log(0, waits_for_disk));
        assert!(matches!(stuck, Some(Stuck::Diverged(_))), "{stuck:?}");
        assert_eq!(dog.look(seconds(60), signs(), left_of_ended_log(0, END.into())), None);
        assert_eq!(left_of_ended_log(3, END.into()), 3);
    }

    #[test]
    fn a_disk_has_longer_to_answer_and_that_is_no_divergence() {
        let mut dog = Watched::new();
        let waits = Signs { awaits_disk: true, ..signs() };
        assert_eq!(dog.look(seconds(30), waits, 5), None);
        // It has answered: QEMU has its usual time again.
        assert_eq!(dog.look(seconds(4), signs(), 5), None);
        assert_eq!(dog.look(seconds(20), waits, 5), None);
        let stuck = dog.look(seconds(10), waits, 5);
        assert!(matches!(stuck, Some(Stuck::Disk(time)) if time > seconds(30)), "{stuck:?}");
    }

    /// Before, a sound copy that held the only state was ended, its host having slept.
    #[test]
    fn what_its_own_host_lost_is_no_divergence() {
        let mut dog = Watched::new();
        assert_eq!(dog.look(seconds(1), signs(), 5), None);
        assert_eq!(dog.look_after(seconds(600), signs(), 5), None);
        assert_eq!(dog.look(seconds(3), signs(), 5), None);
        let stuck = dog.look(seconds(3), signs(), 5);
        assert!(matches!(stuck, Some(Stuck::Diverged(_))), "{stuck:?}");
    }
}
