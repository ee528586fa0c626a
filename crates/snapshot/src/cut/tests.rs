//! Random schedules: however members send, read, pause and are told, every snapshot that comes
//! about is a consistent cut of the whole group, and the running group notices nothing.

use super::*;
use crate::random::Random;
use std::collections::BTreeMap;

const MEMBERS: usize = 4;

type Frame = Vec<u8>;

/// The messages under way from one member to another.
type Wire = VecDeque<(Envelope, Option<Frame>)>;

/// The knowledge of a guest: the last frame that it sent to each member, and all that it has read.
#[derive(Clone, Default)]
struct Guest {
    sent: [u64; MEMBERS],
    read: [Vec<u64>; MEMBERS],
}

fn frame(serial: u64) -> Frame {
    serial.to_le_bytes().to_vec()
}

fn serial(frame: &Frame) -> u64 {
    u64::from_le_bytes(frame[..].try_into().unwrap())
}

/// An order of the coordinator to a member.
#[derive(Clone, Copy)]
enum Order {
    Take(SnapshotNumber),
    Abandon(SnapshotNumber),
}

struct World {
    random: Random,
    /// Whether members look at colours. They must.
    colours: bool,
    guests: [Guest; MEMBERS],
    cuts: Vec<Cut<Frame>>,
    /// Frames delivered and not read.
    sockets: [VecDeque<(Member, Frame)>; MEMBERS],
    /// Wires by sender and receiver, in order.
    wires: BTreeMap<(usize, usize), Wire>,
    orders: [VecDeque<Order>; MEMBERS],
    pausing: [Option<SnapshotNumber>; MEMBERS],
    lost: BTreeSet<(usize, usize, u64)>,
    snapshot: SnapshotNumber,
    states: BTreeMap<usize, Guest>,
    logs: BTreeMap<usize, Vec<(Member, Frame)>>,
    totals: Totals,
}

#[derive(Clone, Copy, Default)]
struct Totals {
    snapshots: u32,
    abandoned: u32,
    in_flight: u32,
    orphans: u32,
    held: u32,
}

impl World {
    fn new(seed: u64, colours: bool) -> World {
        let cut =
            |own: usize| Cut::new(Member(own as u16), MEMBERS, Incarnation(3), SnapshotNumber(7));
        World {
            random: Random::new(seed),
            colours,
            guests: Default::default(),
            cuts: (0..MEMBERS).map(cut).collect(),
            sockets: Default::default(),
            wires: BTreeMap::new(),
            orders: Default::default(),
            pausing: [None; MEMBERS],
            lost: BTreeSet::new(),
            snapshot: SnapshotNumber(7),
            states: (0..MEMBERS).map(|member| (member, Guest::default())).collect(),
            logs: (0..MEMBERS).map(|member| (member, Vec::new())).collect(),
            totals: Totals::default(),
        }
    }

    fn step(&mut self) {
        let mut any = || self.random.below(MEMBERS as u64) as usize;
        let (member, other) = (any(), any());
        match self.random.below(12) {
            0..=2 if member != other => self.send(member, other),
            3..=5 if member != other => self.carry(member, other),
            6 | 7 => self.read(member),
            8 => self.pause(member),
            9 => self.obey(member),
            10 if self.random.below(8) == 0 => self.coordinate(),
            11 if self.random.below(10) == 0 && member != other => self.lose(member, other),
            _ => {}
        }
    }

    fn send(&mut self, from: usize, to: usize) {
        self.guests[from].sent[to] += 1;
        let frame = frame(self.guests[from].sent[to]);
        let envelope = self.cuts[from].envelope(Member(to as u16));
        self.wires.entry((from, to)).or_default().push_back((envelope, Some(frame)));
    }

    fn carry(&mut self, from: usize, to: usize) {
        let wire = self.wires.entry((from, to)).or_default();
        let Some((mut envelope, frame)) = wire.pop_front() else { return };
        if !self.colours {
            envelope.number = envelope.number.min(self.cuts[to].number());
        }
        self.totals.held += u32::from(envelope.number > self.cuts[to].number());
        self.event(to, CutEvent::Arrived(envelope, frame));
    }

    fn read(&mut self, member: usize) {
        let Some((from, frame)) = self.sockets[member].pop_front() else { return };
        self.guests[member].read[from.index()].push(serial(&frame));
    }

    /// The VM of a member that is to take a snapshot comes to stand still.
    fn pause(&mut self, member: usize) {
        let Some(number) = self.pausing[member].take() else { return };
        let unread = self.sockets[member].iter().cloned().collect();
        if number == self.snapshot {
            self.states.insert(member, self.guests[member].clone());
        }
        self.event(member, CutEvent::Taken { number, unread });
    }

    fn obey(&mut self, member: usize) {
        match self.orders[member].pop_front() {
            Some(Order::Take(number)) => self.event(member, CutEvent::Take(number)),
            Some(Order::Abandon(number)) => self.event(member, CutEvent::Over(number)),
            None => {}
        }
    }

    /// A frame is lost; an envelope without one is not, since links between hosts lose nothing.
    fn lose(&mut self, from: usize, to: usize) {
        let wire = self.wires.entry((from, to)).or_default();
        if let Some((_, Some(frame))) = wire.front() {
            self.lost.insert((from, to, serial(frame)));
            wire.pop_front();
        }
    }

    /// Begins a snapshot when the last one is complete; sometimes gives one up.
    fn coordinate(&mut self) {
        let whole = self.states.len() == MEMBERS && self.logs.len() == MEMBERS;
        let tired = !whole && self.random.below(12) == 0;
        if tired {
            self.totals.abandoned += 1;
            self.order(Order::Abandon(self.snapshot));
        }
        if whole || tired {
            self.snapshot = self.snapshot.next();
            self.states.clear();
            self.logs.clear();
            self.order(Order::Take(self.snapshot));
        }
    }

    fn order(&mut self, order: Order) {
        self.orders.iter_mut().for_each(|orders| orders.push_back(order));
    }

    fn event(&mut self, member: usize, event: CutEvent<Frame>) {
        let mut actions = Vec::new();
        self.cuts[member].handle(event, &mut actions);
        for action in actions {
            match action {
                CutAction::Transmit(envelope) => {
                    let wire = self.wires.entry((member, envelope.to.index())).or_default();
                    wire.push_back((envelope, None));
                }
                CutAction::Deliver { from, frame } => {
                    self.sockets[member].push_back((from, frame));
                }
                CutAction::Take(number) => self.pausing[member] = Some(number),
                CutAction::LogComplete(number) => self.complete(member, number),
            }
        }
        if !self.colours && self.states.len() == MEMBERS && self.logs.is_empty() {
            self.totals.orphans += self.orphans();
            self.logs = (0..MEMBERS).map(|member| (member, Vec::new())).collect();
        }
    }

    fn complete(&mut self, member: usize, number: SnapshotNumber) {
        if number != self.snapshot || !self.colours {
            return;
        }
        let log = self.cuts[member].log().expect("it was said to be complete").to_vec();
        assert!(self.logs.insert(member, log).is_none(), "complete twice");
        if self.logs.len() == MEMBERS {
            self.totals.snapshots += 1;
            assert_eq!(self.orphans(), 0, "frames received that were never sent");
            self.check_logs();
        }
    }

    /// Frames that a saved member has read and that its saved sender has not sent.
    fn orphans(&self) -> u32 {
        let pairs = (0..MEMBERS).flat_map(|to| (0..MEMBERS).map(move |from| (from, to)));
        let orphan = |(from, to): &(usize, usize)| {
            let last = self.states[to].read[*from].last();
            last.is_some_and(|last| *last > self.states[from].sent[*to])
        };
        pairs.filter(orphan).count() as u32
    }

    /// Checks that what was sent is either read, or in the log once, or lost by the network; in
    /// order.
    fn check_logs(&mut self) {
        for to in 0..MEMBERS {
            for from in (0..MEMBERS).filter(|&from| from != to) {
                let read = self.states[&to].read[from].last().copied().unwrap_or(0);
                let sent = self.states[&from].sent[to];
                let lost = |serial: &u64| self.lost.contains(&(from, to, *serial));
                let expected: Vec<u64> = (read + 1..=sent).filter(|serial| !lost(serial)).collect();
                let of_sender = |entry: &&(Member, Frame)| entry.0.index() == from;
                let logged: Vec<u64> = self.logs[&to]
                    .iter()
                    .filter(of_sender)
                    .map(|(_, frame)| serial(frame))
                    .collect();
                assert_eq!(logged, expected, "in flight from {from} to {to}");
                self.totals.in_flight += logged.len() as u32;
            }
        }
    }

    /// The guests got each frame once, in order, and nothing waits for ever.
    fn settle(&mut self) {
        let busy = |world: &World| {
            world.wires.values().any(|wire| !wire.is_empty())
                || world.orders.iter().any(|orders| !orders.is_empty())
                || world.pausing.iter().any(Option::is_some)
                || world.sockets.iter().any(|socket| !socket.is_empty())
        };
        while busy(self) {
            for member in 0..MEMBERS {
                self.obey(member);
                self.pause(member);
                self.read(member);
                (0..MEMBERS).filter(|&other| other != member).for_each(|other| {
                    self.carry(member, other);
                });
            }
        }
        for to in 0..MEMBERS {
            for from in (0..MEMBERS).filter(|&from| from != to) {
                let sent = 1..=self.guests[from].sent[to];
                let lost = |serial: &u64| self.lost.contains(&(from, to, *serial));
                let arrived: Vec<u64> = sent.filter(|serial| !lost(serial)).collect();
                assert_eq!(self.guests[to].read[from], arrived, "from {from} to {to}");
            }
        }
    }
}

fn play(colours: bool, seeds: u64) -> Totals {
    let mut sum = Totals::default();
    for seed in 1..=seeds {
        let mut world = World::new(seed, colours);
        (0..3_000).for_each(|_| world.step());
        if colours {
            world.settle();
        }
        sum.snapshots += world.totals.snapshots;
        sum.abandoned += world.totals.abandoned;
        sum.in_flight += world.totals.in_flight;
        sum.orphans += world.totals.orphans;
        sum.held += world.totals.held;
    }
    sum
}

#[test]
fn every_snapshot_is_a_consistent_cut_and_the_group_runs_on() {
    let totals = play(true, 600);
    // The schedules reach what they are meant to test.
    assert!(totals.snapshots > 1_000, "{} snapshots", totals.snapshots);
    assert!(totals.abandoned > 1_000, "{} given up", totals.abandoned);
    assert!(totals.in_flight > 20_000, "{} frames in flight", totals.in_flight);
    assert!(totals.held > 2_000, "{} frames early", totals.held);
}

#[test]
fn without_colours_the_cut_is_wrong() {
    let totals = play(false, 200);
    assert!(totals.orphans > 50, "{}: the test above would not notice", totals.orphans);
}

#[test]
fn a_frame_of_another_life_is_dropped() {
    let mut cut = Cut::<Frame>::new(Member(0), 2, Incarnation(2), SnapshotNumber(5));
    let mut envelope = Envelope {
        from: Member(1),
        to: Member(0),
        incarnation: Incarnation(1),
        number: SnapshotNumber(6),
    };
    let mut actions = Vec::new();
    cut.handle(CutEvent::Arrived(envelope, Some(frame(1))), &mut actions);
    envelope.from = Member(9);
    cut.handle(CutEvent::Arrived(envelope, Some(frame(1))), &mut actions);
    assert_eq!(actions, []);
}

#[test]
fn a_vm_by_itself_has_no_frames_in_flight() {
    let mut cut = Cut::<Frame>::new(Member(0), 1, Incarnation(0), SnapshotNumber(0));
    let (number, mut actions) = (SnapshotNumber(1), Vec::new());
    cut.handle(CutEvent::Take(number), &mut actions);
    cut.handle(CutEvent::Taken { number, unread: vec![] }, &mut actions);
    assert_eq!(actions, [CutAction::Take(number), CutAction::LogComplete(number)]);
    assert_eq!(cut.log(), Some(&[][..]));
}

/// Member 0 of three, which has taken snapshot 6 and has heard of it from member 1.
fn recording<F: AsRef<[u8]> + Clone>() -> (Cut<F>, SnapshotNumber) {
    let mut cut = Cut::new(Member(0), 3, Incarnation(1), SnapshotNumber(5));
    let number = SnapshotNumber(6);
    cut.handle(CutEvent::Taken { number, unread: vec![] }, &mut Vec::new());
    assert!(arrives(&mut cut, 1, 6, None).is_empty());
    (cut, number)
}

fn arrives<F: AsRef<[u8]> + Clone>(
    cut: &mut Cut<F>,
    from: u16,
    number: u64,
    frame: Option<F>,
) -> Vec<CutAction<F>> {
    let (incarnation, number) = (Incarnation(1), SnapshotNumber(number));
    let envelope = Envelope { from: Member(from), to: Member(0), incarnation, number };
    let mut actions = Vec::new();
    cut.handle(CutEvent::Arrived(envelope, frame), &mut actions);
    actions
}

/// Regression: a peer that gave an old number filled the memory of the member's host, and nothing ended the log.
#[test]
fn nothing_is_logged_that_was_not_in_flight() {
    let (mut cut, number) = recording();
    let delivered = |from, n| CutAction::Deliver { from: Member(from), frame: frame(n) };
    assert_eq!(arrives(&mut cut, 1, 5, Some(frame(1))), [delivered(1, 1)]);
    assert_eq!(arrives(&mut cut, 2, 5, Some(frame(2))), [delivered(2, 2)]);
    assert_eq!(arrives(&mut cut, 2, 6, None), [CutAction::LogComplete(number)]);
    assert_eq!(arrives(&mut cut, 2, 5, Some(frame(3))), [delivered(2, 3)]);
    assert_eq!(cut.log(), Some(&[(Member(2), frame(2))][..]));
    let mut actions = Vec::new();
    cut.handle(CutEvent::Over(number), &mut actions);
    assert!(actions.is_empty() && cut.recording.is_none(), "it is saved");
    assert_eq!(cut.number(), number);
}

#[test]
fn frames_that_are_too_many_are_delivered_and_no_log() {
    let (mut cut, number) = recording::<&[u8]>();
    let memory = vec![0; LOGGED_BYTES / 2 - FRAME_BYTES];
    for _ in 0..2 {
        assert_eq!(arrives(&mut cut, 2, 5, Some(&memory)).len(), 1);
    }
    let last = CutAction::Deliver { from: Member(2), frame: &memory[..1] };
    let told = CutAction::LogComplete(number);
    assert_eq!(arrives(&mut cut, 2, 5, Some(&memory[..1])), [told, last.clone()]);
    assert_eq!(cut.log(), None, "the snapshot fails");
    assert_eq!(arrives(&mut cut, 2, 5, Some(&memory[..1])), [last]);
    assert!(arrives(&mut cut, 2, 6, None).is_empty(), "and hears of it once");
    assert!(cut.recording.is_some_and(|recording| recording.log.is_empty()));
}
