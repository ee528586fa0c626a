//! A host that keeps an understudy: what the daemon's threads do around [`backup::Standby`].

use crate::guest::{PAGES, Pages, State};
use crate::host::{HostId, Role, SessionId};
use crate::lockstep::Following;
use crate::mutant::DriverMutant;
use crate::network::ConnectionId;
use crate::paths::Ways;
use crate::schedule::Moment;
use crate::turn::{Beside, Other};
use crate::world::{Event, World};
use std::collections::VecDeque;
use std::time::Duration;
use understudy_protocol::validity::ImageRole;
use understudy_protocol::wire::{Kind, Message, WireError};
use understudy_protocol::{
    Backup, BackupPhase, Beats, CardFrames, Carried, Epoch, EpochEnd, Generation, Ownership,
    PathEvent, StagedEpoch, Staging, TICK, Time,
};
use understudy_session::backup::{self, Awaited, Effect, Errand, Event as BackupEvent, Word};
use understudy_session::hand_back::WinnersWord;
use understudy_session::primary::MACHINE;

/// A disk that is silent for longer hangs.
const DISK_PATIENCE: Duration = Duration::from_secs(1);

/// Time after that at which a host that stands still now and then may notice.
const LATE_LOOK: Duration = Duration::from_millis(500);

/// A winner that is awaited has so long to start the guest.
const START_PATIENCE: Duration = Duration::from_secs(5);

/// Time between two proofs of a backup that it could take over.
const PROOFS: Duration = Duration::from_millis(200);

/// The least time that a primary that was told has to hang up.
const PARTING: Duration = Duration::from_secs(1);

/// The VM on the host that keeps an understudy of it.
#[derive(Debug)]
pub struct Standby {
    /// Tells sessions apart.
    pub id: SessionId,
    /// Host whose backup it is.
    pub primary: HostId,
    /// The state machine that decides.
    pub core: backup::Standby,
    /// Checkpoints and acknowledgements.
    pub data: ConnectionId,
    /// Signs of life, over each path.
    pub(crate) ways: Ways,
    /// Memory.
    pub pages: Pages,
    pub(crate) staging: Staging<Message>,
    pub(crate) device_state: Option<State>,
    /// Frames that the guest sent and that the primary may not have released.
    pub(crate) carried: Carried,
    /// Epochs that are whole, and not committed, applied or skipped.
    pub(crate) parts: VecDeque<StagedEpoch<Message>>,
    /// Errands that are to be done.
    pub(crate) errands: VecDeque<Errand>,
    /// Messages of the epoch in front that are applied already.
    pub(crate) progress: usize,
    /// Time at which the primary was told why this host gives up.
    told: Option<Time>,
    /// Time at which it was given the VM.
    won: Option<Time>,
    /// Its disk did not take what was written.
    pub(crate) lost_writes: bool,
    /// Its guest could not be started.
    pub(crate) never_started: bool,
    next_tick: Time,
    beats: Beats,
    /// Messages that it has applied, and of how many its primary has heard, which hears nothing else of it.
    pub(crate) worked: u64,
    told_work: u64,
    /// Its QEMU died.
    pub(crate) broken: bool,
    /// Log that its QEMU executes, in lockstep.
    pub(crate) log: Following,
    /// It gives up, and what it is sent is of no use.
    pub(crate) deaf: bool,
    /// QEMUs for turns.
    pub(crate) beside: Beside,
    /// Those that turns need which are committed, and not carried out.
    pub(crate) others: VecDeque<(Epoch, Option<Other>)>,
}

impl Standby {
    /// Whether this epoch is a turn, for which another QEMU waits.
    pub(crate) fn turns_with(&self, epoch: Epoch) -> bool {
        self.others.front().is_some_and(|(of, _)| *of == epoch)
    }

    /// The epoch is not applied, with whatever it is.
    pub(crate) fn forget_turn(&mut self, epoch: Epoch) {
        if self.turns_with(epoch) {
            self.others.pop_front();
        }
    }

    /// Whether it is putting on record that it has won.
    pub(crate) fn is_recording(&self) -> bool {
        matches!(self.errands.front(), Some(Errand::Activate(_)))
    }
}

impl World {
    /// Its former primary, which keeps a sound guest, waits no longer for a winner that hangs, and not at
    /// all for one whose copy is dead.
    pub(crate) fn check_hurried(&mut self, host: HostId, id: SessionId) {
        let now = self.now;
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let is_late = standby.won.is_some_and(|won| now - won > START_PATIENCE);
        let hopeless = is_late || standby.broken;
        if hopeless && standby.is_recording() && *standby.core.phase() == BackupPhase::Live {
            self.violation(format!("{host} has won the VM, does not start it, and keeps it"));
        }
    }

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
        let owner = &self.arbiter;
        if owner.owner == host && owner.generation > generation {
            // The arbiter was asked for it, and this host has it, though it started nothing.
            return self.close(host, data);
        }
        let core = Backup::new(generation, self.schedule.timeout, self.now);
        let mut core = backup::Standby::new(core, 1).with_patience(DISK_PATIENCE);
        core.join();
        let primary = self.network.other(data, host);
        let lockstep = self.schedule.lockstep;
        self.hosts[host.0].backs = Some(primary);
        self.hosts[host.0].role = Role::Backup(Box::new(Standby {
            id,
            primary,
            core,
            data,
            ways: Ways::new(self.schedule.paths, self.schedule.timeout, self.now),
            pages: [0; PAGES],
            staging: Staging::new(),
            device_state: None,
            carried: Carried::new(1),
            parts: VecDeque::new(),
            errands: VecDeque::new(),
            progress: 0,
            told: None,
            won: None,
            lost_writes: false,
            never_started: false,
            next_tick: self.now,
            beats: Beats::new(self.schedule.heartbeat_interval(), self.now),
            worked: 0,
            told_work: 0,
            broken: false,
            log: if lockstep { Following::behind(MACHINE) } else { Following::default() },
            deaf: false,
            beside: Beside::default(),
            others: VecDeque::new(),
        }));
        self.set_record(host, ImageRole::Syncing, generation);
        self.note(host, || format!("stands by at generation {generation}"));
        let ready = Message::new(Kind::Ready, Epoch(0), Vec::new());
        self.send(host, data, ready);
        self.after(TICK, Event::BackupBeat(host, id));
        self.after(PROOFS, Event::Prove(host, id));
    }

    /// A message of the primary.
    pub(crate) fn backup_receives(&mut self, host: HostId, id: SessionId, message: Message) {
        if self.hosts[host.0].standby(id).is_none_or(|standby| standby.deaf) {
            return;
        }
        match message.header.kind {
            Kind::TakeOver => self.backup_event(host, id, BackupEvent::TakeOver { planned: true }),
            Kind::StandDown => {
                self.moment(Moment::StandingDown);
                self.backup_event(host, id, BackupEvent::StandDown);
            }
            Kind::Log => self.take_log(host, id, &message),
            Kind::Turn => self.take_order(host, id, &message),
            // The first synchronisation: nothing to be kept whole yet.
            _ if message.header.epoch == Epoch(0) => self.apply_message(host, id, &message),
            _ => self.stage(host, id, message),
        }
    }

    fn stage(&mut self, host: HostId, id: SessionId, message: Message) {
        let now = self.now;
        let (kind, epoch) = (message.header.kind, message.header.epoch);
        if !self.expect_turn(host, id, &message) {
            return;
        }
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        if standby.log.span.is_some_and(|span| !span.may_come(epoch)) {
            return self.violation(format!("{host} gets a {kind:?} after its log had begun"));
        }
        if self.has(DriverMutant::ApplyPartialEpoch) && kind != Kind::EpochEnd {
            self.apply_message(host, id, &message);
        }
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let (data, applied) = (standby.data, standby.core.applied(0));
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
                let event = BackupEvent::Staged(0, whole.epoch);
                let Some(standby) = self.hosts[host.0].standby(id) else { return };
                standby.parts.push_back(whole);
                self.backup_event(host, id, event);
                self.moment(Moment::Acknowledged);
            }
            Err(error) => self.cannot_read(host, id, &error.to_string()),
        }
    }

    /// What came is not to be understood. So it may be where the log is taken in no more, since its primary seems lost, or
    /// is let go.
    fn cannot_read(&mut self, host: HostId, id: SessionId, error: &str) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let follows = matches!(standby.core.phase(), BackupPhase::Syncing | BackupPhase::Standing);
        if follows || !standby.log.has_ended() {
            return self.violation(format!("{host} refuses what the primary sent: {error}"));
        }
        standby.deaf = true;
        let data = standby.data;
        self.send(host, data, Message::new(Kind::Refuse, Epoch(0), error.as_bytes().to_vec()));
        self.close(host, data);
        self.backup_event(host, id, BackupEvent::DataEnded(0, error.to_owned()));
    }

    /// Tells the session what happened and does what comes of it.
    pub(crate) fn backup_event(&mut self, host: HostId, id: SessionId, event: BackupEvent) {
        let now = self.now;
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let before = standby.core.phase().clone();
        let mut effects = Vec::new();
        standby.core.handle(now, event, &mut effects);
        let after = standby.core.phase().clone();
        for effect in effects {
            self.backup_acts(host, id, effect);
        }
        if before != after {
            if let Some(data) = self.hosts[host.0].standby(id).map(|standby| standby.data) {
                self.read_on(data);
            }
            self.note(host, || format!("backup: {after:?}"));
        }
    }

    fn backup_acts(&mut self, host: HostId, id: SessionId, effect: Effect) {
        let now = self.now;
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let (data, primary, logged) = (standby.data, standby.primary, standby.log.last);
        match effect {
            Effect::Commit(_, epoch) => {
                let part = standby.parts.iter_mut().find(|part| part.epoch == epoch);
                let frames = frames_of(part.expect("it was staged"));
                standby.carried.commit(now, epoch, &frames);
                self.commit_turn(host, id, epoch);
            }
            Effect::Acknowledge(epoch) => {
                self.note_routine(host, || format!("acknowledges epoch {epoch}"));
                if self.has(DriverMutant::AckBeforeStaged) && epoch > logged {
                    return; // Sent before.
                }
                self.send(host, data, Message::new(Kind::Acknowledge, epoch, Vec::new()));
            }
            Effect::HandBack(from) => {
                self.ask_arbiter(host, id, (from, Some(primary)), WinnersWord::default());
            }
            Effect::Contest(from) => {
                self.check_spare_path(host, id);
                let seen = self.now - self.hosts[host.0].stalled_until;
                if self.disk_silence(host).min(seen) > DISK_PATIENCE + LATE_LOOK {
                    self.violation(format!("{host} asks for the VM, and could not start it"));
                }
                self.ask_arbiter(host, id, (from, None), WinnersWord::default());
                self.moment(Moment::BackupContests);
                let turns = |standby: &mut Standby| !standby.others.is_empty();
                let in_turn = self.hosts[host.0].standby(id).is_some_and(turns);
                self.coverage.contests_in_turn += u64::from(in_turn);
            }
            Effect::Granted { .. } => {
                standby.won = Some(now);
                self.moment(Moment::Granted);
            }
            Effect::Do(_, Errand::End(ending)) => self.ended(host, id, &ending),
            Effect::Do(_, errand) => self.errand(host, id, errand),
            Effect::Say(_, word) => self.tell_primary(host, id, word),
            Effect::Close(_) => self.close_standby(host, id),
            Effect::GiveUp(reason) => self.note(host, || format!("gives up: {reason}")),
            Effect::TellObstacle(obstacle) => {
                let words = obstacle.unwrap_or_default().into_bytes();
                self.send(host, data, Message::new(Kind::MayTakeOver, Epoch(0), words));
            }
            Effect::EndLog => standby.log.end(),
            Effect::Leave(None) => self.excuse("the operator ended protection"),
            // Nothing of it is here: inbound frames, and what is for people.
            Effect::Suspect | Effect::Leave(_) | Effect::NoteObstacle(_) => {}
        }
    }

    fn tell_primary(&mut self, host: HostId, id: SessionId, word: Word) {
        let now = self.now;
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let data = standby.data;
        let message = match word {
            Word::Refuse(reason) | Word::Diverged(reason) => {
                // One that cannot turn goes on.
                if *standby.core.phase() == BackupPhase::Discarded {
                    standby.told.get_or_insert(now);
                }
                Message::new(Kind::Refuse, Epoch(0), reason.into_bytes())
            }
            Word::StoodDown => Message::new(Kind::StoodDown, Epoch(0), Vec::new()),
            Word::Live(generation) => Message::new(Kind::Live, Epoch(generation.0), Vec::new()),
        };
        self.send(host, data, message);
    }

    pub(crate) fn close_standby(&mut self, host: HostId, id: SessionId) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let (data, beats) = (standby.data, standby.ways.open());
        self.check_told(host, id);
        self.close(host, data);
        for heartbeat in beats {
            self.close(host, heartbeat);
        }
    }

    /// Checks that a backup which gives up says why, and that its primary hears that before the end
    /// of a connection.
    fn check_told(&mut self, host: HostId, id: SessionId) {
        let now = self.now;
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let (data, told) = (standby.data, standby.told);
        let patient = told.is_some_and(|told| now - told < PARTING);
        if patient && self.has_unread(host, data, Kind::Refuse) {
            self.violation(format!("{host} hangs up before its primary has heard why"));
        }
    }

    /// Heartbeat and tick; after a stall of its own the peer's messages come first.
    pub(crate) fn backup_beat(&mut self, host: HostId, id: SessionId) {
        let now = self.now;
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let punctual = now <= standby.next_tick + super::world::OWN_STALL;
        standby.next_tick = now + TICK;
        let is_due = standby.beats.are_due(now);
        let over = standby.core.may_hang_up(0);
        for heartbeat in standby.ways.open() {
            if over {
                self.check_told(host, id);
                self.close(host, heartbeat);
            } else if is_due {
                self.send(host, heartbeat, Message::new(Kind::Heartbeat, Epoch(0), Vec::new()));
            }
        }
        self.after(TICK, Event::BackupBeat(host, id));
        self.tell_work(host, id);
        self.check_other(host, id);
        if punctual {
            self.path_event(host, id, PathEvent::Tick);
            self.look_at_vitals(host, id);
            self.backup_event(host, id, BackupEvent::Tick);
        }
        self.ask_others(host, id);
    }

    /// A primary whose data is not read hears whether this host works.
    fn tell_work(&mut self, host: HostId, id: SessionId) {
        let Some(data) = self.hosts[host.0].standby(id).map(|standby| standby.data) else { return };
        if !self.reads_nothing(host, data) {
            return;
        }
        self.coverage.backups_full += 1;
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let worked = standby.worked;
        if std::mem::replace(&mut standby.told_work, worked) < worked {
            self.send(host, data, Message::new(Kind::Works, Epoch(worked), Vec::new()));
        }
    }

    /// The time for which this host's disk has answered nothing.
    fn disk_silence(&self, host: HostId) -> Duration {
        let host = &self.hosts[host.0];
        let hangs = host.disk_hangs_until > self.now;
        if hangs { self.now - host.disk_hangs_from } else { Duration::ZERO }
    }

    fn look_at_vitals(&mut self, host: HostId, id: SessionId) {
        let hung = &self.hosts[host.0];
        let disk = (hung.disk_hangs_until > self.now).then_some(hung.disk_hangs_from);
        let awaited = vec![Awaited { disk, qemu: None }];
        self.backup_event(host, id, BackupEvent::Look(awaited));
    }

    /// A backup that follows proves that the arbiter would give it the VM.
    pub(crate) fn prove(&mut self, host: HostId, id: SessionId) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let follows = matches!(standby.core.phase(), BackupPhase::Syncing | BackupPhase::Standing);
        if *standby.core.phase() == BackupPhase::Standing && self.hosts[host.0].disk_fails > 0 {
            return self.cannot_write(host, id);
        }
        if follows {
            let proof = match self.arbiter.reachable(host) {
                true => Ok(()),
                false => Err("no answer".to_owned()),
            };
            self.backup_event(host, id, BackupEvent::Proven(proof));
        }
        self.after(PROOFS, Event::Prove(host, id));
    }

    /// Its disk is written to prove that it can be, while the guest writes nothing.
    fn cannot_write(&mut self, host: HostId, id: SessionId) {
        self.a_write_fails(host);
        if let Some(standby) = self.hosts[host.0].standby(id) {
            standby.lost_writes = true;
        }
        self.excuse("the backup's disk fails");
        self.cannot_run(host, id, BackupEvent::CannotServe("its disk fails".to_owned()));
    }

    /// Has a backup that waits for the arbiter ask another host now and then which generation it
    /// ran.
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
            self.backup_event(host, id, BackupEvent::OwnedElsewhere(owner));
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
