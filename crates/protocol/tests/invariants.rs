//! The two invariants of DESIGN.md section 2, over random schedules of the real
//! state machines: messages are delayed, the connection is cut at any moment,
//! both sides suspect each other, the arbiter answers late or not at all.

use std::collections::VecDeque;
use std::time::Duration;
use understudy_protocol::{
    Backup, BackupAction, BackupEvent, BackupPhase, Epoch, Generation, Ownership, Primary,
    PrimaryAction, PrimaryEvent, PrimaryPhase, Time, Verdict,
};

/// A small generator; the seed is the schedule.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Host {
    A,
    B,
}

/// The arbiter: one compare-and-swap register.
struct Arbiter {
    generation: Generation,
    owner: Host,
}

impl Arbiter {
    fn acquire(&mut self, host: Host, from: Generation) -> Verdict {
        let granted =
            self.generation == from || (self.generation == from.next() && self.owner == host);
        if granted {
            (self.generation, self.owner) = (from.next(), host);
            return Verdict::Granted(from.next());
        }
        let host = if self.owner == Host::A { "a" } else { "b" };
        Verdict::Taken(Ownership { host: Some(host.into()), generation: self.generation })
    }
}

enum ToBackup {
    EpochEnd(Epoch),
    TakeOver,
    StandDown,
}

enum ToPrimary {
    Acknowledge(Epoch),
    StoodDown,
}

struct World {
    random: Random,
    now: Time,
    primary: Primary,
    backup: Backup,
    arbiter: Arbiter,
    connected: bool,
    to_backup: VecDeque<ToBackup>,
    to_primary: VecDeque<ToPrimary>,
    contests: Vec<(Host, Generation)>,
    released: Epoch,
    opened: bool,
    live_from: Option<Epoch>,
}

impl World {
    fn new(seed: u64) -> World {
        let now = Time(Duration::from_secs(1));
        let timeout = Duration::from_millis(100);
        World {
            random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            now,
            primary: Primary::new(Generation(1), timeout, now),
            backup: Backup::new(Generation(1), timeout, now),
            arbiter: Arbiter { generation: Generation(1), owner: Host::A },
            connected: true,
            to_backup: VecDeque::new(),
            to_primary: VecDeque::new(),
            contests: Vec::new(),
            released: Epoch(0),
            opened: false,
            live_from: None,
        }
    }

    fn primary(&mut self, event: PrimaryEvent) {
        let mut actions = Vec::new();
        self.primary.handle(self.now, event, &mut actions);
        for action in actions {
            match action {
                PrimaryAction::Release(epoch) => {
                    assert!(epoch > self.released, "output is released once, in order");
                    assert!(epoch <= self.backup.committed(), "output before its commit");
                    self.released = epoch;
                }
                PrimaryAction::OpenOutput => {
                    assert!(self.live_from.is_none(), "two live copies");
                    self.opened = true;
                }
                PrimaryAction::Contest(from) => self.contests.push((Host::A, from)),
                PrimaryAction::YieldToBackup => self.to_backup.push_back(ToBackup::TakeOver),
                PrimaryAction::StandDown => self.to_backup.push_back(ToBackup::StandDown),
                PrimaryAction::ClosePeer => self.connected = false,
                PrimaryAction::Halt(_) => {}
            }
        }
    }

    fn backup(&mut self, event: BackupEvent) {
        let mut actions = Vec::new();
        self.backup.handle(self.now, event, &mut actions);
        for action in actions {
            match action {
                BackupAction::AcknowledgeAndApply(epoch) => {
                    self.to_primary.push_back(ToPrimary::Acknowledge(epoch));
                }
                BackupAction::Contest(from) => self.contests.push((Host::B, from)),
                BackupAction::GoLive { epoch, .. } => {
                    assert!(!self.opened, "two live copies");
                    assert!(epoch >= self.released, "the survivor lacks released output");
                    self.live_from = Some(epoch);
                }
                BackupAction::StandDown => self.to_primary.push_back(ToPrimary::StoodDown),
                BackupAction::ClosePeer => self.connected = false,
                BackupAction::Discard(_) => {}
            }
        }
    }

    fn step(&mut self) {
        self.now = self.now + Duration::from_millis(self.random.below(30));
        match self.random.below(12) {
            0..=2 if self.primary.may_capture() => {
                let closed = self.primary.running();
                if *self.primary.phase() == PrimaryPhase::Protected && self.random.one_in(60) {
                    self.primary(PrimaryEvent::CapturedLast);
                } else {
                    self.primary(PrimaryEvent::Captured);
                }
                self.to_backup.push_back(ToBackup::EpochEnd(closed));
            }
            3 | 4 => self.deliver_to_backup(),
            5 | 6 => self.deliver_to_primary(),
            7 if self.connected => {
                self.primary(PrimaryEvent::Heard);
                self.backup(BackupEvent::Heard);
            }
            8 => {
                self.primary(PrimaryEvent::Tick);
                self.backup(BackupEvent::Tick);
            }
            9 if !self.contests.is_empty() => self.arbitrate(),
            10 if self.random.one_in(25) => self.cut(),
            11 if self.random.one_in(40) => {
                let event = if self.random.one_in(2) {
                    PrimaryEvent::Unprotect
                } else {
                    PrimaryEvent::GuestDied("gone".into())
                };
                self.primary(event);
            }
            _ => {}
        }
        self.check();
    }

    fn deliver_to_backup(&mut self) {
        match self.to_backup.pop_front() {
            Some(ToBackup::EpochEnd(epoch)) => self.backup(BackupEvent::Staged(epoch)),
            Some(ToBackup::TakeOver) => self.backup(BackupEvent::TakeOver),
            Some(ToBackup::StandDown) => self.backup(BackupEvent::StandDown),
            None if !self.connected => self.backup(BackupEvent::PeerGone("reset".into())),
            None => {}
        }
    }

    fn deliver_to_primary(&mut self) {
        match self.to_primary.pop_front() {
            Some(ToPrimary::Acknowledge(epoch)) => {
                self.primary(PrimaryEvent::Acknowledged(epoch));
            }
            Some(ToPrimary::StoodDown) => self.primary(PrimaryEvent::StoodDown),
            None if !self.connected => self.primary(PrimaryEvent::PeerGone("reset".into())),
            None => {}
        }
    }

    /// Loses what is under way, from a random point on, in both directions.
    fn cut(&mut self) {
        self.connected = false;
        let keep = self.random.below(3) as usize;
        self.to_backup.truncate(keep);
        self.to_primary.truncate(keep);
    }

    fn arbitrate(&mut self) {
        let index = self.random.below(self.contests.len() as u64) as usize;
        let (host, from) = self.contests.swap_remove(index);
        let verdict = if self.random.one_in(3) {
            // The swap may have happened although the answer is lost.
            if self.random.one_in(2) {
                self.arbiter.acquire(host, from);
            }
            Verdict::Unreachable("no answer".into())
        } else {
            self.arbiter.acquire(host, from)
        };
        match host {
            Host::A => self.primary(PrimaryEvent::Verdict(verdict)),
            Host::B => self.backup(BackupEvent::Verdict(verdict)),
        }
    }

    fn check(&self) {
        if self.live_from.is_some() {
            assert!(!matches!(self.primary.phase(), PrimaryPhase::Alone(_)), "two live copies");
        }
        if matches!(self.backup.phase(), BackupPhase::Contesting(_)) {
            assert!(self.released <= self.backup.committed());
        }
    }
}

#[test]
fn no_schedule_breaks_output_commit_or_makes_two_live_copies() {
    let (mut takeovers, mut alone, mut commits) = (0, 0, 0);
    for seed in 1..=20_000 {
        let mut world = World::new(seed);
        for _ in 0..300 {
            world.step();
        }
        takeovers += u32::from(world.live_from.is_some());
        alone += u32::from(world.opened);
        commits += world.released.0;
    }
    // The schedules reach what they are meant to test.
    assert!(takeovers > 2_000, "{takeovers} take-overs");
    assert!(alone > 2_000, "{alone} primaries alone");
    assert!(commits > 50_000, "{commits} commits");
}
