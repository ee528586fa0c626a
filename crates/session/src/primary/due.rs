//! The next step of a group, and its time.

use std::time::Duration;
use understudy_protocol::{
    Activity, Due, GroupStep, LastCheckpoint, Policy, Primary, PrimaryPhase, Rendezvous, Situation,
    Time,
};

/// The requests to a group beside its epochs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// A planned fail-over.
    pub hand_over: bool,
    /// A checkpoint, however little there is to commit.
    pub checkpoint: bool,
}

/// The guests of a group, looked at only where it matters.
pub trait Guests {
    /// The time since which output has waited for the end of the epoch that runs, if any does.
    fn output_since(&self, last: LastCheckpoint) -> Option<Time>;
    /// Whether any has written to its disks what an epoch should have.
    fn is_full(&self) -> bool;
    /// The activity of the guests.
    fn activity(&self) -> Activity;
}

/// The step that is due at `now`, or how long to wait at most; for a change alone, if that is none.
pub fn next_step(
    core: &Primary,
    (rendezvous, policy): (&Rendezvous, &Policy),
    asked: Asked,
    now: Time,
    guests: &impl Guests,
) -> Result<GroupStep, Option<Duration>> {
    // None while a member still stands still.
    let last = rendezvous.last().filter(|_| !rendezvous.is_broken() && core.may_capture());
    let Some(last) = last else { return Err(None) };
    let protected = *core.phase() == PrimaryPhase::Protected;
    if protected && asked.hand_over {
        return Ok(GroupStep::LastCheckpoint);
    }
    if protected && asked.checkpoint {
        return Ok(GroupStep::Checkpoint);
    }
    let in_flight = core.in_flight();
    let may_end = in_flight < policy.pipeline();
    let output_since = if may_end { guests.output_since(last) } else { None };
    let (length, full) = (rendezvous.length(), guests.is_full());
    let situation = Situation { now, last, length, in_flight, output_since, full };
    match policy.due(&situation, || guests.activity()) {
        Due::At(time) if time <= now => Ok(GroupStep::Checkpoint),
        Due::At(time) | Due::Look(time) => Err(Some(time - now)),
        Due::OnChange => Err(None),
    }
}
