//! How well each policy foretold what was touched, from what was noted on one run.

use crate::bench::suite::statistics::median;
use serde::Serialize;
use std::collections::BTreeMap;
use understudy_protocol::{BlockId, PageIndex};
use understudy_snapshot::{Clock, FirstAccess, Page, Recency, Score};

/// Numbers of pages loaded before the start, as in HotRestore's tables.
pub const SIZES: [u64; 4] = [5_000, 10_000, 15_000, 20_000];
/// And parts of the product's estimate of the working set; the first is what a restore loads.
pub const PARTS: [f64; 3] = [0.5, 0.7, 1.0];
/// The one that its authors name.
pub const NAMED: u64 = 15_000;

/// Shares that were right, by policy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ByPolicy {
    /// First access, first load.
    pub fafl: f64,
    /// Least recently used.
    pub lru: f64,
    /// CLOCK.
    pub clock: f64,
}

/// What would have become of a restore with so many pages loaded before the start.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AtSize {
    /// Pages loaded.
    pub pages: u64,
    /// Share of the touched pages that had been loaded.
    pub hit_rate: ByPolicy,
    /// Share of the loaded pages that were touched.
    pub accuracy: ByPolicy,
    /// What no policy of that size can exceed: the share of the touched pages that it could load.
    pub bound: f64,
}

impl AtSize {
    /// Of all accesses after the snapshot, in their order, and of the first ones after the
    /// restore.
    pub fn of(pages: u64, accesses: &[u64], touched: &[u64]) -> AtSize {
        let size = pages as usize;
        let (mut first, mut recent, mut clock) =
            (FirstAccess::new(size), Recency::new(size), Clock::new(size));
        for page in accesses.iter().copied().map(page) {
            first.access(page);
            recent.access(page);
            clock.access(page);
        }
        let touched: Vec<Page> = touched.iter().copied().map(page).collect();
        let scores = [first.pages(), &recent.pages(), &clock.pages()]
            .map(|loaded| Score::of(loaded, &touched));
        let by = |figure: fn(&Score) -> f64| {
            let [fafl, lru, clock] = scores.map(|score| figure(&score));
            ByPolicy { fafl, lru, clock }
        };
        AtSize {
            pages,
            hit_rate: by(|score| score.hit_rate),
            accuracy: by(|score| score.accuracy),
            bound: (pages as f64 / touched.len().max(1) as f64).min(1.0),
        }
    }
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
    let pages = |numbers: &[u64]| numbers.iter().copied().map(page).collect::<Vec<Page>>();
    Score::of(&pages(&queue[..loaded]), &pages(touched)).faults as u64
}

/// Keyed by a share, as it is written: JSON's keys are texts.
pub type ByShare<T> = BTreeMap<String, T>;

fn page(index: u64) -> Page {
    Page { block: BlockId(0), index: PageIndex(index) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_judged_by_what_the_guest_touches_next() {
        // It does the same again: 1 2 3 4, of which two can be loaded, and then rests.
        let at = AtSize::of(2, &[1, 2, 3, 4, 4], &[1, 2, 5]);
        assert_eq!(at.hit_rate.fafl, 2.0 / 3.0);
        assert_eq!(at.hit_rate.lru, 0.0);
        assert_eq!(at.accuracy.fafl, 1.0);
        assert_eq!(at.bound, 2.0 / 3.0);
        // All that was touched fits: all policies load the same.
        let at = AtSize::of(9, &[1, 2, 3], &[3, 2]);
        assert_eq!([at.hit_rate.fafl, at.hit_rate.lru, at.hit_rate.clock], [1.0; 3]);
        assert_eq!((at.accuracy.fafl, at.bound), (2.0 / 3.0, 1.0));
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
