//! The primary's half of the two invariants (ARCHITECTURE.md).
//!
//! Output of epoch *n* is released only when the backup acknowledged *n*, or
//! the arbiter made this host the sole owner. Everything that decides about
//! that is here, without I/O or clock.

mod contest;
mod ending;
mod words;

pub use words::{PrimaryAction, PrimaryEvent, PrimaryPhase};

use crate::delivery::{Delivery, EPOCH_BOUND};
use crate::detector::SYNC_PATIENCE;
use crate::output::LEASE;
use crate::{Detector, Epoch, Generation, Output, Ownership, Time};
use std::collections::VecDeque;
use std::time::Duration;

/// A lost backup only holds up output, a lost primary holds up the guest: when
/// both suspect each other the backup should win, so the primary waits longer.
const PATIENCE: u32 = 3;

/// A primary that was stopped for longer than this may have lost the VM meanwhile: its
/// right to release output is out of date. Shorter than any time-out.
pub const STALL: Duration = Duration::from_millis(40);

/// A backup that was told to take over, and lives, must run the VM within this time: how long it
/// takes is bounded by the log that it has yet to execute, and by its disks.
const HAND_OVER_PATIENCE: Duration = Duration::from_secs(10);

/// A backup that was told to forget the VM, and lives, must have done so within this time: it may have
/// to end a QEMU with much memory, and to bring a disk's mirror to stable storage. Output waits for that.
const STAND_DOWN_PATIENCE: Duration = Duration::from_secs(3);

/// Checkpoints that may be captured and not yet acknowledged.
pub const PIPELINE_DEPTH: u64 = 2;

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
    /// The reason why the VM is being handed over without a last checkpoint.
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
    /// The epochs on their way.
    delivery: Delivery,
    /// Time at which the backup was told to take over.
    yielded: Option<Time>,
    /// Time at which the backup was told to forget the VM.
    stands_down: Option<Time>,
    /// Whether the guest's last state here was captured.
    captured_last: bool,
    /// The arbiter is asked before the backup hears that it is given up: one whose heart beats would
    /// ask, too, and could do nothing with the VM.
    peer_unaware: bool,
    /// The winner of the VM, while this copy is kept.
    winner: Option<Ownership>,
    /// Whether this copy was halted for the sake of another host, which has the VM or is to take it.
    elsewhere: bool,
    /// Whether another host was heard of to run the VM.
    runs_elsewhere: bool,
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
            delivery: Delivery::new(EPOCH_BOUND, now),
            yielded: None,
            stands_down: None,
            captured_last: false,
            peer_unaware: false,
            winner: None,
            elsewhere: false,
            runs_elsewhere: false,
        }
    }

    /// The same, which gives an epoch so long on which nothing moves.
    pub fn with_epoch_bound(self, bound: Duration) -> Primary {
        Primary { delivery: Delivery::new(bound, self.last_event), ..self }
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

    /// The phase in which the primary is.
    pub fn phase(&self) -> &PrimaryPhase {
        &self.phase
    }

    /// The winner of the VM, while this copy is kept.
    pub fn winner(&self) -> Option<&Ownership> {
        self.winner.as_ref()
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

    /// The time for which held output has waited for an epoch on its way, or for one that has no room on its
    /// way, if that is longer than an epoch may take on which nothing moves: something of this one does.
    pub fn overdue(&self, now: Time) -> Option<Duration> {
        self.delivery.overdue(now).filter(|_| self.holds_output())
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

    /// Whether the guest's last state is on its way to the backup: the guest may not run on beside that, whatever
    /// would let it, before it is decided whose it is.
    pub fn has_captured_last(&self) -> bool {
        self.captured_last
    }

    /// Whether it asks the arbiter for the VM: its verdict tells whose that is, and nothing else does.
    pub fn contests(&self) -> bool {
        matches!(self.phase, PrimaryPhase::Contesting(_) | PrimaryPhase::Frozen(_))
    }

    /// Whether this copy was halted for the sake of another host, which has the VM or is to take it. Else
    /// it has merely ended: whose the VM is the arbiter knows, and it may be this host's.
    pub fn is_elsewhere(&self) -> bool {
        self.elsewhere
    }

    /// Whether the guest goes on, on another host, from where it was here: nothing of what it did is lost. A copy that
    /// died leaves the other host with its last checkpoint.
    pub fn goes_on_elsewhere(&self) -> bool {
        self.elsewhere && (self.captured_last || self.runs_elsewhere)
    }

    /// The oldest epoch that is not acknowledged, the one that runs if no other, if it has not moved
    /// for long: another path may carry it.
    pub fn stuck(&self, now: Time) -> Option<Epoch> {
        match self.phase {
            PrimaryPhase::Alone(_)
            | PrimaryPhase::Halted(_)
            | PrimaryPhase::Contesting(_)
            | PrimaryPhase::Frozen(_) => None,
            _ => {
                let waits = self.awaits_epochs() && self.delivery.is_stuck(now);
                waits.then(|| self.committed.next())
            }
        }
    }

    /// Time at which [`PrimaryEvent::Tick`] is due next, if nothing else happens.
    pub fn deadline(&self) -> Option<Time> {
        match self.phase {
            PrimaryPhase::Alone(_) | PrimaryPhase::Halted(_) => None,
            PrimaryPhase::Contesting(_) | PrimaryPhase::Frozen(_) => self.retry_at,
            _ => {
                let taken_over = self.yielded.map(|at| at + HAND_OVER_PATIENCE);
                let delivered = self.delivery.deadline().filter(|_| self.awaits_epochs());
                let due =
                    [Some(self.detector.deadline()), taken_over, self.forgotten_by(), delivered];
                due.into_iter().flatten().min()
            }
        }
    }

    /// Time by which the backup must have forgotten the VM, if it was told to. An epoch before that word
    /// may be long, as long as it moves.
    fn forgotten_by(&self) -> Option<Time> {
        let by = self.stands_down? + STAND_DOWN_PATIENCE;
        Some(self.delivery.deadline().map_or(by, |delivered| delivered.max(by)))
    }

    /// Whether the backup is to acknowledge what is on its way: not once it was told its last.
    fn awaits_epochs(&self) -> bool {
        let was_let_go = self.stands_down.is_some() && !planted!(HurryTheForgetful);
        self.yielded.is_none() && !was_let_go
    }

    /// Takes one event; appends what must be done to `actions`.
    pub fn handle(&mut self, now: Time, event: PrimaryEvent, actions: &mut Vec<PrimaryAction>) {
        self.notice_stall(now);
        match event {
            PrimaryEvent::Captured => self.captured(now),
            PrimaryEvent::Acknowledged(epoch) => self.acknowledged(now, epoch, actions),
            PrimaryEvent::Heard => self.detector.heard(now),
            PrimaryEvent::Headway(headway) => {
                self.delivery.headway(now, headway, self.committed.next());
            }
            PrimaryEvent::PeerGone(reason) => self.peer_lost(reason, actions),
            PrimaryEvent::Tick => self.tick(now, actions),
            PrimaryEvent::Verdict(verdict) => self.verdict(now, verdict, actions),
            PrimaryEvent::CapturedLast => self.captured_last(now, actions),
            PrimaryEvent::Replace(reason) => {
                if self.phase == PrimaryPhase::Protected {
                    self.peer_useless(reason, actions);
                }
            }
            PrimaryEvent::Unprotect => self.unprotect(now, actions),
            PrimaryEvent::StillWanted => self.unprotect_asked = false,
            PrimaryEvent::StoodDown => self.stood_down(actions),
            PrimaryEvent::LiveElsewhere(generation) => self.live_elsewhere(generation, actions),
            PrimaryEvent::GuestDied(reason) => self.guest_died(reason, actions),
            PrimaryEvent::CannotCapture(reason) => self.cannot_capture(now, reason, actions),
            PrimaryEvent::GuestHangs(reason) => self.guest_hangs(now, reason, actions),
        }
    }

    /// Ends it whatever its state is: to be called when that may be half changed. The VM must not
    /// run here any more.
    pub fn condemn(&mut self, reason: &str) {
        if !self.phase.is_over() {
            self.elsewhere = self.winner.is_some();
            self.phase = PrimaryPhase::Halted(reason.to_owned());
        }
    }

    /// Notices that this host stood still: nothing at all happened, not even time passed.
    fn notice_stall(&mut self, now: Time) {
        let still = now - self.last_event;
        if still > STALL {
            if !planted!(ReleaseAfterStall) {
                self.releases_from = self.running;
            }
            self.delivery.stood_still(now, still);
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
        self.delivery.captured(now);
    }

    fn acknowledged(&mut self, now: Time, epoch: Epoch, actions: &mut Vec<PrimaryAction>) {
        self.detector.heard(now);
        if self.phase.has_lost() || matches!(self.phase, PrimaryPhase::Alone(_)) {
            return;
        }
        if epoch >= self.running || epoch <= self.committed {
            let reason = format!("the backup acknowledged epoch {epoch}, which is not in flight");
            return self.peer_lost(reason, actions);
        }
        let newly = (epoch.0 - self.committed.0) as usize;
        let captured = self.captured_at.drain(..newly).next_back();
        self.delivery.acknowledged(now, newly);
        self.committed = epoch;
        if let (Output::Unheld, Some(captured), None) = (self.output, captured, self.yielded) {
            // Nothing is left of it if the acknowledgement waited while this host stood still.
            actions.push(PrimaryAction::Permit(captured + LEASE - now));
        }
        // Also true while contesting: the backup stops acknowledging before it
        // contests, so what it acknowledged it will take over with.
        if epoch >= self.releases_from {
            let early = planted!(ReleaseEarly);
            actions.push(PrimaryAction::Release(if early { epoch.next() } else { epoch }));
        }
        match self.phase {
            PrimaryPhase::Syncing => self.phase = PrimaryPhase::Protected,
            PrimaryPhase::HandingOver if self.in_flight() == 0 && self.hung.is_none() => {
                self.yield_to_backup(now, actions);
            }
            _ => {}
        }
    }

    /// Whether the backup may contest the VM: once a whole epoch may be there.
    fn backup_may_be_entitled(&self) -> bool {
        self.running > if planted!(EntitledTooLate) { Epoch(2) } else { Epoch(1) }
    }

    fn peer_lost(&mut self, reason: String, actions: &mut Vec<PrimaryAction>) {
        match self.phase {
            PrimaryPhase::Alone(_)
            | PrimaryPhase::Halted(_)
            | PrimaryPhase::Frozen(_)
            | PrimaryPhase::Contesting(_) => {}
            PrimaryPhase::Syncing if !self.backup_may_be_entitled() => {
                actions.push(PrimaryAction::ClosePeer);
                self.alone(Some(reason), actions);
            }
            _ => {
                actions.push(PrimaryAction::ClosePeer);
                self.contest(reason, actions);
            }
        }
    }

    fn tick(&mut self, now: Time, actions: &mut Vec<PrimaryAction>) {
        match self.phase {
            PrimaryPhase::Alone(_) | PrimaryPhase::Halted(_) => {}
            PrimaryPhase::Contesting(_) | PrimaryPhase::Frozen(_) => {
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
                } else if let Some(yielded) = self.yielded {
                    if now - yielded > HAND_OVER_PATIENCE {
                        let patience = HAND_OVER_PATIENCE.as_secs();
                        let reason = format!("the backup has not taken over for {patience} s");
                        self.peer_useless(reason, actions);
                    }
                } else if self.forgotten_by().is_some_and(|by| now > by) {
                    let patience = STAND_DOWN_PATIENCE.as_secs();
                    let reason = format!("the backup has not forgotten it for {patience} s");
                    self.peer_useless(reason, actions);
                } else if let Some(late) = self.delivery.late(now).filter(|_| self.awaits_epochs())
                {
                    self.peer_useless(self.undelivered(late), actions);
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "primary_tests.rs"]
mod tests;
