//! A group, seen from the backup. A VM that is protected by itself is a group of one.
//!
//! The members share one state machine: an epoch is committed when every member's part of it is
//! there, and after a failure all go live at the same epoch, or none. Each member does one errand at
//! a time, in the order of commits; what comes next is decided when one ends:
//!
//! ```text
//! apply, apply, … ─▶ complete the log ─▶ settle ─▶ (all members) ─▶ write the record ─▶ (all) ─▶ start ─▶ (all) ─▶ open
//!                └─▶ forget ─▶ the primary hangs up ─▶ end    (none) ─▶ halt ─▶ (all) ─▶ hand back ─▶ forget
//! ```

mod fitness;
mod member;
mod takeover;
mod turn;
mod words;

pub use fitness::HANG;
pub use turn::{LogSpan, Orders};
pub use words::{Awaited, Effect, Ending, Errand, Event, Word};

use crate::Place;
use fitness::Fitness;
use member::{Copy, Member, Step};
use std::time::Duration;
use understudy_protocol::{
    Backup, BackupAction, BackupEvent, BackupPhase, Epoch, Generation, GroupStaging, Output, Time,
    Verdict, planted,
};

/// Time for a primary that was told of a turn that does not come to ask the arbiter first.
const YIELDS: Duration = Duration::from_millis(500);

/// The backup of a group.
#[derive(Clone, Debug)]
pub struct Standby {
    core: Backup,
    /// Number of members that the group has; they join in order.
    size: usize,
    members: Vec<Member>,
    staging: GroupStaging<()>,
    fitness: Fitness,
    /// The generation that this host has won, and why it asked for it.
    won: Option<(Generation, String)>,
    /// The primary hands the VM over as its operator wants.
    planned: bool,
    /// Whether the former primary still has the group, as far as was heard of it since this host won, or as it handed
    /// it over.
    former_lives: bool,
    /// QEMU did not follow the log.
    diverged: bool,
    /// Whether whoever changed the state machine panicked.
    condemned: bool,
}

impl Standby {
    /// A group of so many members, whose state machine this is.
    pub fn new(core: Backup, size: usize) -> Standby {
        Standby {
            core,
            size,
            members: Vec::new(),
            staging: GroupStaging::new(size),
            fitness: Fitness::new(HANG),
            won: None,
            planned: false,
            former_lives: false,
            diverged: false,
            condemned: false,
        }
    }

    /// The same, for which what has not answered for `patience` hangs.
    pub fn with_patience(self, patience: Duration) -> Standby {
        Standby { fitness: Fitness::new(patience), ..self }
    }

    /// The next member's session begins, if protection has not ended.
    pub fn join(&mut self) -> bool {
        let joins = *self.core.phase() == BackupPhase::Syncing && self.members.len() < self.size;
        if joins {
            self.members.push(Member::new());
        }
        joins
    }

    /// The number of members whose sessions have begun.
    pub fn joined(&self) -> usize {
        self.members.len()
    }

    /// The phase in which the group is.
    pub fn phase(&self) -> &BackupPhase {
        self.core.phase()
    }

    /// The rule for what the guests send.
    pub fn output(&self) -> Output {
        self.core.output()
    }

    /// The leader's generation.
    pub fn generation(&self) -> Generation {
        self.core.generation()
    }

    /// The last epoch that was acknowledged.
    pub fn committed(&self) -> Epoch {
        self.core.committed()
    }

    /// The last epoch that a member's mirrors hold.
    pub fn applied(&self, member: Place) -> Epoch {
        self.members[member].applied
    }

    /// Whether it is handed over as the primary's operator wants.
    pub fn is_planned(&self) -> bool {
        self.planned
    }

    /// The reason why this host could not take over, as it last found.
    pub fn obstacle(&self) -> Option<String> {
        self.fitness.obstacle()
    }

    /// Time at which [`Event::Tick`] is due next, if nothing else happens.
    pub fn deadline(&self) -> Option<Time> {
        self.core.deadline()
    }

    /// Whether the VM is this host's, or is forgotten.
    pub fn is_over(&self) -> bool {
        matches!(self.core.phase(), BackupPhase::Live | BackupPhase::Discarded)
    }

    /// Whether a member has nothing more to do.
    pub fn has_ended(&self, member: Place) -> bool {
        self.members[member].ended
    }

    /// Whether a member's signs of life may end: their end is a reason for the primary to give the
    /// session up, and it must not hear that before a better one. Whether the guest starts here, or
    /// is forgotten, it hears before the connections are closed.
    pub fn may_hang_up(&self, member: Place) -> bool {
        let early = *self.core.phase() == BackupPhase::Discarded && planted!(HangUpUntold);
        self.is_over() && (self.members[member].closed || early)
    }

    /// Ends it whatever its state is: to be called when that may be half changed.
    pub fn condemn(&mut self) {
        self.core.condemn();
        self.condemned = true;
    }

    /// Takes one event; appends what must be done to `effects`.
    pub fn handle(&mut self, now: Time, event: Event, effects: &mut Vec<Effect>) {
        match event {
            Event::Staged(member, epoch) => {
                if let Some((epoch, _)) = self.staging.put(member, epoch, ()) {
                    self.staged(now, epoch, true, effects);
                }
            }
            Event::Logged(epoch) => self.staged(now, epoch, false, effects),
            Event::Heard => {
                self.former_lives |= self.won.is_some();
                self.decide(now, BackupEvent::Heard, effects);
            }
            Event::PeerLost(reason) => self.decide(now, BackupEvent::PeerGone(reason), effects),
            Event::DataEnded(member, reason) => {
                self.members[member].hung_up = true;
                self.decide(now, BackupEvent::PeerGone(reason), effects);
                self.close_those_due(now, effects);
            }
            Event::TakeOver { planned } => {
                self.planned = planned;
                // One that has not planned it may have no guest any more.
                self.former_lives |= planned;
                self.decide(now, BackupEvent::TakeOver, effects);
            }
            Event::StandDown => self.decide(now, BackupEvent::StandDown, effects),
            Event::Doomed => self.decide(now, BackupEvent::Doomed, effects),
            Event::CannotServe(reason) => self.give_up(now, reason, effects),
            Event::CannotTurn(reason) => self.cannot_turn(now, reason, effects),
            Event::Diverged(_) if planted!(StayDiverged) => {}
            Event::Diverged(reason) => {
                self.diverged = true;
                self.give_up(now, reason, effects);
            }
            Event::Awaited => {
                self.former_lives = true;
                self.decide(now, BackupEvent::Awaited, effects);
            }
            Event::OwnedElsewhere(owner) => {
                self.decide(now, BackupEvent::OwnedElsewhere(owner), effects);
            }
            Event::Verdict(verdict) => self.verdict(now, verdict, effects),
            Event::Tick => {
                self.decide(now, BackupEvent::Tick, effects);
                self.close_those_due(now, effects);
            }
            Event::Look(awaited) => self.look(now, &awaited, effects),
            Event::Proven(proof) => {
                effects.extend(self.fitness.proven(proof).map(Effect::NoteObstacle));
                effects.push(Effect::TellObstacle(self.obstacle()));
            }
            Event::Done(member, errand, result) => {
                self.done(now, member, errand, result, effects);
            }
            Event::Panicked(reason) => self.panicked(now, reason, effects),
            Event::Abandoned => {
                effects.push(Effect::EndLog);
                (0..self.members.len()).for_each(|member| self.close(member, effects));
            }
        }
    }

    /// The state machine's word.
    fn decide(&mut self, now: Time, event: BackupEvent, effects: &mut Vec<Effect>) {
        let mut actions = Vec::new();
        self.core.handle(now, event, &mut actions);
        actions.into_iter().for_each(|action| self.act(action, effects));
    }

    fn act(&mut self, action: BackupAction, effects: &mut Vec<Effect>) {
        match action {
            BackupAction::AcknowledgeAndApply(epoch) => effects.push(Effect::Acknowledge(epoch)),
            BackupAction::Contest(from) => {
                effects.push(Effect::Suspect);
                // While the arbiter is asked: the images must be on stable storage before the
                // guest runs on them.
                if !planted!(ActivateUnsettled) {
                    self.plan_for_all(Step::Settle, effects);
                }
                effects.push(Effect::Contest(from));
            }
            BackupAction::HandBack(from) => effects.push(Effect::HandBack(from)),
            BackupAction::ClosePeer => {
                (0..self.members.len()).for_each(|member| self.close(member, effects));
            }
            BackupAction::GoLive { generation, epoch, reason } => {
                self.won = Some((generation, reason.clone()));
                effects.push(Effect::EndLog);
                effects.push(Effect::Granted { generation, epoch, reason });
                self.plan_for_all(Step::TakeOver, effects);
            }
            BackupAction::Discard(reason) => {
                effects.push(Effect::EndLog);
                effects.push(Effect::Leave(Some(reason.clone())));
                let word = if self.diverged { Word::Diverged } else { Word::Refuse };
                for (place, member) in self.members.iter_mut().enumerate() {
                    member.told = true;
                    effects.push(Effect::Say(place, word(reason.clone())));
                }
                self.plan_for_all(Step::Forget, effects);
            }
            BackupAction::StandDown => {
                effects.push(Effect::EndLog);
                effects.push(Effect::Leave(None));
                // Its primary waits for that, and has all that they would bring.
                self.members.iter_mut().for_each(Member::forget_epochs);
                self.plan_for_all(Step::Forget, effects);
            }
        }
    }

    /// An epoch is here; `apply`: as a checkpoint.
    fn staged(&mut self, now: Time, epoch: Epoch, apply: bool, effects: &mut Vec<Effect>) {
        let mut actions = Vec::new();
        self.core.handle(now, BackupEvent::Staged(epoch), &mut actions);
        for action in actions {
            if apply && action == BackupAction::AcknowledgeAndApply(epoch) {
                let commits = (0..self.members.len()).map(|place| Effect::Commit(place, epoch));
                effects.extend(commits);
                self.plan_for_all(Step::Apply(epoch), effects);
            }
            self.act(action, effects);
        }
    }

    fn verdict(&mut self, now: Time, verdict: Verdict, effects: &mut Vec<Effect>) {
        let contests = matches!(self.core.phase(), BackupPhase::Contesting(_));
        if let (true, Verdict::Unreachable(reason)) = (contests, &verdict) {
            self.fitness.proven(Err(reason.clone()));
        }
        self.decide(now, BackupEvent::Verdict(verdict), effects);
    }

    fn look(&mut self, now: Time, awaited: &[Awaited], effects: &mut Vec<Effect>) {
        let Some(ailment) = self.fitness.look(now, awaited) else { return };
        effects.push(Effect::NoteObstacle(ailment.clone()));
        self.decide(now, BackupEvent::Fitness(ailment), effects);
        effects.push(Effect::TellObstacle(self.obstacle()));
    }

    fn plan_for_all(&mut self, step: Step, effects: &mut Vec<Effect>) {
        self.members.iter_mut().for_each(|member| member.plan(step));
        (0..self.members.len()).for_each(|place| self.go_on(place, effects));
    }

    /// A member's next step, if it is free for one.
    fn go_on(&mut self, place: Place, effects: &mut Vec<Effect>) {
        let Some(step) = self.members[place].next_step() else { return };
        match step {
            Step::Apply(epoch) => {
                let errand = self.members[place].errand_for(epoch);
                self.have_done(place, errand, effects);
            }
            Step::Settle => self.have_done(place, Errand::Settle, effects),
            Step::TakeOver => {
                self.members[place].takes_over = true;
                match &self.members[place].copy {
                    Copy::Whole if planted!(LeaveTheLog) => {
                        self.have_done(place, Errand::Settle, effects);
                    }
                    Copy::Whole => self.have_done(place, Errand::Complete, effects),
                    Copy::Filling => {
                        self.cannot_start(place, "no epoch was applied".to_owned(), effects);
                    }
                    Copy::Failed(reason) => {
                        let reason = reason.clone();
                        self.cannot_start(place, reason, effects);
                    }
                }
            }
            Step::Forget => self.have_done(place, Errand::Forget, effects),
        }
    }

    fn have_done(&mut self, place: Place, errand: Errand, effects: &mut Vec<Effect>) {
        self.members[place].busy = Some(errand.clone());
        effects.push(Effect::Do(place, errand));
    }

    /// A member's errand ended.
    fn done(
        &mut self,
        now: Time,
        place: Place,
        errand: Errand,
        result: Result<(), String>,
        effects: &mut Vec<Effect>,
    ) {
        let member = &mut self.members[place];
        if member.busy.as_ref() != Some(&errand) {
            // What it did before a panic.
            return;
        }
        member.busy = None;
        match (errand, result) {
            (Errand::Apply(epoch), Ok(())) => {
                (member.copy, member.applied) = (Copy::Whole, epoch);
            }
            (Errand::Apply(epoch), Err(reason)) => {
                let reason = format!("epoch {epoch} could not be applied: {reason}");
                self.fails(now, place, reason, effects);
            }
            (Errand::Settle, Err(reason)) if !member.takes_over => {
                self.fails(now, place, reason, effects);
            }
            (Errand::Halt, _) => {
                member.takes_over = false;
                let reason = match &member.copy {
                    Copy::Failed(reason) => reason.clone(),
                    Copy::Filling | Copy::Whole => String::new(),
                };
                // The former primary may run the VMs once none does here.
                let none_runs = self.members.iter().all(|member| !member.takes_over);
                if none_runs || planted!(HandBackBesideOthers) {
                    self.decide(now, BackupEvent::NotStarted(reason), effects);
                }
            }
            (Errand::Forget, _) => {
                effects.push(Effect::Say(place, Word::StoodDown));
                member.part(now);
                self.close_those_due(now, effects);
            }
            (errand, result) if member.takes_over => {
                self.taken_further(now, place, errand, result, effects);
            }
            _ => {}
        }
        self.go_on(place, effects);
    }

    /// A copy has a gap from here on, and is of no use.
    fn fails(&mut self, now: Time, place: Place, reason: String, effects: &mut Vec<Effect>) {
        self.members[place].copy = Copy::Failed(reason.clone());
        self.give_up(now, reason, effects);
    }

    fn give_up(&mut self, now: Time, reason: String, effects: &mut Vec<Effect>) {
        effects.push(Effect::GiveUp(reason.clone()));
        self.decide(now, BackupEvent::CannotServe(reason), effects);
    }

    fn end(&mut self, place: Place, ending: Ending, effects: &mut Vec<Effect>) {
        self.close(place, effects);
        self.members[place].ended = true;
        effects.push(Effect::Do(place, Errand::End(ending)));
    }

    fn close(&mut self, place: Place, effects: &mut Vec<Effect>) {
        self.members[place].closed = true;
        effects.push(Effect::Close(place));
    }

    /// A backup that gives up says why, and its primary hangs up. Were it to end its connections at
    /// once, the primary could see the end of one before the reason.
    fn close_those_due(&mut self, now: Time, effects: &mut Vec<Effect>) {
        for place in 0..self.members.len() {
            if self.members[place].may_close(now) {
                let ending = self.members[place].ending(self.won.is_some());
                self.end(place, ending, effects);
            }
        }
    }

    /// A primary that hears it goes on without this backup. One that is lost does not, and what is committed is whole:
    /// so this host does not give the VM up. One that was told to forget it says nothing but that it has.
    fn cannot_turn(&mut self, now: Time, reason: String, effects: &mut Vec<Effect>) {
        if planted!(GiveUpForATurn) {
            return self.give_up(now, reason, effects);
        }
        if !matches!(self.core.phase(), BackupPhase::Syncing | BackupPhase::Standing) {
            return;
        }
        self.core.yield_until(now + YIELDS);
        let places = 0..self.members.len();
        effects.extend(places.map(|place| Effect::Say(place, Word::Refuse(reason.clone()))));
    }

    /// Handles a panic. Whoever panicked may have been about to do what was decided: then all that
    /// is left is to forget the copies.
    fn panicked(&mut self, now: Time, reason: String, effects: &mut Vec<Effect>) {
        if !self.condemned {
            return self.give_up(now, reason, effects);
        }
        for place in 0..self.members.len() {
            let member = &mut self.members[place];
            if member.ended {
                continue;
            }
            member.told = true;
            member.forget_steps();
            effects.push(Effect::Say(place, Word::Refuse(reason.clone())));
            self.have_done(place, Errand::Forget, effects);
        }
    }
}

#[cfg(test)]
mod tests;
