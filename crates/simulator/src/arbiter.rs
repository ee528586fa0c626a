//! The arbiter: one compare-and-swap register, which may be out of reach, slow,
//! or lose its answers.

use crate::host::{HostId, Role, SessionId};
use crate::world::{Event, World};
use std::collections::{BTreeMap, BTreeSet};
use understudy_protocol::{BackupPhase, Generation, Ownership, PrimaryPhase, Renewal, Verdict};
use understudy_session::hand_back::WinnersWord;

/// The register and who reaches it.
#[derive(Debug)]
pub struct Arbiter {
    /// Owner of the VM.
    pub owner: HostId,
    /// Generation of that ownership.
    pub generation: Generation,
    /// Whether it is down for everybody.
    pub down: bool,
    /// Sole owners' renewals, by the generation of their ownership.
    pub renewals: BTreeMap<Generation, Renewal>,
    /// Hosts that do not reach it.
    pub cut_off: BTreeSet<HostId>,
}

/// A question under way.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    /// Tells questions apart.
    pub ticket: u64,
    /// Host that asks.
    pub host: HostId,
    /// Session for which it asks.
    pub session: SessionId,
    /// The generation that the asker knows.
    pub from: Generation,
    /// Host that it hands the VM to; itself if none.
    pub to: Option<HostId>,
    /// Word that whoever has won had said before.
    pub word: WinnersWord,
}

impl Arbiter {
    /// `owner` owns the VM at `generation`.
    pub fn new(owner: HostId, generation: Generation) -> Arbiter {
        Arbiter {
            owner,
            generation,
            down: false,
            renewals: BTreeMap::new(),
            cut_off: BTreeSet::new(),
        }
    }

    /// Whether `host` gets an answer now.
    pub fn reachable(&self, host: HostId) -> bool {
        !self.down && !self.cut_off.contains(&host)
    }

    /// The compare-and-swap. Asking again for what was won is granted.
    pub fn acquire(&mut self, host: HostId, from: Generation) -> Verdict {
        let again = self.generation == from.next() && self.owner == host;
        if self.generation == from || again {
            (self.owner, self.generation) = (host, from.next());
            return Verdict::Granted(from.next());
        }
        if self.owner == host {
            return Verdict::Returned(self.generation);
        }
        self.taken()
    }

    /// The compare-and-swap in another's favour.
    pub fn hand_back(&mut self, host: HostId, to: HostId, from: Generation) -> Verdict {
        let again = self.generation == from.next() && self.owner == to;
        if (self.generation, self.owner) == (from, host) || again {
            (self.owner, self.generation) = (to, from.next());
            return Verdict::Granted(from.next());
        }
        self.taken()
    }

    fn taken(&self) -> Verdict {
        let owner = Some(self.owner.name());
        Verdict::Taken(Ownership { host: owner, generation: self.generation })
    }
}

impl World {
    /// `host` asks the arbiter in the name of `session`; returns the ticket.
    pub(crate) fn ask_arbiter(
        &mut self,
        host: HostId,
        session: SessionId,
        (from, to): (Generation, Option<HostId>),
        word: WinnersWord,
    ) -> u64 {
        let contests = |role: &Role| match role {
            Role::Backup(standby) => matches!(standby.core.phase(), BackupPhase::Contesting(_)),
            Role::Primary(running) => running
                .session
                .as_ref()
                .is_some_and(|session| matches!(session.core.phase(), PrimaryPhase::Contesting(_))),
            Role::Idle | Role::Fenced => false,
        };
        let contesting = self.hosts.iter().filter(|host| contests(&host.role)).count();
        self.coverage.contested_by_both += u64::from(contesting > 1);
        self.tickets += 1;
        let question = Question { ticket: self.tickets, host, session, from, to, word };
        self.note(host, || match to {
            None => format!("asks the arbiter for generation {}", from.next()),
            Some(to) => format!("hands generation {from} back to {to}"),
        });
        let travel = self.random.micros(200, 3_000);
        // A question may linger and be served after its asker gave up.
        let lingers = self.random.percent(self.schedule.lost_answers / 2);
        let travel = if lingers { travel + self.random.millis(100, 900) } else { travel };
        self.after(travel, Event::Question(question));
        let patience = self.random.millis(200, 300);
        let unreachable = Verdict::Unreachable("no answer".to_owned());
        self.after(patience, Event::Answer(question, unreachable));
        question.ticket
    }

    /// Whether who asked has nothing of the VM any more.
    fn is_gone(&mut self, question: &Question) -> bool {
        let host = &mut self.hosts[question.host.0];
        host.session(question.session).is_none() && host.standby(question.session).is_none()
    }

    pub(crate) fn question_arrives(&mut self, question: Question) {
        if !self.arbiter.reachable(question.host) {
            return;
        }
        let verdict = match question.to {
            None => self.arbiter.acquire(question.host, question.from),
            Some(to) => self.arbiter.hand_back(question.host, to, question.from),
        };
        self.note_world(|| format!("arbiter: {} asks, {verdict:?}", question.host));
        if matches!(verdict, Verdict::Granted(_)) && self.is_gone(&question) {
            self.excuse("the guest that it is granted for has died since it was asked for");
        }
        if self.random.percent(self.schedule.lost_answers) {
            if matches!(verdict, Verdict::Granted(_)) && question.to.is_none() {
                self.coverage.grant_unheard += 1;
            }
            return;
        }
        let travel = self.random.micros(200, 3_000);
        if self.random.percent(self.schedule.lost_answers) {
            // Delivered twice.
            let again = travel + self.random.micros(1, 2_000);
            self.after(again, Event::Answer(question, verdict.clone()));
        }
        self.after(travel, Event::Answer(question, verdict));
    }
}
