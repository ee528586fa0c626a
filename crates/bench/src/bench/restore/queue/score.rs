//! Scores of how well each policy foretold what was touched, from what was noted.

use crate::bench::suite::statistics::median;
use serde::Serialize;
use std::collections::BTreeMap;
use understudy_protocol::{BlockId, PageIndex};
use understudy_snapshot::{Clock, FirstAccess, Page, Recency, Score};

/// Numbers of pages loaded before the start, as in HotRestore's tables.
pub const SIZES: [u64; 4] = [5_000, 10_000, 15_000, 20_000];
/// Parts of the product's estimate of the working set; the first is what a restore loads.
pub const PARTS: [f64; 3] = [0.5, 0.7, 1.0];
/// The one that its authors name.
pub const NAMED: u64 = 15_000;

/// Shares that were right, by policy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ByPolicy {
    /// First access, first load.
    pub fafl: f64,
    /// Recency: least recently used.
    pub lru: f64,
    /// CLOCK.
    pub clock: f64,
}

/// Notes on one snapshot: all accesses after it, in their order, and the pages that were
/// touched after its restore.
#[derive(Clone, Debug)]
pub struct Noted {
    /// Each page once, if only first accesses were traced.
    pub accesses: Vec<u64>,
    /// Each page once, in the order in which they were touched.
    pub touched: Vec<u64>,
}

/// Scores of how well so many pages in the order of a queue of first accesses foretold what was
/// touched.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Foretold {
    /// Share of the touched pages that are among them.
    pub hit_rate: f64,
    /// Share of them that was touched.
    pub accuracy: f64,
    /// Bound that no policy of that size can exceed: the share of the touched pages that it could
    /// load.
    pub bound: f64,
}

impl Foretold {
    /// Scores with the first `pages` of the queue loaded.
    pub fn of(pages: u64, noted: &Noted) -> Foretold {
        let mut queue = FirstAccess::new(pages as usize);
        for page in numbered(&noted.accesses) {
            queue.access(page);
        }
        let touched: Vec<Page> = numbered(&noted.touched).collect();
        let score = Score::of(queue.pages(), &touched);
        let (hit_rate, accuracy) = (score.hit_rate, score.accuracy);
        Foretold { hit_rate, accuracy, bound: bound(pages, noted) }
    }
}

/// Scores of a restore with so many pages loaded before the start.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AtSize {
    /// Pages loaded.
    pub pages: u64,
    /// Scores by the queue of a snapshot as it is taken by default: only first accesses are traced.
    pub as_taken: Foretold,
    /// Share of the touched pages that had been loaded, by policies that saw the same accesses.
    pub hit_rate: ByPolicy,
    /// Share of the loaded pages that were touched.
    pub accuracy: ByPolicy,
    /// Bound that no policy of that size can exceed: the share of the touched pages that it could
    /// load.
    pub bound: f64,
}

impl AtSize {
    /// Scores of a snapshot as it is taken by default, and of one that has all accesses.
    pub fn of(pages: u64, as_taken: &Noted, compared: &Noted) -> AtSize {
        let size = pages as usize;
        let (mut first, mut recent, mut clock) =
            (FirstAccess::new(size), Recency::new(size), Clock::new(size));
        for page in numbered(&compared.accesses) {
            first.access(page);
            recent.access(page);
            clock.access(page);
        }
        let touched: Vec<Page> = numbered(&compared.touched).collect();
        let scores = [first.pages(), &recent.pages(), &clock.pages()]
            .map(|loaded| Score::of(loaded, &touched));
        let by = |figure: fn(&Score) -> f64| {
            let [fafl, lru, clock] = scores.map(|score| figure(&score));
            ByPolicy { fafl, lru, clock }
        };
        AtSize {
            pages,
            as_taken: Foretold::of(pages, as_taken),
            hit_rate: by(|score| score.hit_rate),
            accuracy: by(|score| score.accuracy),
            bound: bound(pages, compared),
        }
    }
}

/// Scores of how well the first half of what was touched was foretold, by HotRestore's own measure:
/// so many pages are loaded, and of the first so many that are touched that share had been. No load
/// is too small for it: only who foretells the order of accesses has all.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AtHalf {
    /// Pages loaded, of a snapshot as it is taken by default: half of what was touched after it.
    pub pages: u64,
    /// Share that was right, by the queue of such a snapshot.
    pub as_taken: f64,
    /// The same by policies that saw the same accesses, at half of what was touched after those.
    pub by_policy: ByPolicy,
}

impl AtHalf {
    /// Scores of a snapshot as it is taken by default, and of one that has all accesses.
    pub fn of(as_taken: &Noted, compared: &Noted) -> AtHalf {
        let pages = as_taken.touched.len() as u64 / 2;
        let (as_taken, compared) = (as_taken.first_half(), compared.first_half());
        let by_policy = AtSize::of(compared.touched.len() as u64, &as_taken, &compared).hit_rate;
        AtHalf { pages, as_taken: Foretold::of(pages, &as_taken).hit_rate, by_policy }
    }
}

impl Noted {
    /// Notes with the first half of what was touched.
    fn first_half(&self) -> Noted {
        let half = self.touched.len() / 2;
        Noted { accesses: self.accesses.clone(), touched: self.touched[..half].to_vec() }
    }
}

fn bound(pages: u64, noted: &Noted) -> f64 {
    (pages as f64 / noted.touched.len().max(1) as f64).min(1.0)
}

/// The middle of several runs, policy by policy.
pub fn middle(figures: &[ByPolicy]) -> Option<ByPolicy> {
    let of =
        |figure: fn(&ByPolicy) -> f64| median(&figures.iter().map(figure).collect::<Vec<f64>>());
    Some(ByPolicy { fafl: of(|by| by.fafl)?, lru: of(|by| by.lru)?, clock: of(|by| by.clock)? })
}

/// Touched pages that had not been loaded, when that share of the queue had.
pub fn not_loaded(queue: &[u64], share: f64, touched: &[u64]) -> u64 {
    let loaded = ((queue.len() as f64 * share).round() as usize).min(queue.len());
    let pages = |numbers: &[u64]| numbered(numbers).collect::<Vec<Page>>();
    Score::of(&pages(&queue[..loaded]), &pages(touched)).faults as u64
}

/// Keyed by a share, as it is written: JSON's keys are texts.
pub type ByShare<T> = BTreeMap<String, T>;

/// Pages of main memory.
fn numbered(numbers: &[u64]) -> impl Iterator<Item = Page> {
    numbers.iter().map(|&index| Page { block: BlockId(0), index: PageIndex(index) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted(accesses: &[u64], touched: &[u64]) -> Noted {
        Noted { accesses: accesses.to_vec(), touched: touched.to_vec() }
    }

    #[test]
    fn policies_are_judged_by_what_the_guest_touches_next() {
        // It does the same again: 1 2 3 4, of which two can be loaded, and then rests.
        let as_taken = noted(&[1, 2, 3], &[2, 6, 7, 8]);
        let at = AtSize::of(2, &as_taken, &noted(&[1, 2, 3, 4, 4], &[1, 2, 5]));
        assert_eq!(at.hit_rate.fafl, 2.0 / 3.0);
        assert_eq!(at.hit_rate.lru, 0.0);
        assert_eq!(at.accuracy.fafl, 1.0);
        assert_eq!(at.bound, 2.0 / 3.0);
        assert_eq!(at.as_taken, Foretold { hit_rate: 0.25, accuracy: 0.5, bound: 0.5 });
        // All that was touched fits: all policies load the same.
        let at = AtSize::of(9, &as_taken, &noted(&[1, 2, 3], &[3, 2]));
        assert_eq!([at.hit_rate.fafl, at.hit_rate.lru, at.hit_rate.clock], [1.0; 3]);
        assert_eq!((at.accuracy.fafl, at.bound), (2.0 / 3.0, 1.0));
    }

    #[test]
    fn at_half_of_what_is_touched_only_the_right_order_has_all() {
        // All that is touched was traced, but in another order: 15 000 pages would have it all.
        let traced = noted(&[5, 6, 1, 7, 8, 2], &[1, 2, 5, 6, 7, 8]);
        assert_eq!(Foretold::of(NAMED, &traced).hit_rate, 1.0);
        let again = noted(&[1, 2, 3, 4, 1, 2], &[1, 2, 3, 4]);
        let half = AtHalf::of(&traced, &again);
        assert_eq!((half.pages, half.as_taken), (3, 2.0 / 3.0));
        assert_eq!((half.by_policy.fafl, half.by_policy.lru), (1.0, 1.0));
        let half = AtHalf::of(&traced, &noted(&[1, 2, 3, 4], &[1, 2, 3, 4]));
        assert_eq!((half.by_policy.fafl, half.by_policy.lru), (1.0, 0.0));
    }

    #[test]
    fn faults_are_what_was_touched_and_not_loaded() {
        let (queue, touched) = ([9, 8, 7, 6], [6, 7, 5]);
        assert_eq!(not_loaded(&queue, 0.5, &touched), 3);
        assert_eq!(not_loaded(&queue, 0.75, &touched), 2);
        assert_eq!(not_loaded(&queue, 2.0, &touched), 1);
    }

    #[test]
    fn the_middle_is_taken_policy_by_policy() {
        let by = |fafl, lru, clock| ByPolicy { fafl, lru, clock };
        let runs = [by(0.9, 0.1, 0.5), by(1.0, 0.3, 0.4), by(0.8, 0.2, 0.6)];
        assert_eq!(middle(&runs), Some(by(0.9, 0.2, 0.5)));
        assert_eq!(middle(&[]), None);
    }
}
