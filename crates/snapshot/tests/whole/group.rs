//! The running group, and what its hosts do for its snapshots.

use crate::MEMBERS;
use crate::random::Random;
use crate::saving::{Saving, store_member};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;
use understudy_protocol::literal;
use understudy_protocol::{BlockId, PageIndex, Time};
use understudy_snapshot::{
    About, AreaMap, Compression, Cut, CutAction, CutEvent, Envelope, FirstAccess, Incarnation,
    Manifest, Member, MemberEntry, Page, Part, SnapshotNumber, Store, TakeAction, TakeCohort,
    TakeEvent, TakeOrder, TakeReport, Taker, TakerAction, TakerEvent, TakerPhase, UNIT_BYTES,
};

pub const PAGES: u64 = 150;
pub const START_BALANCE: u64 = 1_000_000;
pub const NOW: u64 = 1_790_000_000;

pub type Memory = Vec<u8>;
pub type Frame = Vec<u8>;

/// The messages under way from one member to another.
type Wire = VecDeque<(Envelope, Option<Frame>)>;

/// The amount that a frame pays: it is a TCP segment whose data is the amount.
pub fn amount(frame: &[u8]) -> u64 {
    u64::from_le_bytes(frame[54..62].try_into().unwrap())
}

fn frame(amount: u64) -> Frame {
    let mut frame = vec![0; 62];
    (frame[12], frame[14]) = (0x08, 0x45);
    frame[16..18].copy_from_slice(&48u16.to_be_bytes());
    (frame[23], frame[46], frame[47]) = (6, 0x50, 0x18);
    frame[54..].copy_from_slice(&amount.to_le_bytes());
    frame
}

pub fn balance(memory: &Memory) -> u64 {
    u64::from_le_bytes(memory[..8].try_into().unwrap())
}

fn page(unit: u64) -> Page {
    Page { block: BlockId(0), index: PageIndex(unit) }
}

/// One member and its host.
struct Host {
    memory: Memory,
    /// Pages written since the base.
    changed: BTreeSet<u64>,
    base: AreaMap,
    cut: Cut<Frame>,
    socket: VecDeque<(Member, Frame)>,
    pausing: Option<SnapshotNumber>,
    cohort: TakeCohort,
    orders: VecDeque<About<TakeOrder>>,
    saving: Option<Saving>,
}

pub struct Group<'a> {
    store: &'a Store,
    random: Random,
    now: Time,
    hosts: Vec<Host>,
    wires: BTreeMap<(usize, usize), Wire>,
    last: SnapshotNumber,
    truths: BTreeMap<SnapshotNumber, BTreeMap<usize, Memory>>,
}

impl Group<'_> {
    pub fn new(seed: u64, store: &Store) -> Group<'_> {
        let (now, none) = (Time(Duration::from_secs(1)), SnapshotNumber(0));
        let host = |own: usize| {
            let mut memory = vec![0; PAGES as usize * UNIT_BYTES];
            memory[..8].copy_from_slice(&START_BALANCE.to_le_bytes());
            Host {
                memory,
                changed: (0..PAGES).collect(),
                base: AreaMap::zeros(PAGES),
                cut: Cut::new(Member(own as u16), MEMBERS, Incarnation(1), none),
                socket: VecDeque::new(),
                pausing: None,
                cohort: TakeCohort::new(none, now),
                orders: VecDeque::new(),
                saving: None,
            }
        };
        Group {
            store,
            random: Random::new(seed),
            now,
            hosts: (0..MEMBERS).map(host).collect(),
            wires: BTreeMap::new(),
            last: none,
            truths: BTreeMap::new(),
        }
    }

    /// The memory of each member as it was at its pause.
    pub fn truth(&self, number: SnapshotNumber) -> impl Iterator<Item = &Memory> {
        self.truths[&number].values()
    }

    pub fn run_for(&mut self, steps: u32) {
        (0..steps).for_each(|_| drop(self.step()));
    }

    /// Takes a snapshot, or cancels it half-way: then none.
    pub fn snapshot(&mut self) -> Option<SnapshotNumber> {
        let writing = self.store.begin(&literal("bank"), self.last, NOW).unwrap();
        let number = writing.number;
        self.last = number;
        let mut cancel = Some(self.random.below(60)).filter(|_| self.random.below(4) == 0);
        let mut actions = Vec::new();
        let mut taker = Taker::new(number, MEMBERS, self.now, &mut actions);
        let mut writing = Some(writing);
        while !taker.is_over() {
            for action in std::mem::take(&mut actions) {
                match action {
                    TakerAction::Send(member, order) => {
                        self.hosts[member.index()].orders.push_back(order);
                    }
                    TakerAction::Publish(parts) => {
                        let manifest = self.manifest(number, parts);
                        self.store.publish(writing.take().unwrap(), &manifest).unwrap();
                        taker.handle(self.now, TakerEvent::Published, &mut actions);
                    }
                    TakerAction::Discard => {
                        self.store.abandon(&writing.take().unwrap(), NOW).unwrap();
                    }
                }
            }
            for (member, report) in self.step() {
                taker.handle(self.now, TakerEvent::Report(member, report), &mut actions);
            }
            cancel = cancel.map(|steps| steps.saturating_sub(1));
            if cancel == Some(0) {
                taker.handle(self.now, TakerEvent::Cancel, &mut actions);
            }
            taker.handle(self.now, TakerEvent::Tick, &mut actions);
        }
        (*taker.phase() == TakerPhase::Done).then_some(number)
    }

    fn manifest(&self, number: SnapshotNumber, parts: Vec<Part>) -> Manifest {
        let crossings = parts.iter().flat_map(|part| &part.crossings).copied().collect();
        let entry = |(at, part): (usize, Part)| MemberEntry {
            name: format!("bank-{at}").parse().unwrap(),
            host: format!("host-{at}").parse().unwrap(),
            memory: PAGES * UNIT_BYTES as u64,
            part: part.manifest,
        };
        Manifest {
            group: literal("bank"),
            number,
            label: None,
            taken_at: NOW,
            incarnation: Incarnation(1),
            compression: Compression::Lz4,
            members: parts.into_iter().enumerate().map(entry).collect(),
            crossings,
        }
    }

    /// Lets one member do something; returns what its host reports.
    fn step(&mut self) -> Vec<(Member, About<TakeReport>)> {
        self.now = self.now + Duration::from_millis(1);
        let at = self.random.below(MEMBERS as u64) as usize;
        let other = (at + 1 + self.random.below(MEMBERS as u64 - 1) as usize) % MEMBERS;
        let mut reports = Vec::new();
        match self.random.below(9) {
            0 | 1 => {
                let paid = 1 + self.random.below(100);
                self.pay(at, paid.wrapping_neg());
                let envelope = self.hosts[at].cut.envelope(Member(other as u16));
                let wire = self.wires.entry((at, other)).or_default();
                wire.push_back((envelope, Some(frame(paid))));
            }
            2 | 3 => {
                let arrived = self.wires.entry((other, at)).or_default().pop_front();
                if let Some((envelope, frame)) = arrived {
                    self.cut(at, CutEvent::Arrived(envelope, frame));
                }
            }
            4 => {
                if let Some((_, frame)) = self.hosts[at].socket.pop_front() {
                    self.pay(at, amount(&frame));
                }
            }
            5 => self.scribble(at),
            6 => self.pause(at, &mut reports),
            7 => {
                if let Some(order) = self.hosts[at].orders.pop_front() {
                    self.cohort(at, TakeEvent::Order(order), &mut reports);
                }
            }
            _ => self.save(at, &mut reports),
        }
        reports
    }

    fn touch(&mut self, at: usize, unit: u64) {
        let host = &mut self.hosts[at];
        host.changed.insert(unit);
        if let Some(saving) = &mut host.saving {
            saving.queue.access(page(unit));
        }
    }

    fn pay(&mut self, at: usize, amount: u64) {
        let balance = balance(&self.hosts[at].memory).wrapping_add(amount);
        self.hosts[at].memory[..8].copy_from_slice(&balance.to_le_bytes());
        self.touch(at, 0);
    }

    /// Writes a page: zeros, a common content, or one of its own.
    fn scribble(&mut self, at: usize) {
        let (unit, kind) = (1 + self.random.below(PAGES - 1), self.random.below(4));
        let content = match kind {
            0 => 0,
            1 => 7,
            _ => self.random.below(u64::MAX),
        };
        let from = unit as usize * UNIT_BYTES;
        self.hosts[at].memory[from..from + UNIT_BYTES]
            .copy_from_slice(&content.to_le_bytes().repeat(UNIT_BYTES / 8));
        self.touch(at, unit);
    }

    fn pause(&mut self, at: usize, reports: &mut Vec<(Member, About<TakeReport>)>) {
        let host = &mut self.hosts[at];
        let Some(number) = host.pausing.take() else { return };
        if number <= host.cut.number() {
            return;
        }
        let (truth, changed) = (host.memory.clone(), std::mem::take(&mut host.changed));
        let unread = host.socket.iter().cloned().collect();
        self.truths.entry(number).or_default().insert(at, truth.clone());
        let queue = FirstAccess::new(20);
        host.saving = Some(Saving { number, truth, changed, queue, map: None });
        self.cut(at, CutEvent::Taken { number, unread });
        self.cohort(at, TakeEvent::Taken(number), reports);
    }

    fn cut(&mut self, at: usize, event: CutEvent<Frame>) {
        let mut actions = Vec::new();
        self.hosts[at].cut.handle(event, &mut actions);
        for action in actions {
            match action {
                CutAction::Transmit(envelope) => {
                    let wire = self.wires.entry((at, envelope.to.index())).or_default();
                    wire.push_back((envelope, None));
                }
                CutAction::Deliver { from, frame } => {
                    self.hosts[at].socket.push_back((from, frame));
                }
                CutAction::Take(number) => self.hosts[at].pausing = Some(number),
                CutAction::LogComplete(_) => {}
            }
        }
    }

    fn cohort(
        &mut self,
        at: usize,
        event: TakeEvent,
        reports: &mut Vec<(Member, About<TakeReport>)>,
    ) {
        let mut actions = Vec::new();
        self.hosts[at].cohort.handle(self.now, event, &mut actions);
        for action in actions {
            match action {
                TakeAction::Prepare(number) => {
                    self.cohort(at, TakeEvent::Prepared(number), reports);
                }
                TakeAction::Take(number) => self.cut(at, CutEvent::Take(number)),
                TakeAction::Commit(number) => {
                    let saved = self.hosts[at].saving.take().unwrap();
                    assert_eq!(saved.number, number);
                    self.hosts[at].base = saved.map.unwrap();
                }
                TakeAction::Discard(number) => {
                    let host = &mut self.hosts[at];
                    if let Some(saving) = host.saving.take() {
                        host.changed.extend(saving.changed);
                    }
                    self.cut(at, CutEvent::Over(number));
                }
                TakeAction::Report(report) => reports.push((Member(at as u16), report)),
            }
        }
    }

    /// Saves once the log is complete, and the queue has been traced for a while.
    fn save(&mut self, at: usize, reports: &mut Vec<(Member, About<TakeReport>)>) {
        let host = &mut self.hosts[at];
        let (Some(saving), Some(log)) = (&mut host.saving, host.cut.log()) else { return };
        if saving.map.is_some() || self.random.below(5) > 0 {
            return;
        }
        let number = saving.number;
        let part = store_member(self.store, at, &host.base, saving, log);
        self.cohort(at, TakeEvent::Saved(number, part), reports);
    }
}
