//! The cohort of one member, for one snapshot after the other.

use super::{About, Part, TakeOrder, TakeReport};
use crate::SnapshotNumber;
use crate::contact::{SILENCE, Silence, Standstill};
use understudy_protocol::{Time, planted};

/// An event that happens to a cohort.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TakeEvent {
    /// The coordinator says something.
    Order(About<TakeOrder>),
    /// Write protection is armed.
    Prepared(SnapshotNumber),
    /// The VM was paused, captured, and runs on.
    Taken(SnapshotNumber),
    /// All is in the store.
    Saved(SnapshotNumber, Part),
    /// The member cannot go on, for this reason.
    Failed(SnapshotNumber, String),
    /// Whoever prepares, takes and saves has done so much by now. Said once a second or more often.
    Working(SnapshotNumber, u64),
    /// Time has passed.
    Tick,
}

/// An action that must be taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TakeAction {
    /// Arm write protection; then say [`TakeEvent::Prepared`].
    Prepare(SnapshotNumber),
    /// Tell the cut, [`crate::CutEvent::Take`]; once it is through and the VM runs on, say
    /// [`TakeEvent::Taken`], and once all is in the store [`TakeEvent::Saved`].
    Take(SnapshotNumber),
    /// Note that what changed since this snapshot is all that the next one needs to save.
    Commit(SnapshotNumber),
    /// Stop saving, lift write protection, tell the cut, and count what this snapshot would
    /// have saved as changed since the last one that exists. The guest runs on.
    Discard(SnapshotNumber),
    /// Tell the coordinator.
    Report(About<TakeReport>),
}

/// The phase in which a cohort is with a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TakeCohortPhase {
    /// No snapshot is going on.
    Idle,
    /// Write protection is being armed.
    Preparing,
    /// The snapshot can be taken.
    Prepared,
    /// The snapshot is being taken, or saved.
    Taking {
        /// Whether the pause is over.
        taken: bool,
    },
    /// All is in the store.
    Saved(Part),
    /// The snapshot exists.
    Committed,
    /// The snapshot was given up as told.
    Abandoned,
    /// The snapshot was given up for this reason.
    Failed(String),
}

/// Decides for one member.
#[derive(Clone, Debug)]
pub struct TakeCohort {
    number: SnapshotNumber,
    phase: TakeCohortPhase,
    silence: Silence,
    standstill: Standstill,
}

impl TakeCohort {
    /// Creates one for a member whose group's last snapshot, taken or given up, has this number.
    pub fn new(number: SnapshotNumber, now: Time) -> TakeCohort {
        let (silence, standstill) = (Silence::new(now), Standstill::new(now));
        TakeCohort { number, phase: TakeCohortPhase::Idle, silence, standstill }
    }

    /// The phase in which it is.
    pub fn phase(&self) -> &TakeCohortPhase {
        &self.phase
    }

    /// Whether everything of that snapshot is in the store, and it may still come to exist.
    pub fn has_saved(&self, number: SnapshotNumber) -> bool {
        number == self.number && matches!(self.phase, TakeCohortPhase::Saved(_))
    }

    /// Time at which [`TakeEvent::Tick`] is due next, if nothing else happens.
    pub fn deadline(&self) -> Option<Time> {
        self.is_busy().then(|| self.silence.next_look())
    }

    /// Takes one event; appends what must be done to `actions`.
    pub fn handle(&mut self, now: Time, event: TakeEvent, actions: &mut Vec<TakeAction>) {
        use TakeCohortPhase::{Prepared, Preparing, Saved, Taking};
        let own = self.number;
        match (event, &self.phase) {
            (TakeEvent::Order(About { number, said }), _) => self.order(now, number, said, actions),
            (TakeEvent::Prepared(number), Preparing) if number == own => {
                self.enter(Prepared, actions);
            }
            (TakeEvent::Taken(number), Taking { .. }) if number == own => {
                self.enter(Taking { taken: true }, actions);
            }
            // Also before the coordinator has said so: another member's frame may have.
            (TakeEvent::Taken(number), Prepared) if number == own => {
                self.enter(Taking { taken: true }, actions);
            }
            (TakeEvent::Saved(number, part), Taking { taken: true }) if number == own => {
                self.enter(Saved(part), actions);
            }
            (TakeEvent::Failed(number, why), _) if number == own && self.is_busy() => {
                self.fail(why, actions);
            }
            (TakeEvent::Working(number, done), Preparing | Taking { .. })
                if number == own && self.standstill.look(now, done) =>
            {
                self.fail(format!("its host {}", Standstill::words()), actions);
            }
            (TakeEvent::Tick, _) if planted!(StayArmed) => {}
            (TakeEvent::Tick, _) if self.is_busy() && self.silence.look(now) => {
                let silence = SILENCE.as_secs();
                self.fail(format!("the coordinator was silent for {silence} s"), actions);
            }
            _ => {}
        }
    }

    fn order(
        &mut self,
        now: Time,
        number: SnapshotNumber,
        order: TakeOrder,
        actions: &mut Vec<TakeAction>,
    ) {
        use TakeCohortPhase::{Abandoned, Committed, Prepared, Preparing, Saved, Taking};
        if number < self.number {
            let why = format!("snapshot {} has begun since", self.number);
            return refuse(number, order, why, actions);
        }
        if number > self.number {
            return self.other(now, number, order, actions);
        }
        self.silence.end(now);
        match (order, &self.phase) {
            (TakeOrder::Take, Prepared) => {
                actions.push(TakeAction::Take(number));
                self.enter(Taking { taken: false }, actions);
            }
            (TakeOrder::Commit, Saved(_)) => {
                actions.push(TakeAction::Commit(number));
                self.enter(Committed, actions);
            }
            (TakeOrder::Abandon, Preparing | Prepared | Taking { .. } | Saved(_)) => {
                actions.push(TakeAction::Discard(number));
                self.enter(Abandoned, actions);
            }
            // Said again: where it stands is the answer.
            _ => self.report(actions),
        }
    }

    /// A snapshot after the one that this cohort knows: what was going on is over, unless its coordinator
    /// is still heard.
    fn other(
        &mut self,
        now: Time,
        number: SnapshotNumber,
        order: TakeOrder,
        actions: &mut Vec<TakeAction>,
    ) {
        if self.is_busy() {
            if self.silence.is_short(now) {
                let why = format!("snapshot {} is being taken: try again after that", self.number);
                return refuse(number, order, why, actions);
            }
            actions.push(TakeAction::Discard(self.number));
        }
        self.number = number;
        self.silence.end(now);
        self.standstill = Standstill::new(now);
        match order {
            TakeOrder::Prepare => {
                actions.push(TakeAction::Prepare(number));
                self.enter(TakeCohortPhase::Preparing, actions);
            }
            // It was given up before it came here. The cut must hear of the number.
            TakeOrder::Abandon => {
                actions.push(TakeAction::Discard(number));
                self.enter(TakeCohortPhase::Abandoned, actions);
            }
            TakeOrder::Take | TakeOrder::Commit => {
                self.fail(
                    "it was told to go on with a snapshot that it does not know".into(),
                    actions,
                );
            }
        }
    }

    fn fail(&mut self, why: String, actions: &mut Vec<TakeAction>) {
        actions.push(TakeAction::Discard(self.number));
        self.enter(TakeCohortPhase::Failed(why), actions);
    }

    fn enter(&mut self, phase: TakeCohortPhase, actions: &mut Vec<TakeAction>) {
        self.phase = phase;
        self.report(actions);
    }

    fn report(&self, actions: &mut Vec<TakeAction>) {
        let said = match &self.phase {
            TakeCohortPhase::Idle => return,
            TakeCohortPhase::Preparing => TakeReport::Preparing,
            TakeCohortPhase::Prepared | TakeCohortPhase::Taking { taken: false } => {
                TakeReport::Prepared
            }
            TakeCohortPhase::Taking { taken: true } => TakeReport::Taken,
            TakeCohortPhase::Saved(part) => TakeReport::Saved(part.clone()),
            TakeCohortPhase::Committed => TakeReport::Committed,
            TakeCohortPhase::Abandoned => TakeReport::Abandoned,
            TakeCohortPhase::Failed(why) => TakeReport::Failed { why: why.clone() },
        };
        actions.push(TakeAction::Report(About { number: self.number, said }));
    }

    fn is_busy(&self) -> bool {
        use TakeCohortPhase::{Prepared, Preparing, Saved, Taking};
        matches!(self.phase, Preparing | Prepared | Taking { .. } | Saved(_))
    }
}

/// Answers an order about a snapshot that this member is not in.
fn refuse(number: SnapshotNumber, order: TakeOrder, why: String, actions: &mut Vec<TakeAction>) {
    let said = match order {
        TakeOrder::Abandon => TakeReport::Abandoned,
        TakeOrder::Prepare | TakeOrder::Take | TakeOrder::Commit => TakeReport::Failed { why },
    };
    actions.push(TakeAction::Report(About { number, said }));
}
