//! One VM's protection, seen from the backup: the state machine and the threads
//! that feed it.

use super::apply::{apply, apply_epoch, validate};
use super::group::Group;
use super::inbound::Inbound;
use super::outbound::Outbound;
use super::takeover::{self, Stage};
use crate::arbiter::Arbiter;
use crate::channel::Channel;
use crate::clock;
use crate::doorbell::Doorbell;
use crate::group::Membership;
use crate::heartbeat::{Heartbeats, Pulse};
use crate::lockstep::backup::{self as lockstep, Following};
use crate::lockstep::be_urgent;
use crate::lockstep::evidence;
use crate::lockstep::primary::MACHINE;
use crate::machine::Machine;
use crate::paths::PathMonitor;
use crate::records::{Activation, Record, Records};
use crate::report::{Mode, TakeoverReport};
use crate::resync;
use crate::sync::{ByteBudget, lock};
use anyhow::{Context, ensure};
use crossbeam_channel::{Receiver, Sender};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tracing::{error, info, warn};
use understudy_disk::{ChangeMap, Mirror};
use understudy_lockstep::Written;
use understudy_protocol::validity::ImageRole;
use understudy_protocol::wire::{Kind, LogProgress, Message};
use understudy_protocol::{
    Backup, BackupAction, BackupEvent, BackupPhase, Epoch, Generation, Output, StagedEpoch, Staging,
};

/// Bytes of whole epochs that may wait to be applied; over it the primary is
/// slowed by the connection's flow control.
pub(super) const WAITING_BYTES: u64 = 32 << 20;

/// The state shared by a session's threads.
pub struct Session {
    /// The VM's name.
    pub vm: String,
    /// Names the session; the heartbeat connection asks for it.
    pub id: String,
    /// The primary's host name.
    pub primary: String,
    /// How this host keeps up with it.
    pub mode: Mode,
    /// Its log, in lockstep.
    pub following: Option<Following>,
    /// The standby on this host.
    pub machine: Arc<Machine>,
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
    pub(super) contests: Sender<Generation>,
    pub(super) waiting: ByteBudget,
    pub(super) received: AtomicU64,
    /// QEMU does not follow the log any more.
    pub(super) diverged: AtomicBool,
    /// Of the take-over, if it comes to one.
    pub(super) clock: takeover::Clock,
    pub(super) changed: Doorbell,
}

/// What is made before a take-over, so that it costs no time then.
pub struct Readiness {
    /// Where the guest's changes will be noted, for each disk.
    changes: Vec<Arc<ChangeMap>>,
    activation: Activation,
}

/// What the apply thread does, in order.
#[derive(Debug)]
pub enum Errand {
    /// Apply a committed epoch.
    Apply(StagedEpoch),
    /// Bring what was applied to stable storage.
    Settle,
    /// Start the guest.
    GoLive {
        /// The generation won.
        generation: Generation,
        /// Why, for people.
        reason: String,
    },
    /// Forget the VM.
    Discard,
}

/// How a session ended.
#[derive(Debug)]
pub enum Outcome {
    /// The VM runs here now.
    Live {
        /// The generation of ownership.
        generation: Generation,
        /// Why, for people.
        reason: String,
        /// How long it took.
        takeover: TakeoverReport,
    },
    /// The VM owns nothing here any more.
    Discarded,
    /// This host owns the VM and could not start it.
    Failed {
        /// The generation of ownership.
        generation: Generation,
        /// What went wrong.
        reason: String,
    },
}

impl Session {
    /// Where the session stands.
    pub fn phase(&self) -> BackupPhase {
        lock(&self.core).phase().clone()
    }

    /// The rule for what the guest sends.
    pub fn output(&self) -> Output {
        lock(&self.core).output()
    }

    /// Generation and last committed epoch.
    pub fn position(&self) -> (Generation, Epoch) {
        let core = lock(&self.core);
        (self.group.generation(self, core.generation()), core.committed())
    }

    /// Who this VM is protected with.
    pub fn membership(&self) -> &Membership {
        &self.group.membership
    }

    /// Bytes received from the primary.
    pub fn bytes_received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Feeds the group's state machine and does what it says. `parts` are those of
    /// the epoch that a [`BackupEvent::Staged`] speaks of, one for each member.
    pub fn event(&self, event: BackupEvent, parts: Option<Vec<StagedEpoch>>) {
        let mut actions = Vec::new();
        let mut core = lock(&self.core);
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
    fn perform(&self, action: &BackupAction, parts: &mut impl Iterator<Item = StagedEpoch>) {
        let leads = self.place == 0;
        match action {
            &BackupAction::AcknowledgeAndApply(epoch)
                if self.following.is_some() && epoch > MACHINE =>
            {
                // A batch of log, which was taken in before.
                let _ = self.data.send_signal(Kind::Acknowledge, epoch);
            }
            &BackupAction::AcknowledgeAndApply(epoch) => {
                let mut part = parts.next().expect("the event came with every member's part");
                self.inbound.commit(epoch);
                self.outbound.commit(&mut part);
                let _ = self.errands.send(Errand::Apply(part));
                if leads {
                    // If it cannot be sent the reading thread finds out why.
                    let _ = self.data.send_signal(Kind::Acknowledge, epoch);
                }
            }
            &BackupAction::Contest(from) => {
                self.clock.reach(Stage::Suspected);
                if let Some(following) = &self.following {
                    following.note_failure();
                }
                for port in self.machine.ports() {
                    port.discard_inbound();
                }
                // While the arbiter is asked: the images must be on stable storage before
                // the guest runs on them.
                let _ = self.errands.send(Errand::Settle);
                if leads {
                    let _ = self.contests.send(from);
                }
            }
            BackupAction::ClosePeer => self.close_connections(),
            BackupAction::GoLive { generation, epoch, reason } => {
                self.clock.reach(Stage::Granted);
                self.end_log();
                info!(vm = self.vm, "taking over at epoch {epoch}: {reason}");
                let generation = self.group.generation(self, *generation);
                let reason = reason.clone();
                let _ = self.errands.send(Errand::GoLive { generation, reason });
            }
            BackupAction::Discard(reason) => {
                info!(vm = self.vm, "forgetting the VM: {reason}");
                self.end_log();
                if self.diverged.load(Ordering::Acquire) {
                    // If it cannot be sent the reading thread finds out why.
                    let _ = self.data.send_parts(Kind::Diverged, Epoch(0), &[reason.as_bytes()]);
                } else {
                    self.data.refuse(reason);
                }
                let _ = self.errands.send(Errand::Discard);
            }
            BackupAction::StandDown => {
                info!(vm = self.vm, "standing down: the primary ended protection");
                self.end_log();
                let _ = self.errands.send(Errand::Discard);
            }
        }
    }

    /// This backup cannot serve any more: says so to the primary and ends.
    pub fn give_up(&self, reason: &str) {
        warn!(vm = self.vm, "this backup gives up: {reason}");
        self.event(BackupEvent::CannotServe(reason.to_owned()), None);
    }

    /// Lockstep: QEMU does not follow the log any more. What it did last is kept.
    pub(crate) fn diverged(&self, reason: &str) {
        // What it wrote nobody knows: its mirrors are no base for another synchronisation.
        if let Err(error) = self.records.change(&self.vm, |record| record.sessions.clear()) {
            error!(vm = self.vm, "{error}");
        }
        let following = self.following.as_ref();
        let kept = following
            .map(|following| evidence::keep(&self.directory, &self.machine, following, reason));
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
    pub(crate) fn qemu_died(&self, words: &str) {
        match &self.following {
            Some(following) if following.has_begun() => {
                self.diverged(&format!("the backup does not follow the log: {words}"));
            }
            _ => self.give_up(words),
        }
    }

    /// Receive, stage whole, acknowledge: until the connection ends.
    pub fn receive(&self) {
        let mut staging = Staging::new();
        let reason = loop {
            match self.receive_one(&mut staging) {
                Ok(()) => {}
                Err(error) => break format!("{error:#}"),
            }
        };
        self.data.refuse(&reason);
        self.data.close();
        self.event(BackupEvent::PeerGone(reason), None);
    }

    fn receive_one(&self, staging: &mut Staging) -> anyhow::Result<()> {
        let message = self.data.receive()?;
        self.received.fetch_add(message.payload.len() as u64, Ordering::Relaxed);
        match message.header.kind {
            Kind::TakeOver => self.event(BackupEvent::TakeOver, None),
            Kind::StandDown => self.event(BackupEvent::StandDown, None),
            Kind::Refuse => {
                anyhow::bail!("the primary gave up: {}", String::from_utf8_lossy(&message.payload))
            }
            Kind::Log => self.take_log(&message)?,
            Kind::Written => {
                let following = self.following.as_ref().context("counts came, but no log")?;
                following.writes().told(&message, self.machine.disks().len())?;
            }
            Kind::DiskReads => {
                let following = self.following.as_ref();
                following.context("reads came, but there is no log")?.reads().take(&message)?;
            }
            Kind::EpochEnd => self.stage(staging, message)?,
            _ => {
                validate(&self.machine, &message)?;
                // The first synchronisation: nothing to be kept whole yet.
                if message.header.epoch == Epoch(0) {
                    apply(&self.machine, message)?;
                } else {
                    self.stage(staging, message)?;
                }
            }
        }
        Ok(())
    }

    /// Lockstep: the batch is acknowledged, and executed when QEMU comes to it.
    fn take_log(&self, message: &Message) -> anyhow::Result<()> {
        let epoch = message.header.epoch;
        let following = self.following.as_ref().context("a log came, which was not agreed on")?;
        if epoch == MACHINE.next() {
            // Output waits for this thread from here on, and for nothing else.
            be_urgent();
        }
        if following.take(message)? {
            self.event(BackupEvent::Staged(epoch), None);
        }
        following.await_room();
        Ok(())
    }

    fn end_log(&self) {
        if let Some(following) = &self.following {
            following.end();
        }
    }

    fn stage(&self, staging: &mut Staging, message: Message) -> anyhow::Result<()> {
        ensure!(
            self.following.is_none() || message.header.epoch <= MACHINE,
            "{:?} came after the log had begun",
            message.header.kind
        );
        if let Some(epoch) = staging.take(message)? {
            // Before the apply thread has it, which gives its bytes back.
            self.waiting.force(epoch.bytes);
            self.group.staged(self, epoch);
            // Acknowledged whatever waits; the next one is read when there is room.
            self.waiting.take(0);
        }
        Ok(())
    }

    /// Applies epochs in order until the VM is live here or forgotten.
    pub fn apply_all(&self, errands: &Receiver<Errand>, mirrors: Vec<Mirror>) -> Outcome {
        let mut mirrors = Some(mirrors);
        let mut state = Err(anyhow::anyhow!("no epoch was applied"));
        for errand in errands {
            match errand {
                Errand::Apply(epoch) => {
                    let bytes = epoch.bytes;
                    // After one failure the copy is behind for good.
                    if state.is_ok() || mirrors.is_some() {
                        state = self.apply_one(epoch, &mut mirrors);
                        if let (Ok(machine), Some(following)) = (&state, &self.following) {
                            self.note_changes();
                            let begun = lockstep::begin(&self.machine, following, machine);
                            state = begun.and(state);
                        }
                    }
                    if let Err(error) = &state {
                        self.give_up(&format!("{error:#}"));
                    }
                    self.waiting.give_back(bytes);
                }
                Errand::Settle => {
                    if let Err(error) = self.settle() {
                        self.give_up(&format!("{error:#}"));
                    }
                }
                Errand::GoLive { generation, reason } => {
                    let ready = state.and_then(|state| {
                        if let Some(following) = &self.following {
                            lockstep::await_end(&self.machine, following)?;
                        }
                        self.clock.reach(Stage::Executed);
                        self.activate(generation)?;
                        Ok(state)
                    });
                    let result =
                        self.group.all_or_none(ready).and_then(|state| self.go_live(&state));
                    self.close(Some(generation));
                    return match result {
                        Ok(takeover) => Outcome::Live { generation, reason, takeover },
                        Err(error) => self.failed(generation, &error),
                    };
                }
                Errand::Discard => {
                    self.machine.halt();
                    let _ = self.data.send_signal(Kind::StoodDown, Epoch(0));
                    self.close(None);
                    return Outcome::Discarded;
                }
            }
        }
        Outcome::Discarded
    }

    /// Starts the guest, and takes up its conversations where the primary left them.
    fn go_live(&self, state: &[u8]) -> anyhow::Result<TakeoverReport> {
        self.clock.reach(Stage::Activated);
        let resent_frames = match &self.following {
            Some(_) => lockstep::go_live(&self.machine)?,
            None => self.machine.go_live(state, &self.outbound.take())?,
        };
        self.clock.reach(Stage::Live);
        let injected_frames = self.inbound.inject(&self.machine);
        let lag_ms = self.following.as_ref().map_or(0.0, Following::lag_at_failure_ms);
        Ok(TakeoverReport { lag_ms, injected_frames, resent_frames, ..self.clock.report() })
    }

    fn apply_one(
        &self,
        epoch: StagedEpoch,
        mirrors: &mut Option<Vec<Mirror>>,
    ) -> anyhow::Result<Vec<u8>> {
        let number = epoch.epoch;
        let state = apply_epoch(&self.machine, epoch)?;
        // With the first whole epoch the mirrors are images of their own.
        if let Some(fresh) = mirrors.take() {
            for mirror in fresh {
                mirror.complete()?;
            }
            self.make_ready()?;
        }
        self.applied.store(number.0, Ordering::Release);
        Ok(state)
    }

    /// The mirrors are whole: they are this host's images from now on.
    fn make_ready(&self) -> anyhow::Result<()> {
        let definition = self.machine.definition();
        let record = self.records.of(ImageRole::Mirror, self.position().0, definition);
        let (peer, sessions) = (Some(self.primary.clone()), vec![self.id.clone()]);
        self.records.write(&Record { peer, sessions, ..record })?;
        let changes = resync::create(self.machine.disks(), &self.directory)?;
        let activation = self.records.prepare_activation(&self.vm, &self.id)?;
        *lock(&self.readiness) = Some(Readiness { changes, activation });
        Ok(())
    }

    /// In lockstep the guest writes the mirrors before a take-over: what the primary may lack is
    /// noted from here on.
    fn note_changes(&self) {
        if let Some(ready) = &*lock(&self.readiness) {
            for (disk, changes) in self.machine.disks().iter().zip(&ready.changes) {
                disk.set_changes(Some(changes.clone()));
            }
        }
    }

    /// Brings all that was applied to the mirrors to stable storage.
    pub(super) fn settle(&self) -> anyhow::Result<()> {
        for disk in self.machine.disks() {
            disk.sync().context("cannot sync the mirror")?;
        }
        Ok(())
    }

    /// The last epoch that the mirrors hold.
    pub(super) fn applied(&self) -> Epoch {
        Epoch(self.applied.load(Ordering::Acquire))
    }

    /// Lockstep: tells the primary how far QEMU is.
    pub(crate) fn tell_progress(&self, progress: &LogProgress) {
        // If it cannot be sent the reading thread finds out why.
        let _ = self.data.send_parts(Kind::Progress, Epoch(0), &[&progress.encode()]);
    }

    /// Lockstep: tells the primary what its mirrors have on stable storage.
    pub(super) fn tell_written(&self, written: &Written) {
        // If it cannot be sent the reading thread finds out why.
        let _ = self.data.send_parts(Kind::Written, Epoch(0), &[&written.encode()]);
    }

    pub(super) fn tell_settled(&self, epoch: Epoch) {
        // If it cannot be sent the reading thread finds out why.
        let _ = self.data.send_signal(Kind::Settled, epoch);
    }

    /// Remus 2.5: all is on the disks first, then the activation record; then only may
    /// the guest run.
    fn activate(&self, generation: Generation) -> anyhow::Result<()> {
        fail::fail_point!("before-activation");
        let began = Instant::now();
        self.settle()?;
        let settled = began.elapsed();
        let ready = lock(&self.readiness).take().context("no epoch was applied")?;
        for (disk, changes) in self.machine.disks().iter().zip(ready.changes) {
            disk.set_changes(Some(changes));
        }
        ready.activation.write(generation).context("cannot write the activation record")?;
        info!(
            vm = self.vm,
            "activated in {:.1} ms, {:.1} of them to sync the mirrors",
            began.elapsed().as_secs_f64() * 1e3,
            settled.as_secs_f64() * 1e3
        );
        Ok(())
    }

    fn failed(&self, generation: Generation, error: &anyhow::Error) -> Outcome {
        error!(vm = self.vm, "cannot go live: {error:#}");
        self.machine.halt();
        Outcome::Failed { generation, reason: format!("{error:#}") }
    }

    /// Tells the primary where the VM lives now, and ends all connections.
    fn close(&self, live: Option<Generation>) {
        if let Some(generation) = live {
            let _ = self.data.send_signal(Kind::Live, Epoch(generation.0));
        }
        self.close_connections();
        self.waiting.close();
    }

    fn close_connections(&self) {
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
        self.event(BackupEvent::Tick, None);
    }
    fn is_over(&self) -> bool {
        matches!(self.phase(), BackupPhase::Live | BackupPhase::Discarded)
    }
}
