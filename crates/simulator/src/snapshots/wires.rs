//! What goes between hosts, late, in order, lost with a connection: frames of members, orders of a
//! coordinator and reports to it.

use super::world::{Event, Frame, Guest, Host, OpId, Vm, VmId, World};
use crate::host::HostId;
use std::collections::VecDeque;
use std::time::Duration;
use understudy_protocol::{Generation, Time};
use understudy_snapshot::{
    About, Cut, CutAction, CutEvent, Envelope, Gate, Incarnation, Member, Order, Report,
    SnapshotNumber, TakeOrder, TakeReport,
};

/// Pause before a host is dialled again.
const AGAIN: Duration = Duration::from_millis(250);

/// Time between two steps of a guest, in milliseconds; and once nothing fails any more.
const STEP: (u64, u64) = (10, 60);
const QUIET_STEP: (u64, u64) = (100, 600);

/// A direction between two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PipeId {
    /// Frames, from the one to the other.
    Frames(HostId, HostId),
    /// Orders of a command's coordinator to a host.
    Orders(OpId, HostId),
    /// Reports of a host to it.
    Reports(OpId, HostId),
}

/// What is under way.
#[derive(Clone, Debug)]
pub(crate) enum Payload {
    Frame(Envelope, Option<Frame>),
    Take(OpId, Member, About<TakeOrder>),
    Restore(OpId, Member, Order),
    Taken(OpId, Member, About<TakeReport>),
    Restored(OpId, Member, Report),
}

/// A connection's direction: first in, first out.
#[derive(Debug)]
pub(crate) struct Pipe {
    pub(crate) from: HostId,
    pub(crate) to: HostId,
    up: bool,
    items: VecDeque<(Time, Payload)>,
    /// What waits for the next connection.
    waiting: Vec<Payload>,
}

impl World {
    pub(crate) fn open_ways(&mut self) {
        for from in (0..self.hosts.len()).map(HostId) {
            for to in (0..self.hosts.len()).map(HostId).filter(|to| *to != from) {
                self.open(PipeId::Frames(from, to), from, to);
            }
        }
    }

    /// The connections of a command to the hosts of its members.
    pub(crate) fn open_exchange(&mut self, op: OpId) {
        let (own, mut hosts) = (self.ops[op.0].host, self.ops[op.0].hosts.clone());
        hosts.sort();
        hosts.dedup();
        for host in hosts.into_iter().filter(|host| *host != own) {
            self.open(PipeId::Orders(op, host), own, host);
            self.open(PipeId::Reports(op, host), host, own);
        }
    }

    fn open(&mut self, id: PipeId, from: HostId, to: HostId) {
        let pipe = Pipe { from, to, up: false, items: VecDeque::new(), waiting: Vec::new() };
        self.pipes.insert(id, pipe);
        self.soon(1, 20, Event::Dial(id));
    }

    pub(crate) fn is_cut(&self, from: HostId, to: HostId) -> bool {
        self.cuts.iter().any(|cut| (cut.0, cut.1) == (from, to))
    }

    /// Whether there is a connection for frames from the one to the other.
    pub(crate) fn carries(&self, from: HostId, to: HostId) -> bool {
        self.pipes.get(&PipeId::Frames(from, to)).is_some_and(|pipe| pipe.up)
    }

    /// Whether both talk to each other.
    pub(crate) fn reach(&self, one: HostId, other: HostId) -> bool {
        let up = |host: HostId| self.hosts[host.0].up && !self.is_stalled(host);
        let cut = self.is_cut(one, other) || self.is_cut(other, one);
        up(one) && up(other) && !cut
    }

    pub(crate) fn dial(&mut self, id: PipeId) {
        let Some(pipe) = self.pipes.get(&id) else { return };
        let (from, to) = (pipe.from, pipe.to);
        match self.reach(from, to) {
            false => self.after(AGAIN, Event::Dial(id)),
            true if pipe.up => {}
            true => {
                let pipe = self.pipes.get_mut(&id).expect("it was just there");
                pipe.up = true;
                let waiting = std::mem::take(&mut pipe.waiting);
                waiting.into_iter().for_each(|payload| self.put(id, payload));
                // Each connection begins with a sign for each pair.
                if let PipeId::Frames(from, _) = id {
                    self.signs_of(from, Some(to));
                }
            }
        }
    }

    /// The members on a host say to which snapshot they have come.
    fn signs_of(&mut self, from: HostId, only: Option<HostId>) {
        let here = |vm: &&Vm| vm.alive && !vm.frozen && vm.seated && vm.host == from;
        let here: Vec<VmId> = self.vms.iter().filter(here).map(|vm| vm.id).collect();
        for vm in here {
            for to in self.members() {
                let there = self.running(to).map(|other| self.vms[other.0].host);
                let Some(host) = there.filter(|host| *host != from) else { continue };
                if only.is_none_or(|only| only == host) {
                    let sign = self.vms[vm.0].cut.envelope(to);
                    self.put(PipeId::Frames(from, host), Payload::Frame(sign, None));
                }
            }
        }
    }

    /// Puts something into a connection, or has it wait for one, or lost.
    pub(crate) fn put(&mut self, id: PipeId, payload: Payload) {
        let most = if self.slow > 0 { 400 } else { 8 };
        let delay = self.random.micros(100, most * 1_000);
        let now = self.now;
        let Some(pipe) = self.pipes.get_mut(&id) else { return };
        if !pipe.up {
            match id {
                PipeId::Orders(..) => pipe.waiting.push(payload),
                PipeId::Frames(..) | PipeId::Reports(..) => self.lose(payload),
            }
            return;
        }
        let last = pipe.items.back().map_or(now, |item| item.0);
        let arrives = last.max(now + delay);
        pipe.items.push_back((arrives, payload));
        self.after(arrives - now, Event::Arrives(id));
    }

    pub(crate) fn arrives(&mut self, id: PipeId) {
        let Some(pipe) = self.pipes.get(&id) else { return };
        let (to, due) = (pipe.to, pipe.items.front().is_some_and(|item| item.0 <= self.now));
        if !due || self.is_cut(pipe.from, to) {
            return;
        }
        let pipe = self.pipes.get_mut(&id).expect("it was just there");
        let Some((_, payload)) = pipe.items.pop_front() else { return };
        self.take_in(to, payload);
    }

    pub(crate) fn take_in(&mut self, host: HostId, payload: Payload) {
        if !self.hosts[host.0].up {
            return self.lose(payload);
        }
        match payload {
            Payload::Frame(envelope, frame) => self.frame_arrives(host, envelope, frame),
            Payload::Take(op, member, order) => self.take_order(host, op, member, order),
            Payload::Restore(op, member, order) => self.restore_order(host, op, member, order),
            Payload::Taken(op, member, report) => self.take_report(op, member, report),
            Payload::Restored(op, member, report) => self.restore_report(op, member, report),
        }
    }

    /// What waits on the way is sent again.
    pub(crate) fn flow(&mut self, from: HostId, to: HostId) {
        let ids: Vec<(PipeId, usize)> = self
            .pipes
            .iter()
            .filter(|(_, pipe)| (pipe.from, pipe.to) == (from, to))
            .map(|(id, pipe)| (*id, pipe.items.len()))
            .collect();
        for (id, items) in ids {
            (0..items).for_each(|_| self.soon(1, 200, Event::Arrives(id)));
        }
    }

    /// All connections between both break; a tail of what is under way is lost, and some of the rest is
    /// heard after what the next connection brings.
    pub(crate) fn break_connections(&mut self, one: HostId, other: HostId) {
        let between = |pipe: &&mut Pipe| {
            (pipe.from, pipe.to) == (one, other) || (pipe.to, pipe.from) == (one, other)
        };
        let mut lost = Vec::new();
        let mut late = Vec::new();
        let mut broken = Vec::new();
        for (id, pipe) in &mut self.pipes {
            if !between(&pipe) {
                continue;
            }
            pipe.up = false;
            broken.push(*id);
            let kept = self.random.index(pipe.items.len() + 1);
            lost.extend(pipe.items.drain(kept..).map(|item| item.1));
            if !matches!(id, PipeId::Frames(..)) {
                late.extend(pipe.items.drain(..).map(|item| (pipe.to, item.1)));
            }
        }
        lost.into_iter().for_each(|payload| self.lose(payload));
        for (to, payload) in late {
            self.coverage.cluster_messages_late += 1;
            self.soon(1, 1_500, Event::Late(to, payload));
        }
        broken.into_iter().for_each(|id| self.after(AGAIN, Event::Dial(id)));
    }

    /// A host's connections are gone with its daemon.
    pub(crate) fn drop_connections(&mut self, host: HostId) {
        for other in (0..self.hosts.len()).map(HostId).filter(|other| *other != host) {
            self.break_connections(host, other);
        }
    }

    fn lose(&mut self, payload: Payload) {
        match payload {
            Payload::Frame(_, Some(frame)) => drop(self.truth.lost.insert(frame)),
            Payload::Frame(_, None) => {}
            _ => self.coverage.cluster_messages_lost += 1,
        }
    }

    /// Says it to the host of a member; on the own host nothing is lost.
    pub(crate) fn say(&mut self, op: OpId, host: HostId, payload: Payload) {
        match host == self.ops[op.0].host {
            true => self.after(Duration::ZERO, Event::Late(host, payload)),
            false => self.put(PipeId::Orders(op, host), payload),
        }
    }

    /// Answers the coordinator of a command.
    pub(crate) fn answer(&mut self, op: OpId, from: HostId, payload: Payload) {
        let to = self.ops[op.0].host;
        match from == to {
            true => self.after(Duration::ZERO, Event::Late(to, payload)),
            false => self.put(PipeId::Reports(op, from), payload),
        }
    }
}

/// Frames.
impl World {
    /// A VM becomes a member of the cluster; an error if the cluster lives a later incarnation here.
    pub(crate) fn join(
        &mut self,
        vm: &mut Vm,
        incarnation: Incarnation,
        number: SnapshotNumber,
    ) -> Result<(), String> {
        let Host { incarnation: known, .. } = self.hosts[vm.host.0];
        let here = |other: &&mut Vm| other.alive && other.seated && other.host == vm.host;
        if incarnation < known && self.vms.iter_mut().any(|other| here(&other)) {
            return Err(format!("the cluster has been restored since: this is {}", known.0));
        }
        if incarnation != known {
            self.vms.iter_mut().filter(here).for_each(|other| other.seated = false);
        }
        self.hosts[vm.host.0].incarnation = incarnation;
        let members = self.schedule.places.len();
        vm.cut = Cut::new(vm.member, members, incarnation, number);
        (vm.gate, vm.incarnation, vm.seated) = (Gate::default(), incarnation, true);
        vm.held.clear();
        Ok(())
    }

    /// All others are told who runs here now.
    pub(crate) fn tell_all(&mut self, host: HostId) {
        self.signs_of(host, None);
    }

    pub(crate) fn new_vm(&self, host: HostId, member: Member, generation: Generation) -> Vm {
        Vm {
            id: VmId(self.vms.len()),
            member,
            host,
            generation,
            incarnation: Incarnation(0),
            alive: true,
            frozen: false,
            restored_by: None,
            entrusted: false,
            seated: false,
            guest: Guest::default(),
            cut: Cut::new(member, 1 + member.index(), Incarnation(0), SnapshotNumber(0)),
            gate: Gate::default(),
            socket: VecDeque::new(),
            held: Default::default(),
        }
    }

    pub(crate) fn guest_step(&mut self, id: VmId) {
        let vm = &self.vms[id.0];
        if !vm.alive || vm.frozen {
            return;
        }
        let (low, high) = if self.is_calm { QUIET_STEP } else { STEP };
        self.soon(low, high, Event::GuestStep(id));
        for _ in 0..self.random.below(3) {
            self.guest_reads(id);
        }
        for _ in 0..self.random.below(3) {
            let to = Member(self.random.index(self.schedule.places.len()) as u16);
            let own = self.vms[id.0].member;
            if to != own && self.schedule.mute != Some(own) {
                self.guest_sends(id, to);
            }
        }
        self.check_held(id);
    }

    fn guest_reads(&mut self, id: VmId) {
        let guest = &mut self.vms[id.0];
        let Some((_, frame)) = guest.socket.pop_front() else { return };
        // What was in flight across the cut was sent to its former life.
        if frame.to == id {
            let read = guest.guest.read.entry(frame.from).or_default();
            let former = std::mem::replace(read, frame.serial);
            if frame.serial <= former {
                let member = guest.member;
                self.violation(format!("{member:?} reads {frame:?} behind {former}"));
            }
        }
    }

    fn guest_sends(&mut self, id: VmId, to: Member) {
        let Some(other) = self.running(to) else { return };
        let vm = &mut self.vms[id.0];
        if !vm.seated {
            return;
        }
        let serial = vm.guest.sent.entry(other).or_default();
        *serial += 1;
        let frame = Frame { incarnation: vm.incarnation, from: id, to: other, serial: *serial };
        let (envelope, from) = (vm.cut.envelope(to), vm.host);
        let host = self.vms[other.0].host;
        match host == from {
            true => self.frame_arrives(host, envelope, Some(frame)),
            false => self.put(PipeId::Frames(from, host), Payload::Frame(envelope, Some(frame))),
        }
    }

    fn frame_arrives(&mut self, host: HostId, envelope: Envelope, frame: Option<Frame>) {
        let vm = self.vm_on(host, envelope.to).filter(|vm| {
            let vm = &self.vms[vm.0];
            vm.seated && !vm.frozen
        });
        let Some(vm) = vm else {
            return self.truth.lost.extend(frame);
        };
        if envelope.incarnation != self.vms[vm.0].incarnation {
            self.coverage.frames_of_another_life += u64::from(frame.is_some());
            self.truth.lost.extend(frame);
        } else if let Some(frame) = frame {
            if frame.to != vm {
                // Of a life before this one.
                self.truth.lost.insert(frame);
            }
            // Until it is delivered.
            let since = (self.now, envelope.number);
            self.vms[vm.0].held.insert(frame, since);
        }
        self.cut(vm, CutEvent::Arrived(envelope, frame));
        if let Some(frame) = frame.filter(|frame| self.vms[vm.0].held.contains_key(frame)) {
            self.coverage.frames_held_for_a_cut += 1;
            self.note(Some(host), || format!("{:?} holds frame {}", envelope.to, frame.serial));
        }
    }

    /// An event of a member's cut, and what comes of it.
    pub(crate) fn cut(&mut self, id: VmId, event: CutEvent<Frame>) {
        // Whoever is the member on that host is told.
        let (host, member) = (self.vms[id.0].host, self.vms[id.0].member);
        let there = if self.vms[id.0].alive { Some(id) } else { self.vm_on(host, member) };
        let Some(id) = there else { return };
        let mut actions = Vec::new();
        self.vms[id.0].cut.handle(event, &mut actions);
        for action in actions {
            match action {
                CutAction::Transmit(envelope) => self.sign(id, envelope),
                CutAction::Deliver { from, frame } => self.deliver(id, from, frame),
                CutAction::Take(number) => self.cut_takes(id, number),
                CutAction::LogComplete(number) => {
                    if self.vms[id.0].gate.log_complete(number) {
                        self.log_complete(id, number);
                    }
                }
            }
        }
    }

    fn sign(&mut self, id: VmId, envelope: Envelope) {
        let from = self.vms[id.0].host;
        let Some(other) = self.running(envelope.to) else { return };
        let host = self.vms[other.0].host;
        match host == from {
            true => self.frame_arrives(host, envelope, None),
            false => self.put(PipeId::Frames(from, host), Payload::Frame(envelope, None)),
        }
    }

    fn deliver(&mut self, id: VmId, from: Member, frame: Frame) {
        let vm = &mut self.vms[id.0];
        vm.held.remove(&frame);
        vm.socket.push_back((from, frame));
        if frame.incarnation != vm.incarnation {
            let (member, own) = (vm.member, vm.incarnation.0);
            self.violation(format!("{member:?} of life {own} is given {frame:?} of another"));
        }
    }

    fn cut_takes(&mut self, id: VmId, number: SnapshotNumber) {
        let vm = &mut self.vms[id.0];
        if vm.gate.take(number) {
            return self.take_told(id, number);
        }
        if let Some(number) = self.vms[id.0].gate.passed() {
            self.coverage.snapshots_passed += 1;
            self.cut(id, CutEvent::Over(number));
        }
    }
}
