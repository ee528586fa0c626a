//! The coordinator of a group's restore.

use super::{Decision, Order, Report};
use crate::Member;
use crate::contact::{Contact, Failure};
use crate::graph::StartOrder;
use std::time::Duration;
use understudy_protocol::{Time, planted};

/// The line by which members start that are loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Order of the starts.
    pub order: StartOrder,
    /// Time that those that are loaded wait for the others, once for all of them: when all
    /// start one right after the other, each is answered when it speaks. Without an order and
    /// with no patience each member starts as soon as it is loaded.
    pub patience: Duration,
}

/// An event that happens to the restore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RestoreEvent {
    /// A cohort says something.
    Report(Member, Report),
    /// All that the snapshot consists of is in the store: members may start.
    Whole,
    /// The snapshot cannot be restored, for this reason. Only before it was said to be whole.
    Refused(String),
    /// The decision that [`RestoreAction::Decide`] came to.
    Decided(Decision),
    /// Time has passed.
    Tick,
}

/// An action that must be taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RestoreAction {
    /// Say this to a cohort. It may be lost; it is repeated.
    Send(Member, Order),
    /// All members have started: decide at the arbiter that they stay, unless somebody has decided
    /// otherwise; ask until it answers.
    Decide,
}

/// The phase in which the restore is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RestorePhase {
    /// Members are still to be started.
    Starting,
    /// All have. Whether they stay is not decided yet.
    Deciding,
    /// All members stay, some still load.
    Running,
    /// All members run and are loaded; or failed after that was decided, for these reasons.
    Restored(Vec<Failure>),
    /// The restore failed before that was decided, for this reason; nobody runs.
    Failed(Failure),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Loading,
    Loaded,
    Starting,
    Started,
    Restored,
    /// The member has stopped, or is as good as.
    Ended,
}

/// Decides about one restore.
#[derive(Clone, Debug)]
pub struct Restorer {
    line: Line,
    pages: Vec<u64>,
    members: Vec<State>,
    /// All that the snapshot consists of is there.
    whole: bool,
    /// Time since which somebody who is loaded waits for others.
    waiting: Option<Time>,
    contact: Contact,
    phase: RestorePhase,
    failures: Vec<Failure>,
}

impl Restorer {
    /// Begins: each member loads so many pages before its start.
    ///
    /// # Panics
    /// If there is not one number for each member.
    pub fn new(
        line: Line,
        pages: Vec<u64>,
        now: Time,
        actions: &mut Vec<RestoreAction>,
    ) -> Restorer {
        assert_eq!(pages.len(), line.order.members(), "a number of pages for each member");
        let restorer = Restorer {
            members: vec![State::Loading; pages.len()],
            whole: false,
            waiting: None,
            contact: Contact::new(pages.len(), now),
            line,
            pages,
            phase: RestorePhase::Starting,
            failures: Vec::new(),
        };
        restorer.send_all(actions);
        restorer
    }

    /// The phase in which the restore is.
    pub fn phase(&self) -> &RestorePhase {
        &self.phase
    }

    /// Whether no message needs to be sent any more.
    pub fn is_over(&self) -> bool {
        self.phase != RestorePhase::Deciding && self.all().all(|member| self.is_let_go(member))
    }

    /// Time at which [`RestoreEvent::Tick`] is due next, if nothing else happens.
    pub fn deadline(&self) -> Option<Time> {
        let held = self.waiting.filter(|_| self.rings().any(|ring| self.may_start(ring)));
        let impatient = held.map(|since| since + self.line.patience);
        let repeat = self.contact.deadline();
        (!self.is_over()).then(|| impatient.map_or(repeat, |at| at.min(repeat)))
    }

    /// Takes one event; appends what must be done to `actions`.
    pub fn handle(&mut self, now: Time, event: RestoreEvent, actions: &mut Vec<RestoreAction>) {
        match event {
            RestoreEvent::Report(member, report) => {
                self.contact.heard(member, now);
                self.report(member, report, actions);
            }
            RestoreEvent::Whole => self.whole = true,
            RestoreEvent::Refused(why) => self.abort(Failure { member: None, why }, actions),
            RestoreEvent::Decided(decision) => self.decided(decision, actions),
            RestoreEvent::Tick => self.tick(now, actions),
        }
        self.start_what_may(now, actions);
        self.conclude(actions);
    }

    fn report(&mut self, member: Member, report: Report, actions: &mut Vec<RestoreAction>) {
        let failed = matches!(self.phase, RestorePhase::Failed(_));
        let state = &mut self.members[member.index()];
        match (report, &*state) {
            (_, State::Ended) => {}
            (Report::Failed { why }, _) => self.lost(Failure::of(member, why), actions),
            (Report::Aborted, _) => self.lost(Failure::of(member, "it was stopped"), actions),
            // How far it had got does not matter any more.
            _ if failed => {}
            (Report::LoadFin, State::Loading) => *state = State::Loaded,
            (Report::StartFin, State::Starting) => *state = State::Started,
            (Report::RestoreFin, State::Starting | State::Started) => *state = State::Restored,
            _ => {}
        }
    }

    /// A member has ended. Before all have started that is the end for all; while it is being
    /// decided whether they stay, nobody knows.
    fn lost(&mut self, failure: Failure, actions: &mut Vec<RestoreAction>) {
        let member = failure.member.expect("a member's failure");
        if std::mem::replace(&mut self.members[member.index()], State::Ended) == State::Ended {
            return;
        }
        match self.phase {
            RestorePhase::Starting => self.abort(failure, actions),
            RestorePhase::Failed(_) => {}
            _ => self.failures.push(failure),
        }
    }

    fn abort(&mut self, failure: Failure, actions: &mut Vec<RestoreAction>) {
        if matches!(self.phase, RestorePhase::Starting | RestorePhase::Deciding) {
            self.phase = RestorePhase::Failed(failure);
            self.send_all(actions);
        }
    }

    fn decided(&mut self, decision: Decision, actions: &mut Vec<RestoreAction>) {
        match decision {
            _ if self.phase != RestorePhase::Deciding => {}
            Decision::GivenUp => {
                let why = "a host that heard nothing from the coordinator gave it up".to_owned();
                let nobody = Failure { member: None, why };
                let failure = self.failures.first().cloned().unwrap_or(nobody);
                self.abort(failure, actions);
            }
            Decision::Settled => {
                self.phase = RestorePhase::Running;
                let there = |member: &Member| self.members[member.index()] != State::Ended;
                let all = self.all().filter(there);
                actions.extend(all.map(|member| RestoreAction::Send(member, Order::Settle)));
            }
        }
    }

    fn tick(&mut self, now: Time, actions: &mut Vec<RestoreAction>) {
        for member in self.all() {
            if !self.is_let_go(member) && self.contact.is_silent(member, now) {
                self.lost(Failure::silent(member), actions);
            }
        }
        if self.contact.repeat(now) {
            self.send_all(actions);
        }
    }

    /// Whether a member is of no concern any more. One that is restored is until all are to
    /// stay: it may still have to stop.
    fn is_let_go(&self, member: Member) -> bool {
        match self.members[member.index()] {
            State::Ended => true,
            State::Restored => {
                matches!(self.phase, RestorePhase::Running | RestorePhase::Restored(_))
            }
            _ => false,
        }
    }

    /// Tells each member what it should be doing; a repetition asks where it stands.
    fn send_all(&self, actions: &mut Vec<RestoreAction>) {
        for member in self.all().filter(|member| !self.is_let_go(*member)) {
            let order = match (&self.phase, &self.members[member.index()]) {
                (RestorePhase::Failed(_), _) => Order::Abort,
                (RestorePhase::Running, _) => Order::Settle,
                // Also as a sign of life, for whoever waits for others.
                (_, State::Loading | State::Loaded) => {
                    Order::Load { pages: self.pages[member.index()] }
                }
                _ => Order::Start,
            };
            actions.push(RestoreAction::Send(member, order));
        }
    }

    /// Starts each ring that may start, once all members are loaded or patience is over.
    fn start_what_may(&mut self, now: Time, actions: &mut Vec<RestoreAction>) {
        let all_loaded = self.members.iter().all(|state| *state != State::Loading);
        for ring in self.rings() {
            if !self.may_start(ring) {
                continue;
            }
            let since = *self.waiting.get_or_insert(now);
            if all_loaded || now - since >= self.line.patience {
                self.start(ring, actions);
            }
        }
    }

    /// Whether the restore goes on, all of it is there, a ring is loaded, and all run that start
    /// before it.
    fn may_start(&self, ring: usize) -> bool {
        let runs = |state: &State| matches!(state, State::Started | State::Restored);
        let mut earlier = self.line.order.rings()[ring].after.iter();
        self.phase == RestorePhase::Starting
            && (self.whole || planted!(StartUnchecked))
            && self.is_ring(ring, |state| *state == State::Loaded)
            && earlier.all(|&earlier| self.is_ring(earlier, runs))
    }

    fn is_ring(&self, ring: usize, is: impl Fn(&State) -> bool) -> bool {
        let members = &self.line.order.rings()[ring].members;
        members.iter().all(|member| is(&self.members[member.index()]))
    }

    fn start(&mut self, ring: usize, actions: &mut Vec<RestoreAction>) {
        for member in self.line.order.rings()[ring].members.clone() {
            self.members[member.index()] = State::Starting;
            actions.push(RestoreAction::Send(member, Order::Start));
        }
    }

    fn conclude(&mut self, actions: &mut Vec<RestoreAction>) {
        let runs = |state: &State| {
            matches!(state, State::Started | State::Restored)
                || (*state == State::Starting && planted!(DecideEarly))
        };
        if self.phase == RestorePhase::Starting && self.members.iter().all(runs) {
            self.phase = RestorePhase::Deciding;
            actions.push(RestoreAction::Decide);
        }
        if self.phase == RestorePhase::Running && self.is_over() {
            self.phase = RestorePhase::Restored(std::mem::take(&mut self.failures));
        }
    }

    fn rings(&self) -> impl Iterator<Item = usize> + use<> {
        0..self.line.order.rings().len()
    }

    fn all(&self) -> impl Iterator<Item = Member> + use<> {
        (0..self.members.len()).map(|member| Member(member as u16))
    }
}
