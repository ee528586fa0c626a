//! The pages that a restored VM will touch first (HotRestore, elastic working set).
//!
//! Right after a snapshot the VM does what it would do right after a restore of it. So the
//! pages that it touches then, reads and writes, in the order of their first access, are the
//! queue in which to load them: [`FirstAccess`], first access, first load. How many of them
//! before the start is decided by [`Sampling`] and [`working_set_size`]. [`Recency`] and
//! [`Clock`] are what the paper compares with, over the same trace.

mod clock;
mod recency;
mod sampling;

pub use clock::Clock;
pub use recency::Recency;
pub use sampling::Sampling;

use crate::format::Page;
use std::collections::HashSet;

/// The queue of first accesses, while it is traced.
#[derive(Clone, Debug, Default)]
pub struct FirstAccess {
    queue: Vec<Page>,
    touched: HashSet<Page>,
    limit: usize,
}

impl FirstAccess {
    /// Keeps at most `limit` pages: those accessed first are those needed first.
    pub fn new(limit: usize) -> FirstAccess {
        FirstAccess { limit, ..FirstAccess::default() }
    }

    /// The guest, or a device of it, reads or writes a page. Returns whether it is the first
    /// access, and in the queue now.
    pub fn access(&mut self, page: Page) -> bool {
        if self.is_full() || !self.touched.insert(page) {
            return false;
        }
        self.queue.push(page);
        true
    }

    /// Whether tracing can end: further accesses change nothing.
    pub fn is_full(&self) -> bool {
        self.queue.len() >= self.limit
    }

    /// Moves the bound. Done periodically while the estimate of the working set changes; the
    /// queue keeps its beginning.
    pub fn bound(&mut self, limit: usize) {
        self.limit = limit;
        for page in self.queue.drain(limit.min(self.queue.len())..) {
            self.touched.remove(&page);
        }
    }

    /// The queue, first accesses first.
    pub fn pages(&self) -> &[Page] {
        &self.queue
    }
}

/// The working set in pages from what was sampled in normal running and from what was touched
/// while the snapshot was traced (HotRestore: 0.7 and 0.3). A sample alone sees the past, a
/// trace alone only its few seconds.
pub fn working_set_size(sampled: u64, traced: u64) -> u64 {
    (sampled * 7 + traced * 3) / 10
}

/// The score of how well a working set foretold what was touched after the restore.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// The share of touched pages that had been loaded: each of the others is a fault.
    pub hit_rate: f64,
    /// The share of loaded pages that were touched: the others were loaded for nothing.
    pub accuracy: f64,
    /// Touched pages that had not been loaded.
    pub faults: usize,
}

impl Score {
    /// Rates a working set by the pages that were touched after the restore. Nothing touched, or
    /// nothing loaded, counts as right.
    pub fn of<'a>(
        loaded: impl IntoIterator<Item = &'a Page>,
        touched: impl IntoIterator<Item = &'a Page>,
    ) -> Score {
        let loaded: HashSet<_> = loaded.into_iter().collect();
        let touched: HashSet<_> = touched.into_iter().collect();
        let hits = loaded.intersection(&touched).count();
        let share = |all: usize| if all == 0 { 1.0 } else { hits as f64 / all as f64 };
        Score {
            hit_rate: share(touched.len()),
            accuracy: share(loaded.len()),
            faults: touched.len() - hits,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use understudy_protocol::{BlockId, PageIndex};

    fn page(index: u64) -> Page {
        Page { block: BlockId(0), index: PageIndex(index) }
    }

    fn pages(indices: &[u64]) -> Vec<Page> {
        indices.iter().copied().map(page).collect()
    }

    #[test]
    fn the_first_access_counts_and_the_bound_cuts_the_end() {
        let mut queue = FirstAccess::new(4);
        for index in [5, 1, 5, 9, 1, 2, 7] {
            queue.access(page(index));
        }
        assert_eq!(queue.pages(), pages(&[5, 1, 9, 2]));
        assert!(queue.is_full());
        queue.bound(2);
        queue.bound(3);
        assert!(queue.access(page(2)), "forgotten with the end, hence new again");
        assert_eq!(queue.pages(), pages(&[5, 1, 2]));
    }

    #[test]
    fn the_estimate_weighs_the_sample_and_the_trace() {
        assert_eq!(working_set_size(1000, 2000), 1300);
        assert_eq!(working_set_size(0, 10), 3);
    }

    #[test]
    fn hits_are_counted_against_what_was_touched_and_against_what_was_loaded() {
        let score = Score::of(&pages(&[1, 2, 3, 4]), &pages(&[3, 4, 5, 6, 7, 8, 3]));
        assert_eq!((score.hit_rate, score.accuracy, score.faults), (2.0 / 6.0, 0.5, 4));
        assert_eq!(Score::of(&[], &[]).hit_rate, 1.0);
    }

    proptest! {
        #[test]
        fn no_policy_of_the_same_size_beats_first_accesses_when_the_future_repeats(
            trace in proptest::collection::vec(0..60u64, 1..400), size in 1..60usize,
        ) {
            // The restored VM does the same again; until the queue is used up it never faults.
            let (mut queue, mut recency, mut clock) =
                (FirstAccess::new(size), Recency::new(size), Clock::new(size));
            for &index in &trace {
                queue.access(page(index));
                recency.access(page(index));
                clock.access(page(index));
            }
            let mut first_faults = [queue.pages().to_vec(), recency.pages(), clock.pages()]
                .map(|set| {
                    let fault = |index: &u64| !set.contains(&page(*index));
                    trace.iter().position(fault).unwrap_or(trace.len())
                })
                .into_iter();
            let own = first_faults.next().unwrap();
            prop_assert!(first_faults.all(|other| own >= other));
        }
    }
}
