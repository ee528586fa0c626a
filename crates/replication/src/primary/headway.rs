//! The measure of what has got to the backup: whether epochs move, where none is acknowledged.

use super::session::Session;
use crate::clock;
use crate::heartbeat::Pulse;
use crate::paths::Consequence;
use std::sync::atomic::{AtomicU64, Ordering};
use tracing::info;
use understudy_protocol::{Behind, Headway, PathEvent, Time};
use understudy_session::primary::Event;

/// The work of the backup on what it has, as it says.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// Bytes that it has applied, or a count of its own of the times that it had too much log.
    applied: AtomicU64,
    /// Bytes of log that it has executed.
    executed: AtomicU64,
    /// Number of times that either grew.
    signs: AtomicU64,
}

impl Work {
    /// Notes that it has applied so many bytes.
    pub fn applied(&self, bytes: u64) {
        self.note(self.applied.fetch_max(bytes, Ordering::Relaxed) < bytes);
    }

    /// Notes that it has executed its log so far.
    pub fn executed(&self, position: u64) {
        self.note(self.executed.swap(position, Ordering::Relaxed) != position);
    }

    fn note(&self, grew: bool) {
        self.signs.fetch_add(u64::from(grew), Ordering::Relaxed);
    }
}

impl Session {
    /// The headway of this VM's data.
    pub(super) fn headway(&self) -> Headway {
        // Both machines stand still, again and again, while they are compared as a whole.
        let compares = self.recording().is_some_and(|log| log.comparer().is_wanted());
        self.work.note(compares);
        // What goes on over another path has a new beginning.
        let done = self.work.signs.load(Ordering::Relaxed) + self.data.renewals();
        let behind = Behind { held_up: self.outbox.waits_since(), output_due: self.output_due() };
        Headway { bytes: self.data.delivered(), whole: self.data.whole(), done, behind }
    }

    /// The time at which the epoch that runs was to end at the latest, for the sake of its output.
    fn output_due(&self) -> Option<Time> {
        let last = self.group.rendezvous().last();
        let since = last.map_or_else(|| self.frames_since(), |last| self.output_since(last));
        since.map(|since| since + self.policy.longest_epoch())
    }

    /// Tells the state machine how far the group's data has got.
    pub(super) fn look_at_headway(&self) {
        let headway = self.group.headway();
        self.event(Event::Headway(headway));
    }

    /// Has the data go on over another path, if what was captured last does not move over this one.
    pub(super) fn look_for_better_path(&self) {
        if !self.paths.are_several() {
            return;
        }
        let Some(epoch) = self.group.core().stuck(clock::now()) else { return };
        if self.paths.event(PathEvent::Stuck(epoch)).contains(&Consequence::Leave) {
            info!(vm = %self.vm, "what is sent does not arrive: another path is tried");
            self.leave_path();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backup_works_if_it_says_something_new() {
        let work = Work::default();
        for (applied, executed) in [(5, 0), (5, 0), (9, 7), (3, 7)] {
            work.applied(applied);
            work.executed(executed);
        }
        assert_eq!(work.signs.load(Ordering::Relaxed), 3);
    }
}
