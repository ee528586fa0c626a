//! Checkpoints: the first copy, pause, barrier, capture, and sending it.

use crate::guest::{Gate, PAGES, State};
use crate::host::{HostId, SessionId};
use crate::lockstep::Step;
use crate::mutant::DriverMutant;
use crate::oracle::Boundary;
use crate::schedule::Moment;
use crate::world::{Event, World};
use std::time::Duration;
use understudy_protocol::wire::{DiskWrite, Kind, Message};
use understudy_protocol::{
    Activity, CardFrames, CardIndex, DiskIndex, Epoch, EpochEnd, GroupStep, LastCheckpoint, Time,
};
use understudy_session::primary::{Asked, Event as PrimaryEvent, Guests, next_step};

/// Time between two looks whether a guest that is to stand still does.
pub(crate) const STOP_LOOK: Duration = Duration::from_micros(500);

/// An activity that is sometimes idle, sometimes busy, and always the same for a seed.
fn guessed_activity(state: State) -> Activity {
    let busy_share = (state.number % 5) as f64 / 4.0;
    Activity { idle: state.number % 2 == 0, busy_share }
}

/// A guest, as it is looked at.
struct Looked {
    since: Option<Time>,
    is_full: bool,
    activity: Activity,
}

impl Guests for Looked {
    fn output_since(&self, _: LastCheckpoint) -> Option<Time> {
        self.since
    }
    fn is_full(&self) -> bool {
        self.is_full
    }
    fn activity(&self) -> Activity {
        self.activity
    }
}

/// The further part that a checkpoint has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// No other part.
    Plain,
    /// The last one: the guest is left paused.
    Last,
    /// The log begins with its pause.
    LogBegins,
    /// The log ends with its pause.
    LogEnds,
}

impl Cut {
    /// Whether the backup keeps up in another way from then on.
    fn is_turn(self) -> bool {
        matches!(self, Cut::LogBegins | Cut::LogEnds)
    }
}

/// The copy that a checkpoint made while the guest stood still.
#[derive(Debug)]
pub struct Capture {
    epoch: Epoch,
    cut: Cut,
    pages: Vec<u8>,
    state: State,
}

impl World {
    /// Copies a page and a block while the guest runs, once there is room for them.
    pub(crate) fn sync_piece(&mut self, host: HostId, id: SessionId, piece: usize) {
        if piece == PAGES {
            let Some(session) = self.hosts[host.0].session(id) else { return };
            session.busy = false;
            self.note(host, || "has sent a first copy".to_owned());
            return self.consider_checkpoint(host, id);
        }
        if self.has_room_to_copy(host, id, piece) {
            self.copy_piece(host, id, piece);
        }
    }

    pub(crate) fn copy_piece(&mut self, host: HostId, id: SessionId, piece: usize) {
        let value = self.hosts[host.0].image.blocks[piece];
        let Some(running) = self.hosts[host.0].running() else { return };
        let page = running.guest.pages[piece];
        let Some(session) = running.session.as_mut().filter(|session| session.id == id) else {
            return;
        };
        session.dirty[piece] = false;
        self.send_data(host, id, Kind::Pages, Epoch(0), page_entry(piece, page));
        self.send_data(host, id, Kind::DiskWrite, Epoch(0), disk_write(piece, value));
        let next = self.random.micros(300, 6_000);
        self.after_work(host, next, Event::SyncPiece(host, id, piece + 1));
    }

    /// The guest wrote a page.
    pub(crate) fn page_written(&mut self, host: HostId, page: usize) {
        if let Some(session) = self.hosts[host.0].running().and_then(|vm| vm.session.as_mut()) {
            session.dirty[page] = true;
        }
    }

    /// A block that the guest wrote goes to the backup, in the epoch that runs.
    pub(crate) fn put_write(&mut self, host: HostId, id: SessionId, step: Step) {
        let epoch = self.hosts[host.0].session(id).map(|session| session.disk_epoch);
        if let (Some(epoch), Some(block)) = (epoch, step.block) {
            let write = disk_write(block, step.state.number);
            self.send_data(host, id, Kind::DiskWrite, epoch, write);
        }
    }

    /// The last look said that one would be due now, or worth a look. Whatever was said before is
    /// void: the product's thread waits for one time only, too.
    pub(crate) fn checkpoint_due(&mut self, host: HostId, id: SessionId) {
        let now = self.now;
        let Some(session) = self.hosts[host.0].session(id) else { return };
        if session.check_at.is_some_and(|at| at <= now) {
            session.check_at = None;
            self.consider_checkpoint(host, id);
        }
    }

    /// Takes a checkpoint if one is due, or looks again when it will be.
    pub(crate) fn consider_checkpoint(&mut self, host: HostId, id: SessionId) {
        let (now, policy) = (self.now, self.schedule.policy);
        let Some(running) = self.hosts[host.0].running() else { return };
        let guest = Looked {
            since: running.port.waits_since(),
            is_full: running.session.as_ref().is_some_and(|it| it.outbox.epoch_room.is_full()),
            activity: guessed_activity(running.guest.state),
        };
        let Some(session) = running.session.as_mut().filter(|session| session.id == id) else {
            return;
        };
        if session.busy || !session.core.may_capture() {
            return;
        }
        let is_log = session.records();
        if session.rendezvous.last().is_none() {
            // The first one ends the first synchronisation.
            return self.pause(host, id, Cut::Plain);
        }
        if self.begin_turn(host, id) {
            return;
        }
        if is_log {
            return self.consider_batch(host, id);
        }
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let asked = Asked { hand_over: session.core.is_handed_over(), checkpoint: false };
        let pace = (&session.rendezvous, &policy);
        match next_step(&session.core, pace, asked, now, &guest) {
            Ok(GroupStep::Checkpoint) => self.pause(host, id, Cut::Plain),
            Ok(GroupStep::LastCheckpoint) => self.pause(host, id, Cut::Last),
            Err(Some(wait)) if session.check_at != Some(now + wait) => {
                session.check_at = Some(now + wait);
                self.at(now + wait, Event::CheckpointDue(host, id));
            }
            Err(_) => {}
        }
    }

    pub(crate) fn pause(&mut self, host: HostId, id: SessionId, cut: Cut) {
        let now = self.now;
        let Some(running) = self.hosts[host.0].running() else { return };
        running.paused = true;
        running.runs += 1;
        if let Some(session) = &mut running.session {
            session.busy = true;
            session.paused = now;
        }
        let length = self.random.micros(200, 3_000);
        self.after_work(host, length, Event::PauseEnds(host, id, cut));
    }

    /// Barrier, capture, resume.
    pub(crate) fn pause_ends(&mut self, host: HostId, id: SessionId, cut: Cut) {
        let now = self.now;
        let blocks = self.hosts[host.0].image.blocks;
        let barrier_lost = self.has(DriverMutant::LoseBarrier) && self.random.percent(20);
        let Some(running) = self.hosts[host.0].running() else { return };
        let Some(session) = running.session.as_mut().filter(|session| session.id == id) else {
            return;
        };
        if session.outbox.holds_guest() {
            // It stops behind its writes.
            return self.after(STOP_LOOK, Event::PauseEnds(host, id, cut));
        }
        let (epoch, next) = (session.core.running(), session.core.running().next());
        let carried = running.port.held_of(epoch).count() as u64;
        if !barrier_lost {
            if session.core.holds_output() {
                running.port.drain(now);
            }
            running.port.gate = Gate::Held(next);
        }
        session.disk_epoch = next;
        session.outbox.epoch_room.empty();
        let checkpoint =
            LastCheckpoint { started: session.paused, resumed: now, pages: 0, carried };
        session.rendezvous.resumed(checkpoint, &self.schedule.policy);
        let pages = &running.guest.pages;
        let written = (0..PAGES).filter(|page| session.dirty[*page]);
        let capture = Capture {
            epoch,
            cut,
            pages: written.flat_map(|page| page_entry(page, pages[page])).collect(),
            state: running.guest.state,
        };
        session.dirty = [false; PAGES];
        let rest = (cut == Cut::LogEnds).then(|| session.recording.take());
        let boundary = Boundary { state: running.guest.state, pages: *pages, blocks };
        self.oracle.record(id, epoch, boundary);
        self.note_routine(host, || format!("closes epoch {epoch}"));
        if let Some(mut rest) = rest {
            if self.has(DriverMutant::LeaveOutTheRest) {
                rest.clear();
            }
            // Before the guest runs, whose disk writes go with their epochs again.
            self.send_data(host, id, Kind::LogEnds, epoch, rest);
        }
        // A copy that was lost meanwhile is kept as it stands.
        if cut != Cut::Last && !self.hosts[host.0].has_lost() {
            self.resume_guest(host);
        }
        let event = match cut {
            Cut::Last => PrimaryEvent::CapturedLast,
            _ => PrimaryEvent::Captured,
        };
        self.primary_event(host, id, event);
        if let Some(session) = self.hosts[host.0].session(id).filter(|_| cut == Cut::LogEnds) {
            session.turns.way.end_log(&mut session.core);
        }
        if cut.is_turn() {
            self.moment(Moment::TurnCaptured);
        }
        let encode = self.random.micros(10, 1_500);
        self.after_work(host, encode, Event::Captured(host, id, Box::new(capture)));
        self.moment(Moment::Captured);
    }

    /// A checkpoint's data goes out, its end last.
    pub(crate) fn send_capture(&mut self, host: HostId, id: SessionId, capture: Capture) {
        let now = self.now;
        if self.hosts[host.0].session(id).is_none() {
            return;
        }
        if capture.cut == Cut::LogBegins {
            self.send_data(host, id, Kind::LogBegins, capture.epoch, Vec::new());
        }
        self.send_data(host, id, Kind::Pages, capture.epoch, capture.pages);
        self.send_frames(host, id, capture.epoch);
        self.send_data(host, id, Kind::DeviceState, capture.epoch, capture.state.encode());
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let digest = session.digests.remove(&capture.epoch).unwrap_or_default();
        session.busy = false;
        let (epoch, age) = (capture.epoch, now - session.paused);
        let end = EpochEnd { epoch, sums: digest.sums(), age };
        self.put_now(host, id, Message::new(Kind::EpochEnd, epoch, end.encode()), 0);
        self.moment(Moment::EndSent);
        if capture.cut.is_turn() {
            self.turn_captured(host, id);
        }
        self.consider_checkpoint(host, id);
    }

    /// Sends what the guest sent in the epoch with it.
    fn send_frames(&mut self, host: HostId, id: SessionId, epoch: Epoch) {
        let Some(running) = self.hosts[host.0].running() else { return };
        let mut message = CardFrames::outbound(epoch, CardIndex(0));
        let mut count = 0;
        for frame in running.port.held_of(epoch) {
            count += u64::from(message.push(&frame.encode()));
        }
        if count > 0 {
            self.send_data(host, id, Kind::Outbound, epoch, message.into_payload());
        }
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
            digest.add(&message.header);
        }
        self.put_now(host, id, message, 1);
    }
}

/// A page as it travels.
fn page_entry(page: usize, value: u64) -> Vec<u8> {
    [(page as u64).to_le_bytes(), value.to_le_bytes()].concat()
}

/// A disk write as it travels: each block is a number.
fn disk_write(block: usize, value: u64) -> Vec<u8> {
    DiskWrite::new(DiskIndex(0), block as u64 * 8, &value.to_le_bytes()).into_payload()
}
