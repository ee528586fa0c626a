//! A world without time to speak of, in which the cores of both sides meet: frames that wait for
//! their epoch, an arbiter that answers late, a host that dies. What leaves is checked, and who goes
//! on. What the daemon's threads do around the cores is each test's own, in small steps that a
//! schedule mixes.

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use understudy_lockstep::Feed;
use understudy_protocol::{
    Backup, BackupAction, BackupEvent, Epoch, Generation, Ownership, Primary, PrimaryAction,
    PrimaryEvent, Time, Verdict,
};

/// The machine as it was copied.
pub const MACHINE: Epoch = Epoch(1);
const FIRST: Generation = Generation(1);
const TIMEOUT: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Primary,
    Backup,
}

/// The work of the daemons around the cores.
pub trait Daemons {
    /// The connection is gone, with all that is on it.
    fn cut_off(&mut self);

    /// A frame leaves that the guest sent at this state.
    fn frame_leaves(&self, state: u64);

    /// The backup uses up all that it has; returns the state that the guest goes on from.
    fn go_live(&mut self, now: Time) -> u64;
}

/// The guest's state is a number that only grows.
pub struct World<D> {
    pub now: Time,
    pub primary: Primary,
    pub primary_lives: bool,
    pub backup_lives: bool,
    pub connected: bool,
    /// Acknowledgements of the backup that the primary has not heard.
    pub acknowledgements: VecDeque<Epoch>,
    pub daemons: D,
    backup: Backup,
    /// Frames: the epoch that they belong to, and the guest's state when it sent them.
    held: VecDeque<(Epoch, u64)>,
    owner: (Side, Generation),
    questions: VecDeque<(Side, Generation)>,
    /// The latest state that a frame came from which the outside has.
    released: u64,
    /// The primary is the sole owner, and holds nothing any more.
    alone: bool,
    live: bool,
    /// Whether somebody died after the VM was contested already: one failure too many.
    pub two_failures: bool,
}

impl<D: Daemons> World<D> {
    /// The machine was copied: epoch 1.
    pub fn new(daemons: D) -> World<D> {
        let now = Time(Duration::from_secs(1));
        let mut primary = Primary::new(FIRST, TIMEOUT, now);
        let mut backup = Backup::new(FIRST, TIMEOUT, now);
        primary.handle(now, PrimaryEvent::Captured, &mut Vec::new());
        backup.handle(now, BackupEvent::Staged(MACHINE), &mut Vec::new());
        primary.handle(now, PrimaryEvent::Acknowledged(MACHINE), &mut Vec::new());
        World {
            now,
            primary,
            primary_lives: true,
            backup_lives: true,
            connected: true,
            acknowledgements: VecDeque::new(),
            daemons,
            backup,
            held: VecDeque::new(),
            owner: (Side::Primary, FIRST),
            questions: VecDeque::new(),
            released: 0,
            alone: false,
            live: false,
            two_failures: false,
        }
    }

    /// The guest sends a frame, which belongs to this epoch.
    pub fn send(&mut self, epoch: Epoch, state: u64) {
        self.held.push_back((epoch, state));
        self.let_out();
    }

    /// The backup has all of an epoch: whether it acknowledges it.
    pub fn commits(&mut self, epoch: Epoch) -> bool {
        let actions = self.backup_event(BackupEvent::Staged(epoch));
        let commits = actions.contains(&BackupAction::AcknowledgeAndApply(epoch));
        if commits {
            self.acknowledgements.push_back(epoch);
        }
        commits
    }

    /// A host dies. Once the connection is gone it would be the second failure.
    pub fn die(&mut self, side: Side) {
        if self.connected {
            self.two_failures = self.owner.1 > FIRST || !self.questions.is_empty();
            match side {
                Side::Primary => self.primary_lives = false,
                Side::Backup => self.backup_lives = false,
            }
            self.disconnect();
        }
    }

    /// The connection breaks; each side that lives sees it.
    pub fn disconnect(&mut self) {
        self.connected = false;
        self.acknowledgements.clear();
        self.daemons.cut_off();
        self.primary_event(PrimaryEvent::PeerGone("reset".into()));
        self.backup_event(BackupEvent::PeerGone("reset".into()));
    }

    /// The arbiter answers who has asked first; returns whether it refuses.
    pub fn arbitrate(&mut self) -> bool {
        let Some((who, from)) = self.questions.pop_front() else { return false };
        let grants = from == self.owner.1;
        let verdict = if grants {
            self.owner = (who, from.next());
            Verdict::Granted(from.next())
        } else {
            let host = format!("{:?}", self.owner.0).parse().ok();
            Verdict::Taken(Ownership { host, generation: self.owner.1 })
        };
        match who {
            Side::Primary => self.primary_event(PrimaryEvent::Verdict(verdict)),
            Side::Backup => drop(self.backup_event(BackupEvent::Verdict(verdict))),
        }
        !grants
    }

    pub fn primary_event(&mut self, event: PrimaryEvent) {
        let mut actions = Vec::new();
        if self.primary_lives {
            self.primary.handle(self.now, event, &mut actions);
        }
        for action in actions {
            match action {
                PrimaryAction::Release(epoch) => self.release(epoch),
                PrimaryAction::OpenOutput => {
                    let owner = (Side::Primary, self.primary.generation());
                    assert_eq!(self.owner, owner, "not the owner");
                    self.alone = true;
                    self.let_out();
                }
                PrimaryAction::Contest(from) => self.questions.push_back((Side::Primary, from)),
                PrimaryAction::Halt(_) => self.held.clear(),
                _ => {}
            }
        }
    }

    pub fn backup_event(&mut self, event: BackupEvent) -> Vec<BackupAction> {
        let mut actions = Vec::new();
        if self.backup_lives {
            self.backup.handle(self.now, event, &mut actions);
        }
        for action in &actions {
            match action {
                BackupAction::Contest(from) => self.questions.push_back((Side::Backup, *from)),
                BackupAction::GoLive { .. } => self.go_live(),
                _ => {}
            }
        }
        actions
    }

    /// Whether somebody goes on with the VM by himself.
    pub fn goes_on(&self) -> bool {
        (self.primary_lives && self.alone) || self.live
    }

    fn release(&mut self, epoch: Epoch) {
        while self.held.front().is_some_and(|&(of, _)| of <= epoch) {
            let (_, state) = self.held.pop_front().expect("just seen");
            self.released = self.released.max(state);
            self.daemons.frame_leaves(state);
        }
    }

    fn let_out(&mut self) {
        if self.alone {
            assert!(!self.live, "two live copies");
            self.held.clear();
        }
    }

    fn go_live(&mut self) {
        assert!(!self.alone, "two live copies");
        self.live = true;
        let state = self.daemons.go_live(self.now);
        let released = self.released;
        assert!(state >= released, "live at {state}; the world has seen {released}");
    }
}

/// QEMU takes so much of its log at most; returns how many bytes of events.
pub fn replay(feed: &mut Feed, most: usize) -> usize {
    let bytes = feed.ready().len().min(most);
    feed.gave(bytes);
    bytes
}

/// Schedules, the same ones each time that a test runs.
pub struct Schedules<S> {
    strategy: S,
    runner: TestRunner,
}

impl<S: Strategy> Schedules<S> {
    pub fn of(strategy: S) -> Schedules<S> {
        Schedules { strategy, runner: TestRunner::deterministic() }
    }

    /// Whether one of the next schedules breaks a rule when it is played.
    pub fn find(&mut self, schedules: usize, play: impl Fn(S::Value)) -> bool {
        (0..schedules).any(|_| {
            let steps = self.draw();
            catch_unwind(AssertUnwindSafe(|| play(steps))).is_err()
        })
    }

    pub fn draw(&mut self) -> S::Value {
        self.strategy.new_tree(&mut self.runner).expect("nothing is filtered out").current()
    }
}
