//! The backup's half of the two invariants (ARCHITECTURE.md).
//!
//! The backup acknowledges whole epochs only, stops acknowledging before it
//! contests, and goes live only with the arbiter's word.

use crate::detector::SYNC_PATIENCE;
use crate::output::LEASE_IS_OVER;
use crate::{Detector, Epoch, Generation, Output, Ownership, Time, Verdict};
use std::time::Duration;

/// Time to wait before an unreachable arbiter is asked again.
const ARBITER_RETRY: Duration = Duration::from_millis(200);

/// A winner whose disks hang has so long to start the guest, if the former primary keeps its own.
const START_PATIENCE: Duration = Duration::from_secs(5);

/// An event that happens to the backup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackupEvent {
    /// The whole of this epoch is staged and its checksum is right.
    Staged(Epoch),
    /// Any sign of life of the primary.
    Heard,
    /// The connection to the primary ended, or broke the protocol.
    PeerGone(String),
    /// The primary asks for the take-over.
    TakeOver,
    /// The primary ends protection.
    StandDown,
    /// The reason why this copy could not be started just now; none if it could.
    Fitness(Option<String>),
    /// This copy has proved to be another than the primary's: it must not be started any more. Why, and
    /// where that is shown, comes with [`BackupEvent::CannotServe`].
    Doomed,
    /// This copy cannot be started any more.
    CannotServe(String),
    /// This copy, which has won the VM, is about to be started, if it still may.
    Starts,
    /// The former primary keeps its guest, and asks what becomes of the VM.
    Awaited,
    /// This copy, which has won the VM, could not be started; nothing has left it, and nothing will.
    NotStarted(String),
    /// Time has passed.
    Tick,
    /// The arbiter answered a [`BackupAction::Contest`], or a [`BackupAction::HandBack`].
    Verdict(Verdict),
    /// The former primary says that the VM is owned so. While the arbiter gives no verdict this
    /// ends the wait: it granted nobody a later generation without having refused this backup's.
    OwnedElsewhere(Ownership),
}

/// An action that the backup must take, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackupAction {
    /// Apply this staged epoch; its acknowledgement goes out first.
    AcknowledgeAndApply(Epoch),
    /// Ask the arbiter for the generation after this one.
    Contest(Generation),
    /// Ask the arbiter to make the former primary the owner again, from this generation on: it
    /// keeps its guest.
    HandBack(Generation),
    /// Close the connections to the primary.
    ClosePeer,
    /// Start the guest from this epoch, after everything acknowledged is applied.
    GoLive {
        /// The generation won.
        generation: Generation,
        /// The last committed epoch.
        epoch: Epoch,
        /// The reason, for people.
        reason: String,
    },
    /// Forget the VM: it lives, or ends, without this copy, for this reason.
    Discard(String),
    /// Forget the VM as the primary asked, and tell it so.
    StandDown,
}

/// The phase in which the backup is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackupPhase {
    /// First synchronisation: nothing to take over with.
    Syncing,
    /// Holds a committed epoch and follows the primary.
    Standing,
    /// The primary seems lost; the arbiter decides. Nothing is acknowledged.
    Contesting(String),
    /// Runs the VM, or is about to.
    Live,
    /// Has won the VM and cannot run it, for this reason: the former primary is to have it back.
    HandingBack(String),
    /// Forgot the VM.
    Discarded,
}

/// The backup's state machine.
#[derive(Clone, Debug)]
pub struct Backup {
    phase: BackupPhase,
    generation: Generation,
    committed: Epoch,
    /// The shortest silence that counts as failure once standing by.
    timeout: Duration,
    detector: Detector,
    retry_at: Option<Time>,
    output: Output,
    /// The primary may let output go until then.
    leased_until: Time,
    /// Time at which the VM was won.
    won: Time,
    /// The guest runs, or may.
    starts: bool,
    /// Whether it could not be started just now.
    unfit: bool,
    /// Whether it may not be started at all, whatever comes.
    doomed: bool,
    /// Why what was won cannot be started at all.
    useless: Option<String>,
}

impl Backup {
    /// A backup that begins its first synchronisation with the owner of
    /// `generation`; `timeout` is the shortest silence that counts as failure.
    pub fn new(generation: Generation, timeout: Duration, now: Time) -> Backup {
        Backup {
            phase: BackupPhase::Syncing,
            generation,
            committed: Epoch(0),
            timeout,
            detector: Detector::new(timeout.max(SYNC_PATIENCE), now),
            retry_at: None,
            output: Output::Held,
            leased_until: now,
            won: now,
            starts: false,
            unfit: false,
            doomed: false,
            useless: None,
        }
    }

    /// The same, with this rule for the guest's output.
    pub fn with_output(self, output: Output) -> Backup {
        Backup { output, ..self }
    }

    /// The rule for the guest's output.
    pub fn output(&self) -> Output {
        self.output
    }

    /// The phase in which the backup is.
    pub fn phase(&self) -> &BackupPhase {
        &self.phase
    }

    /// The primary's generation, or the own one once live.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Whether it could not be started if it won: it takes part in no contest then.
    fn cannot_start(&self) -> bool {
        self.unfit || self.doomed
    }

    /// Whether [`BackupEvent::Starts`] would let the guest run.
    pub fn may_start(&self) -> bool {
        (self.phase == BackupPhase::Live && !self.doomed) || planted!(StartWhatWasReturned)
    }

    /// Whether the guest may run here: from [`BackupEvent::Starts`] on.
    pub fn may_run(&self) -> bool {
        self.starts
    }

    /// The last epoch that was acknowledged.
    pub fn committed(&self) -> Epoch {
        self.committed
    }

    /// Time at which [`BackupEvent::Tick`] is due next, if nothing else happens.
    pub fn deadline(&self) -> Option<Time> {
        match self.phase {
            BackupPhase::Live | BackupPhase::Discarded => None,
            BackupPhase::Contesting(_) | BackupPhase::HandingBack(_) => self.retry_at,
            _ => Some(self.detector.deadline()),
        }
    }

    /// Takes one event; appends what must be done to `actions`.
    pub fn handle(&mut self, now: Time, event: BackupEvent, actions: &mut Vec<BackupAction>) {
        match event {
            BackupEvent::Staged(epoch) => self.staged(now, epoch, actions),
            BackupEvent::Heard => self.detector.heard(now),
            BackupEvent::PeerGone(reason) => self.primary_lost(now, reason, actions),
            BackupEvent::TakeOver => {
                // It lets nothing go any more.
                self.leased_until = now;
                self.primary_lost(now, "the primary asked for it".to_owned(), actions);
            }
            BackupEvent::StandDown => self.stand_down(actions),
            BackupEvent::Doomed => self.doomed = true,
            BackupEvent::CannotServe(reason) => self.cannot_serve(reason, actions),
            BackupEvent::Fitness(ailment) => {
                self.unfit = ailment.is_some() && !planted!(ContestUnfit);
            }
            BackupEvent::Starts => self.starts |= self.may_start(),
            BackupEvent::NotStarted(reason) => {
                if self.phase == BackupPhase::Live {
                    self.hand_back(reason, actions);
                }
            }
            BackupEvent::Awaited => self.awaited(now, actions),
            BackupEvent::Tick => self.tick(now, actions),
            BackupEvent::Verdict(verdict) => self.verdict(now, verdict, actions),
            BackupEvent::OwnedElsewhere(owner) => self.owned_elsewhere(&owner, actions),
        }
    }

    /// Ends it whatever its state is: to be called when that may be half changed. Should this host
    /// own the VM already, it stays so.
    pub fn condemn(&mut self) {
        if !matches!(self.phase, BackupPhase::Live | BackupPhase::HandingBack(_)) {
            self.phase = BackupPhase::Discarded;
        }
    }

    /// Lets its primary ask the arbiter first until then, should they lose each other: it hangs up and can go on, and this
    /// one would race it for the VM.
    pub fn yield_until(&mut self, until: Time) {
        self.leased_until = self.leased_until.max(until);
    }

    fn staged(&mut self, now: Time, epoch: Epoch, actions: &mut Vec<BackupAction>) {
        self.detector.heard(now);
        let follows = matches!(self.phase, BackupPhase::Syncing | BackupPhase::Standing);
        // What a doomed copy acknowledged would leave on the word of a host that takes nothing over.
        if self.doomed || (!follows && !planted!(StageOnceLive)) {
            return;
        }
        if epoch != self.committed.next() {
            let reason = format!("epoch {epoch} arrived after epoch {}", self.committed);
            return self.primary_lost(now, reason, actions);
        }
        if self.phase == BackupPhase::Syncing {
            self.phase = BackupPhase::Standing;
            self.detector.set_floor(self.timeout);
        }
        self.committed = epoch;
        if self.output == Output::Unheld {
            self.leased_until = now + LEASE_IS_OVER;
        }
        actions.push(BackupAction::AcknowledgeAndApply(epoch));
    }

    fn primary_lost(&mut self, now: Time, reason: String, actions: &mut Vec<BackupAction>) {
        match self.phase {
            BackupPhase::Syncing if !planted!(TakeOverWithNothing) => {
                self.discard(format!("{reason}, before the first synchronisation ended"), actions);
            }
            BackupPhase::Syncing | BackupPhase::Standing => {
                self.phase = BackupPhase::Contesting(reason);
                if planted!(SkipArbiter) {
                    let granted = Verdict::Granted(self.generation.next());
                    return self.verdict(now, granted, actions);
                }
                if now < self.leased_until {
                    self.retry_at = Some(self.leased_until);
                    // As long as this one may not ask, the primary should.
                    return actions.push(BackupAction::ClosePeer);
                }
                // It would win what it cannot start. The primary may go on.
                if self.cannot_start() {
                    self.retry_at = Some(now + ARBITER_RETRY);
                    return actions.push(BackupAction::ClosePeer);
                }
                self.retry_at = None;
                actions.push(BackupAction::Contest(self.generation));
            }
            _ => {}
        }
    }

    fn stand_down(&mut self, actions: &mut Vec<BackupAction>) {
        if matches!(self.phase, BackupPhase::Syncing | BackupPhase::Standing) {
            self.phase = BackupPhase::Discarded;
            actions.push(BackupAction::StandDown);
        }
    }

    /// A copy that cannot run must not win the VM: before the primary hears of
    /// it and hangs up, this backup is out of every contest.
    fn cannot_serve(&mut self, reason: String, actions: &mut Vec<BackupAction>) {
        match self.phase {
            // The start fails, and then it is handed back; sooner, if somebody waits for that.
            BackupPhase::Live | BackupPhase::HandingBack(_) => self.useless = Some(reason),
            BackupPhase::Contesting(_) if planted!(ContestWhenBroken) => {
                self.useless = Some(reason)
            }
            BackupPhase::Discarded => {}
            _ => self.discard(reason, actions),
        }
    }

    fn tick(&mut self, now: Time, actions: &mut Vec<BackupAction>) {
        match self.phase {
            BackupPhase::Live | BackupPhase::Discarded => {}
            BackupPhase::Contesting(_) if self.cannot_start() => {}
            BackupPhase::Contesting(_) | BackupPhase::HandingBack(_) => {
                if self.retry_at.is_some_and(|at| now >= at) {
                    self.retry_at = None;
                    actions.push(match self.phase {
                        BackupPhase::Contesting(_) => BackupAction::Contest(self.generation),
                        _ => BackupAction::HandBack(self.generation),
                    });
                }
            }
            _ => {
                if let Some(silence) = self.detector.suspicion(now) {
                    let reason =
                        format!("the primary has been silent for {} ms", silence.as_millis());
                    self.primary_lost(now, reason, actions);
                }
            }
        }
    }

    fn verdict(&mut self, now: Time, verdict: Verdict, actions: &mut Vec<BackupAction>) {
        match &self.phase {
            BackupPhase::Contesting(reason) => {
                let reason = reason.clone();
                self.contested(now, verdict, reason, actions);
            }
            BackupPhase::HandingBack(reason) => match verdict {
                Verdict::Unreachable(_) => self.retry_at = Some(now + ARBITER_RETRY),
                // The grant itself, which was asked for before that: it is not handed back by it.
                Verdict::Granted(generation) if generation == self.generation => {}
                _ => {
                    let reason = format!("{reason}; handed back");
                    self.discard(reason, actions);
                }
            },
            // A grant that came too late: nobody would have the VM.
            BackupPhase::Discarded => {
                if let Verdict::Granted(generation) = verdict
                    && !planted!(KeepLateGrant)
                {
                    self.generation = generation;
                    self.hand_back("this host had given up before it won".to_owned(), actions);
                }
            }
            _ => {}
        }
    }

    fn contested(
        &mut self,
        now: Time,
        verdict: Verdict,
        reason: String,
        actions: &mut Vec<BackupAction>,
    ) {
        match verdict {
            Verdict::Granted(generation) => {
                assert!(generation > self.generation, "generations only grow");
                self.phase = BackupPhase::Live;
                self.won = now;
                self.generation = generation;
                if self.doomed {
                    let reason = format!("{reason}; its copy has proved to be another");
                    return self.hand_back(reason, actions);
                }
                actions.push(BackupAction::GoLive { generation, epoch: self.committed, reason });
            }
            Verdict::Taken(owner) => {
                let host = owner.host.as_deref().unwrap_or("nobody");
                let reason = format!(
                    "{reason}; the arbiter says that {host} owns the VM at generation {}",
                    owner.generation
                );
                self.discard(reason, actions);
            }
            // What it ran since is no copy of that session's.
            Verdict::Returned(generation) => {
                let reason =
                    format!("{reason}; this host owns the VM at generation {generation} already");
                self.discard(reason, actions);
            }
            Verdict::Unreachable(_) if planted!(SilenceIsGrantToBackup) => {
                let granted = Verdict::Granted(self.generation.next());
                self.contested(now, granted, reason, actions);
            }
            Verdict::Unreachable(_) => {
                self.retry_at = Some(now + ARBITER_RETRY);
                // Nothing is acknowledged any more. A primary that lives must not
                // wait for it in vain: it may reach the arbiter.
                actions.push(BackupAction::ClosePeer);
            }
        }
    }

    /// A copy that is started soon is worth more than one that stands still; one whose host hangs, or
    /// that is known to be of no use, is not, as long as it has not run. The former primary asks
    /// whoever the arbiter has given the VM: this host, which need not have heard of it.
    fn awaited(&mut self, now: Time, actions: &mut Vec<BackupAction>) {
        let contests = matches!(self.phase, BackupPhase::Contesting(_));
        if contests && self.cannot_start() && !planted!(KeepUnheardGrant) {
            self.generation = self.generation.next();
            let reason = "it was granted, unheard, and could not be started then".to_owned();
            return self.hand_back(reason, actions);
        }
        if self.phase != BackupPhase::Live || self.starts {
            return;
        }
        let late = (now - self.won > START_PATIENCE)
            .then(|| format!("it was not started within {} s", START_PATIENCE.as_secs()));
        let useless = self.useless.take().filter(|_| !planted!(KeepTheUseless));
        if let Some(reason) = useless.or(late) {
            self.hand_back(reason, actions);
        }
    }

    fn hand_back(&mut self, reason: String, actions: &mut Vec<BackupAction>) {
        if planted!(KeepTheGrant) {
            return;
        }
        self.phase = BackupPhase::HandingBack(reason);
        self.retry_at = None;
        actions.push(BackupAction::HandBack(self.generation));
    }

    fn owned_elsewhere(&mut self, owner: &Ownership, actions: &mut Vec<BackupAction>) {
        let BackupPhase::Contesting(reason) = &self.phase else { return };
        if owner.generation > self.generation || planted!(ForgetGeneration) {
            let host = owner.host.as_deref().unwrap_or("nobody");
            let reason = format!(
                "{reason}; meanwhile {host} owns the VM at generation {}, as that host says",
                owner.generation
            );
            self.discard(reason, actions);
        }
    }

    fn discard(&mut self, reason: String, actions: &mut Vec<BackupAction>) {
        self.phase = BackupPhase::Discarded;
        actions.push(BackupAction::Discard(reason));
    }
}

#[cfg(test)]
#[path = "backup_tests.rs"]
mod tests;
