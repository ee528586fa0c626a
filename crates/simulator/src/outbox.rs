//! The queue from the guest's side to the wire, where room is short: what is written waits for some, and so does
//! the guest. Who waits, and since when, is the product's own decision.

use crate::host::{CopyId, HostId, Role, SessionId};
use crate::lockstep::Step;
use crate::network::ConnectionId;
use crate::world::{Event, World};
use std::collections::VecDeque;
use std::time::Duration;
use understudy_protocol::wire::{Kind, Message};
use understudy_protocol::{BackupPhase, Epoch, EpochRoom, QueueRoom, Time, Turn};

/// How much waits where, in messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// In the queue.
    pub queue: u64,
    /// Between the hosts: sent, and not read.
    pub wire: usize,
    /// Of what the guest writes to its disk in an epoch.
    pub epoch: u64,
    /// Of a hundred steps of the guest, those that write to its disk.
    pub writes: u64,
    /// Epochs at the backup that are not applied: over it, that reads nothing.
    pub backup: usize,
}

/// A primary's queue. Without a shortage nothing waits in it.
#[derive(Debug)]
pub(crate) struct Outbox {
    shortage: Option<Shortage>,
    queue: VecDeque<(Message, u64)>,
    queue_room: QueueRoom,
    pub(crate) epoch_room: EpochRoom,
    /// A write of the guest that waits.
    writing: Option<Writing>,
    /// The next piece of the first copy, which waits, and since when.
    copying: Option<(usize, Place)>,
}

/// A guest in the midst of a step, whose write waits.
#[derive(Clone, Copy, Debug)]
struct Writing {
    copy: CopyId,
    runs: u32,
    step: Step,
    /// Whether its epoch has room for it.
    has_epoch_room: bool,
    /// Its place among those who wait for the queue.
    place: Option<Place>,
}

/// A place among those who wait, and the time at which it was taken.
type Place = (Turn, Time);

impl Outbox {
    pub(crate) fn new(shortage: Option<Shortage>) -> Outbox {
        let bound = |of: fn(&Shortage) -> u64| shortage.as_ref().map_or(u64::MAX, of);
        Outbox {
            shortage,
            queue: VecDeque::new(),
            queue_room: QueueRoom::new(bound(|it| it.queue)),
            epoch_room: EpochRoom::new(bound(|it| it.epoch)),
            writing: None,
            copying: None,
        }
    }

    /// Whether the guest stands in a write.
    pub(crate) fn holds_guest(&self) -> bool {
        self.writing.is_some()
    }

    /// The guest runs again, which may stand in a write. Whether it does.
    pub(crate) fn goes_on_as(&mut self, runs: u32) -> bool {
        self.writing.as_mut().map(|writing| writing.runs = runs).is_some()
    }

    /// As the product sees it.
    pub(crate) fn waits_since(&self) -> Option<Time> {
        self.queue_room.waits_since()
    }

    /// As it is.
    pub(crate) fn held_up(&self) -> Option<Time> {
        let writing = self.writing.and_then(|writing| writing.place);
        let copying = self.copying.map(|(_, place)| place);
        writing.into_iter().chain(copying).map(|(_, since)| since).min()
    }

    /// Whether the write of the guest may go into the queue, and waits for that from now on if not.
    fn admits(&mut self, now: Time, writing: &mut Writing) -> bool {
        if !writing.has_epoch_room {
            if self.epoch_room.must_wait() {
                return false;
            }
            self.epoch_room.take(1);
            writing.has_epoch_room = true;
        }
        match writing.place {
            Some((turn, _)) if self.queue_room.is_for(turn, 1) => self.queue_room.waited(now),
            Some(_) => return false,
            None if self.queue_room.has(1) => {}
            None => {
                writing.place = Some((self.queue_room.wait(now), now));
                return false;
            }
        }
        true
    }
}

impl World {
    /// Queues a message without waiting.
    pub(crate) fn put_now(&mut self, host: HostId, id: SessionId, message: Message, room: u64) {
        let Some(session) = self.hosts[host.0].session(id) else { return };
        if session.outbox.shortage.is_none() {
            return self.send_out(host, id, message);
        }
        session.outbox.queue_room.take(room);
        session.outbox.queue.push_back((message, room));
        self.pump(host, id);
    }

    /// The guest writes a block, in this step. Whether it goes on at once: else its write waits.
    pub(crate) fn write_through(
        &mut self,
        host: HostId,
        (copy, runs): (CopyId, u32),
        step: Step,
    ) -> bool {
        let now = self.now;
        let session = self.hosts[host.0].running().and_then(|running| running.session.as_mut());
        // In lockstep the backup's guest writes it, too.
        let Some(session) = session.filter(|session| !session.records()) else { return true };
        // The first copy is applied as it comes.
        let has_epoch_room = session.disk_epoch == Epoch(0);
        let mut writing = Writing { copy, runs, step, has_epoch_room, place: None };
        if session.outbox.admits(now, &mut writing) {
            let id = session.id;
            self.put_write(host, id, step);
            return true;
        }
        session.outbox.writing = Some(writing);
        self.coverage.writes_held_up += 1;
        false
    }

    /// Whether a piece of the first copy has room; else it waits.
    pub(crate) fn has_room_to_copy(&mut self, host: HostId, id: SessionId, piece: usize) -> bool {
        let now = self.now;
        let Some(session) = self.hosts[host.0].session(id) else { return false };
        let outbox = &mut session.outbox;
        if outbox.queue_room.has(2) {
            return true;
        }
        outbox.copying = Some((piece, (outbox.queue_room.wait(now), now)));
        false
    }

    /// Whoever waits goes on, if there is room.
    pub(crate) fn writers_go_on(&mut self, host: HostId, id: SessionId) {
        let now = self.now;
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let outbox = &mut session.outbox;
        let is_turn = |(_, (turn, _)): &(usize, Place)| outbox.queue_room.is_for(*turn, 2);
        if let Some((piece, _)) = outbox.copying.filter(is_turn) {
            outbox.copying = None;
            outbox.queue_room.waited(now);
            self.copy_piece(host, id, piece);
        }
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let outbox = &mut session.outbox;
        let Some(mut writing) = outbox.writing.take() else { return };
        if !outbox.admits(now, &mut writing) {
            outbox.writing = Some(writing);
            return;
        }
        self.put_write(host, id, writing.step);
        self.end_write(host, writing);
    }

    fn end_write(&mut self, host: HostId, writing: Writing) {
        let Writing { copy, runs, step, .. } = writing;
        let Some(running) = self.hosts[host.0].running() else { return };
        // Whoever let it stand still meanwhile lets it go on.
        if running.copy == copy && running.runs == runs && !running.paused {
            self.end_step(host, (copy, runs), step);
        }
    }

    /// Nothing is sent any more: nobody waits.
    pub(crate) fn close_outbox(&mut self, host: HostId, id: SessionId) {
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let outbox = std::mem::replace(&mut session.outbox, Outbox::new(None));
        if let Some(writing) = outbox.writing {
            self.end_write(host, writing);
        }
        if let Some((piece, _)) = outbox.copying {
            self.copy_piece(host, id, piece);
        }
    }

    /// What is queued is the last to be sent.
    pub(crate) fn flush_outbox(&mut self, host: HostId, id: SessionId) {
        let Some(session) = self.hosts[host.0].session(id) else { return };
        for (message, _) in std::mem::take(&mut session.outbox.queue) {
            self.send_out(host, id, message);
        }
    }

    /// Sends for as long as there is room on the wire.
    pub(crate) fn pump(&mut self, host: HostId, id: SessionId) {
        loop {
            let Some(session) = self.hosts[host.0].session(id) else { return };
            let Some(shortage) = session.outbox.shortage else { return };
            let data = session.data;
            if self.on_the_wire(data) >= shortage.wire {
                break;
            }
            let Some(session) = self.hosts[host.0].session(id) else { return };
            let Some((message, room)) = session.outbox.queue.pop_front() else { break };
            session.outbox.queue_room.give_back(room);
            self.send_out(host, id, message);
        }
        self.writers_go_on(host, id);
    }

    fn send_out(&mut self, host: HostId, id: SessionId, message: Message) {
        let Some(data) = self.hosts[host.0].session(id).map(|session| session.data) else { return };
        let ended = (message.header.kind == Kind::EpochEnd).then_some(message.header.epoch);
        self.send(host, data, message);
        if let Some(epoch) = ended {
            self.note_end(host, id, epoch);
        }
    }

    /// There is room again on a connection of this host's.
    pub(crate) fn made_room(&mut self, host: HostId, connection: ConnectionId) {
        let Role::Primary(running) = &self.hosts[host.0].role else { return };
        let session = running.session.as_ref().filter(|session| session.data == connection);
        let Some(session) = session.filter(|session| session.outbox.shortage.is_some()) else {
            return;
        };
        if !session.outbox.queue.is_empty() || session.outbox.held_up().is_some() {
            self.after(Duration::ZERO, Event::Pump(host, session.id));
        }
    }

    /// Whether a backup reads nothing just now: it has more than it should of what is not applied.
    pub(crate) fn reads_nothing(&self, host: HostId, connection: ConnectionId) -> bool {
        let Some(shortage) = self.schedule.shortage else { return false };
        let Role::Backup(standby) = &self.hosts[host.0].role else { return false };
        let follows = matches!(standby.core.phase(), BackupPhase::Syncing | BackupPhase::Standing);
        standby.data == connection && follows && standby.parts.len() > shortage.backup
    }
}
