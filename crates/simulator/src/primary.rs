//! A host that runs the VM under protection: what the daemon's threads do around [`Lead`].

mod checks;

use crate::guest::{Frame, PAGES};
use crate::host::{HostId, Role, SessionId};
use crate::lockstep::{PIPELINE, Recording};
use crate::network::ConnectionId;
use crate::outbox::Outbox;
use crate::paths::Ways;
use crate::schedule::Moment;
use crate::turn::Turns;
use crate::world::{Event, World};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use understudy_protocol::repair::RepairEvent;
use understudy_protocol::validity::ImageRole;
use understudy_protocol::wire::{Kind, Message};
use understudy_protocol::{
    Beats, Behind, Epoch, EpochDigest, Generation, Headway, PathEvent, PathIndex, Primary,
    PrimaryAction, PrimaryPhase, Rendezvous, TICK, Time,
};
use understudy_session::primary::{Effect, Event as PrimaryEvent, Lead};

/// A backup's word on itself counts for so long: less than in the product, as all here.
const FRESH: Duration = Duration::from_millis(450);

/// A backup that could not take over for so long is replaced: less than in the product, too.
const SICK: Duration = Duration::from_secs(2);

/// How much later than the bound a beat may come.
const SLACK: Duration = Duration::from_millis(100);

/// One protection, seen from the primary.
#[derive(Debug)]
pub struct Session {
    /// Tells sessions apart.
    pub id: SessionId,
    /// State machine that decides.
    pub core: Lead,
    /// The backup.
    pub peer: HostId,
    /// Checkpoints and acknowledgements.
    pub data: ConnectionId,
    /// Signs of life, over each path.
    pub(crate) ways: Ways,
    /// Word that the backup said last of itself, and its time.
    word: (Option<String>, Time),
    /// Whether it is handed over without a last checkpoint.
    pub(crate) hung: bool,
    /// The tag of disk writes: 0 during the first synchronisation.
    pub(crate) disk_epoch: Epoch,
    pub(crate) digests: BTreeMap<Epoch, EpochDigest>,
    /// Pages written since they were sent last.
    pub(crate) dirty: [bool; PAGES],
    /// Time at which the last pause began.
    pub(crate) paused: Time,
    pub(crate) rendezvous: Rendezvous,
    /// The way in which the backup keeps up, and turns to the other.
    pub(crate) turns: Turns,
    /// Part of it that is not sent yet.
    pub(crate) recording: Recording,
    /// The first synchronisation, or a checkpoint, is being taken.
    pub(crate) busy: bool,
    pub(crate) check_at: Option<Time>,
    /// Number of messages that have got to the backup, and the time at which that last grew by
    /// something of the oldest epoch in flight.
    pub(crate) delivered: (u64, Time),
    /// Number that have when all of an epoch has.
    pub(crate) ends: BTreeMap<Epoch, u64>,
    /// Times at which the epochs in flight were captured, oldest first.
    pub(crate) flying: VecDeque<Time>,
    /// What goes to the backup, on its way there.
    pub(crate) outbox: Outbox,
    /// Number of times that the backup has said that it works.
    work: u64,
    /// Time of the last acknowledgement.
    acknowledged: Time,
    next_tick: Time,
    beats: Beats,
}

impl Session {
    /// All its connections, data first.
    pub(crate) fn connections(&self) -> Vec<ConnectionId> {
        [vec![self.data], self.ways.open()].concat()
    }
}

impl World {
    /// The backup is ready: the first synchronisation begins.
    pub(crate) fn start_session(&mut self, host: HostId) {
        let (now, timeout, paths) = (self.now, self.schedule.timeout, self.schedule.paths);
        let told = self.clock_of_cores(host);
        let (lockstep, shortage) = (self.schedule.lockstep, self.schedule.shortage);
        let Some(running) = self.hosts[host.0].running() else { return };
        let Some(dialled) = running.dialling.take() else { return };
        let id = dialled.session;
        let core = Primary::new(running.generation, timeout, told);
        let lead = Lead::new(core, 1, dialled.peer.name(), told).with_freshness(FRESH, told);
        let mut lead = lead.with_patience(SICK);
        running.records |= lockstep;
        if lockstep {
            lead.set_pipeline(PIPELINE);
        }
        let mut ways = Ways::new(paths, timeout, now);
        ways.beats[0] = dialled.heartbeat;
        running.session = Some(Session {
            id,
            core: lead,
            peer: dialled.peer,
            data: dialled.data,
            ways,
            word: (None, now),
            hung: false,
            disk_epoch: Epoch(0),
            digests: BTreeMap::new(),
            dirty: [false; PAGES],
            paused: now,
            rendezvous: Rendezvous::new(1),
            turns: Turns::new(lockstep, now),
            recording: Recording::default(),
            busy: true,
            check_at: None,
            delivered: (0, now),
            ends: BTreeMap::new(),
            flying: VecDeque::new(),
            outbox: Outbox::new(shortage),
            work: 0,
            acknowledged: now,
            next_tick: now,
            beats: Beats::new(self.schedule.heartbeat_interval(), now),
        });
        self.note(host, || format!("protects the VM on {}", dialled.peer));
        self.primary_event(host, id, PrimaryEvent::Ready);
        self.path_event(host, id, PathEvent::Connected(PathIndex(0)));
        for path in 1..paths as u16 {
            self.dial_path(host, id, PathIndex(path));
        }
        self.after(Duration::ZERO, Event::PrimaryBeat(host, id));
        self.after(Duration::ZERO, Event::SyncPiece(host, id, 0));
    }

    /// A message of the backup.
    pub(crate) fn primary_receives(&mut self, host: HostId, id: SessionId, message: &Message) {
        let now = self.now;
        let event = match message.header.kind {
            Kind::Settled => PrimaryEvent::Whole(0),
            Kind::MayTakeOver => {
                let words = String::from_utf8_lossy(&message.payload).into_owned();
                let obstacle = Some(words).filter(|words| !words.is_empty());
                if let Some(session) = self.hosts[host.0].session(id) {
                    session.word = (obstacle.clone(), now);
                }
                PrimaryEvent::MayTakeOver(obstacle)
            }
            Kind::Acknowledge => {
                if let Some(session) = self.hosts[host.0].session(id) {
                    session.acknowledged = now;
                }
                PrimaryEvent::Acknowledged(message.header.epoch)
            }
            Kind::StoodDown => PrimaryEvent::StoodDown(0),
            Kind::Works => {
                let Some(session) = self.hosts[host.0].session(id) else { return };
                session.work += 1;
                session.delivered.1 = now;
                return;
            }
            Kind::TurnAnswer => return self.turn_answered(host, id, message),
            Kind::Live => PrimaryEvent::LiveElsewhere(Generation(message.header.epoch.0)),
            _ => PrimaryEvent::PeerGone("the backup gave up".to_owned()),
        };
        self.primary_event(host, id, event);
    }

    /// Heartbeat and tick; after a stall of its own the peer's messages come first.
    pub(crate) fn primary_beat(&mut self, host: HostId, id: SessionId) {
        let now = self.now;
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let punctual = now <= session.next_tick + super::world::OWN_STALL;
        session.next_tick = now + TICK;
        let beats = if session.beats.are_due(now) { session.ways.open() } else { Vec::new() };
        for heartbeat in beats {
            self.send(host, heartbeat, Message::new(Kind::Heartbeat, Epoch(0), Vec::new()));
        }
        self.after(TICK, Event::PrimaryBeat(host, id));
        if punctual {
            self.path_event(host, id, PathEvent::Tick);
            self.look_at_headway(host, id);
            self.look_for_better_path(host, id);
            self.primary_event(host, id, PrimaryEvent::Tick);
            self.check_data_path(host, id);
            self.check_delivery(host, id);
            self.check_standing(host, id);
            self.look_at_turn(host, id);
            self.check_turn(host, id);
        }
    }

    /// Looks at the headway, as the daemon asks its system.
    fn look_at_headway(&mut self, host: HostId, id: SessionId) {
        let Some(data) = self.hosts[host.0].session(id).map(|session| session.data) else { return };
        let (now, delivered) = (self.now, self.delivered(data));
        let longest = self.schedule.policy.longest_epoch();
        let waits = self.hosts[host.0].running().and_then(|running| running.port.waits_in_epoch());
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let oldest = session.core.committed().next();
        let end = session.ends.get(&oldest);
        let (before, moved) = session.delivered;
        // Its host may have lost its power since.
        let delivered = delivered.max(before);
        let grew = delivered > before && end.is_none_or(|end| before < *end);
        session.delivered = (delivered, if grew { now } else { moved });
        session.ends.retain(|epoch, _| *epoch >= oldest);
        let whole = session.ends.iter().take_while(|(_, end)| **end <= delivered).last();
        let whole = whole.map_or(Epoch(0), |(epoch, _)| *epoch);
        // Each is as much as counts.
        let done = session.ways.renewals + session.work;
        let output_due = waits.map(|since| since + longest);
        let behind = Behind { held_up: session.outbox.waits_since(), output_due };
        let headway = Headway { bytes: delivered << 20, whole, done, behind };
        self.primary_event(host, id, PrimaryEvent::Headway(headway));
    }

    /// Moves the data to a better path where it waits too long.
    fn look_for_better_path(&mut self, host: HostId, id: SessionId) {
        let told = self.clock_of_cores(host);
        let Some(session) = self.hosts[host.0].session(id) else { return };
        if let Some(epoch) = session.core.stuck(told).filter(|_| session.ways.are_several()) {
            self.path_event(host, id, PathEvent::Stuck(epoch));
        }
    }

    /// All of an epoch was sent.
    pub(crate) fn note_end(&mut self, host: HostId, id: SessionId, epoch: Epoch) {
        let Some(data) = self.hosts[host.0].session(id).map(|session| session.data) else { return };
        let end = self.sent(data);
        if let Some(session) = self.hosts[host.0].session(id) {
            session.ends.insert(epoch, end);
        }
    }

    /// Feeds the state machine and does what it says.
    pub(crate) fn primary_event(&mut self, host: HostId, id: SessionId, event: PrimaryEvent) {
        let now = self.now;
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let before = session.core.phase().clone();
        let (mut effects, policy) = (Vec::new(), self.schedule.policy);
        let by_its_clock = self.clock_of_cores(host);
        let Some(session) = self.hosts[host.0].session(id) else { return };
        if matches!(event, PrimaryEvent::Captured | PrimaryEvent::CapturedLast) {
            session.flying.push_back(now);
        }
        let lost = matches!(event, PrimaryEvent::Verdict(..));
        session.core.handle(by_its_clock, event, &mut effects);
        let after = session.core.phase().clone();
        let landed = session.flying.len().saturating_sub(session.core.in_flight() as usize);
        session.flying.drain(..landed);
        let useless =
            matches!(&after, PrimaryPhase::Contesting(reason) if reason.contains("is heard"));
        if useless && before != after {
            self.coverage.backups_useless += 1;
            self.check_useless(host, id);
        }
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let blocked = session.core.in_flight() >= policy.pipeline();
        session.outbox.epoch_room.set_blocked(blocked);
        let generation = session.core.generation();
        if let Some(running) = self.hosts[host.0].running() {
            running.generation = generation;
        }
        for effect in effects {
            match effect {
                Effect::Act(action) => self.primary_acts(host, id, action),
                Effect::GiveUp(_) => self.gives_up(host, id),
                Effect::HeldBack(obstacle) => {
                    self.coverage.sick_held_back += 1;
                    self.note(host, || format!("keeps a sick guest: {obstacle}"));
                }
                Effect::BackupUnfit(_) => self.coverage.backups_unfit += 1,
                Effect::BackupFit => {}
                Effect::BackupSick { reason, times } => {
                    if let Some(session) = self.hosts[host.0].session(id) {
                        let event = RepairEvent::Sick { host: session.peer.name(), reason, times };
                        self.repair_event(host, event);
                    }
                }
            }
        }
        if before != after {
            self.note(host, || format!("primary: {after:?}"));
            self.check_unprovoked(&after);
            self.primary_turned(&before, &after);
            self.check_sick_winner(host, &before, &after);
            if lost && matches!(after, PrimaryPhase::Halted(_)) {
                self.check_sacrifice(host);
            }
        }
        self.look_at_turn(host, id);
        self.writers_go_on(host, id);
        self.consider_checkpoint(host, id);
    }

    fn primary_acts(&mut self, host: HostId, id: SessionId, action: PrimaryAction) {
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let (generation, elsewhere) = (session.core.generation(), session.core.is_elsewhere());
        let signal = |kind| Message::new(kind, Epoch(0), Vec::new());
        match action {
            PrimaryAction::Release(epoch) => {
                if matches!(session.core.phase(), PrimaryPhase::Contesting(_)) {
                    self.coverage.released_while_contesting += 1;
                }
                let Some(running) = self.hosts[host.0].running() else { return };
                let frames = running.port.release_through(epoch);
                self.coverage.commits += 1;
                let count = frames.len();
                self.note_routine(host, || format!("releases epoch {epoch}: {count} frames"));
                self.let_out(host, frames);
            }
            PrimaryAction::Permit(_) => unreachable!("only where output is not held"),
            PrimaryAction::OpenOutput => {
                self.open_output(host);
                self.note_generation(host);
            }
            PrimaryAction::Contest(from) => {
                self.check_spare_path(host, id);
                let word = self.ask_winner(host, id);
                self.ask_arbiter(host, id, (from, None), word);
                self.moment(Moment::PrimaryContests);
            }
            PrimaryAction::YieldToBackup => {
                self.note_hand_over(host, id);
                self.put_now(host, id, signal(Kind::TakeOver), 0);
            }
            PrimaryAction::StandDown => self.put_now(host, id, signal(Kind::StandDown), 0),
            PrimaryAction::ClosePeer => self.hang_up(host, id),
            PrimaryAction::Freeze => {
                self.coverage.frozen += 1;
                self.stop_guest(host);
            }
            PrimaryAction::Halt(_) => {
                self.flush_outbox(host, id);
                self.hang_up(host, id);
                if let Some(running) = self.hosts[host.0].running() {
                    running.port.shut();
                }
                self.hosts[host.0].role = Role::Fenced;
                let role = if elsewhere { ImageRole::Stale } else { ImageRole::Cut };
                self.set_record(host, role, generation);
            }
        }
    }

    fn hang_up(&mut self, host: HostId, id: SessionId) {
        let Some(session) = self.hosts[host.0].session(id) else { return };
        for connection in session.connections() {
            self.close(host, connection);
        }
        self.close_outbox(host, id);
    }

    /// A sick guest is left to its backup, which could go on with it by the last that is known.
    fn gives_up(&mut self, host: HostId, id: SessionId) {
        self.coverage.guest_hangs += 1;
        let Some(session) = self.hosts[host.0].session(id) else { return };
        session.hung = true;
        if let Some(obstacle) = session.word.0.clone() {
            self.violation(format!("{host} leaves its guest to a backup that says: {obstacle}"));
        }
    }

    /// Notes that from here on the backup is to go on exactly where the guest stands.
    fn note_hand_over(&mut self, host: HostId, id: SessionId) {
        let Some(running) = self.hosts[host.0].running() else { return };
        let planned = running.session.as_ref().filter(|session| !session.hung);
        let phase = planned.map(|session| session.core.phase());
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
        // A sole owner that slept may end its session without having heard that it lost the VM: its
        // record says what it said.
        let owns = (self.arbiter.owner, self.arbiter.generation) == (host, generation);
        if self.random.percent(70) && owns {
            self.set_record(host, ImageRole::Active, generation);
        }
    }

    fn open_output(&mut self, host: HostId) {
        let Some(running) = self.hosts[host.0].running() else { return };
        let session = running.session.take();
        let frames: Vec<Frame> = running.port.open();
        let stands_still = running.paused;
        self.let_out(host, frames);
        if stands_still {
            self.resume_guest(host);
        }
        // One that ended as its operator wanted is no loss.
        let lost = session.filter(|session| *session.core.phase() != PrimaryPhase::Alone(None));
        if let Some(session) = lost {
            self.session_lost(host, session.id);
        }
    }
}
