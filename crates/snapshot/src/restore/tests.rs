//! Random schedules: messages are lost and delayed, hosts die, coordinators die; members start
//! in order or not at all.

use super::*;
use crate::contact::{REPEAT, SILENCE};
use crate::graph::{Crossing, StartOrder};
use crate::random::Random;
use crate::{Failure, Member};
use std::collections::VecDeque;
use std::time::Duration;
use understudy_protocol::Time;

const MEMBERS: usize = 5;
const STEP: Duration = Duration::from_millis(10);

#[derive(Clone, Copy, Debug, Default)]
struct Faults {
    /// Messages of a hundred that are lost.
    loss: u64,
    /// A host dies, with its VM.
    deaths: bool,
    /// The coordinator dies.
    orphans: bool,
    /// Loading fails on a host.
    failures: bool,
}

/// One member's host. What the VM does is the truth that is checked.
struct Host {
    cohort: Cohort,
    alive: bool,
    loaded_at: Option<Time>,
    complete_at: Option<Time>,
    started_at: Option<Time>,
    /// Since when the VM runs.
    runs: Option<Time>,
    ever_ran: bool,
    settled: bool,
    to: VecDeque<(Time, Order)>,
    from: VecDeque<(Time, Report)>,
}

struct World {
    random: Random,
    faults: Faults,
    now: Time,
    order: StartOrder,
    restorer: Option<Restorer>,
    hosts: Vec<Host>,
    death: Option<Member>,
}

impl World {
    fn new(seed: u64, faults: Faults, patience: Duration) -> World {
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
            runs: None,
            ever_ran: false,
            settled: false,
            to: VecDeque::new(),
            from: VecDeque::new(),
        };
        let hosts = (0..MEMBERS).map(host).collect();
        let mut world =
            World { random, faults, now, order, restorer: Some(restorer), hosts, death: None };
        world.carry_out(actions);
        world
    }

    fn later(&mut self, most: u64) -> Time {
        self.now + Duration::from_millis(self.random.below(most))
    }

    fn lost(&mut self) -> bool {
        self.random.below(100) < self.faults.loss
    }

    fn carry_out(&mut self, actions: Vec<RestoreAction>) {
        for RestoreAction::Send(member, order) in actions {
            if !self.lost() {
                let at = self.later(30);
                self.hosts[member.index()].to.push_back((at, order));
            }
        }
    }

    fn restore(&mut self, event: RestoreEvent) {
        let (mut actions, now) = (Vec::new(), self.now);
        let Some(restorer) = &mut self.restorer else { return };
        restorer.handle(now, event, &mut actions);
        self.carry_out(actions);
    }

    fn cohort(&mut self, at: usize, event: CohortEvent) {
        let (mut actions, now) = (Vec::new(), self.now);
        self.hosts[at].cohort.handle(now, event, &mut actions);
        for action in actions {
            match action {
                CohortAction::Load { pages } => {
                    assert_eq!(pages, 100);
                    self.hosts[at].loaded_at = Some(self.later(3_000));
                    self.hosts[at].complete_at = Some(self.later(6_000));
                }
                CohortAction::Start => {
                    self.check_order(at);
                    self.hosts[at].started_at = Some(self.later(50));
                }
                CohortAction::Settle => {
                    assert!(self.hosts.iter().all(|host| host.ever_ran), "one may still fail");
                    assert!(!std::mem::replace(&mut self.hosts[at].settled, true), "twice");
                }
                CohortAction::Discard => {
                    let host = &mut self.hosts[at];
                    (host.runs, host.started_at) = (None, None);
                    (host.loaded_at, host.complete_at) = (None, None);
                }
                CohortAction::Report(report) => {
                    if !self.lost() {
                        let arrives = self.later(30);
                        self.hosts[at].from.push_back((arrives, report));
                    }
                }
            }
        }
    }

    /// A VM is about to run: all that it starts after have run.
    fn check_order(&self, at: usize) {
        let host = &self.hosts[at];
        assert!(!host.ever_ran && host.started_at.is_none(), "started twice");
        let ring = &self.order.rings()[self.order.ring(Member(at as u16))];
        for &earlier in &ring.after {
            for member in &self.order.rings()[earlier].members {
                assert!(self.hosts[member.index()].ever_ran, "{at} before {member:?}");
            }
        }
    }

    fn step(&mut self) {
        self.now = self.now + STEP;
        self.break_something();
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

    fn run_host(&mut self, at: usize) {
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
        let loading = self.hosts[at].loaded_at.is_some();
        if !loading && due(&mut self.hosts[at].complete_at) {
            self.cohort(at, CohortEvent::Complete);
        }
    }

    fn break_something(&mut self) {
        if self.faults.deaths && self.death.is_none() && self.random.below(400) == 0 {
            let dead = self.random.below(MEMBERS as u64) as usize;
            self.death = Some(Member(dead as u16));
            let host = &mut self.hosts[dead];
            (host.alive, host.runs) = (false, None);
        }
        if self.faults.orphans && self.random.below(300) == 0 {
            self.restorer = None;
        }
    }

    fn phase(&self) -> Option<&RestorePhase> {
        self.restorer.as_ref().map(Restorer::phase)
    }

    fn running(&self) -> usize {
        self.hosts.iter().filter(|host| host.runs.is_some()).count()
    }
}

trait Due<T> {
    fn pop_front_if_due(&mut self, now: Time) -> Option<(Time, T)>;
}

impl<T> Due<T> for VecDeque<(Time, T)> {
    fn pop_front_if_due(&mut self, now: Time) -> Option<(Time, T)> {
        let due = self.front().is_some_and(|(at, _)| *at <= now);
        due.then(|| self.pop_front()).flatten()
    }
}

fn play(seed: u64, faults: Faults, patience: Duration) -> World {
    let mut world = World::new(seed, faults, patience);
    for _ in 0..3_000 {
        world.step();
    }
    world
}

const PATIENCE: Duration = Duration::from_millis(500);

#[test]
fn a_lossy_network_only_delays_a_restore() {
    let mut settled = 0;
    for seed in 1..=300 {
        let faults = Faults { loss: seed % 40, ..Faults::default() };
        let world = play(seed, faults, PATIENCE);
        assert_eq!(world.phase(), Some(&RestorePhase::Restored(vec![])), "seed {seed}");
        assert_eq!(world.running(), MEMBERS);
        assert!(world.restorer.as_ref().unwrap().is_over());
        settled += world.hosts.iter().filter(|host| host.settled).count();
    }
    // The others had loaded all before they were told.
    assert!(settled > 600, "{settled} members were settled");
}

#[test]
fn a_failure_before_all_have_started_stops_everybody_and_is_named() {
    let (mut failed, mut survived) = (0, 0);
    for seed in 1..=600 {
        let failures = seed % 2 == 0;
        let faults = Faults { loss: 10, deaths: !failures, failures, orphans: false };
        let world = play(seed, faults, PATIENCE);
        match world.phase().unwrap() {
            RestorePhase::Failed(failure) => {
                failed += 1;
                assert_eq!(world.running(), 0, "seed {seed}");
                assert!(!world.hosts.iter().any(|host| host.settled), "seed {seed}");
                assert!(world.restorer.as_ref().unwrap().is_over());
                let Failure { member, why } = failure;
                let expected = if failures {
                    "the store is gone"
                } else {
                    "its host has not answered for 5 s"
                };
                assert_eq!(why, expected, "seed {seed}");
                assert!(failures || *member == world.death);
            }
            RestorePhase::Restored(failures) => {
                survived += 1;
                let dead = usize::from(world.death.is_some());
                assert_eq!(world.running(), MEMBERS - dead, "seed {seed}");
                assert!(failures.len() <= dead, "{failures:?}");
            }
            other => panic!("seed {seed}: {other:?}"),
        }
    }
    assert!(failed > 100 && survived > 100, "{failed} failed, {survived} went well");
}

#[test]
fn without_a_coordinator_what_runs_goes_on_and_the_rest_is_given_up() {
    let (mut partly, mut none) = (0, 0);
    for seed in 1..=300 {
        let faults = Faults { orphans: true, ..Faults::default() };
        let world = play(seed, faults, PATIENCE);
        for host in &world.hosts {
            match host.cohort.phase() {
                CohortPhase::Running | CohortPhase::Restored => assert!(host.runs.is_some()),
                CohortPhase::Failed(why) => {
                    assert_eq!(why, "the coordinator was silent for 5 s");
                    assert!(!host.ever_ran);
                }
                other => panic!("seed {seed}: {other:?}"),
            }
        }
        partly += u32::from((1..MEMBERS).contains(&world.running()));
        none += u32::from(world.running() == 0);
    }
    assert!(partly > 10 && none > 10, "{partly} {none}");
}

/// A restore of members of one page each, told what happens; says who is told to start.
struct Told(Restorer);

impl Told {
    fn new(order: StartOrder, patience: Duration, now: Time) -> Told {
        let pages = vec![1; order.members()];
        Told(Restorer::new(Line { order, patience }, pages, now, &mut Vec::new()))
    }

    fn event(&mut self, at: Time, event: RestoreEvent) -> Vec<u16> {
        let mut actions = Vec::new();
        self.0.handle(at, event, &mut actions);
        let start = |RestoreAction::Send(member, order): RestoreAction| {
            (order == Order::Start).then_some(member.0)
        };
        actions.into_iter().filter_map(start).collect()
    }

    fn says(&mut self, at: Time, member: u16, report: Report) -> Vec<u16> {
        self.event(at, RestoreEvent::Report(Member(member), report))
    }
}

/// The first of three starts before the second; nothing was in flight to or from the third.
fn one_chain_of_three() -> StartOrder {
    let data = Crossing { from: Member(1), to: Member(0), data: 1, acknowledgements: 0, others: 0 };
    StartOrder::new(3, &[data])
}

const NOBODY: [u16; 0] = [];
const BEGIN: Time = Time(Duration::from_secs(1));

#[test]
fn members_start_in_order_when_all_are_loaded() {
    let mut told = Told::new(one_chain_of_three(), PATIENCE, BEGIN);
    assert_eq!(told.says(BEGIN, 2, Report::LoadFin), NOBODY);
    assert_eq!(told.says(BEGIN, 0, Report::LoadFin), NOBODY);
    assert_eq!(told.event(BEGIN + REPEAT, RestoreEvent::Tick), NOBODY);
    let mut first = told.says(BEGIN + REPEAT, 1, Report::LoadFin);
    first.sort();
    assert_eq!(first, [0, 2]);
    assert_eq!(told.says(BEGIN + REPEAT, 0, Report::StartFin), [1]);
}

#[test]
fn patience_is_for_all_together() {
    let mut told = Told::new(one_chain_of_three(), PATIENCE, BEGIN);
    assert_eq!(told.says(BEGIN, 0, Report::LoadFin), NOBODY);
    assert!(told.0.deadline() <= Some(BEGIN + PATIENCE));
    let over = BEGIN + PATIENCE;
    assert_eq!(told.event(over, RestoreEvent::Tick), [0]);
    assert!(told.0.deadline() > Some(over), "nobody is held");
    assert_eq!(told.says(over, 1, Report::LoadFin), NOBODY, "the first does not run yet");
    assert_eq!(told.says(over, 0, Report::StartFin), [1]);
    assert_eq!(told.says(over + REPEAT, 2, Report::LoadFin), [2]);
}

#[test]
fn nobody_is_waited_for_once_the_restore_has_failed() {
    let mut told = Told::new(one_chain_of_three(), PATIENCE, BEGIN);
    assert_eq!(told.says(BEGIN, 0, Report::LoadFin), NOBODY);
    let later = BEGIN + 2 * PATIENCE;
    assert_eq!(told.event(BEGIN, RestoreEvent::Cancel), NOBODY);
    assert_eq!(told.event(later, RestoreEvent::Tick), NOBODY);
    assert!(told.0.deadline() > Some(later), "else the coordinator spins");
}

#[test]
fn with_neither_order_nor_patience_each_starts_when_it_is_loaded() {
    let mut told = Told::new(StartOrder::none(2), Duration::ZERO, BEGIN);
    assert_eq!(told.says(BEGIN, 1, Report::LoadFin), [1]);
    assert_eq!(told.says(BEGIN, 0, Report::LoadFin), [0]);
}

#[test]
fn a_cancelled_restore_leaves_nothing() {
    let mut world = World::new(7, Faults::default(), PATIENCE);
    (0..100).for_each(|_| world.step());
    world.restore(RestoreEvent::Cancel);
    (0..100).for_each(|_| world.step());
    assert_eq!(world.running(), 0);
    assert!(matches!(world.phase(), Some(RestorePhase::Failed(Failure { member: None, .. }))));
    assert!(SILENCE > REPEAT * 10);
}
