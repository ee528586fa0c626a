//! Whether a keeper goes on with the guest that the last keeper of its VM has left to it.

use crate::validity::{ImageRecord, ImageRole};
use crate::{Generation, LeaseAnswer};

/// The finding about a guest that was left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Adoptable {
    /// The guest goes on.
    Yes,
    /// The same once the record shows the generation at which it was left: its last keeper won that, and did not come to
    /// noting it.
    OnceNoted,
    /// Nothing may be concluded yet.
    Later(String),
    /// The guest is to end.
    Lost(String),
}

/// Whether the guest that was left at this generation may go on, by this host's record of its images and the arbiter's
/// word on that generation.
pub fn may_adopt(record: Option<&ImageRecord>, left: Generation, answer: LeaseAnswer) -> Adoptable {
    let runs =
        |record: &&ImageRecord| record.role == ImageRole::Active && record.generation <= left;
    let Some(record) = record.filter(runs) else {
        return Adoptable::Lost("by this host's own record it does not run here".to_owned());
    };
    match by_arbiter(answer) {
        Adoptable::Yes if record.generation < left => Adoptable::OnceNoted,
        found => found,
    }
}

/// The same of a guest whose record is known, by the arbiter's word alone.
pub fn by_arbiter(answer: LeaseAnswer) -> Adoptable {
    match answer {
        LeaseAnswer::Own => Adoptable::Yes,
        LeaseAnswer::Unreachable(why) => Adoptable::Later(why),
        LeaseAnswer::Moved { why, .. } => {
            Adoptable::Lost(format!("while it had no keeper the VM was lost: {why}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::literal;

    const LEFT: Generation = Generation(2);

    fn found(role: ImageRole, generation: u64, answer: LeaseAnswer) -> Adoptable {
        let (host, generation) = (literal("a"), Generation(generation));
        let record = ImageRecord { host, role, generation, claimed_from: None };
        may_adopt(Some(&record), LEFT, answer)
    }

    // Before, a guest whose last keeper had won a generation, and ended before that was on record, was killed.
    #[test]
    fn what_the_last_keeper_won_and_did_not_note_is_noted_by_the_next() {
        assert_eq!(found(ImageRole::Active, 1, LeaseAnswer::Own), Adoptable::OnceNoted);
        assert_eq!(found(ImageRole::Active, 2, LeaseAnswer::Own), Adoptable::Yes);
        assert!(matches!(found(ImageRole::Active, 3, LeaseAnswer::Own), Adoptable::Lost(_)));
    }

    #[test]
    fn only_the_arbiters_word_has_a_guest_go_on() {
        let silent = || LeaseAnswer::Unreachable("it is down".to_owned());
        let moved = || LeaseAnswer::Moved { to: Some(literal("b")), why: "b has it".to_owned() };
        for generation in [1, 2] {
            let found = |answer| found(ImageRole::Active, generation, answer);
            assert_eq!(found(silent()), Adoptable::Later("it is down".to_owned()));
            assert!(matches!(found(moved()), Adoptable::Lost(_)));
        }
    }

    #[test]
    fn what_does_not_run_here_by_its_record_does_not_go_on() {
        assert!(matches!(may_adopt(None, LEFT, LeaseAnswer::Own), Adoptable::Lost(_)));
        let roles = [ImageRole::Stopped, ImageRole::Cut, ImageRole::Stale, ImageRole::Mirror];
        for role in roles {
            assert!(matches!(found(role, 2, LeaseAnswer::Own), Adoptable::Lost(_)), "{role:?}");
        }
    }
}
