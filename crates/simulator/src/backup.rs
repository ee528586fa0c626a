//! The backup's driver: what the daemon does around [`Backup`].

use crate::guest::{Claim, Gate, Guest};
use crate::guest::{PAGES, Pages, Port, State};
use crate::host::{HostId, Role, Running, SessionId};
use crate::mutant::Mutant;
use crate::network::ConnectionId;
use crate::schedule::Moment;
use crate::world::{Event, World};
use std::collections::VecDeque;
use understudy_protocol::repair::Repair;
use understudy_protocol::validity::ImageRole;
use understudy_protocol::wire::{DiskRange, Kind, Message};
use understudy_protocol::{
    Backup, BackupAction, BackupEvent, BackupPhase, Epoch, Generation, StagedEpoch, Staging, Time,
    Verdict,
};

/// The VM on the host that keeps an understudy of it.
#[derive(Debug)]
pub struct Standby {
    /// Tells sessions apart.
    pub id: SessionId,
    /// The state machine.
    pub core: Backup,
    /// Checkpoints and acknowledgements.
    pub data: ConnectionId,
    /// Signs of life.
    pub heartbeat: Option<ConnectionId>,
    /// Memory.
    pub pages: Pages,
    staging: Staging,
    device_state: Option<State>,
    applied: Epoch,
    errands: VecDeque<Errand>,
    /// Messages of the epoch in front that are applied already.
    progress: usize,
    next_beat: Time,
}

/// What is done beside receiving, in order.
#[derive(Debug)]
enum Errand {
    Apply(StagedEpoch),
    /// Writes the activation record.
    Activate(Generation),
    /// Starts the guest.
    GoLive(Generation),
    Discard,
}

impl World {
    /// A primary's offer is taken: this host's image becomes a mirror.
    pub(crate) fn stand_by(
        &mut self,
        host: HostId,
        id: SessionId,
        generation: Generation,
        data: ConnectionId,
    ) {
        let core = Backup::new(generation, self.schedule.timeout, self.now);
        self.hosts[host.0].role = Role::Backup(Box::new(Standby {
            id,
            core,
            data,
            heartbeat: None,
            pages: [0; PAGES],
            staging: Staging::new(),
            device_state: None,
            applied: Epoch(0),
            errands: VecDeque::new(),
            progress: 0,
            next_beat: self.now,
        }));
        self.set_record(host, ImageRole::Syncing, generation);
        self.note(host, || format!("stands by at generation {generation}"));
        let ready = Message::new(Kind::Ready, Epoch(0), Vec::new());
        self.send(host, data, ready);
        self.after(understudy_protocol::HEARTBEAT_INTERVAL, Event::BackupBeat(host, id));
    }

    /// A message of the primary.
    pub(crate) fn backup_receives(&mut self, host: HostId, id: SessionId, message: Message) {
        if self.hosts[host.0].standby(id).is_none() {
            return;
        }
        match message.header.kind {
            Kind::Heartbeat => self.backup_event(host, id, BackupEvent::Heard, None),
            Kind::TakeOver => self.backup_event(host, id, BackupEvent::TakeOver, None),
            Kind::StandDown => {
                self.moment(Moment::StandingDown);
                self.backup_event(host, id, BackupEvent::StandDown, None);
            }
            // The first synchronisation: nothing to be kept whole yet.
            _ if message.header.epoch == Epoch(0) => self.apply_message(host, id, &message),
            _ => self.stage(host, id, message),
        }
    }

    fn stage(&mut self, host: HostId, id: SessionId, message: Message) {
        let (kind, epoch) = (message.header.kind, message.header.epoch);
        if self.mutant == Some(Mutant::ApplyPartialEpoch) && kind != Kind::EpochEnd {
            self.apply_message(host, id, &message);
        }
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let (data, applied) = (standby.data, standby.applied);
        let overlaps = kind == Kind::DiskWrite && epoch > standby.core.committed().next();
        let taken = standby.staging.take(message);
        self.coverage.overlaps += u64::from(overlaps);
        if self.mutant == Some(Mutant::AckBeforeStaged) && kind == Kind::DeviceState {
            self.send(host, data, Message::new(Kind::Acknowledge, epoch, Vec::new()));
        }
        if self.mutant == Some(Mutant::ApplyPartialEpoch) {
            self.check_copy(host, applied, false);
        }
        match taken {
            Ok(None) => {}
            Ok(Some(whole)) => {
                let event = BackupEvent::Staged(whole.epoch);
                self.backup_event(host, id, event, Some(whole));
                self.moment(Moment::Acknowledged);
            }
            Err(error) => {
                self.violation(format!("{host} refuses what the primary sent: {error}"));
            }
        }
    }

    /// Feeds the state machine and does what it says. `staged` is the epoch that
    /// a [`BackupEvent::Staged`] speaks of.
    pub(crate) fn backup_event(
        &mut self,
        host: HostId,
        id: SessionId,
        event: BackupEvent,
        staged: Option<StagedEpoch>,
    ) {
        let now = self.now;
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let before = standby.core.phase().clone();
        let mut actions = Vec::new();
        standby.core.handle(now, event, &mut actions);
        let after = standby.core.phase().clone();
        let mut staged = staged;
        for action in actions {
            self.backup_acts(host, id, action, &mut staged);
        }
        if before != after {
            self.note(host, || format!("backup: {after:?}"));
        }
    }

    fn backup_acts(
        &mut self,
        host: HostId,
        id: SessionId,
        action: BackupAction,
        staged: &mut Option<StagedEpoch>,
    ) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let (data, heartbeat) = (standby.data, standby.heartbeat);
        match action {
            BackupAction::AcknowledgeAndApply(epoch) => {
                let whole = staged.take().expect("the event came with its epoch");
                self.errand(host, id, Errand::Apply(whole));
                self.note_routine(host, || format!("acknowledges epoch {epoch}"));
                if self.mutant == Some(Mutant::AckBeforeStaged) {
                    return; // Sent before.
                }
                self.send(host, data, Message::new(Kind::Acknowledge, epoch, Vec::new()));
            }
            BackupAction::Contest(from) if self.mutant == Some(Mutant::SkipArbiter) => {
                let verdict = BackupEvent::Verdict(Verdict::Granted(from.next()));
                self.backup_event(host, id, verdict, None);
            }
            BackupAction::Contest(from) => {
                self.ask_arbiter(host, id, from);
                self.moment(Moment::BackupContests);
            }
            BackupAction::ClosePeer => {
                self.close(host, data);
                if let Some(heartbeat) = heartbeat {
                    self.close(host, heartbeat);
                }
            }
            BackupAction::GoLive { generation, .. } => {
                self.errand(host, id, Errand::Activate(generation));
                self.errand(host, id, Errand::GoLive(generation));
                self.moment(Moment::Granted);
            }
            BackupAction::Discard(reason) => {
                self.send(host, data, Message::new(Kind::Refuse, Epoch(0), reason.into_bytes()));
                self.errand(host, id, Errand::Discard);
            }
            BackupAction::StandDown => self.errand(host, id, Errand::Discard),
        }
    }

    fn errand(&mut self, host: HostId, id: SessionId, errand: Errand) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        standby.errands.push_back(errand);
        if standby.errands.len() == 1 {
            let soon = self.random.micros(10, 1_000);
            self.after(soon, Event::Errand(host, id));
        }
    }

    /// Does a piece of the errand in front.
    pub(crate) fn do_errand(&mut self, host: HostId, id: SessionId) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let done = match standby.errands.front() {
            None => return,
            Some(Errand::Apply(_)) => self.apply_next(host, id),
            Some(&Errand::Activate(generation)) => {
                self.activate(host, id, generation);
                true
            }
            Some(&Errand::GoLive(generation)) => return self.go_live(host, id, generation),
            Some(Errand::Discard) => return self.discard(host, id),
        };
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        if done {
            standby.errands.pop_front();
        }
        if !standby.errands.is_empty() {
            let next = self.random.micros(10, 600);
            self.after(next, Event::Errand(host, id));
        }
    }

    /// Applies one message of the epoch in front; whether that was the last.
    fn apply_next(&mut self, host: HostId, id: SessionId) -> bool {
        let Some(standby) = self.hosts[host.0].standby(id) else { return true };
        let Some(Errand::Apply(whole)) = standby.errands.front_mut() else { return true };
        let epoch = whole.epoch;
        if standby.progress < whole.messages.len() {
            let empty = Message::new(Kind::Pages, epoch, Vec::new());
            let message = std::mem::replace(&mut whole.messages[standby.progress], empty);
            standby.progress += 1;
            let applied = standby.applied;
            self.apply_message(host, id, &message);
            self.check_copy(host, applied, true);
            self.moment(Moment::Applying);
            return false;
        }
        standby.progress = 0;
        standby.applied = epoch;
        let generation = standby.core.generation();
        if epoch == Epoch(1) {
            self.set_record(host, ImageRole::Mirror, generation);
        }
        self.check_copy(host, epoch, false);
        true
    }

    fn apply_message(&mut self, host: HostId, id: SessionId, message: &Message) {
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
        match message.header.kind {
            Kind::Pages => {
                let Some(standby) = self.hosts[host.0].standby(id) else { return };
                for entry in message.payload.chunks_exact(16) {
                    standby.pages[word(&entry[..8]) as usize] = word(&entry[8..]);
                }
            }
            Kind::DiskWrite => match DiskRange::decode(message) {
                Ok((range, data)) => {
                    self.hosts[host.0].image.blocks[range.offset as usize / 8] = word(data);
                }
                Err(error) => self.violation(format!("{host} cannot read a disk write: {error}")),
            },
            Kind::DeviceState => {
                let Some(standby) = self.hosts[host.0].standby(id) else { return };
                standby.device_state = Some(State::decode(&message.payload));
            }
            other => self.violation(format!("{host} was sent a {other:?} message")),
        }
    }

    /// Before the guest runs here, this host's image is on stable storage and
    /// says that it is the valid one.
    fn activate(&mut self, host: HostId, id: SessionId, generation: Generation) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let state = standby.device_state.expect("an epoch was applied");
        self.check_owner(host, generation);
        let image = &mut self.hosts[host.0].image;
        image.sync();
        image.lineage = state.lineage;
        self.set_record(host, ImageRole::Active, generation);
        self.check_image();
        self.note(host, || format!("its image is valid at generation {generation}"));
        self.moment(Moment::Activated);
    }

    fn go_live(&mut self, host: HostId, id: SessionId, generation: Generation) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let (committed, pages) = (standby.core.committed(), standby.pages);
        let (data, heartbeat) = (standby.data, standby.heartbeat);
        let origin = standby.device_state.expect("an epoch was applied");
        self.coverage.partial_epochs_dropped += u64::from(standby.staging.bytes() > 0);
        self.check_copy(host, committed, false);
        let right = self.oracle.boundary(id, committed).is_some_and(|it| it.state == origin);
        if !right {
            self.violation(format!("{host} goes live from {origin:?}, not from epoch {committed}"));
        }
        if self.handed_over.is_some_and(|(of, state)| of == id && state != origin) {
            self.violation(format!("a planned fail-over lost the guest's last state: {origin:?}"));
        }
        if let Some(shown) = self.oracle.shown().filter(|it| !self.oracle.descends(origin, *it)) {
            self.violation(format!("output commit: {host} goes live without {shown:?}"));
        }
        self.send(host, data, Message::new(Kind::Live, Epoch(generation.0), Vec::new()));
        self.close(host, data);
        if let Some(heartbeat) = heartbeat {
            self.close(host, heartbeat);
        }
        let state = self.oracle.new_lineage(Some(origin));
        let image = &mut self.hosts[host.0].image;
        image.lineage = state.lineage;
        let flushed = Claim { state, blocks: image.synced };
        self.note(host, || format!("goes live from epoch {committed}"));
        self.coverage.takeovers += 1;
        self.live_since = self.now;
        self.run_here(host, Guest { state, pages, flushed }, generation);
        self.moment(Moment::Live);
    }

    /// The VM runs here, unprotected.
    pub(crate) fn run_here(&mut self, host: HostId, guest: Guest, generation: Generation) {
        let copy = self.new_copy();
        self.hosts[host.0].role = Role::Primary(Box::new(Running {
            copy,
            guest,
            runs: 0,
            paused: true,
            port: Port::new(Gate::Open),
            generation,
            session: None,
            dialling: None,
            repair: Repair::default(),
            wanted: true,
        }));
        self.resume_guest(host);
        self.protection_lost(host, "nobody backs it up");
    }

    fn discard(&mut self, host: HostId, id: SessionId) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let (data, heartbeat) = (standby.data, standby.heartbeat);
        self.send(host, data, Message::new(Kind::StoodDown, Epoch(0), Vec::new()));
        self.close(host, data);
        if let Some(heartbeat) = heartbeat {
            self.close(host, heartbeat);
        }
        self.hosts[host.0].role = Role::Idle;
        self.note(host, || "has forgotten the VM".to_owned());
    }

    /// Heartbeat and tick; after a stall of its own the peer's messages come first.
    pub(crate) fn backup_beat(&mut self, host: HostId, id: SessionId) {
        let now = self.now;
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let punctual = now <= standby.next_beat + super::world::OWN_STALL;
        standby.next_beat = now + understudy_protocol::HEARTBEAT_INTERVAL;
        let (heartbeat, next) = (standby.heartbeat, standby.next_beat);
        let over = matches!(standby.core.phase(), BackupPhase::Live | BackupPhase::Discarded);
        if let Some(heartbeat) = heartbeat.filter(|_| !over) {
            self.send(host, heartbeat, Message::new(Kind::Heartbeat, Epoch(0), Vec::new()));
        }
        self.at(next, Event::BackupBeat(host, id));
        if punctual {
            self.backup_event(host, id, BackupEvent::Tick, None);
        }
    }
}
