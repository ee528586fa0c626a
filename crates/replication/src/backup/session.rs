//! One VM's protection, seen from the backup: the state machine, what it says is done, and what
//! the session's threads share.

use super::activation::Readiness;
use super::control::Ask;
use super::errands::Errand;
use super::group::Group;
use super::group::lock_core;
use super::inbound::Inbound;
use super::outbound::Outbound;
use super::parting::Parting;
use super::takeover::{self, Stage};
use super::turn::{Launch, Orders};
use super::vitals::Vitals;
use crate::clock;
use crate::heartbeat::{Heartbeats, Pulse};
use crate::lockstep::backup::Following;
use crate::lockstep::evidence;
use crate::medium::Medium;
use crate::membership::Membership;
use crate::messages::{ToPrimary, WholeEpoch};
use crate::moments::strike;
use crate::paths::PathMonitor;
use crate::records::Records;
use crate::sync::ByteBudget;
use crossbeam_channel::Sender;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tracing::{error, info, warn};
use understudy_arbiter::Arbiter;
use understudy_cluster::kept::Keeper;
use understudy_disk::Disk;
use understudy_link::channel::Channel;
use understudy_machine::Machine;
use understudy_machine::doorbell::Doorbell;
use understudy_protocol::HostName;
use understudy_protocol::VmName;
use understudy_protocol::{
    Backup, BackupAction, BackupEvent, BackupPhase, Epoch, Generation, Output, Ownership,
};
use understudy_report::{Mode, ProtectRequest};
use understudy_threads::{Mutex, lock};

/// Bytes of whole epochs that may wait to be applied; over it the primary is
/// slowed by the connection's flow control.
pub(super) const WAITING_BYTES: u64 = 32 << 20;

/// The state shared by a session's threads.
pub struct Session {
    /// The VM's name.
    pub vm: VmName,
    /// Names the session; the heartbeat connection asks for it.
    pub id: String,
    /// The primary's host name.
    pub primary: HostName,
    /// Its log, in lockstep.
    pub(super) following: Mutex<Option<Arc<Following>>>,
    /// The standby on this host: another machine after a turn.
    pub(super) machine: Mutex<Arc<Machine>>,
    /// What the primary asked for beside it.
    pub(super) orders: Mutex<Orders>,
    /// A medium that the primary is about to put in.
    pub(super) medium: Mutex<Option<(Medium, Arc<Disk>)>>,
    /// Turns that are committed and not carried out.
    pub(super) turns: AtomicU64,
    pub(super) launch: Launch,
    pub(super) former: Arc<dyn Fn() -> Option<Ownership> + Send + Sync>,
    /// Why this host could not take over, as it last found.
    pub(super) obstacle: Mutex<Option<String>>,
    /// What the operator asked for; this host does the same after a take-over.
    pub(super) wish: Mutex<Option<ProtectRequest>>,
    /// The paths to the primary.
    pub paths: PathMonitor,
    /// What the primary's guest receives, for a take-over.
    pub inbound: Inbound,
    /// What the guest sent that the primary may not have released.
    pub outbound: Outbound,
    pub(super) data: Arc<Channel>,
    pub(super) heartbeats: Heartbeats,
    pub(super) arbiter: Arbiter,
    pub(super) records: Records,
    /// The VM's directory.
    pub(super) directory: PathBuf,
    /// What is ready for a take-over, once there is something to take over with.
    pub(super) readiness: Mutex<Option<Readiness>>,
    /// The last epoch that the mirrors hold.
    pub(super) applied: AtomicU64,
    /// The VMs that are protected with this one, and its place among them.
    pub(super) group: Arc<Group>,
    pub(super) place: usize,
    /// The group's.
    pub(super) core: Arc<Mutex<Backup>>,
    pub(super) errands: Sender<Errand>,
    pub(super) contests: Sender<Ask>,
    pub(super) waiting: ByteBudget,
    /// Keeper of the image for snapshots of the VM.
    pub(super) keeper: Arc<Keeper>,
    pub(super) received: AtomicU64,
    /// The primary hands the VM over as its operator wants.
    pub(super) planned: AtomicBool,
    /// Bytes that were applied.
    pub(super) worked: AtomicU64,
    /// Whether it could be started now.
    pub(super) vitals: Vitals,
    /// The apply thread has ended: the VM runs here, or is forgotten.
    pub(super) ended: AtomicBool,
    /// QEMU does not follow the log any more.
    pub(super) diverged: AtomicBool,
    pub(super) parting: Parting,
    /// Clock of the take-over, if it comes to one.
    pub(super) clock: takeover::Clock,
    pub(super) changed: Doorbell,
}

impl Session {
    /// The standby.
    pub fn machine(&self) -> Arc<Machine> {
        lock(&self.machine).clone()
    }

    /// Its log, in lockstep.
    pub fn following(&self) -> Option<Arc<Following>> {
        lock(&self.following).clone()
    }

    /// How this host keeps up with the primary.
    pub fn mode(&self) -> Mode {
        match self.following() {
            Some(_) => Mode::Lockstep,
            None => Mode::Checkpoint,
        }
    }

    /// Where the session stands.
    pub fn phase(&self) -> BackupPhase {
        lock_core(&self.core).phase().clone()
    }

    /// The rule for what the guest sends.
    pub fn output(&self) -> Output {
        lock_core(&self.core).output()
    }

    /// Generation and last committed epoch.
    pub fn position(&self) -> (Generation, Epoch) {
        let core = lock_core(&self.core);
        (self.group.generation(self, core.generation()), core.committed())
    }

    /// The last epoch that the mirrors hold.
    pub(super) fn applied(&self) -> Epoch {
        Epoch(self.applied.load(Ordering::Acquire))
    }

    /// Membership of the group that this VM is protected in.
    pub fn membership(&self) -> &Membership {
        &self.group.membership
    }

    /// Bytes received from the primary.
    pub fn bytes_received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Feeds the group's state machine and does what it says. `parts` are those of
    /// the epoch that a [`BackupEvent::Staged`] speaks of, one for each member.
    pub fn event(&self, event: BackupEvent, parts: Option<Vec<WholeEpoch>>) {
        let mut actions = Vec::new();
        let mut core = lock_core(&self.core);
        core.handle(clock::now(), event, &mut actions);
        let mut parts = parts.into_iter().flatten();
        for action in &actions {
            self.group.each(|member| member.perform(action, &mut parts));
        }
        self.group.each(|member| member.changed.ring());
    }

    /// Under the core's lock: an acknowledgement leaves before a contest that
    /// comes after it in the order of events. The channels' other ends live as
    /// long as the session, so sending to them does not fail. Every member does the
    /// same, but for what the leader says for all.
    fn perform(&self, action: &BackupAction, parts: &mut impl Iterator<Item = WholeEpoch>) {
        let leads = self.place == 0;
        match action {
            &BackupAction::AcknowledgeAndApply(epoch) => {
                strike("acknowledge", &self.vm);
                // A batch of log was taken in before.
                if let Some(mut part) = parts.next() {
                    self.inbound.commit(epoch);
                    self.outbound.commit(&mut part);
                    let other = self.turn_of(&part);
                    let _ = self.errands.send(Errand::Apply(part, other));
                }
                if leads {
                    self.say(&ToPrimary::Acknowledge(epoch));
                }
            }
            &BackupAction::Contest(from) => {
                self.clock.reach(Stage::Suspected);
                if let Some(following) = self.following() {
                    following.note_failure();
                }
                for port in self.machine().ports() {
                    port.discard_inbound();
                }
                // While the arbiter is asked: the images must be on stable storage before
                // the guest runs on them.
                let _ = self.errands.send(Errand::Settle);
                if leads {
                    let _ = self.contests.send(Ask::Win(from));
                }
            }
            &BackupAction::HandBack(from) => {
                if leads {
                    let _ = self.contests.send(Ask::HandBack(from));
                }
            }
            BackupAction::ClosePeer => self.close_connections(),
            BackupAction::GoLive { generation, epoch, reason } => {
                self.clock.reach(Stage::Granted);
                self.end_log();
                info!(vm = %self.vm, "taking over at epoch {epoch}: {reason}");
                let generation = self.group.generation(self, *generation);
                let reason = reason.clone();
                let _ = self.errands.send(Errand::GoLive { generation, reason });
            }
            BackupAction::Discard(reason) => {
                info!(vm = %self.vm, "forgetting the VM: {reason}");
                self.end_log();
                self.parting.tell();
                let reason = reason.clone();
                self.say(&match self.diverged.load(Ordering::Acquire) {
                    true => ToPrimary::Diverged(reason),
                    false => ToPrimary::Refuse(reason),
                });
                let _ = self.errands.send(Errand::Discard);
            }
            BackupAction::StandDown => {
                info!(vm = %self.vm, "standing down: the primary ended protection");
                self.end_log();
                let _ = self.errands.send(Errand::Discard);
            }
        }
    }

    /// Tells the primary. If it cannot be sent the reading thread finds out why.
    pub fn say(&self, message: &ToPrimary) {
        let _ = message.send(&self.data);
    }

    /// This backup cannot serve any more: says so to the primary and ends.
    pub fn give_up(&self, reason: &str) {
        warn!(vm = %self.vm, "this backup gives up: {reason}");
        self.event(BackupEvent::CannotServe(reason.to_owned()), None);
    }

    /// Lockstep: QEMU does not follow the log any more. What it did last is kept.
    pub fn diverged(&self, reason: &str) {
        // What it wrote nobody knows: its mirrors are no base for another synchronisation.
        if let Err(error) = self.records.change(&self.vm, |record| record.sessions.clear()) {
            error!(vm = %self.vm, "{error}");
        }
        let kept = self
            .following()
            .map(|following| evidence::keep(&self.directory, &self.machine(), &following, reason));
        let reason = match kept {
            Some(Ok(place)) => format!("{reason}; see {} on this backup", place.display()),
            Some(Err(error)) => format!("{reason}; nothing was kept of it: {error:#}"),
            None => reason.to_owned(),
        };
        // Told when this host has given up, never before: the primary hangs up then, and this
        // host must not contest the VM for that.
        self.diverged.store(true, Ordering::Release);
        self.give_up(&reason);
    }

    /// This standby's QEMU ended, which a log that makes no sense to it may be the cause of.
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
        self.group.each(|member| member.machine().halt());
        self.give_up(reason);
        if !self.core.is_poisoned() {
            return;
        }
        // The state machine is at its end and says nothing any more.
        self.group.each(|member| {
            member.parting.tell();
            member.say(&ToPrimary::Refuse(reason.to_owned()));
            let _ = member.errands.send(Errand::Discard);
        });
    }

    /// Ends the group's connections, whoever else was to do so.
    pub fn hang_up_after_panic(&self) {
        self.group.each(|member| {
            member.end_log();
            member.close_connections();
            member.waiting.close();
        });
    }

    /// Whether both are backed up as one.
    pub fn is_fellow(&self, other: &Session) -> bool {
        Arc::ptr_eq(&self.group, &other.group)
    }

    /// Nothing more comes of the log, if there is one.
    fn end_log(&self) {
        if let Some(following) = self.following() {
            following.end();
        }
    }

    pub(super) fn close_connections(&self) {
        self.parting.closed();
        self.data.close();
        self.heartbeats.close();
        self.inbound.close();
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
        self.event(BackupEvent::Heard, None);
    }
    fn lost(&self, reason: String) {
        self.event(BackupEvent::PeerGone(reason), None);
    }
    fn tick(&self) {
        if self.place == 0 {
            self.look_at_vitals();
        }
        self.event(BackupEvent::Tick, None);
    }
    fn is_over(&self) -> bool {
        matches!(self.phase(), BackupPhase::Live | BackupPhase::Discarded)
    }
    fn may_hang_up(&self) -> bool {
        // In this order: who sees the session over sees whether the primary was told, too.
        let untold = self.core.is_poisoned() && !self.parting.is_closed();
        // Whether the guest starts here the primary is to hear first, which keeps its own.
        let starts = self.phase() == BackupPhase::Live && !self.ended.load(Ordering::Acquire);
        self.is_over() && !starts && !untold && self.parting.may_hang_up()
    }
}
