//! The world of a cluster: a virtual clock, what is to come, hosts, VMs, a store, an arbiter.

use super::checks::Truth;
use super::operator::Operator;
use super::restore::{RestoreOp, Restoring};
use super::schedule::{Fault, Lasting, Moment, Planned, Schedule, When};
use super::take::{PublishStep, TakeOp, Taking};
use super::wires::{Payload, Pipe, PipeId};
use crate::coverage::Coverage;
use crate::host::HostId;
use crate::queue::Queue;
use crate::random::Random;
use crate::trace::Trace;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;
use understudy_protocol::{Generation, Ownership, Time, Verdict};
use understudy_snapshot::{Cut, Decision, Gate, Incarnation, Member, SnapshotNumber};

/// The stream of a seed's numbers that decides what happens.
const STREAM: u64 = 201;

/// Time after calm in which all must have ended.
const ENDS: Duration = Duration::from_secs(200);
/// The same where a part has failed for good.
const ENDS_BESIDE: Duration = Duration::from_secs(2_600);

/// A command that was given, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct OpId(pub(crate) usize);

/// A copy of a VM, by number; each is a life of its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct VmId(pub(crate) usize);

/// A frame between members: its sender's incarnation, the lives of sender and receiver, its place
/// among those of the one to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Frame {
    pub(crate) incarnation: Incarnation,
    pub(crate) from: VmId,
    pub(crate) to: VmId,
    pub(crate) serial: u64,
}

impl AsRef<[u8]> for Frame {
    fn as_ref(&self) -> &[u8] {
        &[0; 64]
    }
}

/// A job of a host's daemon for a member; its `id` says which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Job {
    pub(crate) host: HostId,
    /// Life of the daemon.
    pub(crate) life: u32,
    pub(crate) member: Member,
    /// Number of a snapshot, or the command of a restore.
    pub(crate) id: u64,
}

/// An event that will happen.
#[derive(Debug)]
pub(crate) enum Event {
    Strike(Fault),
    Calm,
    Lasts(Lasting),
    PowerOn(HostId, u32),
    Heal(HostId, HostId, u32),
    ConnectionsEnd(HostId, HostId, u32),
    ArbiterBack(Option<HostId>),
    StoreBack,
    QuickAgain,
    Operator,
    GuestStep(VmId),
    Arrives(PipeId),
    /// What a connection that is gone had still to say, or is said on the own host.
    Late(HostId, Payload),
    Dial(PipeId),
    OpTick(OpId),
    Publish(OpId, PublishStep),
    Checked(OpId),
    DecideAsked(OpId),
    DecideAnswered(OpId, Verdict),
    TakeTick(Job),
    TakePrepares(Job, Time),
    TakePauses(Job),
    TakeSaves(Job, Time),
    TakeMissed(Job),
    RestoreTick(Job),
    Loads(Job),
    Claims(Job, Generation),
    Starts(Job, Verdict),
    Completes(Job),
    Entrusts(Job),
    Asks(Job),
    Answered(Job, Decision),
    Discards(Job),
    Adopts(HostId, u32, VmId),
}

/// A host, and what its daemon knows.
#[derive(Debug, Default)]
pub(crate) struct Host {
    pub(crate) up: bool,
    pub(crate) life: u32,
    pub(crate) stalled_until: Time,
    pub(crate) takings: BTreeMap<Member, Taking>,
    pub(crate) restorings: BTreeMap<Member, Restoring>,
    /// The last number that it has heard of.
    pub(crate) number: SnapshotNumber,
    /// Incarnation of the cluster's network here.
    pub(crate) incarnation: Incarnation,
}

/// What a guest knows: what it has sent and read.
#[derive(Clone, Debug, Default)]
pub(crate) struct Guest {
    pub(crate) sent: BTreeMap<VmId, u64>,
    pub(crate) read: BTreeMap<VmId, u64>,
}

/// A VM that runs, or ran.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) id: VmId,
    pub(crate) member: Member,
    pub(crate) host: HostId,
    pub(crate) generation: Generation,
    pub(crate) incarnation: Incarnation,
    pub(crate) alive: bool,
    /// Its daemon is dead, and it waits for another.
    pub(crate) frozen: bool,
    pub(crate) restored_by: Option<OpId>,
    /// It outlives its daemon.
    pub(crate) entrusted: bool,
    /// Its frames go through the cluster.
    pub(crate) seated: bool,
    pub(crate) guest: Guest,
    pub(crate) cut: Cut<Frame>,
    pub(crate) gate: Gate,
    pub(crate) socket: VecDeque<(Member, Frame)>,
    /// Frames that wait for its snapshot, and since when.
    pub(crate) held: BTreeMap<Frame, (Time, SnapshotNumber)>,
}

/// A register of the arbiter.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Record {
    pub(crate) host: Option<HostId>,
    pub(crate) generation: u64,
}

impl Record {
    /// The compare-and-swap: whoever comes first at a generation has it; asking again is granted.
    pub(crate) fn swap(&mut self, from: Generation, host: Option<HostId>) -> Verdict {
        if self.generation <= from.0 {
            *self = Record { host, generation: from.0 + 1 };
        }
        match self.generation == from.0 + 1 && self.host == host {
            true => Verdict::Granted(from.next()),
            false => Verdict::Taken(self.ownership()),
        }
    }

    pub(crate) fn ownership(&self) -> Ownership {
        let host = self.host.map(HostId::name);
        Ownership { host, generation: Generation(self.generation) }
    }
}

/// The arbiter.
#[derive(Debug, Default)]
pub(crate) struct Arbiter {
    pub(crate) vms: Vec<Record>,
    pub(crate) incarnation: Record,
    pub(crate) decision: Record,
    pub(crate) down: u32,
    pub(crate) cut_off: Vec<HostId>,
}

/// The store.
#[derive(Debug, Default)]
pub(crate) struct Store {
    /// The parts of each snapshot that is there, by the place of each in the truth.
    pub(crate) manifests: BTreeMap<SnapshotNumber, Vec<usize>>,
    /// Numbers of those that are being written, or whose writers died.
    pub(crate) marks: BTreeSet<SnapshotNumber>,
    pub(crate) away: u32,
    /// So many writes fail.
    pub(crate) full: u32,
    pub(crate) swept: BTreeSet<SnapshotNumber>,
}

/// A command under way, on its coordinator's host.
#[derive(Debug)]
pub(crate) struct Op {
    pub(crate) host: HostId,
    pub(crate) life: u32,
    pub(crate) hosts: Vec<HostId>,
    pub(crate) since: Time,
    /// It has returned, or its daemon has died.
    pub(crate) over: bool,
    pub(crate) kind: OpKind,
}

#[derive(Debug)]
pub(crate) enum OpKind {
    /// It was just given.
    New,
    Take(TakeOp),
    Restore(RestoreOp),
}

/// The world.
pub(crate) struct World {
    pub(crate) now: Time,
    pub(crate) schedule: Schedule,
    pub(crate) random: Random,
    pub(crate) hosts: Vec<Host>,
    pub(crate) vms: Vec<Vm>,
    pub(crate) pipes: BTreeMap<PipeId, Pipe>,
    /// Ways that carry nothing, and how often each was cut.
    pub(crate) cuts: Vec<(HostId, HostId, u32)>,
    pub(crate) cut_count: u32,
    pub(crate) slow: u32,
    pub(crate) arbiter: Arbiter,
    pub(crate) store: Store,
    pub(crate) ops: Vec<Op>,
    pub(crate) operator: Operator,
    pub(crate) truth: Truth,
    pub(crate) triggers: Vec<Planned>,
    pub(crate) is_calm: bool,
    /// What fails for good has.
    pub(crate) has_lasted: bool,
    pub(crate) coverage: Coverage,
    pub(crate) trace: Trace,
    pub(crate) violation: Option<String>,
    queue: Queue<Event>,
}

impl World {
    pub(crate) fn new(schedule: Schedule, chance: u64, trace: bool) -> World {
        let hosts = (0..schedule.hosts).map(|_| Host { up: true, ..Host::default() }).collect();
        let members = schedule.places.len();
        let mut world = World {
            now: Time::default(),
            random: Random::new(chance, STREAM),
            hosts,
            vms: Vec::new(),
            pipes: BTreeMap::new(),
            cuts: Vec::new(),
            cut_count: 0,
            slow: 0,
            arbiter: Arbiter { vms: vec![Record::default(); members], ..Arbiter::default() },
            store: Store::default(),
            ops: Vec::new(),
            operator: Operator::default(),
            truth: Truth::default(),
            triggers: Vec::new(),
            is_calm: false,
            has_lasted: false,
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
        for planned in self.schedule.faults.clone() {
            match planned.when {
                When::At(at) => self.queue.put(at, Event::Strike(planned.fault)),
                When::In(..) => self.triggers.push(planned),
            }
        }
        self.open_ways();
        for (member, host) in self.schedule.places.clone().into_iter().enumerate() {
            self.boot(host, Member(member as u16));
        }
        self.queue.put(Schedule::calm(), Event::Calm);
        self.after(Duration::from_millis(100), Event::Operator);
        if let Some(what) = self.schedule.lasting {
            self.after(Duration::from_secs(14), Event::Lasts(what));
        }
    }

    /// Plays to the end, or to the first invariant that is broken.
    pub(crate) fn run(&mut self) {
        let ends = match self.schedule.lasting {
            Some(_) => ENDS_BESIDE,
            None => ENDS,
        };
        while self.violation.is_none() && !self.operator.is_done() {
            let Some((time, event)) = self.queue.next() else { break };
            self.now = time;
            if time > Schedule::calm() + ends {
                return self
                    .violation(format!("nothing fails any more, and {}", self.unfinished()));
            }
            match self.host_of(&event).filter(|host| self.is_stalled(*host)) {
                Some(host) => self.queue.put(self.hosts[host.0].stalled_until, event),
                None => self.happen(event),
            }
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Strike(fault) => self.strike(fault),
            Event::Calm => self.calm(),
            Event::Lasts(what) => self.lasts(what),
            Event::PowerOn(host, life) => self.power_on(host, life),
            Event::Heal(from, to, cut) => self.heal(from, to, cut),
            Event::ConnectionsEnd(from, to, cut) => self.connections_end(from, to, cut),
            Event::ArbiterBack(host) => self.arbiter_back(host),
            Event::StoreBack => self.store.away = self.store.away.saturating_sub(1),
            Event::QuickAgain => self.slow = self.slow.saturating_sub(1),
            Event::Operator => self.operate(),
            Event::GuestStep(vm) => self.guest_step(vm),
            Event::Arrives(pipe) => self.arrives(pipe),
            Event::Late(host, payload) => self.take_in(host, payload),
            Event::Dial(pipe) => self.dial(pipe),
            Event::OpTick(op) => self.op_tick(op),
            Event::Publish(op, step) => self.publish(op, step),
            Event::Checked(op) => self.checked(op),
            Event::DecideAsked(op) => self.decide_asked(op),
            Event::DecideAnswered(op, verdict) => self.decide_answered(op, verdict),
            Event::TakeTick(job) => self.take_tick(job),
            Event::TakePrepares(job, until) => self.take_prepares(job, until),
            Event::TakePauses(job) => self.take_pauses(job),
            Event::TakeSaves(job, until) => self.take_saves(job, until),
            Event::TakeMissed(job) => self.take_missed(job),
            Event::RestoreTick(job) => self.restore_tick(job),
            Event::Loads(job) => self.loads(job),
            Event::Claims(job, newest) => self.claims(job, newest),
            Event::Starts(job, verdict) => self.starts(job, verdict),
            Event::Completes(job) => self.completes(job),
            Event::Entrusts(job) => self.entrusts(job),
            Event::Asks(job) => self.asks(job),
            Event::Answered(job, decision) => self.answered(job, decision),
            Event::Discards(job) => self.discards(job),
            Event::Adopts(host, life, vm) => self.adopts(host, life, vm),
        }
    }

    /// The host on which an event happens, which waits if that stands still.
    fn host_of(&self, event: &Event) -> Option<HostId> {
        match event {
            Event::GuestStep(vm) => Some(self.vms[vm.0].host),
            Event::Arrives(pipe) => self.pipes.get(pipe).map(|pipe| pipe.to),
            Event::Late(host, _) | Event::Adopts(host, ..) => Some(*host),
            Event::OpTick(op)
            | Event::Publish(op, _)
            | Event::Checked(op)
            | Event::DecideAsked(op)
            | Event::DecideAnswered(op, _) => Some(self.ops[op.0].host),
            Event::TakeTick(job)
            | Event::TakePrepares(job, _)
            | Event::TakePauses(job)
            | Event::TakeSaves(job, _)
            | Event::TakeMissed(job)
            | Event::RestoreTick(job)
            | Event::Loads(job)
            | Event::Starts(job, _)
            | Event::Completes(job)
            | Event::Entrusts(job)
            | Event::Asks(job)
            | Event::Answered(job, _)
            | Event::Discards(job) => Some(job.host),
            _ => None,
        }
    }

    pub(crate) fn is_stalled(&self, host: HostId) -> bool {
        self.hosts[host.0].stalled_until > self.now
    }

    pub(crate) fn after(&mut self, time: Duration, event: Event) {
        self.queue.put(self.now + time, event);
    }

    /// The same after a time from `low` to below `high` milliseconds.
    pub(crate) fn soon(&mut self, low: u64, high: u64, event: Event) {
        let time = self.random.millis(low, high);
        self.after(time, event);
    }

    pub(crate) fn note(&mut self, host: Option<HostId>, words: impl FnOnce() -> String) {
        self.trace.note(self.now, host, words);
    }

    pub(crate) fn violation(&mut self, words: String) {
        self.note(None, || format!("VIOLATION: {words}"));
        self.violation.get_or_insert(words);
    }

    /// Something happens at which a fault may be planned.
    pub(crate) fn moment(&mut self, moment: Moment) {
        let now = self.now;
        let is_now = |planned: &Planned| match planned.when {
            When::In(of, from, _) => of == moment && from <= now,
            When::At(_) => false,
        };
        if let Some(place) = self.triggers.iter().position(is_now) {
            let planned = self.triggers.swap_remove(place);
            if let When::In(_, _, later) = planned.when {
                self.after(later, Event::Strike(planned.fault));
            }
        }
    }

    pub(crate) fn members(&self) -> impl Iterator<Item = Member> + use<> {
        (0..self.schedule.places.len()).map(|member| Member(member as u16))
    }

    /// The VM of a member on a host: it runs there, or stands still for want of a daemon.
    pub(crate) fn vm_on(&self, host: HostId, member: Member) -> Option<VmId> {
        let is_it = |vm: &&Vm| vm.alive && vm.host == host && vm.member == member;
        self.vms.iter().rfind(is_it).map(|vm| vm.id)
    }

    /// The VM of a member that runs.
    pub(crate) fn running(&self, member: Member) -> Option<VmId> {
        let is_it = |vm: &&Vm| vm.alive && !vm.frozen && vm.member == member;
        self.vms.iter().rfind(is_it).map(|vm| vm.id)
    }

    pub(crate) fn is_of(&self, job: &Job) -> bool {
        let host = &self.hosts[job.host.0];
        host.up && host.life == job.life
    }

    /// Asks the arbiter: nothing comes of it, the deed is done and not answered, or it is.
    pub(crate) fn consult<T>(
        &mut self,
        host: HostId,
        ask: impl FnOnce(&mut Arbiter) -> T,
    ) -> Option<T> {
        if self.arbiter.down > 0 || self.arbiter.cut_off.contains(&host) {
            self.coverage.cluster_arbiter_silent += 1;
            return None;
        }
        let answer = ask(&mut self.arbiter);
        let lost = self.random.percent(self.schedule.lost_answers);
        self.coverage.cluster_answers_lost += u64::from(lost);
        (!lost).then_some(answer)
    }

    /// A VM runs from now on. At most one copy of each may.
    pub(crate) fn start_vm(&mut self, vm: Vm) -> VmId {
        let (id, member) = (vm.id, vm.member);
        if let Some(other) = self.running(member) {
            let (here, there) = (vm.host, self.vms[other.0].host);
            self.violation(format!(
                "two live copies of {member:?}: one begins on {here}, one runs on {there}"
            ));
        }
        self.vms.push(vm);
        self.soon(1, 60, Event::GuestStep(id));
        id
    }

    /// A VM's QEMU ends.
    pub(crate) fn end_vm(&mut self, vm: VmId) {
        (self.vms[vm.0].alive, self.vms[vm.0].seated) = (false, false);
    }
}
