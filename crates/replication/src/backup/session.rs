//! One VM's protection, seen from the backup: the state machine, what it says is done, and what
//! the session's threads share.

use super::control::Ask;
use super::errands::Committed;
use super::failure::OwnFailure;
use super::frames::Frames;
use super::group::{Begun, Group};
use super::takeover::{self, Stage};
use super::turn::{Launch, Orders};
use super::vitals::Vitals;
use crate::clock;
use crate::heartbeat::{Heartbeats, Pulse};
use crate::lockstep::backup::Following;
use crate::lockstep::evidence;
use crate::membership::Membership;
use crate::messages::{ToPrimary, WholeEpoch};
use crate::moments::strike;
use crate::paths::PathMonitor;
use crate::records::Records;
use crate::sessions::SessionName;
use crate::sync::ByteBudget;
use crossbeam_channel::{Receiver, Sender};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tracing::{error, info, warn};
use understudy_arbiter::Arbiter;
use understudy_cluster::kept::{Keeper, KeptJob};
use understudy_disk::Rounds;
use understudy_link::channel::Channel;
use understudy_machine::Machine;
use understudy_protocol::HostName;
use understudy_protocol::VmName;
use understudy_protocol::wire::WireVersion;
use understudy_protocol::{BackupPhase, Epoch, Generation, Output, Ownership};
use understudy_report::{Mode, ProtectRequest};
use understudy_session::backup::{Effect, Errand, Event, Word};
use understudy_threads::{Mutex, lock};

/// The place of the member that speaks for the group where one word is enough.
const LEADER: usize = 0;

/// Bytes of whole epochs that may wait to be applied; over it the primary is
/// slowed by the connection's flow control.
pub(super) const WAITING_BYTES: u64 = 32 << 20;

/// The state shared by a session's threads.
pub struct Session {
    /// The VM's name.
    pub vm: VmName,
    /// Names the session; the heartbeat connection asks for it.
    pub id: SessionName,
    /// The primary's host name.
    pub primary: HostName,
    /// The wire version that is spoken with it.
    pub(super) version: WireVersion,
    pub(super) present: Mutex<Present>,
    /// The rounds in which the guest's changes here are forgotten in lockstep.
    pub(super) rounds: Rounds,
    pub(super) launch: Launch,
    pub(super) former: Arc<dyn Fn() -> Option<Ownership> + Send + Sync>,
    /// The paths to the primary.
    pub paths: PathMonitor,
    pub(super) data: Arc<Channel>,
    pub(super) heartbeats: Heartbeats,
    pub(super) arbiter: Arbiter,
    pub(super) records: Records,
    /// The VM's directory.
    pub(super) directory: PathBuf,
    /// The VMs that are protected with this one, and its place among them.
    pub(super) group: Arc<Group>,
    pub(super) place: usize,
    /// Its parts of epochs that are whole and not committed.
    pub(super) staged: (Sender<WholeEpoch>, Receiver<WholeEpoch>),
    pub(super) commits: Sender<Committed>,
    pub(super) errands: Sender<Errand>,
    pub(super) contests: Sender<Ask>,
    pub(super) waiting: ByteBudget,
    /// Keeper of images for snapshots of the VM.
    pub(super) keeper: Keeper,
    pub(super) received: AtomicU64,
    /// Bytes that were applied, and words that QEMU is waited for in lockstep.
    pub(super) worked: AtomicU64,
    /// A mirror does not hold what the primary's image does.
    pub(super) mirrors_failed: AtomicBool,
    /// Whether it could be started now.
    pub(super) vitals: Vitals,
    /// Clock of the take-over, if it comes to one.
    pub(super) clock: takeover::Clock,
}

/// The standby on this host, and how it keeps up with the primary.
pub(super) struct Present {
    /// Another one after a turn.
    pub machine: Arc<Machine>,
    /// Its log, in lockstep.
    pub following: Option<Arc<Following>>,
    /// Request of the operator; this host does the same after a take-over.
    pub wish: Option<ProtectRequest>,
    /// Orders of the primary beside it.
    pub orders: Orders,
    /// The frames that the primary's guest receives, and those it sent that the primary may not
    /// have released, for a take-over.
    pub frames: Frames,
    /// The image that is kept for a snapshot; one that has ended goes with the next epoch.
    pub kept: Option<Arc<KeptJob>>,
}

impl Session {
    /// The standby.
    pub fn machine(&self) -> Arc<Machine> {
        lock(&self.present).machine.clone()
    }

    /// Its log, in lockstep.
    pub fn following(&self) -> Option<Arc<Following>> {
        lock(&self.present).following.clone()
    }

    /// The mode in which this host keeps up with the primary.
    pub fn mode(&self) -> Mode {
        match self.following() {
            Some(_) => Mode::Lockstep,
            None => Mode::Checkpoint,
        }
    }

    /// The phase in which the session is.
    pub fn phase(&self) -> BackupPhase {
        self.group.core().standby.phase().clone()
    }

    /// The rule for what the guest sends.
    pub fn output(&self) -> Output {
        self.group.core().standby.output()
    }

    /// Generation and last committed epoch.
    pub fn position(&self) -> (Generation, Epoch) {
        let standby = &self.group.core().standby;
        (self.group.generation(self, standby.generation()), standby.committed())
    }

    /// The last epoch that the mirrors hold.
    pub(super) fn applied(&self) -> Epoch {
        self.group.core().standby.applied(self.place)
    }

    /// Membership of the group that this VM is protected in.
    pub fn membership(&self) -> &Membership {
        &self.group.membership
    }

    /// Bytes received from the primary.
    pub fn bytes_received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Whether the VM runs here, or is forgotten, and nothing is left to be done for that.
    pub(super) fn has_ended(&self) -> bool {
        self.group.core().standby.has_ended(self.place)
    }

    /// A part of an epoch is whole.
    pub(super) fn stage(&self, part: WholeEpoch) {
        let epoch = part.epoch;
        // Its other end lives as long.
        let _ = self.staged.0.send(part);
        self.event(Event::Staged(self.place, epoch));
    }

    /// Tells the group what happened, and does what comes of it. Under the lock: an
    /// acknowledgement leaves before a contest that comes after it in the order of events.
    pub fn event(&self, event: Event) {
        let mut effects = Vec::new();
        // Dropped when the lock is free again.
        let begun;
        let mut core = self.group.core();
        core.standby.handle(clock::now(), event, &mut effects);
        if !effects.is_empty() {
            begun = core.begun();
            effects.into_iter().for_each(|effect| self.perform(effect, &begun));
        }
    }

    /// The channels' other ends live as long as the session, so sending to them does not fail.
    /// What the leader says is said for all.
    fn perform(&self, effect: Effect, begun: &Begun) {
        match effect {
            Effect::Commit(place, _) => begun.at(place, Session::commit),
            Effect::Acknowledge(epoch) => {
                strike("acknowledge", &self.vm);
                begun.at(LEADER, |leader| leader.say(&ToPrimary::Acknowledge(epoch)));
            }
            Effect::Suspect => begun.each(Session::suspect),
            Effect::Contest(from) => begun.at(LEADER, |leader| leader.ask(Ask::Win(from))),
            Effect::HandBack(from) => {
                begun.at(LEADER, |leader| leader.ask(Ask::HandBack(from)));
            }
            Effect::Granted { epoch, reason, .. } => begun.each(|member| {
                member.clock.reach(Stage::Granted);
                info!(vm = %member.vm, "taking over at epoch {epoch}: {reason}");
            }),
            Effect::EndLog => begun.each(Session::end_log),
            Effect::GiveUp(reason) => warn!(vm = %self.vm, "this backup gives up: {reason}"),
            Effect::Leave(reason) => begun.each(|member| match &reason {
                Some(reason) => info!(vm = %member.vm, "forgetting the VM: {reason}"),
                None => info!(vm = %member.vm, "standing down: the primary ended protection"),
            }),
            Effect::Do(place, errand) => begun.at(place, |member| {
                let _ = member.errands.send(errand);
            }),
            Effect::Say(place, word) => {
                begun.at(place, |member| member.say(&member.worded(word)));
            }
            Effect::Close(place) => begun.at(place, Session::close_connections),
            Effect::TellObstacle(obstacle) => {
                begun.at(LEADER, |leader| leader.say(&ToPrimary::MayTakeOver(obstacle)));
            }
            Effect::NoteObstacle(Some(reason)) => {
                warn!(vm = %self.vm, "could not take over now: {reason}");
            }
            Effect::NoteObstacle(None) => info!(vm = %self.vm, "could take over again"),
        }
    }

    /// The epoch is committed: what its part is worth for a take-over is kept.
    fn commit(&self) {
        let Ok(mut part) = self.staged.1.try_recv() else { return };
        let outbound = std::mem::take(&mut part.outbound);
        self.frames(|frames| frames.commit(part.epoch, &outbound));
        let other = part.turn.and_then(|turn| self.commit_turn(turn));
        let _ = self.commits.send(Committed { part, other });
    }

    fn ask(&self, question: Ask) {
        let _ = self.contests.send(question);
    }

    fn suspect(&self) {
        self.clock.reach(Stage::Suspected);
        if let Some(following) = self.following() {
            following.note_failure();
        }
        for port in self.machine().ports() {
            port.discard_inbound();
        }
    }

    fn worded(&self, word: Word) -> ToPrimary {
        match word {
            Word::Refuse(reason) => self.refusal(reason),
            Word::Diverged(reason) => ToPrimary::Diverged(reason),
            Word::StoodDown => ToPrimary::StoodDown,
            Word::Live(leaders) => ToPrimary::Live(self.group.generation(self, leaders)),
        }
    }

    pub(super) fn refusal(&self, reason: String) -> ToPrimary {
        let mirrors_failed = self.mirrors_failed.load(Ordering::Acquire);
        ToPrimary::refusal(reason, mirrors_failed, self.version)
    }

    /// Tells the primary. If it cannot be sent the reading thread finds out why.
    pub fn say(&self, message: &ToPrimary) {
        let _ = message.send(&self.data);
    }

    /// Gives up, as this backup cannot serve any more: says so to the primary and ends.
    pub fn give_up(&self, reason: &str) {
        self.event(Event::CannotServe(reason.to_owned()));
    }

    /// Heeds a failure of this host's own.
    pub(super) fn heed(&self, failure: &OwnFailure) {
        match failure {
            OwnFailure::Mirror(_) => self.distrust_mirrors(),
            OwnFailure::Turn(_) | OwnFailure::Other(_) => {}
        }
    }

    /// Distrusts the mirrors, of which nobody knows what they hold: they are no base for another
    /// synchronisation. The primary is told, too, and notes it: this host may be unable to.
    fn distrust_mirrors(&self) {
        self.mirrors_failed.store(true, Ordering::Release);
        fail::fail_point!("distrust", |_| ());
        if let Err(error) = self.records.change(&self.vm, |record| record.sessions.clear()) {
            error!(vm = %self.vm, "{error}");
        }
    }

    /// Lockstep: QEMU does not follow the log any more. What it did last is kept.
    pub fn diverged(&self, reason: &str) {
        // What follows waits for a disk, and meanwhile it could win the VM.
        self.event(Event::Doomed);
        self.distrust_mirrors();
        let reason = self.with_evidence(self.following().as_deref(), reason);
        // Told when this host has given up, never before: the primary hangs up then, and this
        // host must not contest the VM for that.
        self.event(Event::Diverged(reason));
    }

    /// Keeps the evidence of a divergence for this reason, and says where.
    pub(super) fn with_evidence(&self, following: Option<&Following>, reason: &str) -> String {
        let keep = |log| evidence::keep(&self.directory, &self.machine(), log, reason);
        match following.map(keep) {
            Some(Ok(place)) => format!("{reason}; see {} on this backup", place.display()),
            Some(Err(error)) => format!("{reason}; nothing was kept of it: {error:#}"),
            None => reason.to_owned(),
        }
    }

    /// Notes that this standby's QEMU ended, which a log that makes no sense to it may be the cause
    /// of.
    pub fn qemu_died(&self, words: &str) {
        match self.following() {
            Some(following) if following.has_begun() => {
                self.diverged(&format!("the backup does not follow the log: {words}"));
            }
            _ => self.give_up(words),
        }
    }

    /// Ends the group's copies here after a panic in one of their threads. The primary hears why,
    /// if somebody is left to tell it.
    pub fn end_after_panic(&self, reason: &str) {
        // Whoever holds what decides: that may wait for a connection.
        self.machine().halt();
        self.group.each(|member| member.machine().halt());
        self.event(Event::Panicked(reason.to_owned()));
    }

    /// Ends the group's connections, whoever else was to do so.
    pub fn hang_up_after_panic(&self) {
        self.event(Event::Abandoned);
        self.group.each(|member| member.waiting.close());
    }

    /// Whether both are backed up as one.
    pub fn is_fellow(&self, other: &Session) -> bool {
        Arc::ptr_eq(&self.group, &other.group)
    }

    /// Ends the log, if there is one, of which no more comes.
    fn end_log(&self) {
        if let Some(following) = self.following() {
            following.end();
        }
    }

    pub(super) fn close_connections(&self) {
        self.data.close();
        self.heartbeats.close();
        if let Some(link) = self.frames(Frames::close) {
            link.close();
        }
    }
}

impl Pulse for Session {
    fn paths(&self) -> &PathMonitor {
        &self.paths
    }
    fn heartbeats(&self) -> &Heartbeats {
        &self.heartbeats
    }
    // The primary dials.
    fn leave_path(&self) {}
    fn heard(&self) {
        self.event(Event::Heard);
    }
    fn lost(&self, reason: String) {
        self.event(Event::PeerLost(reason));
    }
    fn tick(&self) {
        if self.place == LEADER {
            self.look_at_vitals();
        }
        self.event(Event::Tick);
    }
    fn is_over(&self) -> bool {
        self.group.core().standby.is_over()
    }
    fn may_hang_up(&self) -> bool {
        self.group.core().standby.may_hang_up(self.place)
    }
}
