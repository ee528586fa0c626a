//! The primary's half of the two invariants (ARCHITECTURE.md).
//!
//! Output of epoch *n* is released only when the backup acknowledged *n*, or
//! the arbiter made this host the sole owner. Everything that decides about
//! that is here, without I/O or clock.

use crate::detector::SYNC_PATIENCE;
use crate::output::LEASE;
use crate::{Detector, Epoch, Generation, Output, Time, Verdict};
use std::collections::VecDeque;
use std::time::Duration;

/// A lost backup only holds up output, a lost primary holds up the guest: when
/// both suspect each other the backup should win, so the primary waits longer.
const PATIENCE: u32 = 3;

/// How long to wait before an unreachable arbiter is asked again.
const ARBITER_RETRY: Duration = Duration::from_millis(200);

/// A primary that was stopped for longer than this may have lost the VM meanwhile: its
/// right to release output is out of date. Shorter than any time-out.
pub const STALL: Duration = Duration::from_millis(40);

/// Checkpoints that may be captured and not yet acknowledged.
pub const PIPELINE_DEPTH: u64 = 2;

/// What happens to the primary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PrimaryEvent {
    /// A checkpoint placed its barrier: the running epoch is closed.
    Captured,
    /// The backup holds the whole of this epoch.
    Acknowledged(Epoch),
    /// Any sign of life of the backup.
    Heard,
    /// The connection to the backup ended, or the backup refused to go on.
    PeerGone(String),
    /// Time has passed.
    Tick,
    /// The arbiter answered a [`PrimaryAction::Contest`].
    Verdict(Verdict),
    /// The last checkpoint of a planned fail-over placed its barrier: the guest
    /// stands still until the backup runs it.
    CapturedLast,
    /// The guest's QEMU lives and does not answer, for this reason: the backup is to go on with the
    /// last epoch that it has.
    GuestHangs(String),
    /// The operator wants no more protection.
    Unprotect,
    /// The backup forgot the VM, after [`PrimaryAction::StandDown`].
    StoodDown,
    /// The backup runs the VM at this generation.
    LiveElsewhere(Generation),
    /// The guest died here although the host lives.
    GuestDied(String),
}

/// What the primary must do, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PrimaryAction {
    /// Let out every frame of epochs up to this one.
    Release(Epoch),
    /// Only with [`Output::Unheld`]: let output go at once, for so long from now on.
    Permit(Duration),
    /// Let out everything, from now on at once: this host is the sole owner.
    OpenOutput,
    /// Ask the arbiter for the generation after this one.
    Contest(Generation),
    /// Tell the backup to take over, now.
    YieldToBackup,
    /// Tell the backup to forget the VM.
    StandDown,
    /// Close the connection to the backup.
    ClosePeer,
    /// Let nothing out ever again and end the guest's copy here.
    Halt(String),
}

/// Where the primary stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PrimaryPhase {
    /// First synchronisation; the backup cannot take over yet.
    Syncing,
    /// The backup follows. Every output waits for its epoch's acknowledgement, unless the
    /// output is [unheld](Output::Unheld).
    Protected,
    /// The last checkpoint is being handed over and the guest stands still, or it hangs.
    HandingOver,
    /// Waiting for the backup to forget the VM.
    StandingDown,
    /// The backup seems lost; the arbiter decides. Nothing new is let out.
    Contesting(String),
    /// Sole owner, without protection, for this reason (none: asked for).
    Alone(Option<String>),
    /// The backup has, or may take, the VM; this copy is halted.
    Halted(String),
}

/// The primary's state machine.
#[derive(Clone, Debug)]
pub struct Primary {
    phase: PrimaryPhase,
    generation: Generation,
    running: Epoch,
    committed: Epoch,
    /// The shortest silence that counts as failure once output is held.
    timeout: Duration,
    detector: Detector,
    retry_at: Option<Time>,
    unprotect_asked: bool,
    /// Why the VM is being handed over without a last checkpoint.
    hung: Option<String>,
    last_event: Time,
    /// Acknowledgements of earlier epochs release nothing: they may have been
    /// waiting here while the backup took over. One that is fresh proves that it
    /// has not.
    releases_from: Epoch,
    output: Output,
    /// Times at which the epochs in flight were captured, oldest first.
    captured_at: VecDeque<Time>,
    /// Epochs that may be captured and not yet acknowledged.
    pipeline: u64,
}

impl Primary {
    /// A primary that begins its first synchronisation. It owns the VM at
    /// `generation`; `timeout` is the shortest silence that counts as failure.
    pub fn new(generation: Generation, timeout: Duration, now: Time) -> Primary {
        Primary {
            phase: PrimaryPhase::Syncing,
            generation,
            running: Epoch(1),
            committed: Epoch(0),
            timeout: timeout * PATIENCE,
            detector: Detector::new((timeout * PATIENCE).max(SYNC_PATIENCE), now),
            retry_at: None,
            unprotect_asked: false,
            hung: None,
            last_event: now,
            releases_from: Epoch(0),
            output: Output::Held,
            captured_at: VecDeque::new(),
            pipeline: PIPELINE_DEPTH,
        }
    }

    /// The same, with this rule for the guest's output.
    pub fn with_output(self, output: Output) -> Primary {
        Primary { output, ..self }
    }

    /// The rule for the guest's output.
    pub fn output(&self) -> Output {
        self.output
    }

    /// Lets so many epochs be captured and not yet acknowledged: for epochs that are not
    /// checkpoints, but batches of a log (lockstep mode).
    pub fn with_pipeline(self, epochs: u64) -> Primary {
        Primary { pipeline: epochs, ..self }
    }

    /// The same from now on. Where more are on their way, the next one waits for them.
    pub fn set_pipeline(&mut self, epochs: u64) {
        self.pipeline = epochs;
    }

    /// Where the primary stands.
    pub fn phase(&self) -> &PrimaryPhase {
        &self.phase
    }

    /// The generation at which this host owns, or last owned, the VM.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// The epoch that the guest executes now; its output carries this tag.
    pub fn running(&self) -> Epoch {
        self.running
    }

    /// The last epoch that the backup acknowledged.
    pub fn committed(&self) -> Epoch {
        self.committed
    }

    /// Epochs captured and not yet acknowledged.
    pub fn in_flight(&self) -> u64 {
        self.running.0 - 1 - self.committed.0
    }

    /// Whether another checkpoint may be captured now.
    pub fn may_capture(&self) -> bool {
        let captures = matches!(
            self.phase,
            PrimaryPhase::Syncing | PrimaryPhase::Protected | PrimaryPhase::StandingDown
        );
        captures && self.in_flight() < self.pipeline
    }

    /// Whether output must wait for its commit: from the first capture until sole
    /// ownership. Never, where output is [unheld](Output::Unheld): there it needs a
    /// [permit](PrimaryAction::Permit).
    pub fn holds_output(&self) -> bool {
        self.output == Output::Held && self.guards_output()
    }

    /// Whether output leaves by this state machine's word only: from the first capture
    /// until sole ownership, held or not.
    pub fn guards_output(&self) -> bool {
        match self.phase {
            PrimaryPhase::Alone(_) => false,
            PrimaryPhase::Syncing => self.backup_may_be_entitled(),
            _ => true,
        }
    }

    /// Time at which [`PrimaryEvent::Tick`] is due next, if nothing else happens.
    pub fn deadline(&self) -> Option<Time> {
        match self.phase {
            PrimaryPhase::Alone(_) | PrimaryPhase::Halted(_) => None,
            PrimaryPhase::Contesting(_) => self.retry_at,
            _ => Some(self.detector.deadline()),
        }
    }

    /// Takes one event; appends what must be done to `actions`.
    pub fn handle(&mut self, now: Time, event: PrimaryEvent, actions: &mut Vec<PrimaryAction>) {
        self.notice_stall(now);
        match event {
            PrimaryEvent::Captured => self.captured(now),
            PrimaryEvent::Acknowledged(epoch) => self.acknowledged(now, epoch, actions),
            PrimaryEvent::Heard => self.detector.heard(now),
            PrimaryEvent::PeerGone(reason) => self.peer_lost(reason, actions),
            PrimaryEvent::Tick => self.tick(now, actions),
            PrimaryEvent::Verdict(verdict) => self.verdict(now, verdict, actions),
            PrimaryEvent::CapturedLast => self.captured_last(now),
            PrimaryEvent::Unprotect => self.unprotect(actions),
            PrimaryEvent::StoodDown => self.stood_down(actions),
            PrimaryEvent::LiveElsewhere(generation) => self.live_elsewhere(generation, actions),
            PrimaryEvent::GuestDied(reason) => self.guest_died(reason, actions),
            PrimaryEvent::GuestHangs(reason) => self.guest_hangs(reason, actions),
        }
    }

    /// Ends it whatever its state is: to be called when that may be half changed. The VM must not
    /// run here any more.
    pub fn condemn(&mut self, reason: &str) {
        if !matches!(self.phase, PrimaryPhase::Alone(_) | PrimaryPhase::Halted(_)) {
            self.phase = PrimaryPhase::Halted(reason.to_owned());
        }
    }

    /// This host stood still if nothing at all happened: not even time passed.
    fn notice_stall(&mut self, now: Time) {
        if now - self.last_event > STALL {
            self.releases_from = self.running;
        }
        self.last_event = now;
    }

    fn captured(&mut self, now: Time) {
        // Not `may_capture`: the phase can change between its check and the barrier.
        assert!(self.in_flight() <= self.pipeline, "more epochs in flight than the pipeline holds");
        if !self.backup_may_be_entitled() {
            // From here on a lost backup holds up output.
            self.detector.set_floor(self.timeout);
        }
        self.running = self.running.next();
        self.captured_at.push_back(now);
    }

    fn acknowledged(&mut self, now: Time, epoch: Epoch, actions: &mut Vec<PrimaryAction>) {
        self.detector.heard(now);
        if matches!(self.phase, PrimaryPhase::Alone(_) | PrimaryPhase::Halted(_)) {
            return;
        }
        if epoch >= self.running || epoch <= self.committed {
            let reason = format!("the backup acknowledged epoch {epoch}, which is not in flight");
            return self.peer_lost(reason, actions);
        }
        let newly = (epoch.0 - self.committed.0) as usize;
        let captured = self.captured_at.drain(..newly).next_back();
        self.committed = epoch;
        if let (Output::Unheld, Some(captured)) = (self.output, captured) {
            // Nothing is left of it if the acknowledgement waited while this host stood still.
            actions.push(PrimaryAction::Permit(captured + LEASE - now));
        }
        // Also true while contesting: the backup stops acknowledging before it
        // contests, so what it acknowledged it will take over with.
        if epoch >= self.releases_from {
            actions.push(PrimaryAction::Release(epoch));
        }
        match self.phase {
            PrimaryPhase::Syncing => self.phase = PrimaryPhase::Protected,
            PrimaryPhase::HandingOver if self.in_flight() == 0 && self.hung.is_none() => {
                actions.push(PrimaryAction::YieldToBackup);
            }
            _ => {}
        }
    }

    /// Once a whole epoch may be on the backup, it may contest the VM.
    fn backup_may_be_entitled(&self) -> bool {
        self.running > Epoch(1)
    }

    fn peer_lost(&mut self, reason: String, actions: &mut Vec<PrimaryAction>) {
        match self.phase {
            PrimaryPhase::Alone(_) | PrimaryPhase::Halted(_) | PrimaryPhase::Contesting(_) => {}
            PrimaryPhase::Syncing if !self.backup_may_be_entitled() => {
                actions.push(PrimaryAction::ClosePeer);
                self.alone(Some(reason), actions);
            }
            _ => {
                let reason = self.because(reason);
                self.phase = PrimaryPhase::Contesting(reason);
                self.retry_at = None;
                actions.push(PrimaryAction::ClosePeer);
                actions.push(PrimaryAction::Contest(self.generation));
            }
        }
    }

    fn tick(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        match self.phase {
            PrimaryPhase::Alone(_) | PrimaryPhase::Halted(_) => {}
            PrimaryPhase::Contesting(_) => {
                if self.retry_at.is_some_and(|at| now >= at) {
                    self.retry_at = None;
                    actions.push(PrimaryAction::Contest(self.generation));
                }
            }
            _ => {
                if let Some(silence) = self.detector.suspicion(now) {
                    let reason =
                        format!("the backup has been silent for {} ms", silence.as_millis());
                    self.peer_lost(reason, actions);
                }
            }
        }
    }

    fn verdict(&mut self, now: Time, verdict: Verdict, actions: &mut Vec<PrimaryAction>) {
        let PrimaryPhase::Contesting(reason) = &self.phase else { return };
        match verdict {
            Verdict::Granted(generation) => {
                assert!(generation > self.generation, "generations only grow");
                let reason = (!self.unprotect_asked).then(|| reason.clone());
                self.generation = generation;
                self.alone(reason, actions);
            }
            Verdict::Taken(owner) => {
                let host = owner.host.as_deref().unwrap_or("nobody");
                let reason = format!(
                    "{reason}; the arbiter says that {host} owns the VM at generation {}",
                    owner.generation
                );
                self.halt(reason, actions);
            }
            Verdict::Unreachable(_) => self.retry_at = Some(now + ARBITER_RETRY),
        }
    }

    fn captured_last(&mut self, now: Time) {
        self.captured(now);
        if self.phase == PrimaryPhase::Protected {
            self.phase = PrimaryPhase::HandingOver;
        }
    }

    fn unprotect(&mut self, actions: &mut Vec<PrimaryAction>) {
        self.unprotect_asked = true;
        match self.phase {
            PrimaryPhase::Syncing if !self.backup_may_be_entitled() => {
                actions.push(PrimaryAction::StandDown);
                actions.push(PrimaryAction::ClosePeer);
                self.alone(None, actions);
            }
            PrimaryPhase::Syncing | PrimaryPhase::Protected => {
                self.phase = PrimaryPhase::StandingDown;
                actions.push(PrimaryAction::StandDown);
            }
            _ => {}
        }
    }

    fn stood_down(&mut self, actions: &mut Vec<PrimaryAction>) {
        if self.phase == PrimaryPhase::StandingDown {
            actions.push(PrimaryAction::ClosePeer);
            self.alone(None, actions);
        }
    }

    fn live_elsewhere(&mut self, generation: Generation, actions: &mut Vec<PrimaryAction>) {
        if !matches!(self.phase, PrimaryPhase::Alone(_) | PrimaryPhase::Halted(_)) {
            let taken = format!("the backup took over at generation {generation}");
            let reason = self.because(taken);
            self.halt(reason, actions);
        }
    }

    fn guest_died(&mut self, reason: String, actions: &mut Vec<PrimaryAction>) {
        match self.phase {
            PrimaryPhase::Protected | PrimaryPhase::HandingOver | PrimaryPhase::StandingDown => {
                actions.push(PrimaryAction::YieldToBackup);
                self.halt(reason, actions);
            }
            PrimaryPhase::Halted(_) => {}
            _ => self.halt(reason, actions),
        }
    }

    /// What came of it, after why the VM was being handed over.
    fn because(&self, reason: String) -> String {
        self.hung.as_ref().map_or(reason.clone(), |hung| format!("{hung}; {reason}"))
    }

    /// A guest that hangs may still wake up: its copy is ended once the backup runs, not before.
    /// Until then its output is held as any that the backup has not acknowledged.
    fn guest_hangs(&mut self, reason: String, actions: &mut Vec<PrimaryAction>) {
        if self.phase == PrimaryPhase::Protected {
            self.phase = PrimaryPhase::HandingOver;
            self.hung = Some(reason);
            actions.push(PrimaryAction::YieldToBackup);
        }
    }

    fn alone(&mut self, reason: Option<String>, actions: &mut Vec<PrimaryAction>) {
        self.phase = PrimaryPhase::Alone(reason);
        actions.push(PrimaryAction::OpenOutput);
    }

    fn halt(&mut self, reason: String, actions: &mut Vec<PrimaryAction>) {
        self.phase = PrimaryPhase::Halted(reason.clone());
        actions.push(PrimaryAction::Halt(reason));
    }
}

#[cfg(test)]
#[path = "primary_tests.rs"]
mod tests;
