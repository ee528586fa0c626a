//! The backup's driver: what the daemon does around [`Backup`].

use crate::errands::Errand;
use crate::guest::{PAGES, Pages, State};
use crate::host::{HostId, Role, SessionId};
use crate::mutant::DriverMutant;
use crate::network::ConnectionId;
use crate::schedule::Moment;
use crate::world::{Event, World};
use std::collections::VecDeque;
use std::time::Duration;
use understudy_protocol::validity::ImageRole;
use understudy_protocol::wire::{Kind, Message, WireError};
use understudy_protocol::{
    Backup, BackupAction, BackupEvent, BackupPhase, CardFrames, Carried, Epoch, EpochEnd,
    Generation, Ownership, StagedEpoch, Staging, Time,
};

/// A disk that is silent for longer hangs.
const DISK_PATIENCE: Duration = Duration::from_secs(1);

/// How much later than that a host that stands still now and then may notice.
const LATE_LOOK: Duration = Duration::from_millis(500);

/// The VM on the host that keeps an understudy of it.
#[derive(Debug)]
pub struct Standby {
    /// Tells sessions apart.
    pub id: SessionId,
    /// Whose backup it is.
    pub primary: HostId,
    /// The state machine.
    pub core: Backup,
    /// Checkpoints and acknowledgements.
    pub data: ConnectionId,
    /// Signs of life.
    pub heartbeat: Option<ConnectionId>,
    /// Memory.
    pub pages: Pages,
    pub(crate) staging: Staging<Message>,
    pub(crate) device_state: Option<State>,
    pub(crate) applied: Epoch,
    /// What the guest sent that the primary may not have released.
    pub(crate) carried: Carried,
    pub(crate) errands: VecDeque<Errand>,
    /// Messages of the epoch in front that are applied already.
    pub(crate) progress: usize,
    next_beat: Time,
    /// Its QEMU died.
    pub(crate) broken: bool,
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
        let ran = self.hosts[host.0].image.record_of(host).and_then(|record| record.ran_at());
        if ran.is_some_and(|ran| ran >= generation) {
            // The offer is of a host that slept while this one was given the VM.
            return self.close(host, data);
        }
        let core = Backup::new(generation, self.schedule.timeout, self.now);
        let primary = self.network.other(data, host);
        self.hosts[host.0].backs = Some(primary);
        self.hosts[host.0].role = Role::Backup(Box::new(Standby {
            id,
            primary,
            core,
            data,
            heartbeat: None,
            pages: [0; PAGES],
            staging: Staging::new(),
            device_state: None,
            applied: Epoch(0),
            carried: Carried::new(1),
            errands: VecDeque::new(),
            progress: 0,
            next_beat: self.now,
            broken: false,
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
        let now = self.now;
        let (kind, epoch) = (message.header.kind, message.header.epoch);
        if self.has(DriverMutant::ApplyPartialEpoch) && kind != Kind::EpochEnd {
            self.apply_message(host, id, &message);
        }
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let (data, applied) = (standby.data, standby.applied);
        let overlaps = kind == Kind::DiskWrite && epoch > standby.core.committed().next();
        let taken = take(&mut standby.staging, message, now);
        self.coverage.overlaps += u64::from(overlaps);
        if self.has(DriverMutant::AckBeforeStaged) && kind == Kind::DeviceState {
            self.send(host, data, Message::new(Kind::Acknowledge, epoch, Vec::new()));
        }
        if self.has(DriverMutant::ApplyPartialEpoch) {
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
        staged: Option<StagedEpoch<Message>>,
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
        staged: &mut Option<StagedEpoch<Message>>,
    ) {
        let now = self.now;
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let (data, primary) = (standby.data, standby.primary);
        match action {
            BackupAction::AcknowledgeAndApply(epoch) => {
                let mut whole = staged.take().expect("the event came with its epoch");
                let frames = frames_of(&mut whole);
                standby.carried.commit(now, epoch, &frames);
                self.errand(host, id, Errand::Apply(whole));
                self.note_routine(host, || format!("acknowledges epoch {epoch}"));
                if self.has(DriverMutant::AckBeforeStaged) {
                    return; // Sent before.
                }
                self.send(host, data, Message::new(Kind::Acknowledge, epoch, Vec::new()));
            }
            BackupAction::HandBack(from) => {
                self.ask_arbiter(host, id, from, Some(primary));
            }
            BackupAction::Contest(from) => {
                let seen = self.now - self.hosts[host.0].stalled_until;
                if self.disk_silence(host).min(seen) > DISK_PATIENCE + LATE_LOOK {
                    self.violation(format!("{host} asks for the VM, and could not start it"));
                }
                self.ask_arbiter(host, id, from, None);
                self.moment(Moment::BackupContests);
            }
            BackupAction::ClosePeer => self.close_standby(host, id),
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

    pub(crate) fn close_standby(&mut self, host: HostId, id: SessionId) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let (data, heartbeat) = (standby.data, standby.heartbeat);
        self.close(host, data);
        if let Some(heartbeat) = heartbeat {
            self.close(host, heartbeat);
        }
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
            self.look_at_fitness(host, id);
            self.backup_event(host, id, BackupEvent::Tick, None);
        }
        self.ask_others(host, id);
    }

    /// For how long this host's disk has answered nothing.
    fn disk_silence(&self, host: HostId) -> Duration {
        let host = &self.hosts[host.0];
        let hangs = host.disk_hangs_until > self.now;
        if hangs { self.now - host.disk_hangs_from } else { Duration::ZERO }
    }

    fn look_at_fitness(&mut self, host: HostId, id: SessionId) {
        let silence = self.disk_silence(host);
        let ailment = (silence > DISK_PATIENCE).then(|| "its disk hangs".to_owned());
        self.backup_event(host, id, BackupEvent::Fitness(ailment), None);
    }

    /// Now and then a backup that waits for the arbiter asks another host which generation it ran.
    fn ask_others(&mut self, host: HostId, id: SessionId) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        if !matches!(standby.core.phase(), BackupPhase::Contesting(_)) || !self.random.percent(5) {
            return;
        }
        let others = (0..self.hosts.len()).map(HostId).filter(|other| *other != host);
        let answers = others.filter(|other| self.reaches(host, *other)).filter_map(|other| {
            let generation = self.hosts[other.0].image.record_of(other)?.ran_at()?;
            Some(Ownership { host: Some(other.name()), generation })
        });
        for owner in answers.collect::<Vec<_>>() {
            self.backup_event(host, id, BackupEvent::OwnedElsewhere(owner), None);
            let Some(standby) = self.hosts[host.0].standby(id) else { return };
            if *standby.core.phase() == BackupPhase::Discarded {
                self.coverage.let_go += 1;
                return;
            }
        }
    }
}

/// Takes what belongs to an epoch, or its end; gives the epoch that it completes.
fn take(
    staging: &mut Staging<Message>,
    message: Message,
    now: Time,
) -> Result<Option<StagedEpoch<Message>>, WireError> {
    if message.header.kind == Kind::EpochEnd {
        return staging.end(&EpochEnd::decode(&message)?, now).map(Some);
    }
    let header = message.header;
    staging.take(&header, header.length as u64, message).map(|()| None)
}

/// Takes out what the guest sent.
fn frames_of(whole: &mut StagedEpoch<Message>) -> Vec<CardFrames> {
    let is_sent = |message: &Message| message.header.kind == Kind::Outbound;
    let (sent, rest): (Vec<_>, _) = whole.pieces.drain(..).partition(is_sent);
    whole.pieces = rest;
    let frames = |message| CardFrames::decode(message).expect("its primary made it");
    sent.into_iter().map(frames).collect()
}
