//! The lease of a sole owner, so that its VM can be taken from a host that is silent without that
//! host ever running it, too (docs/decisions/017-lease.md).
//!
//! A host that runs a VM without a backup, while another host has a copy, proves again and again to
//! the arbiter that it lives. Once it could not for the lease's length, it lets nothing out and
//! freezes the guest. Whoever wants the VM looks at the proofs: it may take it when they have not
//! changed for longer than that, by its own clock. No two clocks are compared.

mod watch;

pub use watch::{LeaseSight, LeaseWatch, Renewal};

use crate::{HostName, Time};
use std::time::Duration;

/// Renewals within a lease's length, so that a few may fail.
const RENEWALS: u32 = 5;

/// A sole owner of whose lease so small a part has passed while it stood still does not ask anew.
const STILL_PARTS: u32 = 4;

/// The stake that there would be if this host ran a VM that another one was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stake {
    /// No other host has a copy.
    Nothing,
    /// Another host has one, or had, and this one lets output out by its own word.
    Sole,
    /// A backup is being set up: what there is of a lease goes on, and none begins.
    Undecided,
    /// A backup decides about the output.
    Guarded,
}

impl Stake {
    /// The stake of the host which runs the VM. `guards`: whether the session in which it protects
    /// it, if there is one, decides about its output; `has_copies`: whether others may have images
    /// of it.
    pub fn of(guards: Option<bool>, has_copies: bool) -> Stake {
        match guards {
            Some(true) => Stake::Guarded,
            Some(false) => Stake::Undecided,
            None if has_copies => Stake::Sole,
            None => Stake::Nothing,
        }
    }
}

/// An errand to the arbiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseErrand {
    /// Write a renewal, then read whether the VM is still this host's.
    Renew,
    /// Remove the last renewal, then read the same.
    Withdraw,
}

/// The result of an errand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseAnswer {
    /// The errand is done, and the VM was this host's after it.
    Own,
    /// The VM is not this host's any more, for this reason, but that one's, if it is anybody's.
    Moved {
        /// The host that has it.
        to: Option<HostName>,
        /// The reason.
        why: String,
    },
    /// No answer: nothing may be concluded.
    Unreachable(String),
}

impl LeaseAnswer {
    /// The same beside a contest of this host's own, which is under way or was won meanwhile: that
    /// the VM moved is perhaps this host's own doing, and the contest tells.
    pub fn beside_contest(self, contest: bool) -> LeaseAnswer {
        match self {
            LeaseAnswer::Moved { .. } if contest && !planted!(LeaseBesideContest) => {
                LeaseAnswer::Unreachable("this host asks for the VM itself".to_owned())
            }
            answer => answer,
        }
    }

    /// The same beside a session that decides about the output, between these hosts: the backup may have
    /// won the VM, and not run it, or handed it back. The session finds out, and keeps the guest until
    /// it has.
    pub fn beside_session(self, hosts: &[HostName]) -> LeaseAnswer {
        match self {
            LeaseAnswer::Moved { to: Some(to), .. }
                if hosts.contains(&to) && !planted!(LeaseBesideSession) =>
            {
                LeaseAnswer::Unreachable(format!("host {to} has it, and may not run it"))
            }
            answer => answer,
        }
    }
}

/// An action that the owner must take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseAction {
    /// Let output leave until then; no limit if none.
    Limit(Option<Time>),
    /// Go to the arbiter, and come back with [`Lease::answered`].
    Ask(LeaseErrand),
    /// Let the guest stand still, for this reason.
    Freeze(String),
    /// Let it go on.
    GoOn,
    /// End this copy, for this reason.
    Halt(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No lease, nor a renewal at the arbiter.
    None,
    /// The guest runs until then, and its output leaves at most as long.
    Held(Time),
    /// The lease ran out: the guest stands still.
    RunOut,
    /// The VM is another host's.
    Lost,
}

/// The owner's half.
#[derive(Clone, Debug)]
pub struct Lease {
    length: Duration,
    phase: Phase,
    /// The errand under way.
    asking: Option<LeaseErrand>,
    /// Time at which the next one is due.
    next: Time,
    /// Time before which no question counts: this host stood still since.
    trusts_from: Time,
    /// The reason why the last renewal failed.
    obstacle: Option<String>,
}

impl Lease {
    /// No lease yet; one of no length never begins.
    pub fn new(length: Duration) -> Lease {
        let (next, trusts_from) = (Time::default(), Time::default());
        Lease { length, phase: Phase::None, asking: None, next, trusts_from, obstacle: None }
    }

    /// The time for which a renewal is good.
    pub fn length(&self) -> Duration {
        self.length
    }

    /// Whether it has run out, and the guest stands still.
    pub fn has_run_out(&self) -> bool {
        self.phase == Phase::RunOut
    }

    /// Whether there is one.
    pub fn is_held(&self) -> bool {
        matches!(self.phase, Phase::Held(_))
    }

    /// The reason why the guest stands still, if it does.
    pub fn standstill(&self) -> Option<String> {
        self.has_run_out().then(|| self.words())
    }

    /// The longest standing still of a host that needs no fresh word of the arbiter.
    pub fn longest_still(&self) -> Duration {
        self.length / STILL_PARTS
    }

    /// Time goes by.
    pub fn tick(&mut self, now: Time, stake: Stake) -> Vec<LeaseAction> {
        let mut actions = Vec::new();
        match self.phase {
            Phase::Lost => return actions,
            Phase::None if stake != Stake::Sole || self.length.is_zero() => return actions,
            Phase::None => {
                // Before the first renewal is to be seen, by which others count.
                self.phase = Phase::Held(now + self.length);
                self.next = now;
                actions.push(LeaseAction::Limit(Some(now + self.length)));
            }
            Phase::Held(until) if now >= until => {
                self.phase = Phase::RunOut;
                actions.push(LeaseAction::Freeze(self.words()));
            }
            Phase::Held(_) | Phase::RunOut => {}
        }
        if self.asking.is_none() && now >= self.next {
            let errand = match stake {
                Stake::Sole | Stake::Undecided => LeaseErrand::Renew,
                Stake::Guarded | Stake::Nothing => LeaseErrand::Withdraw,
            };
            self.asking = Some(errand);
            actions.push(LeaseAction::Ask(errand));
        }
        actions
    }

    /// Notes that this host stood still for so long that its clock is not to be trusted alone.
    pub fn stood_still(&mut self, now: Time) -> Vec<LeaseAction> {
        (self.trusts_from, self.next) = (now, now);
        if !self.is_held() || planted!(SleepUnnoticed) {
            return Vec::new();
        }
        self.phase = Phase::Held(now + self.retry());
        let why = "this host stood still, and the arbiter has not been asked since";
        self.obstacle = Some(why.to_owned());
        vec![LeaseAction::Limit(Some(now))]
    }

    /// An errand that began at `asked` is over.
    pub fn answered(&mut self, now: Time, asked: Time, answer: LeaseAnswer) -> Vec<LeaseAction> {
        let errand = self.asking.take();
        if matches!(self.phase, Phase::None | Phase::Lost) {
            return Vec::new();
        }
        match answer {
            LeaseAnswer::Moved { why, .. } if !planted!(MovedIsOwn) => {
                self.phase = Phase::Lost;
                vec![LeaseAction::Limit(Some(Time::default())), LeaseAction::Halt(why)]
            }
            LeaseAnswer::Unreachable(why) => {
                self.obstacle = Some(why);
                self.next = now + self.retry();
                Vec::new()
            }
            LeaseAnswer::Own if asked < self.trusts_from => Vec::new(),
            // It took so long that it is worth nothing.
            LeaseAnswer::Own if now >= asked + self.length && !planted!(LeaseFromAnswer) => {
                self.next = now;
                Vec::new()
            }
            LeaseAnswer::Own if errand == Some(LeaseErrand::Withdraw) => {
                let stood = self.has_run_out();
                (self.phase, self.obstacle) = (Phase::None, None);
                let mut actions = vec![LeaseAction::Limit(None)];
                actions.extend(stood.then_some(LeaseAction::GoOn));
                actions
            }
            LeaseAnswer::Own if planted!(LeaseFromAnswer) => self.renewed(now + self.length, asked),
            LeaseAnswer::Own | LeaseAnswer::Moved { .. } => {
                self.renewed(asked + self.length, asked)
            }
        }
    }

    fn renewed(&mut self, until: Time, asked: Time) -> Vec<LeaseAction> {
        self.next = asked + self.length / RENEWALS;
        let stood = self.has_run_out();
        let until = if planted!(LeaseWithoutEnd) { until + self.length * 100 } else { until };
        (self.phase, self.obstacle) = (Phase::Held(until), None);
        let mut actions = vec![LeaseAction::Limit(Some(until))];
        let stood = stood && !planted!(StayFrozen);
        actions.extend(stood.then_some(LeaseAction::GoOn));
        actions
    }

    fn retry(&self) -> Duration {
        self.length / (RENEWALS * 2)
    }

    fn words(&self) -> String {
        let why = self.obstacle.as_deref().unwrap_or("it does not answer");
        format!(
            "this host's lease has run out: it could not show the arbiter for {} s that it lives, \
             and another host may have been given the VM ({why}); the guest goes on as soon as the \
             arbiter says that it is still this host's",
            self.length.as_secs_f64()
        )
    }
}

#[cfg(test)]
#[path = "lease/tests.rs"]
mod tests;
