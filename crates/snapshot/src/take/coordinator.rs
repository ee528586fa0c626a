//! The coordinator of one snapshot.

use super::{About, Part, TakeOrder, TakeReport};
use crate::contact::{Contact, Failure, Silence};
use crate::{Member, SnapshotNumber};
use std::time::Duration;
use understudy_protocol::{Time, planted};

/// Time in which a store has to say whether the manifest is there: its host looks for every chunk
/// before. All members wait for that, and none can be protected.
const PUBLISHED: Duration = Duration::from_secs(900);

/// An event that happens to the snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TakerEvent {
    /// A cohort says something.
    Report(Member, About<TakeReport>),
    /// The connection to a cohort is lost for good, for this reason.
    Gone(Member, String),
    /// The manifest is written.
    Published,
    /// The manifest could not be written, for this reason, and is certainly not there.
    NotPublished(String),
    /// The one who asked for the snapshot does not want it any more.
    Cancel,
    /// Time has passed.
    Tick,
}

/// An action that must be taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TakerAction {
    /// Say this to a cohort. It may be lost; it is repeated.
    Send(Member, About<TakeOrder>),
    /// Write the manifest of these parts, one for each member in their order; then say
    /// [`TakerEvent::Published`] or [`TakerEvent::NotPublished`].
    Publish(Vec<Part>),
    /// Remove what the members have stored.
    Discard,
}

/// The phase in which the snapshot is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TakerPhase {
    /// The members prepare.
    Preparing,
    /// The members take it, and save.
    Saving,
    /// The manifest is being written.
    Publishing,
    /// The snapshot exists.
    Done,
    /// The snapshot was given up for this reason.
    Failed(Failure),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Preparing,
    Prepared,
    Saved(Part),
    /// The member knows how it ended, or will never hear of it.
    Over,
}

/// Decides about one snapshot.
#[derive(Clone, Debug)]
pub struct Taker {
    number: SnapshotNumber,
    members: Vec<State>,
    contact: Contact,
    publishing: Silence,
    phase: TakerPhase,
}

impl Taker {
    /// Begins snapshot `number` of a group of so many members.
    pub fn new(
        number: SnapshotNumber,
        members: usize,
        now: Time,
        actions: &mut Vec<TakerAction>,
    ) -> Taker {
        let taker = Taker {
            number,
            members: vec![State::Preparing; members],
            contact: Contact::new(members, now),
            publishing: Silence::new(now),
            phase: TakerPhase::Preparing,
        };
        taker.send_all(actions);
        taker
    }

    /// The phase in which the snapshot is.
    pub fn phase(&self) -> &TakerPhase {
        &self.phase
    }

    /// Whether no message needs to be sent any more. While the manifest is being written nobody knows what to say,
    /// though no member may be left to hear it.
    pub fn is_over(&self) -> bool {
        self.phase != TakerPhase::Publishing
            && self.members.iter().all(|state| *state == State::Over)
    }

    /// Time at which [`TakerEvent::Tick`] is due next, if nothing else happens.
    pub fn deadline(&self) -> Option<Time> {
        (!self.is_over()).then(|| self.contact.deadline())
    }

    /// Takes one event; appends what must be done to `actions`.
    pub fn handle(&mut self, now: Time, event: TakerEvent, actions: &mut Vec<TakerAction>) {
        match event {
            TakerEvent::Report(member, About { number, said }) if number == self.number => {
                self.contact.heard(member, now);
                self.report(member, said, actions);
            }
            TakerEvent::Report(..) => {}
            TakerEvent::Gone(member, why) => self.lost(Failure::of(member, why), actions),
            TakerEvent::Published if self.phase == TakerPhase::Publishing => {
                self.phase = TakerPhase::Done;
                self.send_all(actions);
            }
            TakerEvent::NotPublished(why) if self.phase == TakerPhase::Publishing => {
                self.give_up(Failure { member: None, why }, actions);
            }
            TakerEvent::Cancel if self.may_fail() => {
                self.give_up(Failure { member: None, why: "it was cancelled".into() }, actions);
            }
            TakerEvent::Published | TakerEvent::NotPublished(_) | TakerEvent::Cancel => {}
            TakerEvent::Tick => self.tick(now, actions),
        }
    }

    fn report(&mut self, member: Member, report: TakeReport, actions: &mut Vec<TakerAction>) {
        let state = &mut self.members[member.index()];
        match (report, &*state) {
            (_, State::Over) => {}
            (TakeReport::Failed { why }, _) => self.lost(Failure::of(member, why), actions),
            (TakeReport::Abandoned, _) => self.lost(Failure::of(member, "it gave up"), actions),
            (TakeReport::Committed, _) => *state = State::Over,
            (TakeReport::Saved(part), State::Prepared) if self.phase == TakerPhase::Saving => {
                *state = State::Saved(part);
                self.publish(actions);
            }
            // Taken: another member's frame was faster than this coordinator.
            (TakeReport::Prepared | TakeReport::Taken, State::Preparing) => {
                *state = State::Prepared;
                self.take(actions);
            }
            _ => {}
        }
    }

    fn take(&mut self, actions: &mut Vec<TakerAction>) {
        let prepared = self.members.iter().all(|state| *state == State::Prepared);
        if prepared && self.phase == TakerPhase::Preparing {
            self.phase = TakerPhase::Saving;
            self.send_all(actions);
        }
    }

    fn publish(&mut self, actions: &mut Vec<TakerAction>) {
        let part = |state: &State| match state {
            State::Saved(part) => Some(part.clone()),
            _ => None,
        };
        if let Some(parts) = self.members.iter().map(part).collect() {
            self.phase = TakerPhase::Publishing;
            actions.push(TakerAction::Publish(parts));
            if planted!(CommitUnpublished) {
                self.phase = TakerPhase::Done;
                self.send_all(actions);
            }
        }
    }

    /// A member has ended. Once all is stored that does not matter any more.
    fn lost(&mut self, failure: Failure, actions: &mut Vec<TakerAction>) {
        let member = failure.member.expect("a member's failure");
        self.members[member.index()] = State::Over;
        if self.may_fail() {
            self.give_up(failure, actions);
        }
    }

    fn may_fail(&self) -> bool {
        matches!(self.phase, TakerPhase::Preparing | TakerPhase::Saving)
            || (self.phase == TakerPhase::Publishing && planted!(FailWhatIsPublished))
    }

    fn give_up(&mut self, failure: Failure, actions: &mut Vec<TakerAction>) {
        self.phase = TakerPhase::Failed(failure);
        self.send_all(actions);
        actions.push(TakerAction::Discard);
    }

    fn tick(&mut self, now: Time, actions: &mut Vec<TakerAction>) {
        for member in self.all() {
            let over = self.members[member.index()] == State::Over;
            if !over && self.contact.is_silent(member, now) {
                self.lost(Failure::silent(member), actions);
            }
        }
        if self.phase == TakerPhase::Publishing && self.publishing.lasts(now) >= PUBLISHED {
            let why = format!(
                "the store has not said for {} s whether all of it is there; should it be, it is a \
                 snapshot like any other, `understudy cluster snapshots` lists it",
                PUBLISHED.as_secs()
            );
            self.give_up(Failure { member: None, why }, actions);
        }
        if self.contact.repeat(now) {
            self.send_all(actions);
        }
    }

    /// Tells each member what it should be doing; a repetition asks where it stands.
    fn send_all(&self, actions: &mut Vec<TakerAction>) {
        let said = match self.phase {
            TakerPhase::Preparing => TakeOrder::Prepare,
            TakerPhase::Saving | TakerPhase::Publishing => TakeOrder::Take,
            TakerPhase::Done => TakeOrder::Commit,
            TakerPhase::Failed(_) => TakeOrder::Abandon,
        };
        for member in self.all() {
            if self.members[member.index()] != State::Over {
                let about = About { number: self.number, said };
                actions.push(TakerAction::Send(member, about));
            }
        }
    }

    fn all(&self) -> impl Iterator<Item = Member> + use<> {
        (0..self.members.len()).map(|member| Member(member as u16))
    }
}
