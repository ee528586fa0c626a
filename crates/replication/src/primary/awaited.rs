//! The questions to the backup beside the epochs, and who waits for its answers: one of each kind.

use super::keep::Keeping;
use crate::medium::MediumAnswer;
use crossbeam_channel::{Receiver, Sender};

#[derive(Default)]
pub(super) struct Awaited {
    /// An epoch whose image the backup is to keep.
    pub keeping: Keeping,
    /// What it says of a medium.
    pub medium: Asked<MediumAnswer>,
}

/// A question that the backup answers once, however late. Its answer says not of what: so nothing else is asked before.
pub(super) struct Asked<T>(Option<Sender<T>>);

impl<T> Default for Asked<T> {
    fn default() -> Asked<T> {
        Asked(None)
    }
}

impl<T> Asked<T> {
    /// Asks; none while the answer to the last question has not come, though nobody may wait for it any more.
    pub fn ask(&mut self) -> Option<Receiver<T>> {
        if self.0.is_some() {
            return None;
        }
        let (waiting, answers) = crossbeam_channel::bounded(1);
        self.0 = Some(waiting);
        Some(answers)
    }

    /// The answer has come, to whoever waits for it.
    pub fn answered(&mut self, answer: T) {
        if let Some(waiting) = self.0.take() {
            // Nobody may.
            let _ = waiting.try_send(answer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Before, it was taken for that to the next question, and a medium was put in that the backup had not found.
    #[test]
    fn an_answer_that_comes_late_is_none_to_the_next_question() {
        let mut asked = Asked::default();
        let first = asked.ask().unwrap();
        drop(first);
        assert!(asked.ask().is_none(), "the first may yet be answered");
        asked.answered("to the first");
        let second = asked.ask().unwrap();
        assert!(second.try_recv().is_err());
        asked.answered("to the second");
        asked.answered("to nothing");
        assert_eq!(second.try_recv(), Ok("to the second"));
        assert!(asked.ask().unwrap().try_recv().is_err());
    }
}
