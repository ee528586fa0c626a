//! Output commit and one live copy, whatever fails and whenever.
//!
//! The cores of both sides and this crate run in a world without time to speak of: a guest
//! that logs and sends, a wire that loses its tail, an arbiter that answers late. What the
//! daemon's threads do around the cores is done here in small steps that a schedule mixes.

use proptest::prelude::*;
use std::collections::VecDeque;
use std::time::Duration;
use understudy_lockstep::{Batcher, END, Feed, LogPosition};
use understudy_protocol::{
    Backup, BackupAction, BackupEvent, Epoch, Generation, Ownership, Primary, PrimaryAction,
    PrimaryEvent, Time, Verdict,
};

/// The machine as it was copied.
const MACHINE: Epoch = Epoch(1);
const FIRST: Generation = Generation(1);
const TIMEOUT: Duration = Duration::from_millis(100);

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

/// What is done wrong on purpose.
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

struct World {
    mistake: Mistake,
    now: Time,
    // The primary.
    primary: Primary,
    primary_lives: bool,
    batcher: Batcher,
    /// Log in QEMU's buffer, log that left it, and bytes of log so far.
    buffered: Vec<u8>,
    left: Vec<u8>,
    logged: u64,
    /// Frames: the batch that they belong to, and the log that leads to them.
    held: VecDeque<(Epoch, LogPosition)>,
    barrier: Epoch,
    /// A cut is under way, with the log read so far.
    cutting: Option<Vec<u8>>,
    // Between.
    connected: bool,
    batches: VecDeque<(Epoch, Vec<u8>)>,
    acknowledgements: VecDeque<Epoch>,
    owner: (char, Generation),
    questions: VecDeque<(char, Generation)>,
    // The backup.
    backup: Backup,
    backup_lives: bool,
    feed: Feed,
    executed: LogPosition,
    live: bool,
    // What happened.
    released: LogPosition,
    released_alone: bool,
    /// Somebody died after the VM was contested already: one failure too many.
    two_failures: bool,
}

impl World {
    fn new(mistake: Mistake) -> World {
        let now = Time(Duration::from_secs(1));
        let mut primary = Primary::new(FIRST, TIMEOUT, now).with_pipeline(u64::MAX);
        let mut backup = Backup::new(FIRST, TIMEOUT, now);
        // The machine was copied: epoch 1.
        primary.handle(now, PrimaryEvent::Captured, &mut Vec::new());
        backup.handle(now, BackupEvent::Staged(MACHINE), &mut Vec::new());
        primary.handle(now, PrimaryEvent::Acknowledged(MACHINE), &mut Vec::new());
        World {
            mistake,
            now,
            primary,
            primary_lives: true,
            batcher: Batcher::new(MACHINE, 1 << 20),
            buffered: Vec::new(),
            left: Vec::new(),
            logged: 0,
            held: VecDeque::new(),
            barrier: MACHINE.next(),
            cutting: None,
            connected: true,
            batches: VecDeque::new(),
            acknowledgements: VecDeque::new(),
            owner: ('P', FIRST),
            questions: VecDeque::new(),
            backup,
            backup_lives: true,
            feed: Feed::new(),
            executed: LogPosition(0),
            live: false,
            released: LogPosition(0),
            released_alone: false,
            two_failures: false,
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Log { event, flushed } if self.primary_lives => {
                let event = EVENTS[usize::from(event) % EVENTS.len()];
                self.buffered.extend(event);
                self.logged += event.len() as u64;
                let flushed = usize::from(flushed).min(self.buffered.len());
                self.left.extend(self.buffered.drain(..flushed));
            }
            Step::Send if self.primary_lives => {
                self.left.append(&mut self.buffered);
                self.held.push_back((self.barrier, LogPosition(self.logged)));
                self.let_out();
            }
            Step::BeginCut if self.primary_lives && self.cutting.is_none() => self.begin_cut(),
            Step::EndCut if self.primary_lives => self.end_cut(),
            Step::DeliverBatch if self.connected => self.deliver_batch(),
            Step::DeliverAcknowledgement if self.connected => self.deliver_acknowledgement(),
            Step::Replay(most) => self.replay(usize::from(most)),
            Step::Arbitrate => self.arbitrate(),
            Step::Wait { ms, heartbeats } => self.wait(ms, heartbeats),
            Step::Break { batches, acknowledgements } if self.connected => {
                (0..batches).for_each(|_| self.deliver_batch());
                (0..acknowledgements).for_each(|_| self.deliver_acknowledgement());
                self.disconnect();
            }
            Step::PrimaryDies if self.connected && self.primary_lives => {
                self.two_failures = self.owner.1 > FIRST || !self.questions.is_empty();
                self.primary_lives = false;
                self.disconnect();
            }
            Step::BackupDies if self.connected && self.backup_lives => {
                self.two_failures = self.owner.1 > FIRST || !self.questions.is_empty();
                self.backup_lives = false;
                self.disconnect();
            }
            _ => {}
        }
    }

    fn begin_cut(&mut self) {
        let mut log = Vec::new();
        match self.mistake {
            Mistake::LogBeforeBarrier => log.append(&mut self.left),
            _ => self.barrier = self.barrier.next(),
        }
        self.cutting = Some(log);
    }

    fn end_cut(&mut self) {
        let Some(mut log) = self.cutting.take() else { return };
        match self.mistake {
            Mistake::LogBeforeBarrier => self.barrier = self.barrier.next(),
            _ => log.append(&mut self.left),
        }
        let batch = self.batcher.cut(log.len());
        assert_eq!(batch.next(), self.barrier);
        self.primary_event(PrimaryEvent::Captured);
        if self.connected {
            self.batches.push_back((batch, log));
        }
    }

    fn deliver_batch(&mut self) {
        if let Some((batch, log)) = self.batches.pop_front() {
            // As the daemon does: what is not acknowledged is not fed.
            let mut feed_gets = false;
            for action in self.backup_event(BackupEvent::Staged(batch)) {
                feed_gets |= action == BackupAction::AcknowledgeAndApply(batch);
            }
            if feed_gets {
                self.feed.receive(&log, self.now).expect("whole events, cut anywhere");
                self.acknowledgements.push_back(batch);
            }
        }
    }

    fn deliver_acknowledgement(&mut self) {
        if let Some(batch) = self.acknowledgements.pop_front() {
            self.batcher.acknowledged(batch);
            self.primary_event(PrimaryEvent::Acknowledged(batch));
        }
    }

    fn disconnect(&mut self) {
        self.connected = false;
        self.batches.clear();
        self.acknowledgements.clear();
        self.primary_event(PrimaryEvent::PeerGone("reset".into()));
        self.backup_event(BackupEvent::PeerGone("reset".into()));
    }

    fn replay(&mut self, most: usize) {
        if self.backup_lives {
            let bytes = self.feed.ready().len().min(most);
            let end = self.feed.ready()[..bytes].last() == Some(&END);
            self.feed.gave(bytes);
            self.executed = self.executed + (bytes - usize::from(end));
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

    fn arbitrate(&mut self) {
        let Some((who, from)) = self.questions.pop_front() else { return };
        let verdict = if from == self.owner.1 {
            self.owner = (who, from.next());
            Verdict::Granted(from.next())
        } else {
            let host = Some(self.owner.0.to_string());
            Verdict::Taken(Ownership { host, generation: self.owner.1 })
        };
        match who {
            'P' => drop(self.primary_event(PrimaryEvent::Verdict(verdict))),
            _ => drop(self.backup_event(BackupEvent::Verdict(verdict))),
        }
    }

    fn primary_event(&mut self, event: PrimaryEvent) -> Vec<PrimaryAction> {
        let mut actions = Vec::new();
        if self.primary_lives {
            self.primary.handle(self.now, event, &mut actions);
        }
        for action in &actions {
            match action {
                PrimaryAction::Release(batch) => self.release(*batch),
                PrimaryAction::OpenOutput => {
                    assert_eq!(self.owner, ('P', self.primary.generation()), "not the owner");
                    self.released_alone = true;
                    self.let_out();
                }
                PrimaryAction::Contest(from) => self.questions.push_back(('P', *from)),
                PrimaryAction::Halt(_) => self.held.clear(),
                _ => {}
            }
        }
        actions
    }

    fn release(&mut self, batch: Epoch) {
        while self.held.front().is_some_and(|&(of, _)| of <= batch) {
            let (_, position) = self.held.pop_front().expect("just seen");
            self.released = self.released.max(position);
            // The backup has it, whole.
            let covered = self.feed.received();
            assert!(covered >= position, "a frame at {position} left, the backup has {covered}");
        }
    }

    fn let_out(&mut self) {
        if self.released_alone {
            assert!(!self.live, "two live copies");
            self.held.clear();
        }
    }

    fn backup_event(&mut self, event: BackupEvent) -> Vec<BackupAction> {
        let mut actions = Vec::new();
        if self.backup_lives {
            self.backup.handle(self.now, event, &mut actions);
        }
        for action in &actions {
            match action {
                BackupAction::Contest(from) => self.questions.push_back(('B', *from)),
                BackupAction::GoLive { .. } => self.go_live(),
                _ => {}
            }
        }
        actions
    }

    fn go_live(&mut self) {
        assert!(!self.released_alone, "two live copies");
        self.live = true;
        if self.mistake != Mistake::LogIsNotUsedUp {
            self.feed.end();
            while !self.feed.ready().is_empty() {
                self.replay(usize::MAX);
            }
        }
        let (executed, released) = (self.executed, self.released);
        assert!(executed >= released, "live at {executed}; the world has seen {released}");
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

fn play(mistake: Mistake, steps: &[Step]) -> World {
    let mut world = World::new(mistake);
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
    fn output_commit_and_one_live_copy(steps in prop::collection::vec(step(), 1..120)) {
        let world = play(Mistake::None, &steps);
        // One failure never ends the VM.
        let goes_on = (world.primary_lives && world.released_alone) || world.live;
        prop_assert!(goes_on || world.connected || world.two_failures, "nobody goes on");
    }
}

/// The same schedules find what is done wrong.
#[test]
fn mistakes_are_found() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let schedules = prop::collection::vec(step(), 1..120);
    for mistake in [Mistake::LogBeforeBarrier, Mistake::LogIsNotUsedUp] {
        let found = (0..2_000).any(|_| {
            let steps = schedules.new_tree(&mut runner).unwrap().current();
            std::panic::catch_unwind(|| play(mistake, &steps)).is_err()
        });
        assert!(found, "{mistake:?} was not found");
    }
}
