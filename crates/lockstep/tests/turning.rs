//! Output commit and one live copy while a VM turns from checkpoints to lockstep and back.
//!
//! The world of `world`, in which one side dies at most. The guest's state is how many events it
//! has executed, each a byte of log.

mod world;

use proptest::prelude::*;
use std::collections::VecDeque;
use understudy_lockstep::{Batcher, Feed};
use understudy_protocol::{Epoch, PIPELINE_DEPTH, PrimaryEvent, Time};
use world::{Schedules, Side, replay};

type World = world::World<Turning>;

/// An interrupt, of which the whole log is made.
const EVENT: u8 = 1;

#[derive(Clone, Copy, Debug)]
enum Step {
    Execute(u8),
    Send,
    /// A checkpoint, or a batch of log.
    Cut,
    Turn,
    Deliver,
    Acknowledge,
    /// The backup carries out the next of what it has acknowledged.
    Apply,
    Replay(u8),
    Arbitrate,
    PrimaryDies,
    BackupDies,
}

/// A mistake that is made on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    None,
    /// The last of the log does not go with the checkpoint that ends it.
    RestIsLeftOut,
    /// A backup goes live by a log that was announced, in an epoch that never came whole.
    AnnouncementCounts,
    /// The first batch does not wait until the machine at its beginning is committed, and
    /// another way is quicker.
    LogOvertakes,
}

#[derive(Clone, Debug)]
enum Part {
    State(u64),
    LogBegins,
    LogEnds(Vec<u8>),
    /// The epoch is whole.
    End,
    Log(Vec<u8>),
}

/// A log that the backup follows, or is about to.
struct Following {
    machine: Epoch,
    base: u64,
    feed: Feed,
    executed: u64,
}

impl Following {
    fn replay(&mut self, most: usize) {
        self.executed += replay(&mut self.feed, most) as u64;
    }

    fn run_to_end(&mut self) -> u64 {
        self.feed.end();
        while !self.feed.is_over() {
            self.replay(usize::MAX);
        }
        self.base + self.executed
    }
}

struct Turning {
    mistake: Mistake,
    // The primary.
    executed: u64,
    /// The part of the log, since it began, that nobody has read.
    unread: Option<Vec<u8>>,
    batcher: Option<(Epoch, Batcher)>,
    // Between.
    wire: VecDeque<(Epoch, Part)>,
    // The backup.
    staged: Vec<Part>,
    errands: VecDeque<(Epoch, Vec<Part>)>,
    image: u64,
    announced: Option<Following>,
    following: Option<Following>,
    // What happened.
    turns: u32,
    /// Number of these that the backup has carried out.
    carried_out: u32,
}

impl Turning {
    fn new(mistake: Mistake) -> Turning {
        Turning {
            mistake,
            executed: 0,
            unread: None,
            batcher: None,
            wire: VecDeque::new(),
            staged: Vec::new(),
            errands: VecDeque::new(),
            image: 0,
            announced: None,
            following: None,
            turns: 0,
            carried_out: 0,
        }
    }

    fn execute(&mut self, events: u8) {
        self.executed += u64::from(events);
        if let Some(unread) = &mut self.unread {
            unread.resize(unread.len() + usize::from(events), EVENT);
        }
    }

    fn replay(&mut self, most: usize) {
        let begun = self.errands.is_empty();
        if let Some(following) = self.following.as_mut().filter(|_| begun) {
            following.replay(most);
        }
    }

    /// The backup prepares for a turn when it has carried out the one before.
    fn is_other_ready(&self) -> bool {
        self.carried_out == self.turns
    }

    /// The backup carries out the next of what it has acknowledged.
    fn apply(&mut self, now: Time) {
        let Some((epoch, parts)) = self.errands.pop_front() else { return };
        let turns = |part: &Part| matches!(part, Part::LogBegins | Part::LogEnds(_));
        self.carried_out += u32::from(parts.iter().any(turns));
        let mut executed = None;
        for part in parts {
            match part {
                Part::LogEnds(rest) => {
                    let mut following = self.following.take().expect("a log that began");
                    following.feed.receive(&rest, now).expect("whole events");
                    executed = Some(following.run_to_end());
                }
                Part::State(state) => {
                    // What comes with the end of a log changes what its execution left.
                    let base = executed.unwrap_or(state);
                    assert_eq!(base, state, "the pages are changes of another memory");
                    self.image = state;
                }
                Part::LogBegins => self.following = self.announced.take(),
                Part::End | Part::Log(_) => unreachable!("they are not staged"),
            }
        }
        if let Some(following) = self.following.as_mut().filter(|log| log.machine == epoch) {
            following.base = self.image;
        }
    }
}

impl world::Daemons for Turning {
    fn cut_off(&mut self) {
        self.wire.clear();
    }

    // What the backup has shows when it goes live.
    fn frame_leaves(&self, _: u64) {}

    fn go_live(&mut self, now: Time) -> u64 {
        while !self.errands.is_empty() {
            self.apply(now);
        }
        if self.mistake == Mistake::AnnouncementCounts && self.announced.is_some() {
            self.following = self.announced.take();
        }
        match &mut self.following {
            Some(following) => following.run_to_end(),
            None => self.image,
        }
    }
}

impl World {
    fn step(&mut self, step: Step) {
        let may_capture = self.primary_lives && self.connected && self.primary.may_capture();
        match step {
            Step::Execute(events) if self.primary_lives => self.daemons.execute(events),
            Step::Send if self.primary_lives => {
                self.send(self.primary.running(), self.daemons.executed);
            }
            Step::Cut if may_capture => match self.daemons.unread {
                None => self.checkpoint(Vec::new()),
                Some(_) => self.batch(),
            },
            Step::Turn if may_capture && self.daemons.is_other_ready() => self.turn(),
            Step::Deliver if self.connected => self.deliver(),
            Step::Acknowledge if self.connected => {
                if let Some(epoch) = self.acknowledgements.pop_front() {
                    if let Some((_, batcher)) = &mut self.daemons.batcher {
                        batcher.acknowledged(epoch);
                    }
                    self.primary_event(PrimaryEvent::Acknowledged(epoch));
                }
            }
            Step::Apply if self.backup_lives => self.daemons.apply(self.now),
            Step::Replay(most) => self.daemons.replay(most.into()),
            Step::Arbitrate => assert!(!self.arbitrate(), "one side dies at most"),
            Step::PrimaryDies => self.die(Side::Primary),
            Step::BackupDies => self.die(Side::Backup),
            _ => {}
        }
    }

    fn checkpoint(&mut self, turn: Vec<Part>) {
        let epoch = self.primary.running();
        self.primary_event(PrimaryEvent::Captured);
        let state = Part::State(self.daemons.executed);
        let parts = turn.into_iter().chain([state, Part::End]);
        self.daemons.wire.extend(parts.map(|part| (epoch, part)));
    }

    fn batch(&mut self) {
        let overtakes = self.daemons.mistake == Mistake::LogOvertakes;
        let (machine, batcher) = self.daemons.batcher.as_mut().expect("there is a log");
        if self.primary.committed() < *machine && !overtakes {
            return;
        }
        let log = std::mem::take(self.daemons.unread.as_mut().expect("there is a log"));
        let epoch = batcher.cut(log.len());
        assert_eq!(epoch, self.primary.running());
        self.primary_event(PrimaryEvent::Captured);
        match overtakes {
            true => self.daemons.wire.push_front((epoch, Part::Log(log))),
            false => self.daemons.wire.push_back((epoch, Part::Log(log))),
        }
    }

    fn turn(&mut self) {
        match &self.daemons.batcher {
            None => {
                self.primary.set_pipeline(100);
                let machine = self.primary.running();
                self.checkpoint(vec![Part::LogBegins]);
                self.daemons.batcher = Some((machine, Batcher::new(machine, 1 << 20)));
                self.daemons.unread = Some(Vec::new());
            }
            Some((machine, _)) if self.primary.committed() < *machine => return,
            Some(_) => {
                let mut rest = self.daemons.unread.take().unwrap_or_default();
                if self.daemons.mistake == Mistake::RestIsLeftOut {
                    rest.clear();
                }
                self.checkpoint(vec![Part::LogEnds(rest)]);
                self.daemons.batcher = None;
                self.primary.set_pipeline(PIPELINE_DEPTH);
            }
        }
        self.daemons.turns += 1;
    }

    fn deliver(&mut self) {
        let Some((epoch, part)) = self.daemons.wire.pop_front() else { return };
        match part {
            Part::Log(log) => {
                if self.commits(epoch) {
                    let Turning { announced, following, .. } = &mut self.daemons;
                    let following = announced.as_mut().or(following.as_mut());
                    let feed = &mut following.expect("a log that was announced").feed;
                    feed.receive(&log, self.now).expect("whole events");
                }
            }
            Part::End => {
                let parts = std::mem::take(&mut self.daemons.staged);
                if self.commits(epoch) {
                    self.daemons.errands.push_back((epoch, parts));
                }
            }
            Part::LogBegins => {
                let (feed, base, executed) = (Feed::new(), 0, 0);
                let announced = Following { machine: epoch, base, feed, executed };
                self.daemons.announced = Some(announced);
                self.daemons.staged.push(Part::LogBegins);
            }
            part => self.daemons.staged.push(part),
        }
    }
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..9u8).prop_map(Step::Execute),
        5 => Just(Step::Send),
        6 => Just(Step::Cut),
        2 => Just(Step::Turn),
        9 => Just(Step::Deliver),
        6 => Just(Step::Acknowledge),
        4 => Just(Step::Apply),
        3 => (0..9u8).prop_map(Step::Replay),
        1 => Just(Step::PrimaryDies),
        1 => Just(Step::BackupDies),
    ]
}

fn play(mistake: Mistake, steps: &[Step]) -> World {
    let mut world = World::new(Turning::new(mistake));
    steps.iter().for_each(|&step| world.step(step));
    // The end, with a death if there was none.
    world.step(Step::PrimaryDies);
    (0..4).for_each(|_| world.step(Step::Arbitrate));
    world
}

fn schedules() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 1..160)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn output_commit_and_one_live_copy(steps in schedules()) {
        let world = play(Mistake::None, &steps);
        prop_assert!(!world.two_failures, "one side dies at most");
        prop_assert!(world.goes_on(), "nobody goes on");
    }
}

/// The same schedules find what is done wrong, and turn more than once.
#[test]
fn mistakes_are_found() {
    let mut schedules = Schedules::of(schedules());
    let turns = (0..200).map(|_| play(Mistake::None, &schedules.draw()).daemons.turns).max();
    assert!(turns > Some(2), "{turns:?} turns at most");
    for mistake in [Mistake::RestIsLeftOut, Mistake::AnnouncementCounts, Mistake::LogOvertakes] {
        let found = schedules.find(4_000, |steps| drop(play(mistake, &steps)));
        assert!(found, "{mistake:?} was not found");
    }
}
