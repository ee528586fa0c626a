//! A group is one: over random schedules of three guests that talk to each
//! other, every epoch is committed for all members or for none, and no committed
//! state holds a frame that no committed state has sent.

use std::collections::VecDeque;
use std::time::Duration;
use understudy_protocol::{
    Arrival, Backup, BackupAction, BackupEvent, Epoch, Gate, Generation, GroupStaging, Primary,
    PrimaryAction, PrimaryEvent, PrimaryPhase, Rendezvous, Time, Verdict,
};

const MEMBERS: usize = 3;

/// A small generator; the seed is the schedule.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

/// A guest's state: frames sent to, and received from, each member.
#[derive(Clone, Debug, Default, PartialEq)]
struct Guest {
    sent: [u64; MEMBERS],
    received: [u64; MEMBERS],
}

/// The place where a member's capturing thread is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Thread {
    Running,
    AwaitsCheckpoint(Gate),
    Stopped(Gate),
    Capturing,
}

struct World {
    random: Random,
    now: Time,
    /// Whether members wait for each other. They must.
    patient: bool,
    guests: [Guest; MEMBERS],
    threads: [Thread; MEMBERS],
    rendezvous: Rendezvous,
    primary: Primary,
    /// Frames between members that are under way, by sender and receiver.
    wires: [[u64; MEMBERS]; MEMBERS],
    /// Parts of epochs under way to the backup.
    links: [VecDeque<(Epoch, Guest)>; MEMBERS],
    acknowledgements: VecDeque<Epoch>,
    /// Epochs of which a member's part has arrived.
    taken: [u64; MEMBERS],
    alive: bool,
    staging: GroupStaging<Guest>,
    backup: Backup,
    committed: Vec<Guest>,
    live_from: Option<Epoch>,
    violations: u32,
}

impl World {
    fn new(seed: u64, patient: bool) -> World {
        let (now, timeout) = (Time(Duration::from_secs(1)), Duration::from_secs(1));
        World {
            random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            now,
            patient,
            guests: Default::default(),
            threads: [Thread::Running; MEMBERS],
            rendezvous: Rendezvous::new(MEMBERS),
            primary: Primary::new(Generation(1), timeout, now),
            wires: Default::default(),
            links: Default::default(),
            acknowledgements: VecDeque::new(),
            taken: [0; MEMBERS],
            alive: true,
            staging: GroupStaging::new(MEMBERS),
            backup: Backup::new(Generation(1), timeout, now),
            committed: Vec::new(),
            live_from: None,
            violations: 0,
        }
    }

    fn step(&mut self) {
        let (member, other) = (self.random.below(MEMBERS), self.random.below(MEMBERS));
        match self.random.below(8) {
            0 | 1 if self.runs(member) => {
                self.guests[member].sent[other] += 1;
                self.wires[member][other] += 1;
            }
            2 | 3 if self.runs(member) && self.wires[other][member] > 0 => {
                self.wires[other][member] -= 1;
                self.guests[member].received[other] += 1;
            }
            4 | 5 if self.alive => self.advance(member),
            6 => self.deliver(member),
            7 => match self.random.below(40) {
                0 => self.kill(),
                _ => self.acknowledge(),
            },
            _ => {}
        }
    }

    fn runs(&self, member: usize) -> bool {
        let runs = matches!(self.threads[member], Thread::Running | Thread::AwaitsCheckpoint(_));
        self.alive && runs
    }

    /// A capturing thread takes one step.
    fn advance(&mut self, member: usize) {
        let open = |gate| !self.patient || self.rendezvous.is_open(gate);
        self.threads[member] = match self.threads[member] {
            Thread::Running if self.primary.may_capture() => match self.rendezvous.arrive() {
                Arrival::Wait(gate) => Thread::AwaitsCheckpoint(gate),
                Arrival::Last => {
                    self.rendezvous.open();
                    self.stop()
                }
            },
            Thread::AwaitsCheckpoint(gate) if self.rendezvous.is_open(gate) => self.stop(),
            Thread::Stopped(gate) if open(gate) => Thread::Capturing,
            Thread::Capturing => {
                let epoch = Epoch(self.links_ended(member) + 1);
                self.links[member].push_back((epoch, self.guests[member].clone()));
                Thread::Running
            }
            waiting => waiting,
        };
    }

    /// The last to stand still places the barrier for all.
    fn stop(&mut self) -> Thread {
        match self.rendezvous.arrive() {
            Arrival::Wait(gate) => Thread::Stopped(gate),
            Arrival::Last => {
                self.primary(PrimaryEvent::Captured);
                self.rendezvous.open();
                Thread::Capturing
            }
        }
    }

    /// Epochs of which a member's part was captured.
    fn links_ended(&self, member: usize) -> u64 {
        self.links[member].back().map_or(self.taken[member], |(epoch, _)| epoch.0)
    }

    fn deliver(&mut self, member: usize) {
        let Some((epoch, part)) = self.links[member].pop_front() else { return };
        self.taken[member] = epoch.0;
        if let Some((epoch, parts)) = self.staging.put(member, epoch, part) {
            let committed_before = self.backup.committed();
            self.backup(BackupEvent::Staged(epoch));
            if self.backup.committed() > committed_before {
                self.committed = parts;
                self.check_cut();
            }
        }
    }

    /// No member has received what the sender, rolled back to the same epoch,
    /// has not sent.
    fn check_cut(&mut self) {
        for (to, guest) in self.committed.iter().enumerate() {
            for (from, &received) in guest.received.iter().enumerate() {
                self.violations += u32::from(received > self.committed[from].sent[to]);
            }
        }
    }

    fn acknowledge(&mut self) {
        if let Some(epoch) = self.acknowledgements.pop_front().filter(|_| self.alive) {
            self.primary(PrimaryEvent::Acknowledged(epoch));
        }
    }

    /// The primary's host dies; part of what is under way is lost.
    fn kill(&mut self) {
        self.alive = false;
        let keep = self.random.below(3);
        self.links.iter_mut().for_each(|link| link.truncate(keep));
        for member in 0..MEMBERS {
            while !self.links[member].is_empty() {
                self.deliver(member);
            }
        }
        self.backup(BackupEvent::PeerGone("reset".into()));
    }

    fn primary(&mut self, event: PrimaryEvent) {
        let mut actions = Vec::new();
        self.primary.handle(self.now, event, &mut actions);
        // Of an impatient group, only its cuts are looked at.
        for action in actions.into_iter().filter(|_| self.patient) {
            let PrimaryAction::Release(epoch) = action else { panic!("unexpected {action:?}") };
            assert!(
                epoch <= self.backup.committed(),
                "a member's output before the group's commit"
            );
        }
    }

    fn backup(&mut self, event: BackupEvent) {
        let mut actions = Vec::new();
        self.backup.handle(self.now, event, &mut actions);
        for action in actions {
            match action {
                BackupAction::AcknowledgeAndApply(epoch) => self.acknowledgements.push_back(epoch),
                BackupAction::Contest(from) => {
                    let verdict = Verdict::Granted(from.next());
                    self.backup(BackupEvent::Verdict(verdict));
                }
                BackupAction::GoLive { epoch, .. } => self.live_from = Some(epoch),
                BackupAction::ClosePeer
                | BackupAction::HandBack(_)
                | BackupAction::Discard(_)
                | BackupAction::StandDown => {}
            }
        }
    }
}

fn play(patient: bool) -> (u32, u32, u64) {
    let (mut violations, mut takeovers, mut commits) = (0, 0, 0);
    for seed in 1..=3_000 {
        let mut world = World::new(seed, patient);
        for _ in 0..1_500 {
            world.step();
        }
        violations += world.violations;
        commits += world.backup.committed().0;
        if let Some(epoch) = world.live_from {
            takeovers += 1;
            assert_eq!(world.committed.len(), MEMBERS, "a take-over without every member");
            assert_eq!(epoch, world.backup.committed());
        }
        assert!(!patient || !matches!(world.primary.phase(), PrimaryPhase::Alone(_)));
    }
    (violations, takeovers, commits)
}

#[test]
fn a_group_is_committed_as_one_and_no_frame_crosses_the_cut_backwards() {
    let (violations, takeovers, commits) = play(true);
    assert_eq!(violations, 0, "frames received that were never sent");
    // The schedules reach what they are meant to test.
    assert!(takeovers > 1_000, "{takeovers} take-overs");
    assert!(commits > 10_000, "{commits} commits");
}

#[test]
fn without_the_rendezvous_the_cut_is_wrong() {
    let (violations, ..) = play(false);
    assert!(violations > 100, "{violations}: the test above would not notice");
}
