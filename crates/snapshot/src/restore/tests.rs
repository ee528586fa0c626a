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
    /// For 15 s nothing passes between the coordinator and a member.
    cuts: bool,
    /// All hosts stand still for a while, as on a machine that is suspended.
    halts: bool,
}

const HALT: Duration = Duration::from_secs(12);

const CUT: Duration = Duration::from_secs(15);

/// What the arbiter knows, and who waits for its answer.
#[derive(Default)]
struct Arbiter {
    decision: Option<Decision>,
    /// Its answers, to a member's host or to the coordinator.
    answers: Vec<(Time, Option<Member>, Decision)>,
    /// Questions that it did not answer.
    silences: u32,
}

/// One member's host. What the VM does is the truth that is checked.
struct Host {
    cohort: Cohort,
    alive: bool,
    loaded_at: Option<Time>,
    complete_at: Option<Time>,
    started_at: Option<Time>,
    discarded_at: Option<Time>,
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
    cut: Option<(Time, Member)>,
    arbiter: Arbiter,
    decide_again: Option<Time>,
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
            discarded_at: None,
            runs: None,
            ever_ran: false,
            settled: false,
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

    fn later(&mut self, most: u64) -> Time {
        self.now + Duration::from_millis(self.random.below(most))
    }

    fn lost(&mut self, member: Member) -> bool {
        let is_cut = self.cut.is_some_and(|(at, cut)| cut == member && self.now - at < CUT);
        self.random.below(100) < self.faults.loss || is_cut
    }

    fn carry_out(&mut self, actions: Vec<RestoreAction>) {
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
    fn decide(&mut self) {
        let answered = self.ask(None, Decision::Settled);
        self.decide_again = (!answered).then(|| self.now + Duration::from_secs(1));
    }

    /// Whoever asks first decides. The arbiter may be out of reach, and its answer may.
    fn ask(&mut self, who: Option<Member>, wanted: Decision) -> bool {
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

    fn hear_arbiter(&mut self) {
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
        if due(&mut self.hosts[at].discarded_at) {
            self.hosts[at].runs = None;
            self.cohort(at, CohortEvent::Discarded);
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
        if self.faults.cuts && self.cut.is_none() && self.random.below(300) == 0 {
            let member = Member(self.random.below(MEMBERS as u64) as u16);
            self.cut = Some((self.now, member));
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
    for _ in 0..8_000 {
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
fn hosts_that_stand_still_only_delay_a_restore() {
    for seed in 1..=200 {
        let world = play(seed, Faults { loss: 5, halts: true, ..Faults::default() }, PATIENCE);
        assert_eq!(world.phase(), Some(&RestorePhase::Restored(vec![])), "seed {seed}");
    }
}

#[test]
fn a_failure_before_all_have_started_stops_everybody_and_is_named() {
    let (mut failed, mut survived) = (0, 0);
    for seed in 1..=600 {
        let failures = seed % 2 == 0;
        let faults = Faults { loss: 10, deaths: !failures, failures, ..Faults::default() };
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
fn without_a_coordinator_all_stay_or_all_are_stopped() {
    let (mut all, mut none, mut stopped) = (0, 0, 0);
    for seed in 1..=600 {
        let faults = Faults { orphans: true, loss: seed % 3 * 10, ..Faults::default() };
        let world = play(seed, faults, PATIENCE);
        for host in &world.hosts {
            match host.cohort.phase() {
                CohortPhase::Running | CohortPhase::Restored => assert!(host.runs.is_some()),
                CohortPhase::Failed(why) => {
                    assert_eq!(why, "the coordinator was silent for 5 s");
                    stopped += u32::from(host.ever_ran);
                }
                other => panic!("seed {seed}: {other:?}"),
            }
        }
        match world.running() {
            MEMBERS => all += 1,
            0 => none += 1,
            some => panic!("seed {seed}: {some} run"),
        }
    }
    assert!(all > 50 && none > 50 && stopped > 50, "{all} {none} {stopped}");
}

#[test]
fn a_member_that_does_not_hear_the_coordinator_decides_as_all_do() {
    let (mut restored, mut failed, mut silences) = (0, 0, 0);
    for seed in 1..=600 {
        let faults = Faults { cuts: true, loss: seed % 3 * 10, ..Faults::default() };
        let world = play(seed, faults, PATIENCE);
        silences += world.arbiter.silences;
        match world.phase().unwrap() {
            RestorePhase::Restored(_) => {
                restored += 1;
                assert_eq!(world.running(), MEMBERS, "seed {seed}");
            }
            RestorePhase::Failed(_) => {
                failed += 1;
                assert_eq!(world.running(), 0, "seed {seed}");
            }
            other => panic!("seed {seed}: {other:?}"),
        }
    }
    assert!(restored > 50 && failed > 50 && silences > 50, "{restored} {failed} {silences}");
}

/// A restore of members of one page each, told what happens; says who is told to start.
struct Told(Restorer);

impl Told {
    fn new(order: StartOrder, patience: Duration, now: Time) -> Told {
        let pages = vec![1; order.members()];
        let mut told = Told(Restorer::new(Line { order, patience }, pages, now, &mut Vec::new()));
        told.event(now, RestoreEvent::Whole);
        told
    }

    fn event(&mut self, at: Time, event: RestoreEvent) -> Vec<u16> {
        let mut actions = Vec::new();
        self.0.handle(at, event, &mut actions);
        let start = |action| match action {
            RestoreAction::Send(member, Order::Start) => Some(member.0),
            _ => None,
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
    assert_eq!(told.event(BEGIN, RestoreEvent::Refused("a chunk is missing".into())), NOBODY);
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
fn nobody_starts_before_the_snapshot_is_known_to_be_whole() {
    let restorer = |world: &mut World| {
        let line = Line { order: world.order.clone(), patience: Duration::ZERO };
        world.restorer = Some(Restorer::new(line, vec![100; MEMBERS], world.now, &mut vec![]));
    };
    let mut world = World::new(7, Faults::default(), PATIENCE);
    restorer(&mut world);
    (0..500).for_each(|_| world.step());
    assert!(!world.hosts.iter().any(|host| host.ever_ran));
    let loaded = |host: &Host| host.cohort.phase() == &CohortPhase::Loaded;
    assert!(world.hosts.iter().all(loaded));
    world.restore(RestoreEvent::Refused("a chunk is missing".into()));
    (0..500).for_each(|_| world.step());
    assert!(!world.hosts.iter().any(|host| host.ever_ran));
    let aborted = |host: &Host| host.cohort.phase() == &CohortPhase::Aborted;
    assert!(world.hosts.iter().all(aborted) && world.restorer.as_ref().unwrap().is_over());
    let why = Failure { member: None, why: "a chunk is missing".into() };
    assert_eq!(world.phase(), Some(&RestorePhase::Failed(why)));
    assert!(SILENCE > REPEAT * 10);
}
