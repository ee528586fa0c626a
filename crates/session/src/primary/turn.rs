//! A turn of the backup from checkpoints to a log, or back, seen from the primary.
//!
//! ```text
//! asked ─▶ ready ─▶ due ─▶ under way ─▶ captured ─▶ committed
//! ```
//!
//! The turn is an epoch like others, at whose end the log begins or with which it ends. Until it is captured it
//! can be called off; from then on it is carried out, however late it comes to the backup.

use super::Lead;
use std::time::Duration;
use understudy_protocol::{Epoch, PIPELINE_DEPTH, PrimaryPhase, Time, planted};

/// The time that each part of a turn may take: the start of the backup's QEMU, the guest's next end of
/// an epoch, and its commit.
pub const TURN_PATIENCE: Duration = Duration::from_secs(60);

/// The machine as it was copied: the log of a session that begins in lockstep begins behind this epoch.
pub const MACHINE: Epoch = Epoch(1);

/// The way in which a backup keeps up, and since when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    is_log: bool,
    since: Epoch,
}

impl Way {
    /// The way of a session that begins, from its first checkpoint on.
    pub fn at_first(is_log: bool) -> Way {
        Way { is_log, since: MACHINE }
    }

    /// Whether the backup gets a log.
    pub fn is_log(&self) -> bool {
        self.is_log
    }

    /// The epoch, a checkpoint, since which the backup keeps up as it does.
    pub fn since(&self) -> Epoch {
        self.since
    }

    /// A log begins with the end of the epoch that runs, of which so many batches may be on their way.
    pub fn begin_log(&mut self, lead: &mut Lead, pipeline: u64) {
        lead.set_pipeline(pipeline);
        *self = Way { is_log: true, since: lead.running() };
    }

    /// The log has ended with the last epoch that was closed, a checkpoint; others follow.
    pub fn end_log(&mut self, lead: &mut Lead) {
        lead.set_pipeline(PIPELINE_DEPTH);
        *self = Way { is_log: false, since: Epoch(lead.running().0 - 1) };
    }

    /// Whether this epoch, which is on its way, is no batch of a log.
    pub fn is_checkpoint(&self, epoch: Epoch) -> bool {
        if self.is_log { epoch <= self.since } else { epoch >= self.since }
    }

    /// Whether batches may go: nothing overtakes the machine behind which they begin.
    pub fn may_send_log(&self, lead: &Lead) -> bool {
        self.is_log && (lead.committed() >= self.since || planted!(LogOvertakes))
    }
}

/// The reason why a turn has not come about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoTurn {
    /// Another turn is not over yet, for this reason.
    Early(&'static str),
    /// The backup refuses, for this reason.
    Refused(String),
    /// The backup has not answered in time.
    Unanswered,
    /// No epoch came to its end in time.
    NotCaptured,
    /// This host could not carry it out, for this reason.
    Failed(String),
    /// Protection has ended meanwhile.
    Over,
    /// It is captured, and its commit does not come in time, or not any more in this phase.
    Uncommitted(PrimaryPhase),
}

impl NoTurn {
    /// Whether the backup is to be told that the turn is called off: what it has prepared it needs once
    /// the turn is captured.
    pub fn is_called_off(&self) -> bool {
        if let NoTurn::Uncommitted(_) = self {
            return planted!(CallOffWhatIsLate);
        }
        !matches!(self, NoTurn::Early(_) | NoTurn::Over)
    }
}

/// What a look at a turn finds.
#[derive(Debug, PartialEq, Eq)]
pub enum Look<P> {
    /// It goes on.
    Wait,
    /// The backup is ready: this host is to be, too.
    Ready,
    /// The backup keeps up in the other way.
    Committed,
    /// It has ended without that.
    Ended {
        /// Reason.
        why: NoTurn,
        /// What was prepared for it here, which nobody needs any more.
        left: Option<P>,
    },
}

/// The progress of a turn, for which `P` is prepared on this host.
#[derive(Debug)]
pub struct Turning<P> {
    state: State<P>,
    patience: Duration,
    /// Orders that the backup has not answered: each gets one answer, which does not say to which it is.
    unanswered: u32,
    /// The epoch that was the last turn.
    last: Epoch,
}

#[derive(Debug)]
enum State<P> {
    Idle,
    /// The backup has until then to answer.
    Asked(Time),
    Answered(Result<(), String>),
    /// It is due for whoever takes checkpoints, until then.
    Due(Time, P),
    UnderWay,
    Failed(String),
    /// It is this epoch, which is to be committed until then.
    Captured(Epoch, Time),
}

impl<P> Default for Turning<P> {
    fn default() -> Turning<P> {
        let (state, patience) = (State::Idle, TURN_PATIENCE);
        Turning { state, patience, unanswered: 0, last: Epoch(0) }
    }
}

impl<P> Turning<P> {
    /// The same, each part of which may take so long.
    pub fn with_patience(self, patience: Duration) -> Turning<P> {
        Turning { patience, ..self }
    }

    /// The backup is about to be asked, unless something of another turn is on its way: an answer, which would be taken
    /// for that to this order, or the epoch, which would find that the backup prepares for this turn.
    pub fn ask(&mut self, now: Time, lead: &Lead) -> Result<(), NoTurn> {
        if self.unanswered > 0 && !planted!(TakeAnyAnswer) {
            return Err(NoTurn::Early("its backup has not answered the order before"));
        }
        if lead.committed() < self.last && !planted!(AskBehindTurn) {
            return Err(NoTurn::Early("the turn before is not on its backup yet"));
        }
        self.unanswered += 1;
        self.state = State::Asked(now + self.patience);
        Ok(())
    }

    /// The backup answers an order.
    pub fn answered(&mut self, answer: Result<(), String>) {
        self.unanswered = self.unanswered.saturating_sub(1);
        // It may come too late.
        if matches!(self.state, State::Asked(_)) {
            self.state = State::Answered(answer);
        }
    }

    /// All is there for it.
    pub fn prepared(&mut self, now: Time, prepared: P) {
        self.state = State::Due(now + self.patience, prepared);
    }

    /// Whether it is due, and may be the end of the epoch that runs: the backup has what a log begins behind, and no
    /// planned fail-over goes before.
    pub fn may_begin(&self, lead: &Lead, way: &Way) -> bool {
        let is_due = matches!(self.state, State::Due(..));
        let protected = *lead.phase() == PrimaryPhase::Protected && lead.may_capture();
        is_due && protected && !lead.is_handed_over() && (!way.is_log || way.may_send_log(lead))
    }

    /// Begins the turn that is due, if it still is.
    pub fn begin(&mut self) -> Option<P> {
        match std::mem::replace(&mut self.state, State::UnderWay) {
            State::Due(_, prepared) => Some(prepared),
            other => {
                self.state = other;
                None
            }
        }
    }

    /// The turn is captured: it is this epoch.
    pub fn captured(&mut self, now: Time, epoch: Epoch) {
        self.last = epoch;
        // Whoever waited may have heard that protection is over.
        if matches!(self.state, State::UnderWay) {
            self.state = State::Captured(epoch, now + self.patience);
        }
    }

    /// The turn that was begun cannot be carried out, for this reason.
    pub fn failed(&mut self, why: String) {
        if matches!(self.state, State::UnderWay) {
            self.state = State::Failed(why);
        }
    }

    /// Nobody waits for it any more.
    pub fn give_up(&mut self) {
        self.state = State::Idle;
    }

    /// Looks how far it has come.
    pub fn look(&mut self, now: Time, lead: &Lead) -> Look<P> {
        let is_over = lead.phase().is_over();
        let ended = |why| Look::Ended { why, left: None };
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Answered(Ok(())) => Look::Ready,
            State::Answered(Err(why)) => ended(NoTurn::Refused(why)),
            State::Failed(why) => ended(NoTurn::Failed(why)),
            State::Captured(epoch, _) if lead.committed() >= epoch => Look::Committed,
            State::Captured(_, by) if now >= by || *lead.phase() != PrimaryPhase::Protected => {
                ended(NoTurn::Uncommitted(lead.phase().clone()))
            }
            State::Due(_, prepared) if is_over => {
                Look::Ended { why: NoTurn::Over, left: Some(prepared) }
            }
            State::Due(by, prepared) if now >= by => {
                Look::Ended { why: NoTurn::NotCaptured, left: Some(prepared) }
            }
            State::Idle | State::Asked(_) | State::UnderWay if is_over => ended(NoTurn::Over),
            State::Asked(by) if now >= by && !planted!(WaitForTheAnswer) => {
                ended(NoTurn::Unanswered)
            }
            going_on => {
                self.state = going_on;
                Look::Wait
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::primary::{Effect, Event};
    use understudy_protocol::{Generation, HostName, Primary, PrimaryAction};

    const READY: Result<(), String> = Ok(());

    fn at(seconds: u64) -> Time {
        Time(Duration::from_secs(seconds))
    }

    /// A primary whose backup has the first epoch.
    fn protected() -> Lead {
        let peer: HostName = "peer".parse().unwrap();
        let core = Primary::new(Generation(1), Duration::from_millis(100), at(0));
        let mut lead = Lead::new(core, 1, peer, at(0));
        capture(&mut lead);
        acknowledge(&mut lead, 1);
        assert_eq!(*lead.phase(), PrimaryPhase::Protected);
        lead
    }

    fn capture(lead: &mut Lead) {
        lead.handle(at(0), Event::Captured, &mut Vec::new());
    }

    fn acknowledge(lead: &mut Lead, epoch: u64) -> Vec<Effect> {
        let mut effects = Vec::new();
        lead.handle(at(0), Event::Acknowledged(Epoch(epoch)), &mut effects);
        effects
    }

    fn ended<P>(why: NoTurn, left: Option<P>) -> Look<P> {
        Look::Ended { why, left }
    }

    /// One that is due.
    fn due(lead: &Lead) -> Turning<char> {
        let mut turning = Turning::default();
        turning.ask(at(0), lead).unwrap();
        assert!(matches!(turning.look(at(59), lead), Look::Wait));
        turning.answered(READY);
        assert_eq!(turning.look(at(59), lead), Look::Ready);
        turning.prepared(at(60), 'a');
        turning
    }

    #[test]
    fn a_turn_is_asked_for_prepared_captured_and_committed() {
        let (mut lead, mut way) = (protected(), Way::at_first(false));
        let mut turning = due(&lead);
        assert!(turning.may_begin(&lead, &way));
        assert_eq!((turning.begin(), turning.begin()), (Some('a'), None));
        way.begin_log(&mut lead, 100);
        assert_eq!((way.since(), way.is_log()), (Epoch(2), true));
        capture(&mut lead);
        turning.captured(at(60), way.since());
        assert!(way.is_checkpoint(Epoch(2)) && !way.is_checkpoint(Epoch(3)));
        assert!(matches!(turning.look(at(60), &lead), Look::Wait) && !way.may_send_log(&lead));
        let released = acknowledge(&mut lead, 2);
        assert_eq!(released, [Effect::Act(PrimaryAction::Release(Epoch(2)))]);
        assert_eq!(turning.look(at(60), &lead), Look::Committed);
        assert!(way.may_send_log(&lead));
        capture(&mut lead);
        way.end_log(&mut lead);
        assert_eq!((way.since(), way.is_log(), lead.may_capture()), (Epoch(3), false, true));
        capture(&mut lead);
        assert!(!lead.may_capture(), "as many as of checkpoints");
    }

    #[test]
    fn a_turn_back_waits_for_what_its_log_begins_behind_and_a_fail_over_goes_first() {
        let (mut lead, mut way) = (protected(), Way::at_first(false));
        way.begin_log(&mut lead, 100);
        capture(&mut lead);
        let turning = due(&lead);
        assert!(!turning.may_begin(&lead, &way));
        acknowledge(&mut lead, 2);
        assert!(turning.may_begin(&lead, &way));
        lead.handle(at(0), Event::HandOver, &mut Vec::new());
        assert!(!turning.may_begin(&lead, &way));
    }

    #[test]
    fn what_does_not_come_in_time_is_called_off_and_not_what_is_captured() {
        let mut lead = protected();
        let mut asked = Turning::<char>::default();
        asked.ask(at(0), &lead).unwrap();
        assert_eq!(asked.look(at(60), &lead), ended(NoTurn::Unanswered, None));
        let mut turning = due(&lead);
        assert_eq!(turning.look(at(120), &lead), ended(NoTurn::NotCaptured, Some('a')));
        let mut turning = due(&lead);
        turning.begin().unwrap();
        turning.failed("it does not load".to_owned());
        let failed = NoTurn::Failed("it does not load".to_owned());
        assert_eq!(turning.look(at(60), &lead), ended(failed.clone(), None));
        assert!(
            [NoTurn::Unanswered, NoTurn::NotCaptured, failed].iter().all(NoTurn::is_called_off)
        );
        let mut turning = due(&lead);
        turning.begin().unwrap();
        capture(&mut lead);
        turning.captured(at(60), Epoch(2));
        let late = NoTurn::Uncommitted(PrimaryPhase::Protected);
        assert!(!late.is_called_off());
        assert_eq!(turning.look(at(120), &lead), ended(late, None));
    }

    /// Whoever asks again has the answer to the first order taken for that to the second, for which nothing is
    /// prepared.
    #[test]
    fn the_backup_is_not_asked_again_before_it_has_answered() {
        let lead = protected();
        let mut turning = Turning::<char>::default();
        turning.ask(at(0), &lead).unwrap();
        assert_eq!(turning.look(at(60), &lead), ended(NoTurn::Unanswered, None));
        assert!(matches!(turning.ask(at(61), &lead), Err(NoTurn::Early(_))));
        turning.answered(READY);
        assert!(matches!(turning.look(at(61), &lead), Look::Wait), "nobody asks any more");
        turning.ask(at(62), &lead).unwrap();
        // More answers than orders are none.
        [READY, READY, READY].into_iter().for_each(|answer| turning.answered(answer));
        assert_eq!(turning.look(at(62), &lead), Look::Ready);
        turning.ask(at(63), &lead).unwrap();
    }

    /// The order would overtake the epoch of the turn before: the backup gives up what that needs.
    #[test]
    fn the_backup_is_not_asked_again_before_it_has_the_turn_before() {
        let mut lead = protected();
        let mut turning = due(&lead);
        turning.begin().unwrap();
        capture(&mut lead);
        turning.captured(at(60), Epoch(2));
        let late = NoTurn::Uncommitted(PrimaryPhase::Protected);
        assert_eq!(turning.look(at(120), &lead), ended(late, None));
        assert!(matches!(turning.ask(at(121), &lead), Err(NoTurn::Early(_))));
        acknowledge(&mut lead, 2);
        turning.ask(at(122), &lead).unwrap();
    }

    #[test]
    fn nobody_waits_when_protection_is_over() {
        let mut lead = protected();
        let mut turning = due(&lead);
        lead.handle(at(0), Event::GuestDied("it did".to_owned()), &mut Vec::new());
        assert!(!turning.may_begin(&lead, &Way::at_first(false)));
        assert_eq!(turning.look(at(60), &lead), ended(NoTurn::Over, Some('a')));
        assert_eq!(turning.look(at(60), &lead), ended(NoTurn::Over, None));
        assert!(!NoTurn::Over.is_called_off());
    }
}
