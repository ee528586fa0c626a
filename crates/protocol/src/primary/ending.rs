//! Ends of protection that no contest decides: by the operator's wish, or with the guest.

use super::{Primary, PrimaryAction, PrimaryPhase};
use crate::{Output, Time};
use std::time::Duration;

impl Primary {
    pub(super) fn captured_last(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        self.captured(now);
        self.captured_last = true;
        if self.phase == PrimaryPhase::Protected {
            self.phase = PrimaryPhase::HandingOver;
            if planted!(YieldAtOnce) {
                self.yield_to_backup(now, actions);
            }
        }
    }

    pub(super) fn unprotect(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        self.unprotect_asked = true;
        match self.phase {
            _ if planted!(LeaveWithoutWord) && self.phase == PrimaryPhase::Protected => {
                self.alone(None, actions);
            }
            PrimaryPhase::Syncing if !self.backup_may_be_entitled() => {
                actions.push(PrimaryAction::StandDown);
                actions.push(PrimaryAction::ClosePeer);
                self.alone(None, actions);
            }
            PrimaryPhase::Syncing | PrimaryPhase::Protected => {
                self.phase = PrimaryPhase::StandingDown;
                self.stands_down = Some(now);
                actions.push(PrimaryAction::StandDown);
            }
            _ => {}
        }
    }

    pub(super) fn stood_down(&mut self, actions: &mut Vec<PrimaryAction>) {
        if self.phase == PrimaryPhase::StandingDown {
            actions.push(PrimaryAction::ClosePeer);
            let late = "the backup has forgotten it later than was waited for".to_owned();
            self.alone((!self.unprotect_asked).then_some(late), actions);
        }
    }

    pub(super) fn guest_died(&mut self, reason: String, actions: &mut Vec<PrimaryAction>) {
        match self.phase {
            // A backup that is told to forget the VM takes nothing over any more.
            PrimaryPhase::Protected | PrimaryPhase::HandingOver => {
                self.end_permit(actions);
                actions.push(PrimaryAction::YieldToBackup);
                self.halt(reason, actions);
            }
            PrimaryPhase::Halted(_) => {}
            PrimaryPhase::Frozen(_) => self.halt(reason, actions),
            // A contest goes on at the arbiter, and may be this host's to win.
            _ => self.end(reason, actions),
        }
    }

    /// The reason of the end, after that for which the VM was being handed over.
    pub(super) fn because(&self, reason: String) -> String {
        self.hung.as_ref().map_or(reason.clone(), |hung| format!("{hung}; {reason}"))
    }

    /// A guest that hangs may still wake up: its copy is ended once the backup runs, not before.
    /// Until then its output is held as any that the backup has not acknowledged.
    pub(super) fn guest_hangs(
        &mut self,
        now: Time,
        reason: String,
        actions: &mut Vec<PrimaryAction>,
    ) {
        if self.phase == PrimaryPhase::Protected {
            self.phase = PrimaryPhase::HandingOver;
            self.hung = Some(reason);
            self.end_permit(actions);
            self.yield_to_backup(now, actions);
        }
    }

    /// The contest would be this host's to win, whose guest may be of no more use.
    pub(super) fn cannot_capture(
        &mut self,
        now: Time,
        reason: String,
        actions: &mut Vec<PrimaryAction>,
    ) {
        match self.phase {
            _ if planted!(ContestWhenSick) => self.peer_lost(reason, actions),
            PrimaryPhase::Protected => self.guest_hangs(now, reason, actions),
            PrimaryPhase::HandingOver if self.yielded.is_some() => {}
            _ => self.peer_lost(reason, actions),
        }
    }

    pub(super) fn yield_to_backup(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        self.yielded = Some(now);
        actions.push(PrimaryAction::YieldToBackup);
    }

    /// Ends the permit before a backup is told to take over from a guest that may yet send
    /// something: it does not wait until a permit has run out.
    fn end_permit(&self, actions: &mut Vec<PrimaryAction>) {
        if self.output == Output::Unheld {
            actions.push(PrimaryAction::Permit(Duration::ZERO));
        }
    }

    pub(super) fn alone(&mut self, reason: Option<String>, actions: &mut Vec<PrimaryAction>) {
        self.phase = PrimaryPhase::Alone(reason);
        actions.push(PrimaryAction::OpenOutput);
    }

    pub(super) fn halt(&mut self, reason: String, actions: &mut Vec<PrimaryAction>) {
        self.elsewhere = true;
        self.end(reason, actions);
    }

    fn end(&mut self, reason: String, actions: &mut Vec<PrimaryAction>) {
        self.phase = PrimaryPhase::Halted(reason.clone());
        actions.push(PrimaryAction::Halt(reason));
    }
}
