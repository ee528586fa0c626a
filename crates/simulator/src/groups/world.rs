//! The world of a group: a virtual clock, two hosts, connections of each member, an arbiter.

use super::backup::Backing;
use super::checks::Truth;
use super::primary::{Guest, Leading};
use super::schedule::{Fault, Schedule, Side};
use crate::coverage::Coverage;
use crate::host::HostId;
use crate::queue::Queue;
use crate::random::Random;
use crate::trace::Trace;
use std::time::Duration;
use understudy_protocol::{Epoch, Generation, Ownership, Time, Verdict};
use understudy_session::backup::{Errand, Event as BackupEvent, Word};
use understudy_session::hand_back::WinnersWord;
use understudy_session::primary::Event as PrimaryEvent;

/// The stream of a seed's numbers that decides what happens.
const STREAM: u64 = 301;

/// Time after calm in which protection must have come to its end, or go on.
const ENDS: Duration = Duration::from_secs(20);

pub(super) const TICK: Duration = Duration::from_millis(10);

/// A beat that comes later than this tells of an own stall, not of the peer's.
const OWN_STALL: Duration = Duration::from_millis(50);

/// A message between both, over the connection of a member.
#[derive(Clone, Debug)]
pub(crate) enum Said {
    Heartbeat,
    Part(Epoch),
    TakeOver {
        planned: bool,
    },
    StandDown,
    Acknowledge(Epoch),
    Settled,
    MayTakeOver(Option<String>),
    Word(Word),
    /// The connection ends.
    End,
}

/// A connection: those of the members by their place, and one for heartbeats behind them.
#[derive(Clone, Debug)]
pub(crate) struct Way {
    /// Whether each side has it open.
    pub(crate) open: [bool; 2],
    /// When the last message comes to each side.
    last: [Time; 2],
    /// What comes later than this is lost, towards each side.
    lost_after: [Option<Time>; 2],
}

#[derive(Debug)]
pub(crate) enum Event {
    Strike(Fault),
    Calm,
    Arrives(Side, usize, Said),
    Tick(Side),
    Beat(Side),
    Look,
    Prove,
    CheckpointDue,
    Pauses(usize),
    Waits(usize),
    Resumes(usize, Option<Epoch>),
    GuestStep(usize),
    Asked(Side, Generation),
    Answered(Side, Verdict, WinnersWord),
    HandsBack(Generation),
    HandedBack(Verdict),
    Done(usize, Errand),
    QuickAgain(usize),
    ArbiterBack,
}

pub(crate) struct World {
    pub(crate) now: Time,
    pub(crate) schedule: Schedule,
    pub(crate) random: Random,
    pub(crate) a: Option<Leading>,
    pub(crate) b: Option<Backing>,
    pub(crate) guests: Vec<Guest>,
    pub(crate) ways: Vec<Way>,
    /// What goes to each side waits until then.
    cut_until: [Time; 2],
    stalled_until: [Time; 2],
    next_tick: [Time; 2],
    pub(crate) slow: Vec<bool>,
    pub(crate) owner: Side,
    pub(crate) generation: Generation,
    arbiter_down: u32,
    pub(crate) truth: Truth,
    pub(crate) is_calm: bool,
    pub(crate) coverage: Coverage,
    pub(crate) trace: Trace,
    pub(crate) violation: Option<String>,
    queue: Queue<Event>,
}

impl World {
    pub(crate) fn new(schedule: Schedule, chance: u64, trace: bool) -> World {
        let members = schedule.members;
        let start = Time::default();
        let way = Way { open: [true; 2], last: [start; 2], lost_after: [None; 2] };
        let mut world = World {
            now: start,
            random: Random::new(chance, STREAM),
            a: Some(Leading::new(members, start)),
            b: Some(Backing::new(members, start)),
            guests: (0..members).map(|_| Guest::new(members)).collect(),
            ways: vec![way; members + 1],
            cut_until: [start; 2],
            stalled_until: [start; 2],
            next_tick: [start; 2],
            slow: vec![false; members],
            owner: Side::A,
            generation: Generation(1),
            arbiter_down: 0,
            truth: Truth::new(members),
            is_calm: false,
            coverage: Coverage::default(),
            trace: Trace::new(trace),
            violation: None,
            queue: Queue::new(),
            schedule,
        };
        world.begin();
        world
    }

    fn begin(&mut self) {
        for (at, fault) in self.schedule.faults.clone() {
            self.queue.put(at, Event::Strike(fault));
        }
        self.queue.put(Schedule::calm(), Event::Calm);
        for side in [Side::A, Side::B] {
            self.after(TICK, Event::Tick(side));
            self.after(TICK, Event::Beat(side));
        }
        self.after(TICK, Event::Look);
        self.after(TICK, Event::Prove);
        (0..self.schedule.members).for_each(|member| self.soon(1, 8, Event::GuestStep(member)));
        self.lead(PrimaryEvent::Ready);
        self.soon(20, 60, Event::CheckpointDue);
    }

    /// Plays to the end, or to the first invariant that is broken.
    pub(crate) fn run(&mut self) {
        let end = Schedule::calm() + ENDS;
        while self.violation.is_none() {
            let Some((time, event)) = self.queue.next() else { break };
            if time > end {
                break;
            }
            self.now = time;
            match self.side_of(&event).filter(|side| self.stalled_until[*side as usize] > time) {
                Some(side) => self.queue.put(self.stalled_until[side as usize], event),
                None => self.happen(event),
            }
        }
        if self.violation.is_none() {
            self.check_end();
        }
    }

    fn side_of(&self, event: &Event) -> Option<Side> {
        match event {
            Event::Arrives(side, ..) | Event::Tick(side) | Event::Beat(side) => Some(*side),
            Event::Answered(side, ..) => Some(*side),
            Event::CheckpointDue | Event::Pauses(_) | Event::Waits(_) | Event::Resumes(..) => {
                Some(Side::A)
            }
            Event::GuestStep(_) => Some(Side::A),
            Event::Done(..) | Event::Look | Event::Prove | Event::HandedBack(_) => Some(Side::B),
            _ => None,
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Strike(fault) => self.strike(fault),
            Event::Calm => self.calm(),
            Event::Arrives(side, way, said) => self.arrives(side, way, said),
            Event::Tick(side) => self.tick(side),
            Event::Beat(side) => self.beat(side),
            Event::Look => self.look(),
            Event::Prove => self.prove(),
            Event::CheckpointDue => self.checkpoint_due(),
            Event::Pauses(member) => self.pauses(member),
            Event::Waits(member) => self.waits(member),
            Event::Resumes(member, epoch) => self.resumes(member, epoch),
            Event::GuestStep(member) => self.guest_step(member),
            Event::Asked(side, from) => self.asked(side, from),
            Event::Answered(side, verdict, word) => self.answered(side, verdict, word),
            Event::HandsBack(from) => self.hands_back(from),
            Event::HandedBack(verdict) => self.stand_by(BackupEvent::Verdict(verdict)),
            Event::Done(member, errand) => self.done(member, errand),
            Event::QuickAgain(member) => self.slow[member] = false,
            Event::ArbiterBack => self.arbiter_down = self.arbiter_down.saturating_sub(1),
        }
    }

    pub(crate) fn after(&mut self, time: Duration, event: Event) {
        self.queue.put(self.now + time, event);
    }

    /// The same after a time from `low` to below `high` milliseconds.
    pub(crate) fn soon(&mut self, low: u64, high: u64, event: Event) {
        let time = self.random.millis(low, high);
        self.after(time, event);
    }

    pub(crate) fn note(&mut self, side: Option<Side>, words: impl FnOnce() -> String) {
        self.trace.note(self.now, side.map(|side| HostId(side as usize)), words);
    }

    pub(crate) fn violation(&mut self, words: String) {
        self.note(None, || format!("VIOLATION: {words}"));
        self.violation.get_or_insert(words);
    }

    fn is_up(&self, side: Side) -> bool {
        match side {
            Side::A => self.a.is_some(),
            Side::B => self.b.is_some(),
        }
    }

    /// Sends something to the other side over a connection, if that is open here.
    pub(crate) fn send(&mut self, from: Side, way: usize, said: Said) {
        if !self.ways[way].open[from as usize] {
            return;
        }
        let is_slow = self.slow.get(way).is_some_and(|slow| *slow);
        let delay = match (is_slow, &said) {
            (true, Said::Part(_)) => self.random.millis(100, 400),
            _ => self.random.micros(50, 3_000),
        };
        let to = from.other();
        let arrives = self.ways[way].last[to as usize].max(self.now + delay);
        self.ways[way].last[to as usize] = arrives;
        self.queue.put(arrives, Event::Arrives(to, way, said));
    }

    fn arrives(&mut self, to: Side, way: usize, said: Said) {
        if self.cut_until[to as usize] > self.now {
            return self.queue.put(self.cut_until[to as usize], Event::Arrives(to, way, said));
        }
        let own = &mut self.ways[way];
        let is_end = matches!(said, Said::End);
        let lost = own.lost_after[to as usize].is_some_and(|after| self.now > after) && !is_end;
        if lost || !own.open[to as usize] || !self.is_up(to) {
            return;
        }
        if is_end {
            self.ways[way].open[to as usize] = false;
        }
        match to {
            Side::A => self.lead_hears(way, said),
            Side::B => self.backup_hears(way, said),
        }
    }

    /// A side ends a connection; the other hears so behind what was sent before.
    pub(crate) fn close(&mut self, side: Side, way: usize) {
        if self.ways[way].open[side as usize] {
            self.send(side, way, Said::End);
            self.ways[way].open[side as usize] = false;
        }
    }

    pub(crate) fn arbiter_answers(&self) -> bool {
        self.arbiter_down == 0
    }

    /// Whether a question gets from one host to the other now, and its answer back.
    pub(crate) fn ways_are_there(&self) -> bool {
        let is_late = |side: Side| {
            let side = side as usize;
            self.cut_until[side] > self.now || self.stalled_until[side] > self.now
        };
        !is_late(Side::A) && !is_late(Side::B)
    }

    /// The connection that carries heartbeats alone.
    pub(crate) fn heartbeats(&self) -> usize {
        self.schedule.members
    }

    fn tick(&mut self, side: Side) {
        self.after(TICK, Event::Tick(side));
        // What the peer has said during an own stall comes first.
        let punctual = self.now <= self.next_tick[side as usize] + OWN_STALL;
        self.next_tick[side as usize] = self.now + TICK;
        if punctual {
            match side {
                Side::A => self.lead(PrimaryEvent::Tick),
                Side::B => self.stand_by(BackupEvent::Tick),
            }
        }
    }

    fn beat(&mut self, side: Side) {
        self.after(TICK * 2, Event::Beat(side));
        if self.is_up(side) && self.beats(side) {
            self.send(side, self.heartbeats(), Said::Heartbeat);
        }
    }

    /// The arbiter is asked.
    pub(crate) fn ask(&mut self, side: Side, from: Generation) {
        self.soon(1, 40, Event::Asked(side, from));
    }

    fn asked(&mut self, side: Side, from: Generation) {
        let word = if side == Side::A { self.winners_word(from) } else { WinnersWord::default() };
        if self.arbiter_down > 0 {
            self.coverage.group_arbiter_silent += 1;
            let unreachable = Verdict::Unreachable("no answer".into());
            return self
                .after(Duration::from_millis(200), Event::Answered(side, unreachable, word));
        }
        let again = self.owner == side && self.generation == from.next();
        let verdict = match () {
            () if self.generation == from || again => {
                (self.owner, self.generation) = (side, from.next());
                Verdict::Granted(from.next())
            }
            () if self.owner == side => Verdict::Returned(self.generation),
            () => Verdict::Taken(Ownership {
                host: Some(HostId(self.owner as usize).name()),
                generation: self.generation,
            }),
        };
        self.note(None, || format!("arbiter: {side:?} asks, {verdict:?}"));
        self.soon(1, 20, Event::Answered(side, verdict, word));
    }

    fn answered(&mut self, side: Side, verdict: Verdict, word: WinnersWord) {
        match side {
            Side::A => self.lead(PrimaryEvent::Verdict(verdict, word)),
            Side::B => self.stand_by(BackupEvent::Verdict(verdict)),
        }
    }

    /// The arbiter is asked to make the former primary the owner again.
    fn hands_back(&mut self, from: Generation) {
        if self.arbiter_down > 0 {
            let unreachable = Verdict::Unreachable("no answer".into());
            return self.after(Duration::from_millis(200), Event::HandedBack(unreachable));
        }
        self.check_handed_back();
        if (self.owner, self.generation) == (Side::B, from) {
            (self.owner, self.generation) = (Side::A, from.next());
            self.coverage.groups_handed_back += 1;
        }
        let verdict = match self.owner == Side::A && self.generation == from.next() {
            true => Verdict::Granted(from.next()),
            false => Verdict::Taken(Ownership {
                host: Some(HostId(self.owner as usize).name()),
                generation: self.generation,
            }),
        };
        self.note(None, || format!("arbiter: hands back, {verdict:?}"));
        self.soon(1, 20, Event::HandedBack(verdict));
    }

    fn strike(&mut self, fault: Fault) {
        if self.is_calm {
            return;
        }
        self.coverage.group_faults += 1;
        self.truth.strikes(fault);
        self.note(None, || fault.to_string());
        let now = self.now;
        let until = |time: Duration| now + time;
        match fault {
            Fault::Power(side) => self.power(side),
            Fault::Qemu(Side::A, member) => self.qemu_dies(member),
            Fault::Qemu(Side::B, member) => self.copy_dies(member),
            Fault::Disk(member) => self.on_b(|b| b.disk_fails[member] = true),
            Fault::DiskHangs(member, time) => {
                let until = until(time);
                self.on_b(|b| b.hangs_until[member] = until);
            }
            Fault::CannotStart(member) => self.on_b(|b| b.cannot_start[member] = true),
            Fault::Break(member) => self.break_way(member),
            Fault::Cut(side, time) => self.cut_until[side as usize] = until(time),
            Fault::Partition(time) => self.cut_until = [until(time); 2],
            Fault::Stall(side, time) => self.stalled_until[side as usize] = until(time),
            Fault::Arbiter(time) => {
                self.arbiter_down += 1;
                self.after(time, Event::ArbiterBack);
            }
            Fault::SlowMember(member, time) => {
                self.slow[member] = true;
                self.after(time, Event::QuickAgain(member));
            }
            Fault::HandOver => self.lead(PrimaryEvent::HandOver),
            Fault::Unprotect => self.lead(PrimaryEvent::Unprotect),
        }
    }

    fn on_b(&mut self, act: impl FnOnce(&mut Backing)) {
        if let Some(b) = &mut self.b {
            act(b);
        }
    }

    fn power(&mut self, side: Side) {
        match side {
            Side::A => {
                self.a = None;
                self.guests.iter_mut().for_each(Guest::end);
            }
            Side::B => self.b = None,
        }
        self.ways.iter_mut().for_each(|way| way.open[side as usize] = false);
    }

    /// A connection breaks: a tail of what is under way is lost, and each side hears of it.
    fn break_way(&mut self, way: usize) {
        for side in [Side::A, Side::B] {
            let kept = self.random.micros(0, 3_000);
            self.ways[way].lost_after[side as usize] = Some(self.now + kept);
            self.soon(3, 60, Event::Arrives(side, way, Said::End));
        }
    }

    fn calm(&mut self) {
        self.is_calm = true;
        self.arbiter_down = 0;
        self.cut_until = [self.now; 2];
        self.stalled_until = [self.now; 2];
        let now = self.now;
        self.on_b(|b| b.hangs_until.iter_mut().for_each(|until| *until = now));
    }
}
