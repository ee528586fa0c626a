//! Random schedules: messages are lost and delayed, hosts die, coordinators die; members start
//! in order or not at all.

mod world;

use super::*;
use crate::contact::{REPEAT, SILENCE};
use crate::graph::{Crossing, StartOrder};
use crate::{Failure, Member};
use std::time::Duration;
use understudy_protocol::Time;
use world::*;

const PATIENCE: Duration = Duration::from_millis(500);

#[test]
fn a_lossy_network_only_delays_a_restore() {
    let mut settled = 0;
    for seed in 1..=300 {
        let faults = Faults { loss: seed % 40, ..Faults::default() };
        let world = play(seed, faults, PATIENCE);
        assert_eq!(world.phase(), Some(&RestorePhase::Restored(vec![])), "seed {seed}");
        assert_eq!(world.running(), MEMBERS);
        assert!(world.hosts.iter().all(|host| host.concluded), "seed {seed}");
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
                // Of each there is still what it was before.
                assert!(!world.hosts.iter().any(|host| host.concluded), "seed {seed}");
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
