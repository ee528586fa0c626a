//! One VM's protection, seen from the primary: the state machine, what it says is done, and what
//! the session's threads share.

use super::group::Group;
use super::headway::Work;
use super::inbound::{self, Inbound};
use super::outbound::Outbound;
use super::present::Present;
use super::progress::Progress;
use super::references::References;
use super::send::{Outbox, Outgoing};
use super::stance::Stance;
use super::stats::Stats;
use crate::clock;
use crate::hand_back::AskWinner;
use crate::heartbeat::{Heartbeats, Pulse};
use crate::lockstep::reads;
use crate::membership::Membership;
use crate::messages::ToBackup;
use crate::moments::strike;
use crate::paths::PathMonitor;
use crate::primary::TellSick;
use crate::records::Records;
use crate::resync::Basis;
use crate::sessions::SessionName;
use crossbeam_channel::Sender;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tracing::{error, info, warn};
use understudy_arbiter::Arbiter;
use understudy_disk::Rounds;
use understudy_encoding::EncodingPlan;
use understudy_link::channel::Channel;
use understudy_link::link::Next;
use understudy_machine::console::ConsoleOutput;
use understudy_protocol::wire::{HEADER_BYTES, WireVersion};
use understudy_protocol::{
    Epoch, Generation, HostName, LastCheckpoint, Output, Policy, PrimaryAction, PrimaryPhase, Time,
    VmName,
};
use understudy_report::events::{EventKind, VmEvents};
use understudy_session::primary::{Effect, Event, Lead};
use understudy_threads::{Mutex, Waitable, spawn};

/// The longest time that anything waits without looking again.
pub(super) const LONGEST_WAIT: Duration = Duration::from_millis(500);

/// The state shared by a session's threads.
pub struct Session {
    /// The VM's name, for messages.
    pub vm: VmName,
    /// The backup's host name.
    pub peer: HostName,
    /// Names the session.
    pub id: SessionName,
    /// The basis that the first synchronisation begins with.
    pub basis: Basis,
    /// The wire version that is spoken with the backup.
    pub version: WireVersion,
    pub(super) present: Waitable<Present>,
    /// The policy of when to checkpoint.
    pub policy: Policy,
    /// The encoding of pages.
    pub encoding: EncodingPlan,
    /// The guest's words on its console, if they wait for their commit, too.
    pub console: Option<Arc<ConsoleOutput>>,
    /// The rounds, locked while changes of the disks are forgotten, and while the way changes.
    pub(super) rounds: Mutex<Rounds>,
    /// The measurements.
    pub stats: Stats,
    /// The log to which what happens to the VM is told.
    pub(super) events: VmEvents,
    /// The first synchronisation.
    pub progress: Progress,
    /// The queue of what goes to the backup.
    pub outbox: Outbox,
    /// Copies of what the guest receives.
    pub inbound: Arc<Inbound>,
    /// The frames that the guest sent, on their way to the backup.
    pub outbound: Outbound,
    /// The tag of disk writes: 0 during the first synchronisation.
    pub disk_epoch: AtomicU64,
    /// The paths to the backup.
    pub paths: Arc<PathMonitor>,
    /// The way of the data to it.
    pub data: Arc<Channel>,
    pub(super) heartbeats: Heartbeats,
    /// The backup's work on what it has.
    pub(super) work: Work,
    pub(super) records: Records,
    /// The last epoch that is on the backup's disks.
    pub(super) settled: AtomicU64,
    /// The pages that the guest read from its disks, if references may be sent.
    pub(super) references: Option<Arc<References>>,
    /// The VMs that this one is protected with, and this one's place among them.
    pub(super) group: Arc<Group>,
    pub(super) place: usize,
    /// The backup's QEMU did not follow the log.
    pub(super) diverged: AtomicBool,
    /// The backup's mirrors are not what this host's images are: no session is noted any more.
    pub(super) distrusts_mirrors: AtomicBool,
    pub(super) arbiter: Arbiter,
    /// Asks whoever has won the VM.
    pub(super) ask_winner: AskWinner,
    pub(super) tell_sick: TellSick,
    pub(super) contests: Sender<Generation>,
}

impl Session {
    /// Whether output of this VM waits for a commit.
    pub fn output_waits(&self) -> bool {
        self.machine().ports().iter().any(|port| port.held_frames() > 0)
            || self.console.as_ref().is_some_and(|console| console.held_bytes() > 0)
    }

    /// The time since which output of the epoch that runs has waited, if any does: words on the
    /// console since that epoch began, or later.
    pub(super) fn output_since(&self, last: LastCheckpoint) -> Option<Time> {
        let console = self.console.as_ref().filter(|console| console.held_bytes() > 0);
        self.frames_since().into_iter().chain(console.map(|_| last.resumed)).min()
    }

    /// The same of frames alone.
    pub(super) fn frames_since(&self) -> Option<Time> {
        let machine = self.machine();
        machine.ports().iter().filter_map(|port| port.waits_since()).min()
    }

    /// Bytes that the guest has sent and was given since its cards were opened.
    pub(super) fn carried(&self) -> u64 {
        self.machine().ports().iter().map(|port| port.carried_bytes()).sum()
    }

    /// The phase in which protection is.
    pub fn phase(&self) -> PrimaryPhase {
        self.group.core().phase().clone()
    }

    /// The stance of it, as of the last event. Waits for nobody.
    pub fn stance(&self) -> Stance {
        self.group.stance()
    }

    /// The generation at which this host owns the VM, or last owned it. Waits for nobody.
    pub fn generation(&self) -> Generation {
        let member = &self.group.membership.members[self.place];
        self.group.generation(member, self.group.stance().generation)
    }

    /// The rule for what the guest sends.
    pub fn output(&self) -> Output {
        self.group.core().output()
    }

    /// Generation, last committed epoch and epochs in flight.
    pub fn position(&self) -> (Generation, Epoch, u64) {
        let core = self.group.core();
        let member = &self.group.membership.members[self.place];
        let generation = self.group.generation(member, core.generation());
        (generation, core.committed(), core.in_flight())
    }

    /// The group that this VM is protected with.
    pub fn group(&self) -> Arc<Group> {
        self.group.clone()
    }

    /// Membership of the group that this VM is protected in.
    pub fn membership(&self) -> &Membership {
        &self.group.membership
    }

    /// The epoch that the guest executes.
    pub fn running(&self) -> Epoch {
        self.group.core().running()
    }

    /// Whether protection is over, one way or the other.
    pub fn is_over(&self) -> bool {
        self.phase().is_over()
    }

    /// Whether it ended for the sake of another host, which has the VM or is to take it.
    pub fn is_elsewhere(&self) -> bool {
        self.group.core().is_elsewhere()
    }

    /// Tells the group what happened, and does what comes of it.
    pub fn event(&self, event: Event) {
        self.event_told(event);
    }

    /// The same; says what came of it.
    pub(super) fn event_told(&self, event: Event) -> Vec<Effect> {
        let mut core = self.group.core();
        self.event_locked(&mut core, event)
    }

    /// The same for a caller that holds the core's lock, so that what it did
    /// under the lock and the event are one step.
    pub(super) fn event_locked(&self, core: &mut Lead, event: Event) -> Vec<Effect> {
        let mut effects = Vec::new();
        let (decided, before) = (clock::now(), core.stage());
        core.handle(decided, event, &mut effects);
        let blocked = core.in_flight() >= self.policy.pipeline();
        self.group.each(|member| member.outbox.room.set_blocked(blocked));
        for effect in &effects {
            self.take_effect(effect, core, decided);
        }
        self.group.publish(core);
        let phase_changed = before.phase != *core.phase();
        if phase_changed {
            self.group.each(|member| member.tell_phase(&before.phase, core));
        }
        // A log's thread has hundreds of epochs a second to see to, and waits for few of their
        // acknowledgements.
        let flows = || self.recording().is_some_and(|recording| !recording.is_blocked());
        if phase_changed || (core.has_news(&before, &effects) && !flows()) {
            self.group.ring();
        }
        effects
    }

    fn take_effect(&self, effect: &Effect, core: &Lead, decided: Time) {
        let peer = || self.peer.clone();
        match effect {
            Effect::Act(action) => {
                let planned = core.is_handed_over();
                self.group.each(|member| member.perform(action, planned, decided));
            }
            Effect::BackupUnfit(reason) => {
                let reason = reason.clone();
                self.events.record(EventKind::BackupUnfit { peer: peer(), reason });
            }
            Effect::BackupSick { reason, times } => {
                self.group.each(|member| (member.tell_sick)(&member.peer, reason, *times));
            }
            Effect::BackupFit => self.events.record(EventKind::BackupFit { peer: peer() }),
            Effect::GiveUp(reason) => {
                warn!(vm = %self.vm, "{reason}: host {} is to take over", self.peer);
            }
            // Whoever told of it says so.
            Effect::HeldBack(_) => {}
        }
    }

    /// Performs an action under the core's lock, so that the order of actions is the order of
    /// events. Every member does the same, but for what the leader says for all.
    /// Nothing here waits: what takes time goes to other threads. `decided` is not
    /// after the time at which the state machine decided; `planned`: the operator wants a fail-over.
    fn perform(&self, action: &PrimaryAction, planned: bool, decided: Time) {
        let leads = self.place == 0;
        match action {
            &PrimaryAction::Release(epoch) => {
                fail::fail_point!("before-release");
                strike("release", &self.vm);
                let committed = clock::now();
                for port in self.machine().ports() {
                    port.release_through(epoch, decided);
                }
                if let Some(console) = &self.console {
                    console.release_through(epoch);
                }
                if self.is_checkpoint(epoch) {
                    self.stats.committed(epoch, committed);
                }
            }
            &PrimaryAction::Permit(length) => {
                for port in self.machine().ports() {
                    port.permit(decided + length);
                }
            }
            PrimaryAction::OpenOutput => {
                self.machine().disks().iter().for_each(|disk| disk.set_backup(false));
                for port in self.machine().ports() {
                    port.open_gate();
                }
                if let Some(console) = &self.console {
                    console.open();
                }
                self.end_mirroring();
            }
            &PrimaryAction::Contest(from) if leads => {
                // `watch` lives as long as the session.
                let _ = self.contests.send(from);
            }
            PrimaryAction::YieldToBackup if leads => {
                self.outbox.put_now(Outgoing::Message(ToBackup::TakeOver { planned }));
            }
            PrimaryAction::StandDown if leads => {
                self.outbox.put_now(Outgoing::Message(ToBackup::StandDown));
            }
            PrimaryAction::Contest(_) | PrimaryAction::YieldToBackup | PrimaryAction::StandDown => {
            }
            PrimaryAction::ClosePeer => {
                self.outbox.close();
                self.data.close();
                self.heartbeats.close();
            }
            // Its connections are closed; nothing else of it is to be ended yet.
            PrimaryAction::Freeze => {}
            PrimaryAction::Halt(reason) => {
                warn!(vm = %self.vm, "halting this copy: {reason}");
                for port in self.machine().ports() {
                    port.shut();
                }
                if let Some(console) = &self.console {
                    console.shut();
                }
                self.machine().end_aside();
                self.end_mirroring();
            }
        }
    }

    /// Ends all connections to the backup.
    pub(super) fn hang_up(&self) {
        // What goes on, from a first copy, is heard as it was before: shut is for good.
        if let Some(console) = self.console.as_ref().filter(|_| self.machine().is_halted()) {
            console.shut();
        }
        self.end_mirroring();
        self.data.close();
        self.heartbeats.close();
    }

    /// Ends mirroring. Another thread takes the sinks away, which are closed by then: a
    /// write that its disk does not answer would hold everybody up.
    fn end_mirroring(&self) {
        self.outbox.close();
        let disks = self.machine().disks();
        let body = move || disks.iter().for_each(|disk| disk.remove_closed_sink());
        if let Err(error) = spawn(format!("unmirror-{}", self.vm), body) {
            warn!(vm = %self.vm, "what its disks are written is dropped one by one: no thread: {error}");
        }
        if let Some(trail) = self.recording().and_then(|recording| recording.reads.clone()) {
            trail.close();
        }
        reads::forget(&self.machine());
        inbound::end(self);
    }

    /// Waits until `done` says so, or for `timeout`; whether it did.
    pub fn wait_for_phase(
        &self,
        timeout: Duration,
        done: impl Fn(&PrimaryPhase) -> bool,
    ) -> Result<PrimaryPhase, PrimaryPhase> {
        let deadline = clock::now() + timeout;
        loop {
            let seen = self.machine().doorbell().count();
            let phase = self.phase();
            if done(&phase) {
                return Ok(phase);
            }
            let left = deadline - clock::now();
            if left.is_zero() {
                return Err(phase);
            }
            self.machine().doorbell().wait(seen, left.min(LONGEST_WAIT));
        }
    }

    /// Tells the backup, beside what waits to be sent.
    pub(crate) fn say(&self, message: &ToBackup<'_>) -> io::Result<()> {
        let header = message.send(&self.data, Next::Unknown)?;
        self.stats.sent((HEADER_BYTES + header.length) as u64);
        Ok(())
    }

    /// The guest stands still until the backup runs it, or until this host turns out to be the
    /// sole owner after all.
    pub fn await_hand_over(&self) {
        loop {
            let seen = self.machine().doorbell().count();
            match self.phase() {
                PrimaryPhase::Halted(_) | PrimaryPhase::Alone(_) => return,
                _ => self.machine().doorbell().wait(seen, Duration::from_secs(1)),
            }
        }
    }

    /// Whether it ended because the backup did not follow the log.
    pub fn has_diverged(&self) -> bool {
        self.diverged.load(Ordering::Acquire)
    }

    /// The backup does not follow the log: its mirrors are no base, either.
    pub(crate) fn diverge(&self) {
        self.diverged.store(true, Ordering::Release);
        self.distrust_mirrors();
    }

    /// Distrusts the backup's mirrors: they are no base for another synchronisation. That is to be
    /// [noted](Session::note_distrust) before there is another session.
    pub(super) fn distrust_mirrors(&self) {
        self.distrusts_mirrors.store(true, Ordering::Release);
    }

    /// Notes that no session which both hosts know is a base for another synchronisation, if the backup's mirrors are
    /// distrusted: what the backup is told, or has noted, may be lost with it.
    pub fn note_distrust(&self) {
        if !self.distrusts_mirrors.load(Ordering::Acquire) {
            return;
        }
        if let Err(error) = self.records.change(&self.vm, |record| record.sessions.clear()) {
            error!(vm = %self.vm, "that the mirrors of host {} are no base is not on record: {error}", self.peer);
        }
    }

    /// Whether another epoch may be closed now.
    pub fn may_capture(&self) -> bool {
        self.group.core().may_capture()
    }

    /// The backup has this epoch.
    pub fn has_committed(&self, epoch: Epoch) -> bool {
        self.group.core().committed() >= epoch
    }

    /// Epochs that were closed and not acknowledged.
    pub fn in_flight(&self) -> u64 {
        self.group.core().in_flight()
    }

    /// Closes a batch of log; see [`Group::cut_batch`].
    pub fn cut_batch(&self, last: bool) -> Option<Epoch> {
        self.group.cut_batch(self, last)
    }

    /// Whether a planned fail-over was asked for.
    pub fn was_handed_over(&self) -> bool {
        self.group.was_handed_over()
    }

    /// Whether that has ended as it was asked for.
    pub fn has_gone_over(&self) -> bool {
        self.group.core().has_gone_over()
    }

    /// Asks for a planned fail-over.
    pub fn request_hand_over(&self) {
        info!(vm = %self.vm, "handing over to {}", self.peer);
        self.event(Event::HandOver);
        self.group.ring();
    }
}

impl Pulse for Session {
    fn paths(&self) -> &PathMonitor {
        &self.paths
    }
    fn heartbeats(&self) -> &Heartbeats {
        &self.heartbeats
    }
    fn leave_path(&self) {
        self.data.abandon();
    }
    fn heard(&self) {
        self.event(Event::Heard);
    }
    fn lost(&self, reason: String) {
        self.event(Event::LostAside(reason));
    }
    fn tick(&self) {
        if self.place == 0 {
            self.look_at_headway();
        }
        self.look_for_better_path();
        self.event(Event::Tick);
    }
    fn is_over(&self) -> bool {
        Session::is_over(self)
    }
}
