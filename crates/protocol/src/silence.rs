//! Whether a device has hung: one call of the system has waited for it for too long.
//!
//! Time is taken by the watcher's own looks, as for a QEMU that hangs: time in which this host stood
//! still counts as one look, since the device had none of it either.

use std::time::Duration;

/// A disk of this host that has not answered for so long hangs. Longer than the worst queue of a
/// slow disk that works.
pub const DISK_BOUND: Duration = Duration::from_secs(10);

/// Measures the silence of one device.
#[derive(Clone, Debug)]
pub struct Silence<Id> {
    bound: Duration,
    longest_look: Duration,
    oldest: Option<Id>,
    silent: Duration,
}

impl<Id: PartialEq + Copy> Silence<Id> {
    /// A device that may be silent for `bound`, and is looked at every `interval`.
    pub fn new(bound: Duration, interval: Duration) -> Silence<Id> {
        Silence { bound, longest_look: interval * 2, oldest: None, silent: Duration::ZERO }
    }

    /// Looks, `passed` after the last time; `oldest` is the call that has waited longest. How long
    /// it has, if that is too long.
    pub fn look(&mut self, oldest: Option<Id>, passed: Duration) -> Option<Duration> {
        let same = self.oldest == oldest && oldest.is_some();
        self.oldest = oldest;
        self.silent = match same {
            true => self.silent + passed.min(self.longest_look),
            false => Duration::ZERO,
        };
        (self.silent > self.bound).then_some(self.silent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK: Duration = Duration::from_millis(100);

    #[test]
    fn one_call_that_waits_too_long_is_a_silence_many_are_not() {
        let mut disk = Silence::new(Duration::from_secs(1), LOOK);
        for call in 0..100 {
            assert_eq!(disk.look(Some(call), LOOK), None, "it answers them");
        }
        for _ in 0..10 {
            assert_eq!(disk.look(Some(7), LOOK), None);
        }
        let silent = (0..2).filter_map(|_| disk.look(Some(7), LOOK)).last();
        assert_eq!(silent, Some(LOOK * 11));
        assert_eq!(disk.look(None, LOOK), None, "it has answered");
        assert_eq!(disk.look(Some(8), LOOK), None);
    }

    #[test]
    fn what_this_host_lost_itself_is_no_silence() {
        let mut disk = Silence::new(Duration::from_secs(1), LOOK);
        disk.look(Some(1), LOOK);
        assert_eq!(disk.look(Some(1), LOOK * 600), None, "the daemon was stopped");
    }
}
