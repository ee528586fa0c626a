//! The choice of the spots that are compared next, and what is made of the findings.

use crate::{Findings, MOST_SPOTS, Spot};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::iter::Peekable;

/// Times that a spot must differ for certain, at as many places in a row, before the backup is said
/// to have diverged.
const PROOFS: u32 = 2;

/// A difference that is not certain is looked at again, at most so often.
const MOST_DOUBTS: u32 = 200;

/// A place that the backup could not compare at is replaced by another, at most so often in a row.
const MOST_FAILURES: u32 = 20;

/// The reason why a comparison does not come to an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoResult {
    /// The backup answers to what was not asked.
    #[error("the backup compared at a place that it was not asked for ({0})")]
    Unasked(u64),
    /// The backup cannot compare.
    #[error("the backup was not where its log had led to, {MOST_FAILURES} times in a row")]
    Misplaced,
}

/// The number of times that a spot differed, since it was the same last.
#[derive(Clone, Copy, Debug, Default)]
struct Suspicion {
    proofs: u32,
    doubts: u32,
}

/// One comparison of two machines, place by place: a stream of spots, and again those that
/// differed, until that has passed or is proved.
#[derive(Debug)]
pub struct Inquiry<Spots: Iterator<Item = Spot>> {
    spots: Peekable<Spots>,
    again: VecDeque<Spot>,
    suspects: BTreeMap<Spot, Suspicion>,
    asked: BTreeMap<u64, Vec<Spot>>,
    failures: u32,
    tally: Tally,
}

/// The result that a comparison has come to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Spots of memory that were the same, or are in one of the lists.
    pub pages: u64,
    /// The same of disks.
    pub extents: u64,
    /// Places of the log at which was compared.
    pub places: u64,
    /// Spots that differed at one place and were the same at the next.
    pub passed: u64,
    /// Spots that differ.
    pub differing: BTreeSet<Spot>,
    /// Spots that differed whenever they were looked at, and never for certain.
    pub undecided: BTreeSet<Spot>,
}

impl<Spots: Iterator<Item = Spot>> Inquiry<Spots> {
    /// Creates one for these spots, each of which comes once.
    pub fn new(spots: Spots) -> Inquiry<Spots> {
        Inquiry {
            spots: spots.peekable(),
            again: VecDeque::new(),
            suspects: BTreeMap::new(),
            asked: BTreeMap::new(),
            failures: 0,
            tally: Tally::default(),
        }
    }

    /// The spots for the next place, of about so many bytes; none if there is nothing to ask at
    /// present.
    pub fn next(&mut self, bytes: u64) -> Vec<Spot> {
        let (mut next, mut sum) = (Vec::new(), 0);
        while sum < bytes && next.len() < MOST_SPOTS {
            let Some(spot) = self.again.pop_front().or_else(|| self.spots.next()) else { break };
            sum += spot.bytes();
            next.push(spot);
        }
        next
    }

    /// Whether all that is left was asked for before.
    pub fn only_again(&mut self) -> bool {
        self.spots.peek().is_none()
    }

    /// The backup is asked for these at the place with this number.
    pub fn asked(&mut self, number: u64, spots: Vec<Spot>) {
        self.asked.insert(number, spots);
    }

    /// No place was found for these: they come again.
    pub fn put_back(&mut self, spots: Vec<Spot>) {
        self.again.extend(spots);
    }

    /// Places that the backup has not answered for.
    pub fn unanswered(&self) -> usize {
        self.asked.len()
    }

    /// Whether nothing is left to be asked or answered.
    pub fn is_over(&mut self) -> bool {
        self.asked.is_empty() && self.again.is_empty() && self.only_again()
    }

    /// The backup has answered.
    pub fn heard(&mut self, findings: &Findings) -> Result<(), NoResult> {
        let asked = self.asked.remove(&findings.number);
        let asked = asked.ok_or(NoResult::Unasked(findings.number))?;
        if !findings.was_compared {
            self.failures += 1;
            self.put_back(asked);
            return if self.failures < MOST_FAILURES { Ok(()) } else { Err(NoResult::Misplaced) };
        }
        self.failures = 0;
        self.tally.places += 1;
        let found: BTreeMap<Spot, bool> =
            findings.differences.iter().map(|found| (found.spot, found.is_certain)).collect();
        if found.keys().any(|spot| !asked.contains(spot)) {
            return Err(NoResult::Unasked(findings.number));
        }
        for spot in asked {
            self.judge(spot, found.get(&spot).copied());
        }
        Ok(())
    }

    /// A spot was the same, or differed, certainly or not.
    fn judge(&mut self, spot: Spot, certain: Option<bool>) {
        let Some(certain) = certain else {
            if self.suspects.remove(&spot).is_some() {
                self.tally.passed += 1;
            }
            return self.count(spot);
        };
        let suspicion = self.suspects.entry(spot).or_default();
        if certain {
            suspicion.proofs += 1;
        } else {
            suspicion.doubts += 1;
        }
        let list = match *suspicion {
            Suspicion { proofs, .. } if proofs >= PROOFS => &mut self.tally.differing,
            Suspicion { doubts, .. } if doubts >= MOST_DOUBTS => &mut self.tally.undecided,
            _ => return self.again.push_back(spot),
        };
        list.insert(spot);
        self.suspects.remove(&spot);
        self.count(spot);
    }

    fn count(&mut self, spot: Spot) {
        match spot {
            Spot::Page { .. } => self.tally.pages += 1,
            Spot::Extent { .. } => self.tally.extents += 1,
        }
    }

    /// The result so far.
    pub fn tally(&self) -> &Tally {
        &self.tally
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Finding;
    use understudy_protocol::PAGE_SIZE;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn pages(many: u64) -> impl Iterator<Item = Spot> {
        (0..many).map(|index| Spot::Page { block: 0, index })
    }

    /// Asks for the next spots, and has the backup answer.
    fn ask(
        inquiry: &mut Inquiry<impl Iterator<Item = Spot>>,
        number: u64,
        differing: impl Fn(&Spot) -> Option<bool>,
    ) -> Vec<Spot> {
        let spots = inquiry.next(10 * PAGE);
        inquiry.asked(number, spots.clone());
        let finding =
            |spot: &Spot| differing(spot).map(|is_certain| Finding { spot: *spot, is_certain });
        let differences = spots.iter().filter_map(finding).collect();
        inquiry.heard(&Findings { number, was_compared: true, differences }).unwrap();
        spots
    }

    #[test]
    fn all_spots_are_asked_for_once_if_they_are_the_same() {
        let mut inquiry = Inquiry::new(pages(25));
        let mut seen = Vec::new();
        for number in 0..3 {
            assert!(!inquiry.is_over());
            seen.extend(ask(&mut inquiry, number, |_| None));
        }
        assert!(inquiry.is_over());
        assert_eq!(seen, pages(25).collect::<Vec<_>>());
        let tally = Tally { pages: 25, places: 3, ..Default::default() };
        assert_eq!(*inquiry.tally(), tally);
    }

    #[test]
    fn a_difference_must_last_to_count() {
        let [passes, stays] = [3, 5].map(|index| Spot::Page { block: 0, index });
        let mut inquiry = Inquiry::new(pages(8));
        ask(&mut inquiry, 0, |spot| (*spot == passes || *spot == stays).then_some(true));
        assert_eq!(inquiry.tally().differing.len(), 0, "one proof is none");
        let again = ask(&mut inquiry, 1, |spot| (*spot == stays).then_some(true));
        assert_eq!(again, [passes, stays]);
        assert_eq!(inquiry.tally().differing, [stays].into());
        assert_eq!((inquiry.tally().passed, inquiry.tally().pages), (1, 8));
        assert!(inquiry.is_over());
    }

    #[test]
    fn a_difference_that_is_never_certain_is_no_divergence_and_no_sameness_either() {
        let mut inquiry = Inquiry::new(pages(1));
        let mut number = 0;
        while !inquiry.is_over() {
            assert!(number < 1000, "it never ends");
            ask(&mut inquiry, number, |_| Some(false));
            number += 1;
        }
        assert!(inquiry.tally().differing.is_empty());
        assert_eq!(inquiry.tally().undecided.len(), 1);
    }

    #[test]
    fn a_place_that_failed_is_replaced_and_in_the_end_there_is_no_result() {
        let mut inquiry = Inquiry::new(pages(3));
        let failed = |number| Findings { number, ..Default::default() };
        for number in 0.. {
            let spots = inquiry.next(10 * PAGE);
            assert_eq!(spots.len(), 3);
            inquiry.asked(number, spots);
            match inquiry.heard(&failed(number)) {
                Ok(()) => assert!(number < 100 && !inquiry.is_over()),
                Err(error) => {
                    assert_eq!(error, NoResult::Misplaced);
                    break;
                }
            }
        }
    }

    #[test]
    fn answers_to_nothing_are_refused() {
        let mut inquiry = Inquiry::new(pages(3));
        assert!(inquiry.heard(&Findings::default()).is_err());
        let spots = inquiry.next(3 * PAGE);
        inquiry.asked(1, spots);
        let other = Finding { spot: Spot::Extent { disk: 0, index: 0 }, is_certain: true };
        let findings = Findings { number: 1, was_compared: true, differences: vec![other] };
        assert_eq!(inquiry.heard(&findings), Err(NoResult::Unasked(1)));
    }
}
