//! What a member's cut says, held against the snapshot that is prepared there.

use crate::SnapshotNumber;
use understudy_protocol::planted;

/// The snapshot for which a member is prepared, and what its cut has still to say of it.
#[derive(Clone, Debug, Default)]
pub struct Gate {
    number: SnapshotNumber,
    /// Whoever has prepared waits for the moment of the pause.
    awaits_take: bool,
    /// Whoever saves waits for the last frame in flight.
    awaits_log: bool,
    /// Number that nobody has prepared here.
    early: Option<SnapshotNumber>,
}

impl Gate {
    /// Somebody prepares that snapshot here, and waits for its moment.
    pub fn prepare(&mut self, number: SnapshotNumber) {
        (self.number, self.awaits_take, self.awaits_log) = (number, true, false);
    }

    /// The cut says that the VM is to be paused: whether whoever has prepared is to be told. Else it is to
    /// [pass](Gate::passed).
    pub fn take(&mut self, number: SnapshotNumber) -> bool {
        let is_awaited = self.awaits_take && (number == self.number || planted!(PauseForAny));
        match is_awaited {
            true => self.awaits_take = false,
            false => self.early = Some(number),
        }
        is_awaited
    }

    /// The number with which the cut is to be told that it is over. All members prepare before any takes a
    /// snapshot. One that nobody prepares here was over before this member was there, or is given up
    /// because of it: it is not waited for.
    pub fn passed(&mut self) -> Option<SnapshotNumber> {
        self.early.take().filter(|_| !planted!(LetNothingPass))
    }

    /// Whether the moment of that snapshot does not come any more, as the cut was told to take it, and
    /// has not said that the VM is to be paused: it knows a later one.
    pub fn has_missed(&self, number: SnapshotNumber) -> bool {
        self.number == number && self.awaits_take
    }

    /// The VM stands still for it: the end of the log is waited for.
    pub fn taken(&mut self) {
        self.awaits_log = true;
    }

    /// The cut says that the log is complete: whether whoever saves is to be told.
    pub fn log_complete(&self, number: SnapshotNumber) -> bool {
        self.number == number && self.awaits_log
    }

    /// That snapshot is over: nobody waits for anything of it. Whether it is the one that was prepared here.
    pub fn end(&mut self, number: SnapshotNumber) -> bool {
        let is_its = self.number == number;
        if is_its {
            (self.awaits_take, self.awaits_log) = (false, false);
        }
        is_its
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_moment_comes_once_and_what_nobody_prepares_passes() {
        let [three, four, five] = [3, 4, 5].map(SnapshotNumber);
        let mut gate = Gate::default();
        assert!(!gate.take(three), "nobody has prepared it");
        assert_eq!(gate.passed(), Some(three));
        gate.prepare(four);
        assert!(gate.has_missed(four) && !gate.has_missed(five), "it was not told yet");
        assert!(gate.take(four) && !gate.has_missed(four));
        assert!(!gate.take(four), "once");
        assert!(!gate.log_complete(four), "it does not stand still yet");
        gate.taken();
        assert!(gate.log_complete(four) && !gate.log_complete(five));
        gate.prepare(five);
        assert!(!gate.end(four));
        assert!(gate.take(five), "the end of the one before is not its own");
        assert!(gate.end(five));
    }
}
