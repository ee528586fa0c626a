//! The backup's half of the two invariants (ARCHITECTURE.md).
//!
//! The backup acknowledges whole epochs only, stops acknowledging before it
//! contests, and goes live only with the arbiter's word.

use crate::detector::SYNC_PATIENCE;
use crate::output::LEASE_IS_OVER;
use crate::{Detector, Epoch, Generation, Output, Ownership, Time, Verdict};
use std::time::Duration;

/// How long to wait before an unreachable arbiter is asked again.
const ARBITER_RETRY: Duration = Duration::from_millis(200);

/// What happens to the backup.
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
    /// This copy cannot be started any more.
    CannotServe(String),
    /// Time has passed.
    Tick,
    /// The arbiter answered a [`BackupAction::Contest`].
    Verdict(Verdict),
    /// The former primary says that the VM is owned so. While the arbiter gives no verdict this
    /// ends the wait: it granted nobody a later generation without having refused this backup's.
    OwnedElsewhere(Ownership),
}

/// What the backup must do, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackupAction {
    /// Apply this staged epoch; its acknowledgement goes out first.
    AcknowledgeAndApply(Epoch),
    /// Ask the arbiter for the generation after this one.
    Contest(Generation),
    /// Close the connections to the primary.
    ClosePeer,
    /// Start the guest from this epoch, after everything acknowledged is applied.
    GoLive {
        /// The generation won.
        generation: Generation,
        /// The last committed epoch.
        epoch: Epoch,
        /// Why, for people.
        reason: String,
    },
    /// Forget the VM: it lives, or ends, without this copy, for this reason.
    Discard(String),
    /// Forget the VM as the primary asked, and tell it so.
    StandDown,
}

/// Where the backup stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackupPhase {
    /// First synchronisation: nothing to take over with.
    Syncing,
    /// Holds a committed epoch and follows the primary.
    Standing,
    /// The primary seems lost; the arbiter decides. Nothing is acknowledged.
    Contesting(String),
    /// Runs the VM.
    Live,
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

    /// Where the backup stands.
    pub fn phase(&self) -> &BackupPhase {
        &self.phase
    }

    /// The primary's generation, or the own one once live.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// The last epoch that was acknowledged.
    pub fn committed(&self) -> Epoch {
        self.committed
    }

    /// Time at which [`BackupEvent::Tick`] is due next, if nothing else happens.
    pub fn deadline(&self) -> Option<Time> {
        match self.phase {
            BackupPhase::Live | BackupPhase::Discarded => None,
            BackupPhase::Contesting(_) => self.retry_at,
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
            BackupEvent::CannotServe(reason) => self.cannot_serve(reason, actions),
            BackupEvent::Tick => self.tick(now, actions),
            BackupEvent::Verdict(verdict) => self.verdict(now, verdict, actions),
            BackupEvent::OwnedElsewhere(owner) => self.owned_elsewhere(&owner, actions),
        }
    }

    /// Ends it whatever its state is: to be called when that may be half changed. Should this host
    /// own the VM already, it stays so.
    pub fn condemn(&mut self) {
        if self.phase != BackupPhase::Live {
            self.phase = BackupPhase::Discarded;
        }
    }

    fn staged(&mut self, now: Time, epoch: Epoch, actions: &mut Vec<BackupAction>) {
        self.detector.heard(now);
        if !matches!(self.phase, BackupPhase::Syncing | BackupPhase::Standing) {
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
            BackupPhase::Syncing => {
                self.discard(format!("{reason}, before the first synchronisation ended"), actions);
            }
            BackupPhase::Standing => {
                self.phase = BackupPhase::Contesting(reason);
                if now < self.leased_until {
                    self.retry_at = Some(self.leased_until);
                    // As long as this one may not ask, the primary should.
                    return actions.push(BackupAction::ClosePeer);
                }
                self.retry_at = None;
                actions.push(BackupAction::Contest(self.generation));
            }
            BackupPhase::Contesting(_) | BackupPhase::Live | BackupPhase::Discarded => {}
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
        if !matches!(self.phase, BackupPhase::Live | BackupPhase::Discarded) {
            self.discard(reason, actions);
        }
    }

    fn tick(&mut self, now: Time, actions: &mut Vec<BackupAction>) {
        match self.phase {
            BackupPhase::Live | BackupPhase::Discarded => {}
            BackupPhase::Contesting(_) => {
                if self.retry_at.is_some_and(|at| now >= at) {
                    self.retry_at = None;
                    actions.push(BackupAction::Contest(self.generation));
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
        let BackupPhase::Contesting(reason) = &self.phase else { return };
        match verdict {
            Verdict::Granted(generation) => {
                assert!(generation > self.generation, "generations only grow");
                let reason = reason.clone();
                self.phase = BackupPhase::Live;
                self.generation = generation;
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
            Verdict::Unreachable(_) => {
                self.retry_at = Some(now + ARBITER_RETRY);
                // Nothing is acknowledged any more. A primary that lives must not
                // wait for it in vain: it may reach the arbiter.
                actions.push(BackupAction::ClosePeer);
            }
        }
    }

    fn owned_elsewhere(&mut self, owner: &Ownership, actions: &mut Vec<BackupAction>) {
        let BackupPhase::Contesting(reason) = &self.phase else { return };
        if owner.generation > self.generation {
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
mod tests {
    use super::*;

    fn at(ms: u64) -> Time {
        Time(Duration::from_millis(ms))
    }

    #[test]
    fn a_silence_is_borne_until_there_is_something_to_take_over() {
        let mut backup = Backup::new(Generation(1), Duration::from_millis(100), at(0));
        let mut actions = Vec::new();
        backup.handle(at(1_900), BackupEvent::Tick, &mut actions);
        assert_eq!((backup.phase(), actions.len()), (&BackupPhase::Syncing, 0));
        // Regular signs of life, so that no jitter has been learnt.
        for beat in 96..1_000 {
            backup.handle(at(beat * 20), BackupEvent::Heard, &mut actions);
        }
        backup.handle(at(20_000), BackupEvent::Staged(Epoch(1)), &mut actions);
        actions.clear();
        backup.handle(at(20_101), BackupEvent::Tick, &mut actions);
        assert_eq!(actions, [BackupAction::Contest(Generation(1))]);
    }

    #[test]
    fn a_copy_that_cannot_run_does_not_contest_the_vm() {
        let mut backup = Backup::new(Generation(1), Duration::from_millis(100), at(0));
        let mut actions = Vec::new();
        backup.handle(at(1), BackupEvent::Staged(Epoch(1)), &mut actions);
        actions.clear();
        backup.handle(at(2), BackupEvent::CannotServe("QEMU ended".into()), &mut actions);
        backup.handle(at(3), BackupEvent::PeerGone("it hung up".into()), &mut actions);
        assert_eq!(actions, [BackupAction::Discard("QEMU ended".into())]);
    }

    #[test]
    fn a_backup_that_cannot_ask_hangs_up_so_that_the_primary_may_ask() {
        let mut backup = Backup::new(Generation(1), Duration::from_millis(100), at(0));
        let mut actions = Vec::new();
        backup.handle(at(1), BackupEvent::Staged(Epoch(1)), &mut actions);
        backup.handle(at(2), BackupEvent::TakeOver, &mut actions);
        actions.clear();
        let silent = Verdict::Unreachable("no answer".into());
        backup.handle(at(3), BackupEvent::Verdict(silent), &mut actions);
        assert_eq!(actions, [BackupAction::ClosePeer]);
        actions.clear();
        backup.handle(at(203), BackupEvent::Tick, &mut actions);
        assert_eq!(actions, [BackupAction::Contest(Generation(1))], "and asks on");
    }

    #[test]
    fn a_backup_that_cannot_ask_lets_go_when_the_primary_owns_a_later_generation() {
        let mut backup = Backup::new(Generation(3), Duration::from_millis(100), at(0));
        let mut actions = Vec::new();
        let owned = |generation| {
            let (host, generation) = (Some(crate::literal("a")), Generation(generation));
            BackupEvent::OwnedElsewhere(Ownership { host, generation })
        };
        backup.handle(at(1), BackupEvent::Staged(Epoch(1)), &mut actions);
        backup.handle(at(2), owned(4), &mut actions);
        assert_eq!(*backup.phase(), BackupPhase::Standing, "it follows somebody");
        backup.handle(at(2), BackupEvent::PeerGone("the link was cut".into()), &mut actions);
        let silent = Verdict::Unreachable("no answer".into());
        backup.handle(at(3), BackupEvent::Verdict(silent), &mut actions);
        backup.handle(at(4), owned(3), &mut actions);
        assert!(matches!(backup.phase(), BackupPhase::Contesting(_)), "that is what it had");
        actions.clear();
        backup.handle(at(5), owned(4), &mut actions);
        assert_eq!(*backup.phase(), BackupPhase::Discarded);
        assert!(
            matches!(&actions[..], [BackupAction::Discard(words)] if words.contains("as that host says"))
        );
        backup.handle(at(6), BackupEvent::Verdict(Verdict::Granted(Generation(4))), &mut actions);
        assert_eq!(*backup.phase(), BackupPhase::Discarded, "an answer that comes too late");
    }

    #[test]
    fn a_primary_that_holds_nothing_is_waited_for() {
        let new = Backup::new(Generation(1), Duration::from_millis(100), at(0));
        let mut backup = new.with_output(Output::Unheld);
        let mut actions = Vec::new();
        backup.handle(at(100), BackupEvent::Staged(Epoch(1)), &mut actions);
        let asked = backup.clone();
        actions.clear();
        backup.handle(at(101), BackupEvent::PeerGone("it hung up".into()), &mut actions);
        assert_eq!(actions, [BackupAction::ClosePeer]);
        actions.clear();
        backup.handle(at(1_199), BackupEvent::Tick, &mut actions);
        assert_eq!(actions, []);
        backup.handle(at(1_200), BackupEvent::Tick, &mut actions);
        assert_eq!(actions, [BackupAction::Contest(Generation(1))]);
        let mut backup = asked;
        actions.clear();
        backup.handle(at(101), BackupEvent::TakeOver, &mut actions);
        assert_eq!(actions, [BackupAction::Contest(Generation(1))], "it was asked to");
    }

    #[test]
    fn a_long_silence_ends_the_first_synchronisation() {
        let mut backup = Backup::new(Generation(1), Duration::from_millis(100), at(0));
        let mut actions = Vec::new();
        backup.handle(at(2_001), BackupEvent::Tick, &mut actions);
        assert_eq!(*backup.phase(), BackupPhase::Discarded);
    }
}
