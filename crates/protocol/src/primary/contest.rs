//! The contest of who may go on with the VM: the primary asks the arbiter. One that has lost keeps
//! its guest until another host runs it: the winner may turn out not to be able to, and hands the
//! VM back.

use super::{Primary, PrimaryAction, PrimaryPhase};
use crate::delivery::Late;
use crate::{Generation, Ownership, Time, Verdict};
use std::time::Duration;

/// Time to wait before the arbiter is asked again.
const ARBITER_RETRY: Duration = Duration::from_millis(200);

impl Primary {
    pub(super) fn undelivered(&self, late: Late) -> String {
        let Late { captured, age, quiet } = late;
        let (epoch, age, quiet) = (self.committed.next(), age.as_millis(), quiet.as_millis());
        let how = if captured { "been on its way" } else { "waited for room on its way" };
        format!(
            "the backup is heard, and epoch {epoch} has {how} to it for {age} ms, for the last {quiet} \
             without any movement"
        )
    }

    /// The backup lives and is of no use. Before it may be entitled there is nothing to contest, and no barrier that
    /// would hold output meanwhile.
    pub(super) fn peer_useless(&mut self, reason: String, actions: &mut Vec<PrimaryAction>) {
        if !self.backup_may_be_entitled() {
            return self.peer_lost(reason, actions);
        }
        self.peer_unaware = true;
        self.contest(reason, actions);
    }

    pub(super) fn contest(&mut self, reason: String, actions: &mut Vec<PrimaryAction>) {
        self.phase = PrimaryPhase::Contesting(self.because(reason));
        self.retry_at = None;
        actions.push(PrimaryAction::Contest(self.generation));
    }

    /// The arbiter was asked: the backup may hear of it.
    fn hang_up(&mut self, actions: &mut Vec<PrimaryAction>) {
        if std::mem::take(&mut self.peer_unaware) {
            actions.push(PrimaryAction::ClosePeer);
        }
    }

    pub(super) fn verdict(
        &mut self,
        now: Time,
        verdict: Verdict,
        actions: &mut Vec<PrimaryAction>,
    ) {
        self.hang_up(actions);
        let (PrimaryPhase::Contesting(reason) | PrimaryPhase::Frozen(reason)) = &self.phase else {
            return;
        };
        let reason = reason.clone();
        match verdict {
            // What another host has won is granted to nobody.
            Verdict::Granted(_) if self.winner.is_some() => {}
            Verdict::Granted(generation) => self.own(generation, reason, actions),
            Verdict::Returned(generation) => {
                let reason = format!("{reason}; it was handed back at generation {generation}");
                self.own(generation, reason, actions);
            }
            Verdict::Taken(owner) if Some(&owner) == self.winner.as_ref() => {
                self.retry_at = Some(now + ARBITER_RETRY);
            }
            Verdict::Taken(owner) => self.lost(now, owner, &reason, actions),
            Verdict::Unreachable(_) if planted!(SilenceIsGrant) => {
                self.own(self.generation.next(), reason, actions);
            }
            Verdict::Unreachable(_) if planted!(AskOnce) => {}
            Verdict::Unreachable(_) => self.retry_at = Some(now + ARBITER_RETRY),
        }
    }

    fn own(&mut self, generation: Generation, reason: String, actions: &mut Vec<PrimaryAction>) {
        assert!(generation > self.generation, "generations only grow");
        self.generation = generation;
        self.winner = None;
        let reason = (!self.unprotect_asked).then_some(reason);
        self.alone(reason, actions);
    }

    /// Handles a lost contest. The winner may hand the VM back if it has just won; if more has
    /// happened since, somebody has run it.
    fn lost(
        &mut self,
        now: Time,
        owner: Ownership,
        reason: &str,
        actions: &mut Vec<PrimaryAction>,
    ) {
        let host = owner.host.as_deref().unwrap_or("nobody");
        let words = format!(
            "{reason}; the arbiter says that {host} owns the VM at generation {}",
            owner.generation
        );
        let just_won = owner.host.is_some() && owner.generation == self.generation.next();
        if self.winner.is_some() || !just_won || planted!(HaltAtOnce) {
            return self.halt(words, actions);
        }
        self.phase = PrimaryPhase::Frozen(words);
        self.winner = Some(owner);
        self.retry_at = Some(now + ARBITER_RETRY);
        if !planted!(FreezeNothing) {
            actions.push(PrimaryAction::Freeze);
        }
    }

    pub(super) fn live_elsewhere(
        &mut self,
        generation: Generation,
        actions: &mut Vec<PrimaryAction>,
    ) {
        if generation <= self.generation || self.phase.is_over() {
            return;
        }
        let reason = match &self.phase {
            PrimaryPhase::Frozen(reason) => format!("{reason}, and runs it"),
            _ => self.because(format!("the backup took over at generation {generation}")),
        };
        self.runs_elsewhere = true;
        self.halt(reason, actions);
    }
}
