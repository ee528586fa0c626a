//! Has the backup's QEMU stopped replaying? A divergence shows as a silent hang.

use crate::LogPosition;
use std::time::Duration;
use understudy_protocol::Time;

/// What QEMU shows of its work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signs {
    /// The log that it has taken.
    pub taken: LogPosition,
    /// The instructions that it has executed.
    pub instructions: u64,
}

/// Watches for a QEMU that has log and makes nothing of it.
#[derive(Clone, Debug)]
pub struct Watchdog {
    patience: Duration,
    last: Signs,
    since: Time,
}

impl Watchdog {
    /// A QEMU diverged when it had log for `patience` without any progress. It must be
    /// longer than any pause of the host: a false alarm costs a backup.
    pub fn new(patience: Duration, now: Time) -> Watchdog {
        Watchdog { patience, last: Signs::default(), since: now }
    }

    /// Looks: `pending` bytes of whole events wait for QEMU. Gives how long it has made no
    /// progress once that is too long.
    pub fn look(&mut self, signs: Signs, pending: u64, now: Time) -> Option<Duration> {
        let progress = signs.taken > self.last.taken
            || signs.instructions > self.last.instructions
            || pending == 0;
        if progress {
            (self.last, self.since) = (signs, now);
            return None;
        }
        let stuck = now - self.since;
        (stuck > self.patience).then_some(stuck)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_log_without_any_progress_is_a_divergence() {
        let at = |s| Time(Duration::from_secs(s));
        let mut dog = Watchdog::new(Duration::from_secs(5), at(0));
        let mut signs = Signs { taken: LogPosition(10), instructions: 10 };
        assert_eq!(dog.look(signs, 5, at(1)), None);
        // Instructions of one long event, without another.
        signs.instructions += 1;
        assert_eq!(dog.look(signs, 5, at(6)), None);
        // Nothing to do.
        assert_eq!(dog.look(signs, 0, at(60)), None);
        assert_eq!(dog.look(signs, 7, at(64)), None);
        assert_eq!(dog.look(signs, 7, at(66)), Some(Duration::from_secs(6)));
    }
}
