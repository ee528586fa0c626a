//! Lockstep: from the first epoch on what the primary's guest does travels as a log, and the backup's
//! guest does it once more.

use crate::guest::{Gate, State};
use crate::host::{HostId, Role, SessionId};
use crate::oracle::Boundary;
use crate::primary::Session;
use crate::schedule::Moment;
use crate::world::{Event, World};
use std::collections::VecDeque;
use std::time::Duration;
use understudy_protocol::wire::{Kind, Message};
use understudy_protocol::{BackupPhase, Epoch, Time};
use understudy_session::backup::{Event as BackupEvent, LogSpan};
use understudy_session::primary::Event as PrimaryEvent;

/// Batches on their way, at most: fewer than the oracle remembers, and than the product allows.
pub(crate) const PIPELINE: u64 = 48;

/// Log that no output waits for is sent so much later.
const GATHER: Duration = Duration::from_millis(3);

/// A step that a guest takes in one go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// The state that it comes to.
    pub state: State,
    /// The page that it writes.
    pub page: usize,
    /// The block that it writes.
    pub block: Option<usize>,
    /// Whether it flushes its disk.
    pub flushes: bool,
}

impl Step {
    const BYTES: usize = 40;

    fn encode(self) -> Vec<u8> {
        let block = self.block.map_or(u64::MAX, |block| block as u64);
        let words = [self.page as u64, block, u64::from(self.flushes)];
        [self.state.encode(), words.map(u64::to_le_bytes).concat()].concat()
    }

    fn decode(bytes: &[u8]) -> Step {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        Step {
            state: State::decode(&bytes[..16]),
            page: word(16) as usize,
            block: (word(24) != u64::MAX).then(|| word(24) as usize),
            flushes: word(32) == 1,
        }
    }
}

/// A primary's log.
#[derive(Debug, Default)]
pub(crate) struct Recording {
    /// Steps that are in no batch yet.
    steps: Vec<Step>,
    since: Option<Time>,
}

impl Recording {
    /// Takes what is in no batch yet, as it travels.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        std::mem::take(self).steps.into_iter().flat_map(Step::encode).collect()
    }
}

/// The log at its backup.
#[derive(Debug, Default)]
pub(crate) struct Following {
    /// Its epochs, if there is one.
    pub(crate) span: Option<LogSpan>,
    /// The last batch.
    pub last: Epoch,
    /// The epoch with which it has ended, and is executed.
    left: Option<Epoch>,
    /// Steps that are not executed yet.
    steps: VecDeque<Step>,
    /// The next step has its time.
    feeding: bool,
    /// Its QEMU executes something else.
    pub diverges: bool,
    /// Reason why nothing more can be executed.
    spoilt: Option<String>,
    /// All of it is executed: there is nothing left that could come out otherwise.
    completed: bool,
}

impl Following {
    /// A log that begins behind this epoch.
    pub(crate) fn behind(machine: Epoch) -> Following {
        Following { span: Some(LogSpan::new(machine)), ..Following::default() }
    }

    /// Whether there is one of which a batch has come.
    pub(crate) fn has_come(&self) -> bool {
        self.span.is_some() && self.last > Epoch(0)
    }

    /// Whether there is one of which no more is taken in.
    pub(crate) fn has_ended(&self) -> bool {
        self.span.is_some_and(|span| span.has_ended())
    }

    /// No more is taken in.
    pub(crate) fn end(&mut self) {
        if let Some(span) = &mut self.span {
            span.end();
        }
    }

    /// The log ends with this rest of it, as the epoch is committed which that is part of.
    pub(crate) fn end_with(&mut self, rest: &[u8]) {
        if self.span.is_some_and(|span| !span.has_ended()) {
            self.steps.extend(rest.chunks_exact(Step::BYTES).map(Step::decode));
        }
        self.end();
    }

    /// All of it is executed, and another QEMU is to have this one's place.
    pub(crate) fn leave(&mut self, epoch: Epoch) {
        (self.span, self.left) = (None, Some(epoch));
    }

    /// Whether it has ended with this epoch, and all of it is executed.
    pub(crate) fn has_left(&self, epoch: Epoch) -> bool {
        self.left == Some(epoch)
    }

    /// Whether it can be executed no further.
    pub(crate) fn is_spoilt(&self) -> bool {
        self.spoilt.is_some()
    }
}

impl Session {
    /// Whether what the guest does is logged.
    pub(crate) fn records(&self) -> bool {
        self.turns.way.is_log() && self.disk_epoch > self.turns.way.since()
    }
}

impl World {
    /// The guest did something: before anybody hears of it, it is in the log.
    pub(crate) fn log_step(&mut self, host: HostId, step: Step) {
        let now = self.now;
        let session = self.hosts[host.0].running().and_then(|vm| vm.session.as_mut());
        if let Some(session) = session.filter(|session| session.records()) {
            session.recording.steps.push(step);
            session.recording.since.get_or_insert(now);
        }
    }

    /// Cuts a batch if one is due, or looks again when it will be.
    pub(crate) fn consider_batch(&mut self, host: HostId, id: SessionId) {
        let now = self.now;
        let Some(running) = self.hosts[host.0].running() else { return };
        let Some(session) = running.session.as_mut().filter(|session| session.id == id) else {
            return;
        };
        // Nothing may overtake the machine itself.
        if !session.turns.way.may_send_log(&session.core) {
            return;
        }
        let last = session.core.is_handed_over();
        let output = running.port.held_of(session.core.running()).next().is_some();
        let gathered = session.recording.since.map(|since| since + GATHER);
        match gathered {
            _ if last || output => self.cut_batch(host, id, last),
            Some(due) if due <= now => self.cut_batch(host, id, false),
            Some(due) if session.check_at != Some(due) => {
                session.check_at = Some(due);
                self.at(due, Event::CheckpointDue(host, id));
            }
            _ => {}
        }
    }

    /// Cuts a batch: what was sent so far belongs to it, and all the log that led to it is in it.
    pub(crate) fn cut_batch(&mut self, host: HostId, id: SessionId, last: bool) {
        let now = self.now;
        if last {
            self.stop_guest(host);
        }
        let blocks = self.hosts[host.0].image.blocks;
        let Some(running) = self.hosts[host.0].running() else { return };
        let Some(session) = running.session.as_mut().filter(|session| session.id == id) else {
            return;
        };
        let (epoch, next) = (session.core.running(), session.core.running().next());
        if session.core.holds_output() {
            running.port.drain(now);
        }
        running.port.gate = Gate::Held(next);
        session.disk_epoch = next;
        let log = session.recording.take();
        let boundary = Boundary { state: running.guest.state, pages: running.guest.pages, blocks };
        self.oracle.record(id, epoch, boundary);
        self.note_routine(host, || format!("cuts batch {epoch}: {} bytes", log.len()));
        let event = if last { PrimaryEvent::CapturedLast } else { PrimaryEvent::Captured };
        self.primary_event(host, id, event);
        self.put_now(host, id, Message::new(Kind::Log, epoch, log), 1);
        self.note_end(host, id, epoch);
        self.moment(Moment::EndSent);
    }

    /// A batch is acknowledged when it is here, before it is executed.
    pub(crate) fn take_log(&mut self, host: HostId, id: SessionId, message: &Message) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let epoch = message.header.epoch;
        let Some(span) = &mut standby.log.span else {
            return self.violation(format!("{host} gets a log, which was not agreed on"));
        };
        match span.take(epoch) {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => return self.violation(format!("{host} refuses its log: {error}")),
        }
        standby.staging.pass(epoch);
        standby.log.last = epoch;
        standby.log.steps.extend(message.payload.chunks_exact(Step::BYTES).map(Step::decode));
        self.coverage.batches += 1;
        self.backup_event(host, id, BackupEvent::Logged(epoch));
        self.moment(Moment::Acknowledged);
        self.feed_soon(host, id);
    }

    fn feed_soon(&mut self, host: HostId, id: SessionId) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let log = &mut standby.log;
        if !log.feeding && log.spoilt.is_none() && (log.diverges || !log.steps.is_empty()) {
            log.feeding = true;
            let soon = self.random.micros(20, 1_500);
            self.after_work(host, soon, Event::Feed(host, id));
        }
    }

    /// The backup's guest does the next thing of its log, if its machine is loaded.
    pub(crate) fn feed(&mut self, host: HostId, id: SessionId) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        standby.log.feeding = false;
        if standby.broken || *standby.core.phase() == BackupPhase::Discarded {
            return;
        }
        let machine = standby.log.span.map(|span| span.machine());
        if machine.is_some_and(|machine| standby.core.applied(0) >= machine) {
            self.execute(host, id);
            self.moment(Moment::Applying);
        }
        self.feed_soon(host, id);
    }

    /// Executes one step.
    fn execute(&mut self, host: HostId, id: SessionId) {
        let fails = self.hosts[host.0].disk_fails > 0;
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        if standby.log.diverges {
            return self.spoil(
                host,
                id,
                BackupEvent::Diverged("it executed something else".into()),
            );
        }
        let Some(step) = standby.log.steps.pop_front() else { return };
        if step.block.is_some() && fails {
            self.a_write_fails(host);
            return self.spoil(host, id, BackupEvent::CannotServe("its disk fails".into()));
        }
        standby.pages[step.page] = step.state.number;
        standby.device_state = Some(step.state);
        let image = &mut self.hosts[host.0].image;
        if let Some(block) = step.block {
            image.blocks[block] = step.state.number;
        }
        if step.flushes {
            image.sync();
        }
    }

    /// The backup's machine is none any more.
    fn spoil(&mut self, host: HostId, id: SessionId, event: BackupEvent) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        standby.log.spoilt = Some("it cannot execute its log".to_owned());
        standby.log.steps.clear();
        self.excuse("a backup cannot execute its log");
        self.coverage.diverged += u64::from(matches!(event, BackupEvent::Diverged(_)));
        self.cannot_run(host, id, event);
    }

    /// The rest of the log, step by step; how it ended, if it has.
    pub(crate) fn complete(&mut self, host: HostId, id: SessionId) -> Option<Result<(), String>> {
        let standby = self.hosts[host.0].standby(id)?;
        if let Some(reason) = standby.log.spoilt.clone() {
            return Some(Err(reason));
        }
        if standby.log.steps.is_empty() && !standby.log.diverges {
            standby.log.completed = true;
            return Some(Ok(()));
        }
        self.execute(host, id);
        None
    }

    /// The backup's QEMU executes something else than the primary's from here on.
    pub(crate) fn diverge(&mut self, host: HostId) {
        let Role::Backup(standby) = &mut self.hosts[host.0].role else { return };
        if standby.log.has_come() && !standby.log.completed {
            standby.log.diverges = true;
            let id = standby.id;
            self.feed_soon(host, id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::LineageId;

    #[test]
    fn a_step_travels_as_it_is() {
        let state = State { lineage: LineageId(3), number: 77 };
        for step in [
            Step { state, page: 5, block: None, flushes: true },
            Step { state, page: 0, block: Some(0), flushes: false },
        ] {
            let bytes = step.encode();
            assert_eq!((bytes.len(), Step::decode(&bytes)), (Step::BYTES, step));
        }
    }
}
