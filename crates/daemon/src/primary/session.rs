//! One VM's protection, seen from the primary: the state machine and the
//! threads that feed it.

use super::activity::Watch;
use super::group::Group;
use super::inbound::{self, Inbound};
use super::outbound::Outbound;
use super::pace::Pace;
use super::progress::Progress;
use super::references::References;
use super::send::{Outbox, Outgoing};
use super::stats::Stats;
use crate::arbiter::Arbiter;
use crate::channel::Channel;
use crate::clock;
use crate::group::Membership;
use crate::heartbeat::Heartbeats;
use crate::lockstep::primary::{MACHINE, Recording};
use crate::lockstep::reads;
use crate::machine::Machine;
use crate::paths::PathMonitor;
use crate::records::Records;
use crate::report::Mode;
use crate::resync::Basis;
use crate::sync::lock;
use crossbeam_channel::Sender;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tracing::{info, warn};
use understudy_encoding::EncodingPlan;
use understudy_protocol::wire::Kind;
use understudy_protocol::{
    Due, Epoch, Generation, GroupStep, LastCheckpoint, Output, Policy, Primary, PrimaryAction,
    PrimaryEvent, PrimaryPhase, Rendezvous, Situation, Time,
};

/// Nothing waits longer than this without looking again.
pub(super) const LONGEST_WAIT: Duration = Duration::from_millis(500);

/// The state shared by a session's threads.
pub struct Session {
    /// The VM's name, for messages.
    pub vm: String,
    /// The backup's host name.
    pub peer: String,
    /// Names the session.
    pub id: String,
    /// What the first synchronisation begins with.
    pub basis: Basis,
    /// The VM on this host.
    pub machine: Arc<Machine>,
    /// When to checkpoint.
    pub policy: Policy,
    /// How the backup keeps up.
    pub mode: Mode,
    /// How pages are encoded.
    pub encoding: EncodingPlan,
    /// Its log, in lockstep.
    pub recording: Option<Recording>,
    /// What was measured.
    pub stats: Stats,
    /// How fast the guest may run.
    pub pace: Pace,
    /// What the guest does.
    pub(super) watch: Watch,
    pub(super) output_seen: Mutex<OutputSeen>,
    /// The first synchronisation.
    pub progress: Progress,
    /// What goes to the backup.
    pub outbox: Outbox,
    /// Copies of what the guest receives.
    pub inbound: Arc<Inbound>,
    /// What the guest sent, on its way to the backup.
    pub outbound: Outbound,
    /// The tag of disk writes: 0 during the first synchronisation.
    pub disk_epoch: AtomicU64,
    /// The paths to the backup.
    pub paths: Arc<PathMonitor>,
    pub(crate) data: Arc<Channel>,
    pub(super) heartbeats: Heartbeats,
    pub(super) records: Records,
    /// The last epoch that is on the backup's disks.
    pub(super) settled: AtomicU64,
    /// What the guest read from its disks, if references may be sent.
    pub(super) references: Option<Arc<References>>,
    /// The VMs that this one is protected with, and this one's place among them.
    pub(super) group: Arc<Group>,
    pub(super) place: usize,
    /// The backup has said its last word.
    pub(super) stood_down: AtomicBool,
    /// The backup's QEMU did not follow the log.
    pub(super) diverged: AtomicBool,
    pub(super) arbiter: Arbiter,
    pub(super) contests: Sender<Generation>,
    /// The group's.
    pub(super) core: Arc<Mutex<Primary>>,
}

/// Since when output of the epoch that runs has waited, once the one before was committed.
#[derive(Debug, Default)]
pub(super) struct OutputSeen {
    epoch: Epoch,
    since: Option<Time>,
}

/// What the capture thread does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Take a checkpoint.
    Checkpoint,
    /// See how much the guest has written.
    Look,
    /// Take the last checkpoint: a planned fail-over.
    LastCheckpoint,
    /// Protection is over.
    End,
}

impl Session {
    /// Where protection stands.
    pub fn phase(&self) -> PrimaryPhase {
        lock(&self.core).phase().clone()
    }

    /// The rule for what the guest sends.
    pub fn output(&self) -> Output {
        lock(&self.core).output()
    }

    /// Generation, last committed epoch and epochs in flight.
    pub fn position(&self) -> (Generation, Epoch, u64) {
        let core = lock(&self.core);
        let member = &self.group.membership.members[self.place];
        let generation = self.group.generation(member, core.generation());
        (generation, core.committed(), core.in_flight())
    }

    /// What this VM shares with those that it is protected with.
    pub fn group(&self) -> Arc<Group> {
        self.group.clone()
    }

    /// Who this VM is protected with.
    pub fn membership(&self) -> &Membership {
        &self.group.membership
    }

    /// The epoch that the guest executes.
    pub fn running(&self) -> Epoch {
        lock(&self.core).running()
    }

    /// Whether protection is over, one way or the other.
    pub fn is_over(&self) -> bool {
        matches!(self.phase(), PrimaryPhase::Alone(_) | PrimaryPhase::Halted(_))
    }

    /// Feeds the state machine and does what it says.
    pub fn event(&self, event: PrimaryEvent) {
        let mut core = lock(&self.core);
        self.event_locked(&mut core, event);
    }

    /// The same for a caller that holds the core's lock, so that what it did
    /// under the lock and the event are one step.
    pub(super) fn event_locked(&self, core: &mut Primary, event: PrimaryEvent) {
        let mut actions = Vec::new();
        let (decided, before) = (Instant::now(), core.phase().clone());
        core.handle(clock::now(), event, &mut actions);
        for action in &actions {
            self.group.each(|member| member.perform(action, decided));
        }
        // A log's thread has hundreds of epochs a second to see to, and waits for few of their
        // acknowledgements.
        let flows = self.recording.as_ref().is_some_and(|recording| !recording.is_blocked());
        if !flows || before != *core.phase() {
            self.group.ring();
        }
    }

    /// Under the core's lock, so that the order of actions is the order of
    /// events. Every member does the same, but for what the leader says for all.
    /// Nothing here waits: what takes time goes to other threads. `decided` is not
    /// after the time at which the state machine decided.
    fn perform(&self, action: &PrimaryAction, decided: Instant) {
        let leads = self.place == 0;
        match action {
            &PrimaryAction::Release(epoch) => {
                fail::fail_point!("before-release");
                if self.recording.is_none() || epoch <= MACHINE {
                    self.stats.committed(epoch, clock::now());
                    self.pace.committed(epoch, clock::now());
                }
                for port in self.machine.ports() {
                    port.release_through(epoch, decided);
                }
            }
            &PrimaryAction::Permit(length) => {
                for port in self.machine.ports() {
                    port.permit(decided + length);
                }
            }
            PrimaryAction::OpenOutput => {
                self.end_mirroring();
                for port in self.machine.ports() {
                    port.open_gate();
                }
            }
            &PrimaryAction::Contest(from) if leads => {
                // The control thread lives as long as the session.
                let _ = self.contests.send(from);
            }
            PrimaryAction::YieldToBackup if leads => {
                self.outbox.put_now(Outgoing::Signal(Kind::TakeOver));
            }
            PrimaryAction::StandDown if leads => {
                self.outbox.put_now(Outgoing::Signal(Kind::StandDown));
            }
            PrimaryAction::Contest(_) | PrimaryAction::YieldToBackup | PrimaryAction::StandDown => {
            }
            PrimaryAction::ClosePeer => {
                self.outbox.close();
                self.data.close();
                self.heartbeats.close();
            }
            PrimaryAction::Halt(reason) => {
                warn!(vm = self.vm, "halting this copy: {reason}");
                for port in self.machine.ports() {
                    port.shut();
                }
                self.end_mirroring();
                self.machine.halt();
            }
        }
    }

    fn end_mirroring(&self) {
        // First of all: a disk write that waits for room holds its disk's lock.
        self.outbox.close();
        for disk in self.machine.disks() {
            disk.set_sink(None);
        }
        let recording = self.recording.as_ref();
        if let Some(trail) = recording.and_then(|recording| recording.reads.as_ref()) {
            trail.close();
        }
        reads::forget(&self.machine);
        inbound::end(self);
    }

    /// Waits until the capture thread has something to do.
    pub fn next_step(&self) -> Step {
        loop {
            let seen = self.machine.doorbell().count();
            let mut wait = match self.judge() {
                Ok(step) => return step,
                Err(wait) => wait,
            };
            if let Some(look) = self.pace.next_look() {
                if look.is_zero() {
                    return Step::Look;
                }
                wait = wait.min(look);
            }
            self.machine.doorbell().wait(seen, wait.min(LONGEST_WAIT));
        }
    }

    /// The step that is due now, or how long to wait at most. What one member
    /// finds due, all members do.
    fn judge(&self) -> Result<Step, Duration> {
        let core = lock(&self.core);
        if matches!(core.phase(), PrimaryPhase::Alone(_) | PrimaryPhase::Halted(_)) {
            return Ok(Step::End);
        }
        let mut rendezvous = self.group.rendezvous();
        let step = match rendezvous.announced(core.running()) {
            Some(step) => step,
            None => {
                let step = self.due(&core, &rendezvous)?;
                rendezvous.announce(core.running(), step);
                self.group.ring();
                step
            }
        };
        Ok(match step {
            GroupStep::Checkpoint => Step::Checkpoint,
            GroupStep::LastCheckpoint => Step::LastCheckpoint,
        })
    }

    /// Makes a checkpoint due now, unless it cannot be taken or is due already.
    pub fn cut_short(&self) {
        let core = lock(&self.core);
        let mut rendezvous = self.group.rendezvous();
        let idle = rendezvous.last().is_some() && rendezvous.announced(core.running()).is_none();
        if idle && core.may_capture() {
            rendezvous.announce(core.running(), GroupStep::Checkpoint);
            self.group.ring();
        }
    }

    /// What the group is to do now, or how long to wait at most.
    fn due(&self, core: &Primary, rendezvous: &Rendezvous) -> Result<GroupStep, Duration> {
        // None while a member still stands still.
        let last = rendezvous.last().filter(|_| !rendezvous.is_broken() && core.may_capture());
        let Some(last) = last else { return Err(LONGEST_WAIT) };
        let protected = *core.phase() == PrimaryPhase::Protected;
        if protected && self.group.was_handed_over() {
            return Ok(GroupStep::LastCheckpoint);
        }
        let now = clock::now();
        let in_flight = core.in_flight();
        let output_since =
            if in_flight == 0 { self.output_since(core.running(), last, now) } else { None };
        let situation = Situation { now, last, in_flight, output_since };
        match self.policy.due(&situation, || self.group.activity()) {
            Due::At(time) if time <= now => Ok(GroupStep::Checkpoint),
            Due::At(time) | Due::Look(time) => Err(time - now),
            Due::OnChange => Err(LONGEST_WAIT),
        }
    }

    fn output_since(&self, running: Epoch, last: LastCheckpoint, now: Time) -> Option<Time> {
        let mut seen = lock(&self.output_seen);
        // What came while the epoch before was on its way has waited since then.
        let began = if seen.epoch == running { now } else { last.resumed };
        let since = seen.since.filter(|_| seen.epoch == running).unwrap_or(began);
        let since = self.group.output_waits().then_some(since);
        *seen = OutputSeen { epoch: running, since };
        since
    }

    /// Waits until `done` says so, or for `timeout`; whether it did.
    pub fn wait_for_phase(
        &self,
        timeout: Duration,
        done: impl Fn(&PrimaryPhase) -> bool,
    ) -> Result<PrimaryPhase, PrimaryPhase> {
        let deadline = clock::now() + timeout;
        loop {
            let seen = self.machine.doorbell().count();
            let phase = self.phase();
            if done(&phase) {
                return Ok(phase);
            }
            let left = deadline - clock::now();
            if left.is_zero() {
                return Err(phase);
            }
            self.machine.doorbell().wait(seen, left.min(LONGEST_WAIT));
        }
    }

    /// A connection to the backup ended that does not carry its words. While the
    /// backup forgets the VM, and others of its group, it hangs up: then its last
    /// word counts, which the receiving thread reads, and nothing else.
    pub(crate) fn lost_aside(&self, reason: String) {
        if self.phase() != PrimaryPhase::StandingDown {
            self.event(PrimaryEvent::PeerGone(reason));
        }
    }

    /// The guest stands still until the backup runs it, or until this host turns out to be the
    /// sole owner after all.
    pub fn await_hand_over(&self) {
        loop {
            let seen = self.machine.doorbell().count();
            match self.phase() {
                PrimaryPhase::Halted(_) | PrimaryPhase::Alone(_) => return,
                _ => self.machine.doorbell().wait(seen, Duration::from_secs(1)),
            }
        }
    }

    /// Whether it ended because the backup did not follow the log.
    pub fn has_diverged(&self) -> bool {
        self.diverged.load(Ordering::Acquire)
    }

    /// Whether another epoch may be closed now.
    pub fn may_capture(&self) -> bool {
        lock(&self.core).may_capture()
    }

    /// Epochs that were closed and not acknowledged.
    pub fn in_flight(&self) -> u64 {
        lock(&self.core).in_flight()
    }

    /// Closes a batch of log; see [`Group::cut_batch`].
    pub fn cut_batch(&self, last: bool) -> Option<Epoch> {
        self.group.cut_batch(self, last)
    }

    pub fn was_handed_over(&self) -> bool {
        self.group.was_handed_over()
    }

    /// Asks for a planned fail-over.
    pub fn request_hand_over(&self) {
        info!(vm = self.vm, "handing over to {}", self.peer);
        self.group.request_hand_over();
    }
}
