//! Output commit and one live copy, whatever fails and whenever.
//!
//! The world of `world`, with a guest in lockstep that logs and sends, and a wire that loses its
//! tail. The guest's state is its place in the log.

mod world;

use proptest::prelude::*;
use std::collections::VecDeque;
use std::time::Duration;
use understudy_lockstep::{Batcher, Feed, LogPosition};
use understudy_protocol::{BackupEvent, Epoch, PrimaryEvent, Time};
use world::{MACHINE, Schedules, Side, replay};

type World = world::World<Lockstep>;

#[derive(Clone, Copy, Debug)]
enum Step {
    /// The guest logs an event; so much of it leaves QEMU's buffer by itself.
    Log {
        event: u8,
        flushed: u8,
    },
    /// The guest sends a frame: its log leaves first.
    Send,
    /// The daemon begins to cut a batch: the first of its two steps.
    BeginCut,
    /// The second, and the batch is sent.
    EndCut,
    DeliverBatch,
    DeliverAcknowledgement,
    /// The backup's QEMU takes so much of its log.
    Replay(u8),
    Arbitrate,
    /// Time passes; both sides hear each other before, if they can.
    Wait {
        ms: u8,
        heartbeats: bool,
    },
    /// The connection breaks; so many batches and acknowledgements still arrive.
    Break {
        batches: u8,
        acknowledgements: u8,
    },
    PrimaryDies,
    BackupDies,
}

/// A mistake that is made on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    None,
    /// The log is read before the barrier: a frame between is counted to a batch without
    /// its log.
    LogBeforeBarrier,
    /// The backup goes live with what it has executed so far.
    LogIsNotUsedUp,
}

const EVENTS: [&[u8]; 4] = [
    &[0, 0, 0, 1, 0],
    &[31],
    &[9, 0, 0, 0, 0, 0, 0, 0, 0, 3, 7, 7, 7],
    &[29, 0, 0, 0, 0, 0, 0, 0, 9],
];

struct Lockstep {
    mistake: Mistake,
    // The primary.
    batcher: Batcher,
    /// Log in QEMU's buffer, log that left it, and bytes of log so far.
    buffered: Vec<u8>,
    left: Vec<u8>,
    logged: u64,
    /// The batch that a frame belongs to.
    barrier: Epoch,
    /// A cut is under way, with the log read so far.
    cutting: Option<Vec<u8>>,
    // Between.
    batches: VecDeque<(Epoch, Vec<u8>)>,
    // The backup.
    feed: Feed,
    executed: LogPosition,
}

impl Lockstep {
    fn new(mistake: Mistake) -> Lockstep {
        Lockstep {
            mistake,
            batcher: Batcher::new(MACHINE, 1 << 20),
            buffered: Vec::new(),
            left: Vec::new(),
            logged: 0,
            barrier: MACHINE.next(),
            cutting: None,
            batches: VecDeque::new(),
            feed: Feed::new(),
            executed: LogPosition(0),
        }
    }

    fn log(&mut self, event: &[u8], flushed: usize) {
        self.buffered.extend(event);
        self.logged += event.len() as u64;
        self.left.extend(self.buffered.drain(..flushed.min(self.buffered.len())));
    }

    fn begin_cut(&mut self) {
        let mut log = Vec::new();
        match self.mistake {
            Mistake::LogBeforeBarrier => log.append(&mut self.left),
            _ => self.barrier = self.barrier.next(),
        }
        self.cutting = Some(log);
    }

    /// The batch that is cut, if a cut was under way.
    fn end_cut(&mut self) -> Option<(Epoch, Vec<u8>)> {
        let mut log = self.cutting.take()?;
        match self.mistake {
            Mistake::LogBeforeBarrier => self.barrier = self.barrier.next(),
            _ => log.append(&mut self.left),
        }
        let batch = self.batcher.cut(log.len());
        assert_eq!(batch.next(), self.barrier);
        Some((batch, log))
    }

    fn replay(&mut self, most: usize) {
        self.executed = self.executed + replay(&mut self.feed, most);
    }
}

impl world::Daemons for Lockstep {
    fn cut_off(&mut self) {
        self.batches.clear();
    }

    fn frame_leaves(&self, position: u64) {
        // The backup has it, whole.
        let covered = self.feed.received().0;
        assert!(covered >= position, "a frame at {position} left, the backup has {covered}");
    }

    fn go_live(&mut self, _: Time) -> u64 {
        if self.mistake != Mistake::LogIsNotUsedUp {
            self.feed.end();
            while !self.feed.ready().is_empty() {
                self.replay(usize::MAX);
            }
        }
        self.executed.0
    }
}

impl World {
    fn step(&mut self, step: Step) {
        match step {
            Step::Log { event, flushed } if self.primary_lives => {
                let event = EVENTS[usize::from(event) % EVENTS.len()];
                self.daemons.log(event, flushed.into());
            }
            Step::Send if self.primary_lives => {
                self.daemons.left.append(&mut self.daemons.buffered);
                self.send(self.daemons.barrier, self.daemons.logged);
            }
            Step::BeginCut if self.primary_lives && self.daemons.cutting.is_none() => {
                self.daemons.begin_cut();
            }
            Step::EndCut if self.primary_lives => self.end_cut(),
            Step::DeliverBatch if self.connected => self.deliver_batch(),
            Step::DeliverAcknowledgement if self.connected => self.deliver_acknowledgement(),
            Step::Replay(most) if self.backup_lives => self.daemons.replay(most.into()),
            Step::Arbitrate => {
                self.arbitrate();
            }
            Step::Wait { ms, heartbeats } => self.wait(ms, heartbeats),
            Step::Break { batches, acknowledgements } if self.connected => {
                (0..batches).for_each(|_| self.deliver_batch());
                (0..acknowledgements).for_each(|_| self.deliver_acknowledgement());
                self.disconnect();
            }
            Step::PrimaryDies => self.die(Side::Primary),
            Step::BackupDies => self.die(Side::Backup),
            _ => {}
        }
    }

    fn end_cut(&mut self) {
        let Some((batch, log)) = self.daemons.end_cut() else { return };
        self.primary_event(PrimaryEvent::Captured);
        if self.connected {
            self.daemons.batches.push_back((batch, log));
        }
    }

    fn deliver_batch(&mut self) {
        if let Some((batch, log)) = self.daemons.batches.pop_front() {
            // As the daemon does: what is not acknowledged is not fed.
            if self.commits(batch) {
                self.daemons.feed.receive(&log, self.now).expect("whole events, cut anywhere");
            }
        }
    }

    fn deliver_acknowledgement(&mut self) {
        if let Some(batch) = self.acknowledgements.pop_front() {
            self.daemons.batcher.acknowledged(batch);
            self.primary_event(PrimaryEvent::Acknowledged(batch));
        }
    }

    fn wait(&mut self, ms: u8, heartbeats: bool) {
        self.now = self.now + Duration::from_millis(ms.into());
        if heartbeats && self.connected && self.primary_lives && self.backup_lives {
            self.primary_event(PrimaryEvent::Heard);
            self.backup_event(BackupEvent::Heard);
        }
        self.primary_event(PrimaryEvent::Tick);
        self.backup_event(BackupEvent::Tick);
    }
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (any::<u8>(), 0..20u8).prop_map(|(event, flushed)| Step::Log { event, flushed }),
        4 => Just(Step::Send),
        5 => Just(Step::BeginCut),
        5 => Just(Step::EndCut),
        6 => Just(Step::DeliverBatch),
        6 => Just(Step::DeliverAcknowledgement),
        4 => (0..30u8).prop_map(Step::Replay),
        2 => Just(Step::Arbitrate),
        3 => (0..60u8, prop::bool::weighted(0.9))
            .prop_map(|(ms, heartbeats)| Step::Wait { ms, heartbeats }),
        1 => (0..4u8, 0..4u8)
            .prop_map(|(batches, acknowledgements)| Step::Break { batches, acknowledgements }),
        1 => Just(Step::PrimaryDies),
        1 => Just(Step::BackupDies),
    ]
}

fn schedules() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 1..120)
}

fn play(mistake: Mistake, steps: &[Step]) -> World {
    let mut world = World::new(Lockstep::new(mistake));
    world.primary.set_pipeline(u64::MAX);
    steps.iter().for_each(|&step| world.step(step));
    // The end: whatever waits for the arbiter, or for silence to be noticed, comes.
    for _ in 0..20 {
        world.step(Step::Wait { ms: 250, heartbeats: false });
        world.step(Step::Arbitrate);
        world.step(Step::Arbitrate);
    }
    world
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn output_commit_and_one_live_copy(steps in schedules()) {
        let world = play(Mistake::None, &steps);
        // One failure never ends the VM.
        let goes_on = world.goes_on() || world.connected || world.two_failures;
        prop_assert!(goes_on, "nobody goes on");
    }
}

/// The same schedules find what is done wrong.
#[test]
fn mistakes_are_found() {
    let mut schedules = Schedules::of(schedules());
    for mistake in [Mistake::LogBeforeBarrier, Mistake::LogIsNotUsedUp] {
        let found = schedules.find(2_000, |steps| drop(play(mistake, &steps)));
        assert!(found, "{mistake:?} was not found");
    }
}
