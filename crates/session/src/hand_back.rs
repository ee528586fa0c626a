//! The answer of a host about a VM that it has won, to the one that lost it and keeps its guest;
//! and whether it returns what it was granted and has nothing of.

use understudy_protocol::{Generation, HostName, Ownership, planted};

/// The word of a winner that is asked what became of the VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WinnersWord {
    /// The generation at which it runs the VM, if it does.
    pub runs: Option<Generation>,
    /// The generation at which it ran it, if it did and has nothing of it now.
    pub ran: Option<Generation>,
}

/// The part that the host that is asked has now in the group's VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Present {
    /// The host runs them, at the leader's generation.
    Runs(Generation),
    /// The host stands by for the one that asks, or has won them from it.
    StandsBy,
    /// The host does something else with them, which may yet come to something.
    Busy,
    /// The host does nothing with any of them.
    Nothing,
}

impl Present {
    /// The same of a host that may be about to start something, which is not to be seen yet.
    pub fn beside_start(self, starts: bool) -> Present {
        match self {
            Present::Nothing if starts => Present::Busy,
            present => present,
        }
    }
}

/// The content of its record of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// The generation at which it ran the VM last.
    pub ran: Option<Generation>,
    /// Whether it was the backup of the one that asks.
    pub backed_asker: bool,
}

/// The answer to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Say this.
    Say(WinnersWord),
    /// Let the standby know that it is awaited; there is nothing to say.
    Hurry,
    /// Return this generation, if it was granted; there is nothing to say.
    Return(Generation),
}

/// Whether `keeper`, which keeps a guest that it has lost, may go on with it at any moment, by what the arbiter says `now`:
/// then nobody else starts the VM. A claim from a generation that is another's fails once the VM goes back.
pub fn may_go_on(keeper: &HostName, now: Option<&Ownership>) -> bool {
    now.is_some_and(|now| now.host.as_ref() == Some(keeper))
}

/// Answers one that owned the group at `from`, the leader's generation. `records` has those of all
/// members, the leader's first; none if one is missing.
pub fn answer(
    from: Generation,
    present: Present,
    records: impl FnOnce() -> Option<Vec<Recorded>>,
) -> Answer {
    let later = |generation: &Generation| *generation > from;
    let silence = Answer::Say(WinnersWord::default());
    match present {
        Present::Runs(generation) => {
            Answer::Say(WinnersWord { runs: Some(generation).filter(later), ran: None })
        }
        Present::StandsBy => Answer::Hurry,
        Present::Busy => silence,
        Present::Nothing => {
            let Some(records) = records().filter(|records| !records.is_empty()) else {
                return silence;
            };
            let ran = records[0].ran.filter(later);
            if ran.is_some() && !planted!(ReturnWhatRan) {
                return Answer::Say(WinnersWord { runs: None, ran });
            }
            match records.iter().all(|record| record.backed_asker) {
                true => Answer::Return(from.next()),
                false => silence,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(ran: Option<u64>) -> Recorded {
        Recorded { ran: ran.map(Generation), backed_asker: true }
    }

    fn nothing(records: Option<Vec<Recorded>>) -> Answer {
        answer(Generation(4), Present::Nothing, || records)
    }

    #[test]
    fn a_grant_is_returned_only_by_a_host_that_has_and_ran_nothing() {
        assert_eq!(nothing(Some(vec![recorded(None); 2])), Answer::Return(Generation(5)));
        assert_eq!(nothing(Some(vec![recorded(Some(3))])), Answer::Return(Generation(5)));
        let silence = Answer::Say(WinnersWord::default());
        let stranger = Recorded { ran: None, backed_asker: false };
        assert_eq!(nothing(Some(vec![recorded(None), stranger])), silence);
        assert_eq!(nothing(None), silence, "a record is missing");
        let beside = |present: Present| {
            answer(Generation(4), present.beside_start(true), || Some(vec![recorded(None)]))
        };
        assert_eq!(beside(Present::Nothing), silence, "it may have claimed that grant just now");
        let word = WinnersWord { runs: Some(Generation(5)), ran: None };
        assert_eq!(beside(Present::Runs(Generation(5))), Answer::Say(word));
        assert_eq!(answer(Generation(4), Present::Busy, || None), silence);
        assert_eq!(answer(Generation(4), Present::StandsBy, || None), Answer::Hurry);
    }

    #[test]
    fn who_keeps_its_guest_goes_on_with_it_once_the_vm_is_its_own() {
        let now = |host| Ownership { host, generation: Generation(6) };
        let [a, b] = ["a", "b"].map(|name| name.parse::<HostName>().unwrap());
        assert!(may_go_on(&a, Some(&now(Some(a.clone())))));
        assert!(!may_go_on(&a, Some(&now(Some(b)))));
        assert!(!may_go_on(&a, Some(&now(None))) && !may_go_on(&a, None));
    }

    #[test]
    fn what_it_runs_or_ran_counts_if_that_was_later() {
        let runs =
            |generation| answer(Generation(4), Present::Runs(Generation(generation)), || None);
        let word = WinnersWord { runs: Some(Generation(5)), ran: None };
        assert_eq!(runs(5), Answer::Say(word));
        assert_eq!(runs(4), Answer::Say(WinnersWord::default()));
        let word = WinnersWord { runs: None, ran: Some(Generation(6)) };
        assert_eq!(nothing(Some(vec![recorded(Some(6))])), Answer::Say(word));
    }
}
