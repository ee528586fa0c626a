//! Random schedules: messages are lost and delayed, hosts and stores fail; a snapshot has all
//! members or does not exist, and nobody stays armed.

use super::*;
use crate::random::Random;
use crate::{Failure, Member};
use std::collections::VecDeque;
use std::time::Duration;
use understudy_protocol::Time;

const MEMBERS: usize = 4;
const SNAPSHOTS: u64 = 3;

#[derive(Clone, Copy, Debug, Default)]
struct Faults {
    /// Messages of a hundred that are lost.
    loss: u64,
    deaths: bool,
    failures: bool,
    store: bool,
    orphans: bool,
    /// All hosts stand still for a while, as on a machine that is suspended.
    halts: bool,
}

const HALT: Duration = Duration::from_secs(12);

/// One member's host, and what it really did.
struct Host {
    cohort: TakeCohort,
    alive: bool,
    armed: Option<SnapshotNumber>,
    work: VecDeque<(Time, TakeEvent)>,
    saved: Vec<SnapshotNumber>,
    base: SnapshotNumber,
    to: VecDeque<(Time, About<TakeOrder>)>,
    from: VecDeque<(Time, About<TakeReport>)>,
}

struct World {
    random: Random,
    faults: Faults,
    now: Time,
    taker: Option<Taker>,
    hosts: Vec<Host>,
    publishing: Option<Time>,
    published: Vec<SnapshotNumber>,
    discarded: Vec<SnapshotNumber>,
    outcomes: Vec<TakerPhase>,
}

fn part() -> Part {
    Part { manifest: Blob::default(), crossings: vec![] }
}

impl World {
    fn new(seed: u64, faults: Faults) -> World {
        let now = Time(Duration::from_secs(1));
        let host = |_| Host {
            cohort: TakeCohort::new(SnapshotNumber(0), now),
            alive: true,
            armed: None,
            work: VecDeque::new(),
            saved: Vec::new(),
            base: SnapshotNumber(0),
            to: VecDeque::new(),
            from: VecDeque::new(),
        };
        World {
            random: Random::new(seed),
            faults,
            now,
            taker: None,
            hosts: (0..MEMBERS).map(host).collect(),
            publishing: None,
            published: Vec::new(),
            discarded: Vec::new(),
            outcomes: Vec::new(),
        }
    }

    fn later(&mut self, most: u64) -> Time {
        self.now + Duration::from_millis(self.random.below(most))
    }

    fn lost(&mut self) -> bool {
        self.random.below(100) < self.faults.loss
    }

    fn begin(&mut self, number: SnapshotNumber) {
        let mut actions = Vec::new();
        self.taker = Some(Taker::new(number, MEMBERS, self.now, &mut actions));
        self.carry_out(number, actions);
    }

    fn taker(&mut self, number: SnapshotNumber, event: TakerEvent) {
        let (mut actions, now) = (Vec::new(), self.now);
        let Some(taker) = &mut self.taker else { return };
        taker.handle(now, event, &mut actions);
        self.carry_out(number, actions);
    }

    fn carry_out(&mut self, number: SnapshotNumber, actions: Vec<TakerAction>) {
        for action in actions {
            match action {
                TakerAction::Send(member, order) => {
                    if !self.lost() {
                        let at = self.later(30);
                        self.hosts[member.index()].to.push_back((at, order));
                    }
                }
                TakerAction::Publish(parts) => {
                    assert_eq!(parts.len(), MEMBERS);
                    for host in &self.hosts {
                        assert!(host.saved.contains(&number), "published without a member");
                    }
                    self.publishing = Some(self.later(200));
                }
                TakerAction::Discard => self.discarded.push(number),
            }
        }
    }

    fn cohort(&mut self, at: usize, event: TakeEvent) {
        let (mut actions, now) = (Vec::new(), self.now);
        self.hosts[at].cohort.handle(now, event, &mut actions);
        for action in actions {
            match action {
                TakeAction::Prepare(number) => {
                    assert_eq!(self.hosts[at].armed.replace(number), None, "armed twice");
                    let done = self.later(300);
                    self.hosts[at].work.push_back((done, TakeEvent::Prepared(number)));
                }
                TakeAction::Take(number) => {
                    assert_eq!(self.hosts[at].armed, Some(number), "not prepared");
                    let (taken, saved) = (self.later(50), self.later(3_000));
                    let fails = self.faults.failures && self.random.below(8) == 0;
                    let failed = TakeEvent::Failed(number, "the store is full".into());
                    let last = if fails { failed } else { TakeEvent::Saved(number, part()) };
                    let work = &mut self.hosts[at].work;
                    work.push_back((taken, TakeEvent::Taken(number)));
                    work.push_back((saved, last));
                }
                TakeAction::Commit(number) => {
                    assert!(self.published.contains(&number), "committed what is not there");
                    (self.hosts[at].armed, self.hosts[at].base) = (None, number);
                }
                TakeAction::Discard(_) => {
                    self.hosts[at].armed = None;
                    self.hosts[at].work.clear();
                }
                TakeAction::Report(report) => {
                    if !self.lost() {
                        let arrives = self.later(30);
                        self.hosts[at].from.push_back((arrives, report));
                    }
                }
            }
        }
    }

    fn step(&mut self, number: SnapshotNumber) {
        let halts = self.faults.halts && self.random.below(300) == 0;
        self.now = self.now + if halts { HALT } else { Duration::from_millis(10) };
        let now = self.now;
        if self.publishing.take_if(|at| *at <= now).is_some() {
            let fails = self.faults.store && self.random.below(3) == 0;
            if !fails {
                self.published.push(number);
            }
            let failed = TakerEvent::NotPublished("the store is gone".into());
            self.taker(number, if fails { failed } else { TakerEvent::Published });
        }
        if self.faults.orphans && self.random.below(200) == 0 {
            self.taker = None;
        }
        if self.faults.deaths && self.random.below(600) == 0 {
            let dead = self.random.below(MEMBERS as u64) as usize;
            self.hosts[dead].alive = false;
        }
        self.taker(number, TakerEvent::Tick);
        for at in 0..MEMBERS {
            self.exchange(at, number);
        }
    }

    fn exchange(&mut self, at: usize, number: SnapshotNumber) {
        let now = self.now;
        fn due<T>(queue: &mut VecDeque<(Time, T)>, now: Time) -> Option<T> {
            let due = queue.front().is_some_and(|(at, _)| *at <= now);
            due.then(|| queue.pop_front()).flatten().map(|(_, item)| item)
        }
        while let Some(report) = due(&mut self.hosts[at].from, now) {
            self.taker(number, TakerEvent::Report(Member(at as u16), report));
        }
        if !self.hosts[at].alive {
            return;
        }
        while let Some(order) = due(&mut self.hosts[at].to, now) {
            self.cohort(at, TakeEvent::Order(order));
        }
        self.cohort(at, TakeEvent::Tick);
        while let Some(event) = due(&mut self.hosts[at].work, now) {
            if let TakeEvent::Saved(number, _) = &event {
                self.hosts[at].saved.push(*number);
            }
            self.cohort(at, event);
        }
    }

    /// Takes one snapshot after the other; checks what became of each.
    fn play(mut self) -> World {
        for number in (1..=SNAPSHOTS).map(SnapshotNumber) {
            self.begin(number);
            for _ in 0..2_500 {
                self.step(number);
            }
            let Some(taker) = self.taker.take() else {
                self.publishing = None;
                continue;
            };
            assert!(taker.is_over(), "{number}: {:?}", taker.phase());
            let there = self.published.contains(&number);
            assert_eq!(there, *taker.phase() == TakerPhase::Done);
            assert_eq!(!there, self.discarded.contains(&number), "swept if and only if given up");
            self.outcomes.push(taker.phase().clone());
        }
        self
    }
}

fn play(seed: u64, faults: Faults) -> World {
    World::new(seed, faults).play()
}

#[test]
fn a_lossy_network_only_delays_a_snapshot() {
    for seed in 1..=100 {
        let world = play(seed, Faults { loss: seed % 40, ..Faults::default() });
        assert_eq!(world.outcomes, vec![TakerPhase::Done; SNAPSHOTS as usize], "seed {seed}");
        for host in &world.hosts {
            assert_eq!((host.armed, host.base), (None, SnapshotNumber(SNAPSHOTS)));
        }
    }
}

#[test]
fn hosts_that_stand_still_only_delay_a_snapshot() {
    for seed in 1..=100 {
        let world = play(seed, Faults { loss: 5, halts: true, ..Faults::default() });
        assert_eq!(world.outcomes, vec![TakerPhase::Done; SNAPSHOTS as usize], "seed {seed}");
    }
}

#[test]
fn a_failure_leaves_no_snapshot_and_nobody_armed() {
    let (mut failed, mut done) = (0, 0);
    for seed in 1..=150 {
        let faults =
            Faults { loss: 10, failures: seed % 2 == 0, store: seed % 3 == 0, ..Faults::default() };
        let world = play(seed, faults);
        for outcome in &world.outcomes {
            match outcome {
                TakerPhase::Done => done += 1,
                TakerPhase::Failed(Failure { why, .. }) => {
                    assert!(
                        ["the store is full", "the store is gone"].contains(&&why[..]),
                        "{why}"
                    );
                    failed += 1;
                }
                other => panic!("seed {seed}: {other:?}"),
            }
        }
        assert!(world.hosts.iter().all(|host| host.armed.is_none()), "seed {seed}");
    }
    assert!(failed > 50 && done > 50, "{failed} failed, {done} done");
}

#[test]
fn a_dead_host_fails_what_is_not_stored_and_nothing_else() {
    let (mut failed, mut done) = (0, 0);
    for seed in 1..=150 {
        let world = play(seed, Faults { loss: 5, deaths: true, ..Faults::default() });
        failed += world.outcomes.iter().filter(|outcome| **outcome != TakerPhase::Done).count();
        done += world.outcomes.iter().filter(|outcome| **outcome == TakerPhase::Done).count();
        for host in world.hosts.iter().filter(|host| host.alive) {
            assert_eq!(host.armed, None, "seed {seed}");
        }
    }
    assert!(failed > 50 && done > 20, "{failed} failed, {done} done");
}

#[test]
fn without_a_coordinator_the_members_give_up_and_run_on() {
    let mut given_up = 0;
    for seed in 1..=150 {
        let world = play(seed, Faults { orphans: true, ..Faults::default() });
        for host in &world.hosts {
            assert_eq!(host.armed, None, "seed {seed}");
            assert!(host.base == SnapshotNumber(0) || world.published.contains(&host.base));
            given_up += u32::from(matches!(host.cohort.phase(), TakeCohortPhase::Failed(_)));
        }
    }
    assert!(given_up > 50, "{given_up}");
}

/// What became of a cohort that prepares, or takes, and whose coordinator is heard all the time;
/// `done` says how much it has done by a second.
fn after_seconds(takes: bool, seconds: u64, done: impl Fn(u64) -> u64) -> TakeCohortPhase {
    let (number, start) = (SnapshotNumber(1), Time(Duration::from_secs(1)));
    let order = |said| TakeEvent::Order(About { number, said });
    let mut cohort = TakeCohort::new(SnapshotNumber(0), start);
    let mut actions = Vec::new();
    cohort.handle(start, order(TakeOrder::Prepare), &mut actions);
    if takes {
        cohort.handle(start, TakeEvent::Prepared(number), &mut actions);
        cohort.handle(start, order(TakeOrder::Take), &mut actions);
        cohort.handle(start, TakeEvent::Taken(number), &mut actions);
    }
    for second in 1..=seconds {
        let now = start + Duration::from_secs(second);
        cohort.handle(now, order(TakeOrder::Take), &mut actions);
        cohort.handle(now, TakeEvent::Working(number, done(second)), &mut actions);
        cohort.handle(now, TakeEvent::Tick, &mut actions);
    }
    let gave_up = actions.contains(&TakeAction::Discard(number));
    assert_eq!(gave_up, matches!(cohort.phase(), TakeCohortPhase::Failed(_)));
    cohort.phase().clone()
}

/// Regression: nobody could protect a VM whose store was on a mount that had gone.
#[test]
fn a_member_that_gets_nowhere_gives_up() {
    let failed = |phase: &TakeCohortPhase| matches!(phase, TakeCohortPhase::Failed(_));
    let a_little_each_minute = |second: u64| second / 60;
    for takes in [false, true] {
        assert!(!failed(&after_seconds(takes, 299, |_| 7)), "it may still go on");
        let slow = after_seconds(takes, 7_200, a_little_each_minute);
        assert!(!failed(&slow), "it goes on: {slow:?}");
        let failed = after_seconds(takes, 302, |_| 7);
        let TakeCohortPhase::Failed(why) = failed else { panic!("{failed:?}") };
        assert!(why.contains("nowhere with it for 300 s"), "{why}");
    }
}

/// Regression: the coordinator asked a store that was away for ever, and its members waited.
#[test]
fn a_store_that_never_says_whether_the_manifest_is_there_ends_the_snapshot() {
    let (number, start) = (SnapshotNumber(1), Time(Duration::from_secs(1)));
    let report = |said| TakerEvent::Report(Member(0), About { number, said });
    let mut actions = Vec::new();
    let mut taker = Taker::new(number, 1, start, &mut actions);
    taker.handle(start, report(TakeReport::Prepared), &mut actions);
    taker.handle(start, report(TakeReport::Saved(part())), &mut actions);
    assert_eq!(*taker.phase(), TakerPhase::Publishing);
    for second in 1..=901 {
        assert!(second > 899 || *taker.phase() == TakerPhase::Publishing, "at {second} s");
        let now = start + Duration::from_secs(second);
        taker.handle(now, report(TakeReport::Saved(part())), &mut actions);
        taker.handle(now, TakerEvent::Tick, &mut actions);
    }
    let TakerPhase::Failed(failure) = taker.phase() else { panic!("{:?}", taker.phase()) };
    assert!(
        failure.member.is_none() && failure.why.contains("has not said for 900 s"),
        "{failure}"
    );
    taker.handle(start, report(TakeReport::Abandoned), &mut actions);
    assert!(taker.is_over(), "the members are free");
}

/// Regression: the command had ended by then, and said that there was no such snapshot.
#[test]
fn a_snapshot_whose_members_are_all_lost_ends_once_it_is_known_whether_it_is_there() {
    let (number, start) = (SnapshotNumber(1), Time(Duration::from_secs(1)));
    let report = |said| TakerEvent::Report(Member(0), About { number, said });
    for event in [TakerEvent::Published, TakerEvent::NotPublished("the store is full".into())] {
        let mut actions = Vec::new();
        let mut taker = Taker::new(number, 1, start, &mut actions);
        taker.handle(start, report(TakeReport::Prepared), &mut actions);
        taker.handle(start, report(TakeReport::Saved(part())), &mut actions);
        let failed = TakeReport::Failed { why: "the coordinator was silent for 5 s".into() };
        taker.handle(start, report(failed), &mut actions);
        assert_eq!(*taker.phase(), TakerPhase::Publishing);
        assert!(!taker.is_over() && taker.deadline().is_some(), "nobody knows what to say");
        let there = event == TakerEvent::Published;
        taker.handle(start, event, &mut actions);
        assert!(taker.is_over());
        assert_eq!(*taker.phase() == TakerPhase::Done, there);
    }
}

/// Regression: the later one ended the earlier one, whose coordinator then spoke of a silent host.
#[test]
fn of_two_snapshots_the_later_one_is_refused_while_the_first_is_taken() {
    let start = Time(Duration::from_secs(1));
    let mut cohort = TakeCohort::new(SnapshotNumber(0), start);
    let mut say = |ms: u64, number, said| {
        let (mut actions, number) = (Vec::new(), SnapshotNumber(number));
        let order = TakeEvent::Order(About { number, said });
        cohort.handle(start + Duration::from_millis(ms), order, &mut actions);
        actions
    };
    let answers = |actions: &[TakeAction], number, what: &str| {
        let [TakeAction::Report(report)] = actions else { return false };
        report.number == SnapshotNumber(number) && format!("{:?}", report.said).contains(what)
    };
    assert!(say(0, 3, TakeOrder::Prepare).contains(&TakeAction::Prepare(SnapshotNumber(3))));
    for order in [TakeOrder::Prepare, TakeOrder::Take] {
        assert!(answers(&say(900, 4, order), 4, "snapshot 3 is being taken"), "{order:?}");
    }
    assert!(answers(&say(900, 4, TakeOrder::Abandon), 4, "Abandoned"));
    assert!(answers(&say(900, 3, TakeOrder::Prepare), 3, "Preparing"), "it goes on");
    // Its coordinator is not there any more.
    let begun = say(2_000, 5, TakeOrder::Prepare);
    assert!(begun.contains(&TakeAction::Discard(SnapshotNumber(3))), "{begun:?}");
    assert!(begun.contains(&TakeAction::Prepare(SnapshotNumber(5))), "{begun:?}");
    for order in [TakeOrder::Prepare, TakeOrder::Take, TakeOrder::Commit] {
        assert!(answers(&say(2_000, 3, order), 3, "snapshot 5 has begun since"), "{order:?}");
    }
    assert!(answers(&say(2_000, 3, TakeOrder::Abandon), 3, "Abandoned"));
}
