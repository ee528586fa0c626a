//! Who was heard when, and when to ask again: both coordinators repeat what they last said
//! until it is answered, and cohorts answer with where they stand. So a lost message costs one
//! interval, and silence means trouble.

use crate::Member;
use std::time::Duration;
use understudy_protocol::Time;

/// How often an order that is not carried out yet is repeated.
pub const REPEAT: Duration = Duration::from_millis(200);

/// How long the other side may be silent. Work may take longer: whoever does it says so.
pub const SILENCE: Duration = Duration::from_secs(5);

/// The coordinator's contact with its cohorts.
#[derive(Clone, Debug)]
pub(crate) struct Contact {
    heard: Vec<Time>,
    repeat_at: Time,
}

impl Contact {
    pub fn new(members: usize, now: Time) -> Contact {
        Contact { heard: vec![now; members], repeat_at: now + REPEAT }
    }

    pub fn heard(&mut self, member: Member, now: Time) {
        self.heard[member.index()] = now;
    }

    /// Whether a member has been silent for too long.
    pub fn is_silent(&self, member: Member, now: Time) -> bool {
        now - self.heard[member.index()] >= SILENCE
    }

    /// Whether it is time to repeat; once for each time.
    pub fn repeat(&mut self, now: Time) -> bool {
        let due = now >= self.repeat_at;
        if due {
            self.repeat_at = now + REPEAT;
        }
        due
    }

    /// When the next repetition is due.
    pub fn deadline(&self) -> Time {
        self.repeat_at
    }
}

/// A member that failed, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct Failure {
    /// Who failed; none if it was nobody's fault in particular.
    pub member: Option<Member>,
    /// What happened, for people.
    pub why: String,
}

impl Failure {
    pub(crate) fn of(member: Member, why: impl Into<String>) -> Failure {
        Failure { member: Some(member), why: why.into() }
    }

    pub(crate) fn silent(member: Member) -> Failure {
        Failure::of(member, format!("its host has not answered for {} s", SILENCE.as_secs()))
    }
}
