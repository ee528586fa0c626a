//! Contact with others: who was heard when, and when to ask again: both coordinators repeat what
//! they last said until it is answered, and cohorts answer with where they stand. So a lost message
//! costs one interval, and silence means trouble.

use crate::Member;
use std::time::Duration;
use understudy_protocol::Time;

/// Time after which an order that is not carried out yet is repeated.
pub const REPEAT: Duration = Duration::from_millis(200);

/// Time for which the other side may be silent. Work may take longer: whoever does it says so.
pub const SILENCE: Duration = Duration::from_secs(5);

/// Time without a word after which a coordinator need not be there any more: it repeats its orders five
/// times as often.
const HEARD: Duration = Duration::from_secs(1);

/// Time for which work may stand still before it counts as hanging: what it waits for, a store on a
/// mount that has gone, may never answer. No guest can be protected meanwhile.
const STANDSTILL: Duration = Duration::from_secs(300);

/// The longest time between two looks at the clock that counts as silence in full: a host that
/// looks later stood still itself, and what was said to it meanwhile is still to be read.
const LOOK: Duration = Duration::from_secs(1);

/// Silence of a member or host towards a host that waits for it.
#[derive(Clone, Debug)]
pub(crate) struct Silence {
    length: Duration,
    looked: Time,
}

impl Silence {
    pub fn new(now: Time) -> Silence {
        Silence { length: Duration::ZERO, looked: now }
    }

    /// Ends it, as something was heard.
    pub fn end(&mut self, now: Time) {
        *self = Silence::new(now);
    }

    /// Looks, as nothing was heard since the last look, whether that is too long.
    pub fn look(&mut self, now: Time) -> bool {
        self.lasts(now) >= SILENCE
    }

    /// Whether the last word came so recently that whoever said it is there.
    pub fn is_short(&self, now: Time) -> bool {
        self.length + (now - self.looked) < HEARD
    }

    /// Looks, as nothing was heard since the last look, for how long that is.
    pub(crate) fn lasts(&mut self, now: Time) -> Duration {
        self.length += (now - self.looked).min(LOOK);
        self.looked = now;
        self.length
    }

    /// Time at which to look again.
    pub fn next_look(&self) -> Time {
        self.looked + LOOK.min(SILENCE.saturating_sub(self.length))
    }
}

/// Work that may come to stand still.
#[derive(Clone, Debug)]
pub struct Standstill {
    done: u64,
    silence: Silence,
}

impl Standstill {
    /// Nothing is done yet.
    pub fn new(now: Time) -> Standstill {
        Standstill { done: 0, silence: Silence::new(now) }
    }

    /// What has happened if it has for too long, of whoever does it.
    pub fn words() -> String {
        let seconds = STANDSTILL.as_secs();
        format!("has got nowhere with it for {seconds} s: the store or a disk does not answer")
    }

    /// Looks, at least once a second, whether it has stood still for too long. `done` says how much
    /// has been done by now.
    pub fn look(&mut self, now: Time, done: u64) -> bool {
        if done != self.done {
            self.done = done;
            self.silence.end(now);
        }
        self.silence.lasts(now) >= STANDSTILL
    }
}

/// The coordinator's contact with its cohorts.
#[derive(Clone, Debug)]
pub(crate) struct Contact {
    silences: Vec<Silence>,
    repeat_at: Time,
}

impl Contact {
    pub fn new(members: usize, now: Time) -> Contact {
        Contact { silences: vec![Silence::new(now); members], repeat_at: now + REPEAT }
    }

    pub fn heard(&mut self, member: Member, now: Time) {
        self.silences[member.index()].end(now);
    }

    /// Looks whether a member has been silent for too long.
    pub fn is_silent(&mut self, member: Member, now: Time) -> bool {
        self.silences[member.index()].look(now)
    }

    /// Whether it is time to repeat; once for each time.
    pub fn repeat(&mut self, now: Time) -> bool {
        let due = now >= self.repeat_at;
        if due {
            self.repeat_at = now + REPEAT;
        }
        due
    }

    /// Time at which the next repetition is due.
    pub fn deadline(&self) -> Time {
        self.repeat_at
    }
}

/// A member that failed, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct Failure {
    /// Member that failed; none if no single one did.
    pub member: Option<Member>,
    /// The reason, for people.
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
