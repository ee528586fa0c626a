//! One VM of a group, on the backup: its copy, its errands, and how it leaves its primary.

use super::words::{Ending, Errand};
use std::collections::VecDeque;
use std::time::Duration;
use understudy_protocol::{Epoch, Time, planted};

/// A primary that was told has so long to hang up. One that does not is lost, too, or slow: then
/// it hears what comes first.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// A copy of a VM. It never comes back from [`Copy::Failed`]: what is applied behind a gap makes
/// no copy whole, and mirrors that lost writes once stay without them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Copy {
    /// The first synchronisation is under way.
    Filling,
    /// A whole epoch.
    Whole,
    /// No state that a guest could go on from, for this reason.
    Failed(String),
}

/// A step that is to be taken for a member, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A committed epoch.
    Apply(Epoch),
    /// The epochs that were applied so far.
    Settle,
    /// The VM is won.
    TakeOver,
    /// The VM is not this host's.
    Forget,
}

/// A member.
#[derive(Clone, Debug)]
pub struct Member {
    /// The copy that it has of the VM.
    pub copy: Copy,
    /// The last epoch that its mirrors hold.
    pub applied: Epoch,
    /// The errand that is being done.
    pub busy: Option<Errand>,
    steps: VecDeque<Step>,
    /// Whether it is between [`Step::TakeOver`] and its end.
    pub takes_over: bool,
    /// Whether it can go further, while it waits for the others to come as far.
    pub answer: Option<Result<(), String>>,
    /// The primary is told why this host gives up.
    pub told: bool,
    /// Whether nothing more comes from the primary.
    pub hung_up: bool,
    /// This host has ended the connections.
    pub closed: bool,
    /// All is forgotten; the primary, which was told, may hang up until then.
    parts_by: Option<Time>,
    /// Its last errand was given out.
    pub ended: bool,
}

impl Member {
    /// A member whose session begins.
    pub fn new() -> Member {
        Member {
            copy: Copy::Filling,
            applied: Epoch(0),
            busy: None,
            steps: VecDeque::new(),
            takes_over: false,
            answer: None,
            told: false,
            hung_up: false,
            closed: false,
            parts_by: None,
            ended: false,
        }
    }

    /// Plans one more step. The last one comes once.
    pub fn plan(&mut self, step: Step) {
        if !self.ended && self.parts_by.is_none() {
            self.steps.push_back(step);
        }
    }

    /// All that was planned is void.
    pub fn forget_steps(&mut self) {
        self.steps.clear();
    }

    /// The epochs that are yet to be applied are void.
    pub fn forget_epochs(&mut self) {
        self.steps.retain(|step| !matches!(step, Step::Apply(_)));
    }

    /// The next step, unless something is being done, or waits for the other members.
    pub fn next_step(&mut self) -> Option<Step> {
        let waits = self.busy.is_some() || self.takes_over || self.parts_by.is_some();
        if waits { None } else { self.steps.pop_front() }
    }

    /// The errand for a committed epoch.
    pub fn errand_for(&self, epoch: Epoch) -> Errand {
        match self.copy {
            Copy::Failed(_) if !planted!(ApplyBehindGap) => Errand::Skip(epoch),
            _ => Errand::Apply(epoch),
        }
    }

    /// All is forgotten: how long a primary that was told has to hang up.
    pub fn part(&mut self, now: Time) {
        let patience = if planted!(HangUpUntold) { Duration::ZERO } else { PATIENCE };
        self.parts_by = Some(if self.told { now + patience } else { now });
    }

    /// Whether it is time to end the connections.
    pub fn may_close(&self, now: Time) -> bool {
        let due = |by: Time| self.hung_up || self.closed || now >= by;
        !self.ended && self.parts_by.is_some_and(due)
    }

    /// The way in which a member that has forgotten its VM ends. `won`: this host had won it.
    pub fn ending(&self, won: bool) -> Ending {
        match &self.copy {
            Copy::Failed(reason) if won => Ending::Returned(reason.clone()),
            _ => Ending::Discarded,
        }
    }
}
