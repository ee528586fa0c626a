//! The next step of the capture thread, and its time.

use super::session::{LONGEST_WAIT, Session};
use crate::clock;
use std::time::Duration;
use understudy_protocol::{GroupStep, PrimaryPhase, Rendezvous};
use understudy_session::primary::{Asked, Lead, next_step};

/// The next step of the capture thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Take a checkpoint.
    Checkpoint,
    /// See how much the guest has written.
    Look,
    /// Take the last checkpoint: a planned fail-over.
    LastCheckpoint,
    /// Keep up in the other way.
    Turn,
    /// Protection is over.
    End,
}

impl Session {
    /// Waits until the capture thread has something to do.
    pub fn next_step(&self) -> Step {
        loop {
            let seen = self.machine().doorbell().count();
            let mut wait = match self.judge() {
                Ok(step) => return step,
                Err(wait) => wait,
            };
            if let Some(look) = self.stats.next_look() {
                if look.is_zero() {
                    return Step::Look;
                }
                wait = wait.min(look);
            }
            self.machine().doorbell().wait(seen, wait.min(LONGEST_WAIT));
        }
    }

    /// The step that is due now, or how long to wait at most. What one member
    /// finds due, all members do.
    fn judge(&self) -> Result<Step, Duration> {
        let core = self.group.core();
        if core.phase().has_lost() || matches!(core.phase(), PrimaryPhase::Alone(_)) {
            return Ok(Step::End);
        }
        if self.is_turn_due(&core) {
            return Ok(Step::Turn);
        }
        let rendezvous = self.group.rendezvous();
        let step = match rendezvous.announced(core.running()) {
            Some(step) => step,
            None => {
                let step = self.due(&core, &rendezvous)?;
                self.announce(&core, step);
                self.group.ring_others();
                step
            }
        };
        Ok(match step {
            GroupStep::Checkpoint => Step::Checkpoint,
            GroupStep::LastCheckpoint => Step::LastCheckpoint,
        })
    }

    /// Makes a checkpoint due now, unless it cannot be taken or is due already.
    pub fn cut_short(&self) {
        let core = self.group.core();
        let rendezvous = self.group.rendezvous();
        let idle = rendezvous.last().is_some() && rendezvous.announced(core.running()).is_none();
        if idle && core.may_capture() {
            self.announce(&core, GroupStep::Checkpoint);
            self.group.ring_others();
        }
    }

    fn announce(&self, lead: &Lead, step: GroupStep) {
        let running = lead.running();
        self.group.meeting(|rendezvous| rendezvous.announce(running, step));
    }

    /// The step that the group is to take now, or the time to wait at most.
    fn due(&self, lead: &Lead, rendezvous: &Rendezvous) -> Result<GroupStep, Duration> {
        let asked = Asked { hand_over: lead.is_handed_over(), checkpoint: self.is_keep_wanted() };
        let pace = (rendezvous, &self.policy);
        next_step(lead, pace, asked, clock::now(), &*self.group)
            .map_err(|wait| wait.unwrap_or(LONGEST_WAIT))
    }
}
