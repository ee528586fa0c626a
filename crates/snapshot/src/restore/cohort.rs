//! The cohort of one member.

use super::{Decision, Order, Report};
use crate::contact::{SILENCE, Silence};
use understudy_protocol::{Time, planted};

/// An event that happens to a cohort.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CohortEvent {
    /// The coordinator says something.
    Order(Order),
    /// Number of pages loaded so far.
    Progress(u64),
    /// All is loaded that was asked for before the start.
    Loaded,
    /// The VM runs.
    Started,
    /// No more is left to load.
    Complete,
    /// The member cannot go on, for this reason.
    Failed(String),
    /// Discarding is done, for which [`CohortAction::Discard`] asks.
    Discarded,
    /// The decision that [`CohortAction::Ask`] came to.
    Decided(Decision),
    /// Time has passed.
    Tick,
}

/// An action that must be taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CohortAction {
    /// Prepare a QEMU, load so many pages; then say [`CohortEvent::Loaded`] and go on loading.
    Load {
        /// Pages of the queue.
        pages: u64,
    },
    /// Win the VM from the arbiter, load device state, deliver the frames in flight, let it
    /// run; then say [`CohortEvent::Started`].
    Start,
    /// The VM that runs will not be stopped for another member's sake any more.
    Settle,
    /// All of it is there, and it stays: what the VM was before is not needed any more.
    Conclude,
    /// The coordinator is silent: give the restore up at the arbiter, unless the coordinator has
    /// decided that all members stay. Asked again if there is no answer.
    Ask,
    /// End the QEMU, if there is one, and forget what was loaded; then say
    /// [`CohortEvent::Discarded`].
    Discard,
    /// Tell the coordinator.
    Report(Report),
}

/// The phase in which a cohort is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CohortPhase {
    /// No order has come yet.
    Idle,
    /// The member loads; pages so far.
    Loading(u64),
    /// The member could start.
    Loaded,
    /// The member was told to start.
    Starting,
    /// The VM runs, the rest is being loaded.
    Running,
    /// The VM runs, all is loaded.
    Restored,
    /// The member is given up, as it was told or for this reason, and is ending.
    Ending(Option<String>),
    /// The member is given up as it was told.
    Aborted,
    /// The member is given up for this reason.
    Failed(String),
}

/// Decides for one member.
#[derive(Clone, Debug)]
pub struct Cohort {
    phase: CohortPhase,
    /// All was loaded before the VM ran.
    complete: bool,
    /// All members run, and stay.
    settled: bool,
    silence: Silence,
}

impl Cohort {
    /// Creates one that has no order yet.
    pub fn new(now: Time) -> Cohort {
        Cohort::at(CohortPhase::Idle, false, now)
    }

    /// Creates one for a VM that runs, whose former cohort was settled, and ended with its daemon.
    pub fn resumed(now: Time) -> Cohort {
        Cohort::at(CohortPhase::Running, true, now)
    }

    fn at(phase: CohortPhase, settled: bool, now: Time) -> Cohort {
        Cohort { phase, complete: false, settled, silence: Silence::new(now) }
    }

    /// The phase in which it is.
    pub fn phase(&self) -> &CohortPhase {
        &self.phase
    }

    /// Whether nothing can happen any more, but that the rest is loaded.
    pub fn is_over(&self) -> bool {
        match self.phase {
            CohortPhase::Running | CohortPhase::Restored => self.settled,
            CohortPhase::Aborted | CohortPhase::Failed(_) => true,
            _ => false,
        }
    }

    /// Time at which [`CohortEvent::Tick`] is due next, if nothing else happens.
    pub fn deadline(&self) -> Option<Time> {
        self.needs_coordinator().then(|| self.silence.next_look())
    }

    /// Takes one event; appends what must be done to `actions`.
    pub fn handle(&mut self, now: Time, event: CohortEvent, actions: &mut Vec<CohortAction>) {
        match (event, &self.phase) {
            (CohortEvent::Order(order), _) => {
                self.silence.end(now);
                self.order(order, actions);
            }
            (CohortEvent::Progress(pages), CohortPhase::Loading(_)) => {
                self.phase = CohortPhase::Loading(pages);
            }
            (CohortEvent::Loaded, CohortPhase::Loading(_)) => {
                self.enter(CohortPhase::Loaded, actions);
            }
            (CohortEvent::Started, CohortPhase::Starting) => {
                let complete = self.complete;
                self.enter(CohortPhase::Running, actions);
                if complete {
                    self.enter(CohortPhase::Restored, actions);
                }
            }
            (CohortEvent::Decided(decision), _) if self.is_unsettled() => match decision {
                Decision::Settled => self.settle(actions),
                Decision::GivenUp => self.give_up(Some(silent()), actions),
            },
            (CohortEvent::Complete, CohortPhase::Running) => {
                self.enter(CohortPhase::Restored, actions);
                if self.settled {
                    actions.push(CohortAction::Conclude);
                }
            }
            (CohortEvent::Complete, _) => self.complete = true,
            (CohortEvent::Failed(why), phase) if !phase.is_given_up() => {
                self.give_up(Some(why), actions);
            }
            (CohortEvent::Discarded, CohortPhase::Ending(why)) => {
                let end = why.clone().map_or(CohortPhase::Aborted, CohortPhase::Failed);
                self.enter(end, actions);
            }
            (CohortEvent::Tick, _) if self.needs_coordinator() && self.silence.look(now) => {
                self.silence.end(now);
                match self.is_unsettled() && !planted!(GiveUpUnasked) {
                    true => actions.push(CohortAction::Ask),
                    false => self.give_up(Some(silent()), actions),
                }
            }
            _ => {}
        }
    }

    fn order(&mut self, order: Order, actions: &mut Vec<CohortAction>) {
        match (order, &self.phase) {
            (Order::Load { pages }, CohortPhase::Idle) => {
                actions.push(CohortAction::Load { pages });
                self.enter(CohortPhase::Loading(0), actions);
            }
            (Order::Start, CohortPhase::Loaded) => {
                actions.push(CohortAction::Start);
                self.enter(CohortPhase::Starting, actions);
            }
            (Order::Settle, _) => {
                if self.is_unsettled() {
                    self.settle(actions);
                }
                self.report(actions);
            }
            (Order::Abort, phase) if !phase.is_given_up() => self.give_up(None, actions),
            // Said again, or overtaken: where it stands is the answer.
            _ => self.report(actions),
        }
    }

    fn settle(&mut self, actions: &mut Vec<CohortAction>) {
        self.settled = true;
        // Of one that is whole nothing can be lost with the daemon.
        actions.push(match self.phase {
            CohortPhase::Running => CohortAction::Settle,
            _ => CohortAction::Conclude,
        });
    }

    fn give_up(&mut self, why: Option<String>, actions: &mut Vec<CohortAction>) {
        actions.push(CohortAction::Discard);
        self.enter(CohortPhase::Ending(why), actions);
    }

    fn enter(&mut self, phase: CohortPhase, actions: &mut Vec<CohortAction>) {
        self.phase = phase;
        self.report(actions);
    }

    fn report(&self, actions: &mut Vec<CohortAction>) {
        let report = match &self.phase {
            CohortPhase::Idle => return,
            CohortPhase::Loading(pages) => Report::Loading { pages: *pages },
            CohortPhase::Loaded => Report::LoadFin,
            CohortPhase::Starting => Report::Starting,
            CohortPhase::Running => Report::StartFin,
            CohortPhase::Restored => Report::RestoreFin,
            CohortPhase::Ending(_) => Report::Ending,
            CohortPhase::Aborted => Report::Aborted,
            CohortPhase::Failed(why) => Report::Failed { why: why.clone() },
        };
        actions.push(CohortAction::Report(report));
    }

    /// Whether the VM runs, and may still have to stop for another member's sake.
    fn is_unsettled(&self) -> bool {
        matches!(self.phase, CohortPhase::Running | CohortPhase::Restored) && !self.settled
    }

    /// Whether it needs the coordinator: one that is about to start is not stopped in the midst of
    /// it; one that stays needs no coordinator any more.
    fn needs_coordinator(&self) -> bool {
        matches!(self.phase, CohortPhase::Idle | CohortPhase::Loading(_) | CohortPhase::Loaded)
            || (self.is_unsettled() && !planted!(StayUndecided))
    }
}

fn silent() -> String {
    format!("the coordinator was silent for {} s", SILENCE.as_secs())
}

impl CohortPhase {
    fn is_given_up(&self) -> bool {
        matches!(self, CohortPhase::Ending(_) | CohortPhase::Aborted | CohortPhase::Failed(_))
    }
}
