//! The way of a group that was won, from the last epoch to guests that run: all members go it, or none.
//!
//! They wait for each other three times: until all are settled no record is written, until all records are written no
//! guest runs, and until all guests run nothing leaves any. Till the second the former primary may have the group back,
//! since a disk may hang; till the third it gets it back if a guest cannot be started, and it lives.

use super::Standby;
use super::member::Copy;
use super::words::{Effect, Ending, Errand, Word};
use crate::Place;
use understudy_protocol::{BackupEvent, Generation, Time, planted};

impl Standby {
    /// Remus 2.5: all is on the disks first, then the activation record; then only may the guest
    /// run.
    pub(super) fn taken_further(
        &mut self,
        now: Time,
        place: Place,
        errand: Errand,
        result: Result<(), String>,
        effects: &mut Vec<Effect>,
    ) {
        let Some((generation, because)) = self.won.clone() else { return };
        match (errand, result) {
            (Errand::Complete, Ok(())) if !planted!(ActivateUnsettled) => {
                self.have_done(place, Errand::Settle, effects);
            }
            (Errand::Complete | Errand::Settle, Ok(())) => {
                self.settled(now, place, generation, effects);
            }
            (Errand::Activate(_), Ok(())) => self.recorded(now, place, effects),
            (Errand::Start, result) => {
                let result = if planted!(OpenWhatIsDead) { Ok(()) } else { result };
                self.started(place, result, generation, effects);
            }
            (Errand::Complete | Errand::Settle | Errand::Activate(_), Err(reason)) => {
                self.cannot_start(place, reason, effects);
            }
            (Errand::Open, Ok(())) => {
                self.end_live(place, generation, Ending::Live(generation, because), effects);
            }
            // What others of a group have sent may have left by now, which is owned as a whole.
            (Errand::Open, Err(reason)) => {
                self.end_live(place, generation, Ending::Failed(generation, reason), effects);
            }
            _ => {}
        }
    }

    /// All of a member is on its disks: once that is so with every member, the group starts, if it still may.
    fn settled(
        &mut self,
        now: Time,
        place: Place,
        generation: Generation,
        effects: &mut Vec<Effect>,
    ) {
        let Some(answers) = self.gather(place, Ok(())) else { return };
        if answers.iter().any(Result::is_err) {
            return self.end_attempts(answers, effects);
        }
        // A disk that hung until now may have cost this host the VM.
        let may_start = self.core.may_start();
        if planted!(KeepUnrecorded) {
            self.decide(now, BackupEvent::Starts, effects);
        }
        for place in 0..self.members.len() {
            match may_start {
                true if planted!(StartUnrecorded) => self.recorded(now, place, effects),
                true => self.have_done(place, Errand::Activate(generation), effects),
                false => self.end_returned(place, effects),
            }
        }
    }

    /// A member's record is written: once all are, the guests run, if they still may. A record that came too late
    /// is older than that of whoever has the VM back.
    fn recorded(&mut self, now: Time, place: Place, effects: &mut Vec<Effect>) {
        let Some(answers) = self.gather(place, Ok(())) else { return };
        if answers.iter().any(Result::is_err) && !planted!(StartWithoutOne) {
            return self.end_attempts(answers, effects);
        }
        self.decide(now, BackupEvent::Starts, effects);
        for place in 0..self.members.len() {
            match self.core.may_run() {
                true => self.have_done(place, Errand::Start, effects),
                false => self.end_returned(place, effects),
            }
        }
    }

    /// A member's guest runs, and nothing leaves it, or it cannot be started: once all do, they are heard. Those that
    /// do go on without the others if nobody else has any of them.
    fn started(
        &mut self,
        place: Place,
        own: Result<(), String>,
        generation: Generation,
        effects: &mut Vec<Effect>,
    ) {
        if planted!(HearOneByOne) && own.is_ok() {
            return self.have_done(place, Errand::Open, effects);
        }
        let Some(answers) = self.gather(place, own) else { return };
        let none_runs = answers.iter().all(Result::is_err);
        if none_runs || (self.former_lives && answers.iter().any(Result::is_err)) {
            return self.end_attempts(answers, effects);
        }
        for (place, answer) in answers.into_iter().enumerate() {
            match answer {
                Ok(()) => self.have_done(place, Errand::Open, effects),
                Err(reason) => {
                    self.end_live(place, generation, Ending::Failed(generation, reason), effects);
                }
            }
        }
    }

    fn end_returned(&mut self, place: Place, effects: &mut Vec<Effect>) {
        self.end_attempt(place, "it was handed back meanwhile".to_owned(), effects);
    }

    /// A member cannot go live, for this reason: then none does.
    pub(super) fn cannot_start(&mut self, place: Place, reason: String, effects: &mut Vec<Effect>) {
        if let Some(answers) = self.gather(place, Err(reason)) {
            self.end_attempts(answers, effects);
        }
    }

    /// A member has come as far as the others wait for each other, or cannot: what all have said,
    /// once they have.
    fn gather(&mut self, place: Place, own: Result<(), String>) -> Option<Vec<Result<(), String>>> {
        self.members[place].answer = Some(own);
        if self.members.iter().any(|member| member.answer.is_none()) {
            return None;
        }
        Some(self.members.iter_mut().filter_map(|member| member.answer.take()).collect())
    }

    /// Ends the attempts, as one member at least cannot go live.
    fn end_attempts(&mut self, answers: Vec<Result<(), String>>, effects: &mut Vec<Effect>) {
        let refusal = answers.iter().find_map(|answer| answer.clone().err()).unwrap_or_default();
        for (place, own) in answers.into_iter().enumerate() {
            let others = || format!("another VM of the group cannot: {refusal}");
            self.end_attempt(place, own.err().unwrap_or_else(others), effects);
        }
    }

    /// The former primary is to have the VM back. Its copy here may have run for a moment, unseen.
    fn end_attempt(&mut self, place: Place, reason: String, effects: &mut Vec<Effect>) {
        self.members[place].copy = Copy::Failed(reason);
        self.have_done(place, Errand::Halt, effects);
    }

    fn end_live(
        &mut self,
        place: Place,
        generation: Generation,
        ending: Ending,
        effects: &mut Vec<Effect>,
    ) {
        effects.push(Effect::Say(place, Word::Live(generation)));
        self.end(place, ending, effects);
    }
}
