//! The primary's driver: what the daemon does around [`Primary`].

use crate::guest::{Frame, Gate, PAGES, State};
use crate::host::{HostId, Role, SessionId};
use crate::mutant::Mutant;
use crate::network::ConnectionId;
use crate::oracle::Boundary;
use crate::schedule::Moment;
use crate::world::{Event, World};
use std::collections::BTreeMap;
use std::time::Duration;
use understudy_protocol::repair::RepairEvent;
use understudy_protocol::validity::ImageRole;
use understudy_protocol::wire::{DiskRange, Kind, Message};
use understudy_protocol::{
    DiskIndex, Due, Epoch, EpochDigest, Generation, LastCheckpoint, Primary, PrimaryAction,
    PrimaryEvent, PrimaryPhase, Time,
};

/// One protection, seen from the primary.
#[derive(Debug)]
pub struct Session {
    /// Tells sessions apart.
    pub id: SessionId,
    /// The state machine.
    pub core: Primary,
    /// The backup.
    pub peer: HostId,
    /// Checkpoints and acknowledgements.
    pub data: ConnectionId,
    /// Signs of life.
    pub heartbeat: ConnectionId,
    /// A planned fail-over was asked for.
    pub hand_over: bool,
    /// The tag of disk writes: 0 during the first synchronisation.
    disk_epoch: Epoch,
    digests: BTreeMap<Epoch, EpochDigest>,
    /// Pages written since they were sent last.
    dirty: [bool; PAGES],
    last: LastCheckpoint,
    /// The first synchronisation, or a checkpoint, is being taken.
    busy: bool,
    check_at: Option<Time>,
    next_beat: Time,
}

/// What a checkpoint copied while the guest stood still.
#[derive(Debug)]
pub struct Capture {
    epoch: Epoch,
    pages: Vec<u8>,
    state: State,
}

impl World {
    /// The backup is ready: the first synchronisation begins.
    pub(crate) fn start_session(&mut self, host: HostId) {
        let (now, timeout) = (self.now, self.schedule.timeout);
        let Some(running) = self.hosts[host.0].running() else { return };
        let Some(dialled) = running.dialling.take() else { return };
        let id = dialled.session;
        running.session = Some(Session {
            id,
            core: Primary::new(running.generation, timeout, now),
            peer: dialled.peer,
            data: dialled.data,
            heartbeat: dialled.heartbeat.expect("it was welcomed"),
            hand_over: false,
            disk_epoch: Epoch(0),
            digests: BTreeMap::new(),
            dirty: [false; PAGES],
            last: LastCheckpoint { started: now, resumed: now },
            busy: true,
            check_at: None,
            next_beat: now,
        });
        self.note(host, || format!("protects the VM on {}", dialled.peer));
        self.after(Duration::ZERO, Event::PrimaryBeat(host, id));
        self.after(Duration::ZERO, Event::SyncPiece(host, id, 0));
    }

    /// Copies a page and a block while the guest runs.
    pub(crate) fn sync_piece(&mut self, host: HostId, id: SessionId, piece: usize) {
        let value = self.hosts[host.0].image.blocks.get(piece).copied();
        let Some(running) = self.hosts[host.0].running() else { return };
        let page = running.guest.pages.get(piece).copied();
        let Some(session) = running.session.as_mut().filter(|session| session.id == id) else {
            return;
        };
        let (Some(value), Some(page)) = (value, page) else {
            session.busy = false;
            self.note(host, || "has sent a first copy".to_owned());
            return self.consider_checkpoint(host, id);
        };
        session.dirty[piece] = false;
        self.send_data(host, id, Kind::Pages, Epoch(0), page_entry(piece, page));
        self.send_data(host, id, Kind::DiskWrite, Epoch(0), disk_write(piece, value));
        let next = self.random.micros(300, 6_000);
        self.after(next, Event::SyncPiece(host, id, piece + 1));
    }

    /// The guest wrote a page.
    pub(crate) fn page_written(&mut self, host: HostId, page: usize) {
        if let Some(session) = self.hosts[host.0].running().and_then(|vm| vm.session.as_mut()) {
            session.dirty[page] = true;
        }
    }

    /// The guest wrote a block: it goes to the backup at once.
    pub(crate) fn block_written(&mut self, host: HostId, block: usize, value: u64) {
        let session = self.hosts[host.0].running().and_then(|vm| vm.session.as_ref());
        if let Some((id, epoch)) = session.map(|session| (session.id, session.disk_epoch)) {
            self.send_data(host, id, Kind::DiskWrite, epoch, disk_write(block, value));
        }
    }

    /// Takes a checkpoint if one is due, or looks again when it will be.
    pub(crate) fn consider_checkpoint(&mut self, host: HostId, id: SessionId) {
        let (now, policy) = (self.now, self.schedule.policy);
        let Some(running) = self.hosts[host.0].running() else { return };
        let output_waits = running.port.holds_frames();
        let Some(session) = running.session.as_mut().filter(|session| session.id == id) else {
            return;
        };
        if session.busy || !session.core.may_capture() {
            return;
        }
        if session.hand_over && *session.core.phase() == PrimaryPhase::Protected {
            return self.pause(host, id, true);
        }
        let due = match session.core.running() {
            Epoch(1) => Due::At(now),
            _ => policy.due(session.last, session.core.in_flight(), output_waits),
        };
        match due {
            Due::At(time) if time <= now => self.pause(host, id, false),
            Due::At(time) if session.check_at != Some(time) => {
                session.check_at = Some(time);
                self.at(time, Event::CheckpointDue(host, id));
            }
            Due::At(_) | Due::OnChange => {}
        }
    }

    fn pause(&mut self, host: HostId, id: SessionId, last: bool) {
        let now = self.now;
        let Some(running) = self.hosts[host.0].running() else { return };
        running.paused = true;
        running.runs += 1;
        if let Some(session) = &mut running.session {
            session.busy = true;
            session.last.started = now;
        }
        let length = self.random.micros(200, 3_000);
        self.after(length, Event::PauseEnds(host, id, last));
    }

    /// Barrier, capture, resume.
    pub(crate) fn pause_ends(&mut self, host: HostId, id: SessionId, last: bool) {
        let now = self.now;
        let blocks = self.hosts[host.0].image.blocks;
        let barrier_lost = self.mutant == Some(Mutant::LoseBarrier) && self.random.percent(20);
        let Some(running) = self.hosts[host.0].running() else { return };
        let Some(session) = running.session.as_mut().filter(|session| session.id == id) else {
            return;
        };
        let (epoch, next) = (session.core.running(), session.core.running().next());
        if !barrier_lost {
            if session.core.holds_output() {
                running.port.drain();
            }
            running.port.gate = Gate::Held(next);
        }
        session.disk_epoch = next;
        session.last.resumed = now;
        let pages = &running.guest.pages;
        let written = (0..PAGES).filter(|page| session.dirty[*page]);
        let capture = Capture {
            epoch,
            pages: written.flat_map(|page| page_entry(page, pages[page])).collect(),
            state: running.guest.state,
        };
        session.dirty = [false; PAGES];
        let boundary = Boundary { state: running.guest.state, pages: *pages, blocks };
        self.oracle.record(id, epoch, boundary);
        self.note_routine(host, || format!("closes epoch {epoch}"));
        if !last {
            self.resume_guest(host);
        }
        let event = if last { PrimaryEvent::CapturedLast } else { PrimaryEvent::Captured };
        self.primary_event(host, id, event);
        let encode = self.random.micros(10, 1_500);
        self.after(encode, Event::Captured(host, id, Box::new(capture)));
        self.moment(Moment::Captured);
    }

    /// A checkpoint's data goes out, its end last.
    pub(crate) fn send_capture(&mut self, host: HostId, id: SessionId, capture: Capture) {
        if self.hosts[host.0].session(id).is_none() {
            return;
        }
        self.send_data(host, id, Kind::Pages, capture.epoch, capture.pages);
        self.send_data(host, id, Kind::DeviceState, capture.epoch, capture.state.encode());
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let digest = session.digests.remove(&capture.epoch).unwrap_or_default();
        session.busy = false;
        let data = session.data;
        self.send(host, data, Message::new(Kind::EpochEnd, capture.epoch, digest.encode()));
        self.moment(Moment::EndSent);
        self.consider_checkpoint(host, id);
    }

    fn send_data(
        &mut self,
        host: HostId,
        id: SessionId,
        kind: Kind,
        epoch: Epoch,
        payload: Vec<u8>,
    ) {
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let message = Message::new(kind, epoch, payload);
        if epoch > Epoch(0) {
            let digest = session.digests.entry(epoch).or_default();
            digest.add(message.header.checksum(), message.payload.len());
        }
        let data = session.data;
        self.send(host, data, message);
    }

    /// A message of the backup.
    pub(crate) fn primary_receives(&mut self, host: HostId, id: SessionId, message: &Message) {
        let event = match message.header.kind {
            Kind::Acknowledge => PrimaryEvent::Acknowledged(message.header.epoch),
            Kind::Heartbeat => PrimaryEvent::Heard,
            Kind::StoodDown => PrimaryEvent::StoodDown,
            Kind::Live => PrimaryEvent::LiveElsewhere(Generation(message.header.epoch.0)),
            _ => PrimaryEvent::PeerGone("the backup gave up".to_owned()),
        };
        self.primary_event(host, id, event);
    }

    /// Heartbeat and tick; after a stall of its own the peer's messages come first.
    pub(crate) fn primary_beat(&mut self, host: HostId, id: SessionId) {
        let now = self.now;
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let punctual = now <= session.next_beat + super::world::OWN_STALL;
        session.next_beat = now + understudy_protocol::HEARTBEAT_INTERVAL;
        let (heartbeat, next) = (session.heartbeat, session.next_beat);
        self.send(host, heartbeat, Message::new(Kind::Heartbeat, Epoch(0), Vec::new()));
        self.at(next, Event::PrimaryBeat(host, id));
        if punctual {
            self.primary_event(host, id, PrimaryEvent::Tick);
        }
    }

    /// Feeds the state machine and does what it says.
    pub(crate) fn primary_event(&mut self, host: HostId, id: SessionId, event: PrimaryEvent) {
        let now = self.now;
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let before = session.core.phase().clone();
        let mut actions = Vec::new();
        session.core.handle(now, event, &mut actions);
        let after = session.core.phase().clone();
        let generation = session.core.generation();
        if let Some(running) = self.hosts[host.0].running() {
            running.generation = generation;
        }
        for action in actions {
            self.primary_acts(host, id, action);
        }
        if before != after {
            self.note(host, || format!("primary: {after:?}"));
            self.primary_turned(&before, &after);
            if before == PrimaryPhase::Syncing && after == PrimaryPhase::Protected {
                self.repair_event(host, RepairEvent::Protected);
            }
        }
        self.consider_checkpoint(host, id);
    }

    fn primary_acts(&mut self, host: HostId, id: SessionId, action: PrimaryAction) {
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let (data, heartbeat) = (session.data, session.heartbeat);
        let generation = session.core.generation();
        let signal = |kind| Message::new(kind, Epoch(0), Vec::new());
        match action {
            PrimaryAction::Release(epoch) => {
                if matches!(session.core.phase(), PrimaryPhase::Contesting(_)) {
                    self.coverage.released_while_contesting += 1;
                }
                let early = self.mutant == Some(Mutant::ReleaseEarly);
                let epoch = if early { epoch.next() } else { epoch };
                let Some(running) = self.hosts[host.0].running() else { return };
                let frames = running.port.release_through(epoch);
                self.coverage.commits += 1;
                let count = frames.len();
                self.note_routine(host, || format!("releases epoch {epoch}: {count} frames"));
                self.let_out(host, frames);
            }
            PrimaryAction::OpenOutput => {
                self.open_output(host);
                self.note_generation(host);
            }
            PrimaryAction::Contest(from) => {
                self.ask_arbiter(host, id, from);
                self.moment(Moment::PrimaryContests);
            }
            PrimaryAction::YieldToBackup => {
                self.note_hand_over(host, id);
                self.send(host, data, signal(Kind::TakeOver));
            }
            PrimaryAction::StandDown => self.send(host, data, signal(Kind::StandDown)),
            PrimaryAction::ClosePeer => {
                self.close(host, data);
                self.close(host, heartbeat);
            }
            PrimaryAction::Halt(_) => {
                self.close(host, data);
                self.close(host, heartbeat);
                if let Some(running) = self.hosts[host.0].running() {
                    running.port.shut();
                }
                self.hosts[host.0].role = Role::Fenced;
                if self.arbiter.owner != host {
                    self.set_record(host, ImageRole::Stale, generation);
                }
            }
        }
    }

    /// From here on the backup is to go on exactly where the guest stands.
    fn note_hand_over(&mut self, host: HostId, id: SessionId) {
        let Some(running) = self.hosts[host.0].running() else { return };
        let phase = running.session.as_ref().map(|session| session.core.phase());
        if phase == Some(&PrimaryPhase::HandingOver) {
            self.handed_over = Some((id, running.guest.state));
        }
    }

    /// The record follows the generation, unless the host fails first.
    fn note_generation(&mut self, host: HostId) {
        let Some(generation) = self.hosts[host.0].running().map(|running| running.generation)
        else {
            return;
        };
        if self.random.percent(70) {
            self.set_record(host, ImageRole::Active, generation);
        }
    }

    fn open_output(&mut self, host: HostId) {
        let Some(running) = self.hosts[host.0].running() else { return };
        running.session = None;
        let frames: Vec<Frame> = running.port.open();
        let stands_still = running.paused;
        self.let_out(host, frames);
        if stands_still {
            self.resume_guest(host);
        }
        self.protection_lost(host, "protection ended");
    }
}

/// A page as it travels.
fn page_entry(page: usize, value: u64) -> Vec<u8> {
    [(page as u64).to_le_bytes(), value.to_le_bytes()].concat()
}

/// A disk write as it travels: each block is a number.
fn disk_write(block: usize, value: u64) -> Vec<u8> {
    let range = DiskRange { disk: DiskIndex(0), offset: block as u64 * 8, length: 8 };
    [range.encode().as_slice(), &value.to_le_bytes()].concat()
}
