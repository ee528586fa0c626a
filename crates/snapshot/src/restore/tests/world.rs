//! A group's restore in virtual time: a coordinator, members' hosts, an arbiter, and what fails.

use super::super::*;
use crate::Member;
use crate::graph::{Crossing, StartOrder};
use crate::random::Random;
use std::collections::VecDeque;
use std::time::Duration;
use understudy_protocol::Time;

pub(super) const MEMBERS: usize = 5;
pub(super) const STEP: Duration = Duration::from_millis(10);

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    /// Messages of a hundred that are lost.
    pub(super) loss: u64,
    /// A host dies, with its VM.
    pub(super) deaths: bool,
    /// The coordinator dies.
    pub(super) orphans: bool,
    /// Loading fails on a host.
    pub(super) failures: bool,
    /// The way between the coordinator and a member is cut for 15 s.
    pub(super) cuts: bool,
    /// All hosts stand still for a while, as on a machine that is suspended.
    pub(super) halts: bool,
}

pub(super) const HALT: Duration = Duration::from_secs(12);

pub(super) const CUT: Duration = Duration::from_secs(15);

/// The arbiter: what it knows, and who waits for its answer.
#[derive(Default)]
pub(super) struct Arbiter {
    pub(super) decision: Option<Decision>,
    /// Its answers, to a member's host or to the coordinator.
    pub(super) answers: Vec<(Time, Option<Member>, Decision)>,
    /// Questions that it did not answer.
    pub(super) silences: u32,
}

/// One member's host. What the VM does is the truth that is checked.
pub(super) struct Host {
    pub(super) cohort: Cohort,
    pub(super) alive: bool,
    pub(super) loaded_at: Option<Time>,
    pub(super) complete_at: Option<Time>,
    pub(super) started_at: Option<Time>,
    pub(super) discarded_at: Option<Time>,
    /// Time since which the VM runs.
    pub(super) runs: Option<Time>,
    pub(super) ever_ran: bool,
    pub(super) settled: bool,
    pub(super) concluded: bool,
    pub(super) to: VecDeque<(Time, Order)>,
    pub(super) from: VecDeque<(Time, Report)>,
}

pub(super) struct World {
    pub(super) random: Random,
    pub(super) faults: Faults,
    pub(super) now: Time,
    pub(super) order: StartOrder,
    pub(super) restorer: Option<Restorer>,
    pub(super) hosts: Vec<Host>,
    pub(super) death: Option<Member>,
    pub(super) cut: Option<(Time, Member)>,
    pub(super) arbiter: Arbiter,
    pub(super) decide_again: Option<Time>,
}

impl World {
    pub(super) fn new(seed: u64, faults: Faults, patience: Duration) -> World {
        let mut random = Random::new(seed);
        let crossings: Vec<Crossing> = (0..random.below(7))
            .map(|_| Crossing {
                from: Member(random.below(MEMBERS as u64) as u16),
                to: Member(random.below(MEMBERS as u64) as u16),
                data: 1,
                acknowledgements: 0,
                others: 0,
            })
            .collect();
        let (now, order) = (Time(Duration::from_secs(1)), StartOrder::new(MEMBERS, &crossings));
        let line = Line { order: order.clone(), patience };
        let mut actions = Vec::new();
        let restorer = Restorer::new(line, vec![100; MEMBERS], now, &mut actions);
        let host = |_| Host {
            cohort: Cohort::new(now),
            alive: true,
            loaded_at: None,
            complete_at: None,
            started_at: None,
            discarded_at: None,
            runs: None,
            ever_ran: false,
            settled: false,
            concluded: false,
            to: VecDeque::new(),
            from: VecDeque::new(),
        };
        let hosts = (0..MEMBERS).map(host).collect();
        let mut world = World {
            random,
            faults,
            now,
            order,
            restorer: Some(restorer),
            hosts,
            death: None,
            cut: None,
            arbiter: Arbiter::default(),
            decide_again: None,
        };
        world.carry_out(actions);
        world.restore(RestoreEvent::Whole);
        world
    }

    pub(super) fn later(&mut self, most: u64) -> Time {
        self.now + Duration::from_millis(self.random.below(most))
    }

    pub(super) fn lost(&mut self, member: Member) -> bool {
        let is_cut = self.cut.is_some_and(|(at, cut)| cut == member && self.now - at < CUT);
        self.random.below(100) < self.faults.loss || is_cut
    }

    pub(super) fn carry_out(&mut self, actions: Vec<RestoreAction>) {
        for action in actions {
            match action {
                RestoreAction::Send(member, order) if !self.lost(member) => {
                    let at = self.later(30);
                    self.hosts[member.index()].to.push_back((at, order));
                }
                RestoreAction::Send(..) => {}
                RestoreAction::Decide => {
                    assert!(self.hosts.iter().all(|host| host.ever_ran), "one may still fail");
                    self.decide();
                }
            }
        }
    }

    /// The coordinator asks until there is an answer.
    pub(super) fn decide(&mut self) {
        let answered = self.ask(None, Decision::Settled);
        self.decide_again = (!answered).then(|| self.now + Duration::from_secs(1));
    }

    /// Asks the arbiter: whoever does so first decides. The arbiter may be out of reach, and its
    /// answer may.
    pub(super) fn ask(&mut self, who: Option<Member>, wanted: Decision) -> bool {
        let fate = self.random.below(100);
        if self.faults.loss > 0 && fate < 20 {
            self.arbiter.silences += 1;
            return false;
        }
        let decision = *self.arbiter.decision.get_or_insert(wanted);
        if self.faults.loss > 0 && fate < 40 {
            self.arbiter.silences += 1;
            return false;
        }
        let at = self.later(100);
        self.arbiter.answers.push((at, who, decision));
        true
    }

    pub(super) fn hear_arbiter(&mut self) {
        if self.decide_again.take_if(|at| *at <= self.now).is_some() && self.restorer.is_some() {
            self.decide();
        }
        let now = self.now;
        let answers = std::mem::take(&mut self.arbiter.answers);
        let (due, later): (Vec<_>, Vec<_>) = answers.into_iter().partition(|(at, ..)| *at <= now);
        self.arbiter.answers = later;
        for (_, who, decision) in due {
            match who {
                Some(member) if self.hosts[member.index()].alive => {
                    self.cohort(member.index(), CohortEvent::Decided(decision));
                }
                Some(_) => {}
                None => self.restore(RestoreEvent::Decided(decision)),
            }
        }
    }

    pub(super) fn restore(&mut self, event: RestoreEvent) {
        let (mut actions, now) = (Vec::new(), self.now);
        let Some(restorer) = &mut self.restorer else { return };
        restorer.handle(now, event, &mut actions);
        self.carry_out(actions);
    }

    pub(super) fn cohort(&mut self, at: usize, event: CohortEvent) {
        let (mut actions, now) = (Vec::new(), self.now);
        self.hosts[at].cohort.handle(now, event, &mut actions);
        for action in actions {
            match action {
                CohortAction::Report(Report::Aborted | Report::Failed { .. })
                    if self.hosts[at].runs.is_some() =>
                {
                    panic!("said to have ended, and runs");
                }
                CohortAction::Load { pages } => {
                    assert_eq!(pages, 100);
                    self.hosts[at].loaded_at = Some(self.later(3_000));
                    self.hosts[at].complete_at = Some(self.later(6_000));
                }
                CohortAction::Start => {
                    self.check_order(at);
                    self.hosts[at].started_at = Some(self.later(50));
                }
                CohortAction::Ask => {
                    assert!(self.hosts[at].runs.is_some());
                    self.ask(Some(Member(at as u16)), Decision::GivenUp);
                }
                CohortAction::Settle => {
                    assert_eq!(self.arbiter.decision, Some(Decision::Settled));
                    assert!(!std::mem::replace(&mut self.hosts[at].settled, true), "twice");
                }
                CohortAction::Conclude => {
                    assert_eq!(self.arbiter.decision, Some(Decision::Settled));
                    assert_eq!(self.hosts[at].cohort.phase(), &CohortPhase::Restored);
                    assert!(!std::mem::replace(&mut self.hosts[at].concluded, true), "twice");
                }
                CohortAction::Discard => {
                    self.hosts[at].discarded_at = Some(self.later(300));
                    let host = &mut self.hosts[at];
                    (host.started_at, host.loaded_at, host.complete_at) = (None, None, None);
                }
                CohortAction::Report(report) => {
                    if !self.lost(Member(at as u16)) {
                        let arrives = self.later(30);
                        self.hosts[at].from.push_back((arrives, report));
                    }
                }
            }
        }
    }

    /// A VM is about to run: all that it starts after have run.
    pub(super) fn check_order(&self, at: usize) {
        let host = &self.hosts[at];
        assert!(!host.ever_ran && host.started_at.is_none(), "started twice");
        let ring = &self.order.rings()[self.order.ring(Member(at as u16))];
        for &earlier in &ring.after {
            for member in &self.order.rings()[earlier].members {
                assert!(self.hosts[member.index()].ever_ran, "{at} before {member:?}");
            }
        }
    }

    pub(super) fn step(&mut self) {
        let halts = self.faults.halts && self.random.below(300) == 0;
        self.now = self.now + if halts { HALT } else { STEP };
        self.break_something();
        self.hear_arbiter();
        self.restore(RestoreEvent::Tick);
        for at in 0..MEMBERS {
            while let Some((_, report)) = self.hosts[at].from.pop_front_if_due(self.now) {
                self.restore(RestoreEvent::Report(Member(at as u16), report));
            }
            if self.hosts[at].alive {
                self.run_host(at);
            }
        }
    }

    pub(super) fn run_host(&mut self, at: usize) {
        while let Some((_, order)) = self.hosts[at].to.pop_front_if_due(self.now) {
            self.cohort(at, CohortEvent::Order(order));
        }
        self.cohort(at, CohortEvent::Tick);
        let now = self.now;
        let due = |at: &mut Option<Time>| at.take_if(|at| *at <= now).is_some();
        if due(&mut self.hosts[at].loaded_at) {
            let fails = self.faults.failures && self.random.below(MEMBERS as u64 * 2) == 0;
            let failed = CohortEvent::Failed("the store is gone".into());
            self.cohort(at, if fails { failed } else { CohortEvent::Loaded });
        }
        if due(&mut self.hosts[at].started_at) {
            self.hosts[at].runs = Some(now);
            self.hosts[at].ever_ran = true;
            self.cohort(at, CohortEvent::Started);
        }
        if due(&mut self.hosts[at].discarded_at) {
            self.hosts[at].runs = None;
            self.cohort(at, CohortEvent::Discarded);
        }
        let loading = self.hosts[at].loaded_at.is_some();
        if !loading && due(&mut self.hosts[at].complete_at) {
            self.cohort(at, CohortEvent::Complete);
        }
    }

    pub(super) fn break_something(&mut self) {
        if self.faults.deaths && self.death.is_none() && self.random.below(400) == 0 {
            let dead = self.random.below(MEMBERS as u64) as usize;
            self.death = Some(Member(dead as u16));
            let host = &mut self.hosts[dead];
            (host.alive, host.runs) = (false, None);
        }
        if self.faults.orphans && self.random.below(300) == 0 {
            self.restorer = None;
        }
        if self.faults.cuts && self.cut.is_none() && self.random.below(300) == 0 {
            let member = Member(self.random.below(MEMBERS as u64) as u16);
            self.cut = Some((self.now, member));
        }
    }

    pub(super) fn phase(&self) -> Option<&RestorePhase> {
        self.restorer.as_ref().map(Restorer::phase)
    }

    pub(super) fn running(&self) -> usize {
        self.hosts.iter().filter(|host| host.runs.is_some()).count()
    }
}

pub(super) trait Due<T> {
    fn pop_front_if_due(&mut self, now: Time) -> Option<(Time, T)>;
}

impl<T> Due<T> for VecDeque<(Time, T)> {
    fn pop_front_if_due(&mut self, now: Time) -> Option<(Time, T)> {
        let due = self.front().is_some_and(|(at, _)| *at <= now);
        due.then(|| self.pop_front()).flatten()
    }
}

pub(super) fn play(seed: u64, faults: Faults, patience: Duration) -> World {
    let mut world = World::new(seed, faults, patience);
    for _ in 0..8_000 {
        world.step();
    }
    world
}
