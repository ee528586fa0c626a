//! Statistical sampling of the working set in normal running: watch a few pages chosen at
//! random; the share of them that is touched in a period is the share of all.

use std::collections::{BTreeSet, HashSet, VecDeque};

/// Periods whose mean is the estimate: one period's luck must not decide a restore.
const PERIODS: usize = 8;

/// Estimates how many of a member's pages are touched in a period. Pages are numbered
/// through all blocks.
#[derive(Clone, Debug)]
pub struct Sampling {
    pages: u64,
    watched: BTreeSet<u64>,
    touched: HashSet<u64>,
    periods: VecDeque<u64>,
}

impl Sampling {
    /// Creates one for a memory of so many pages.
    pub fn new(pages: u64) -> Sampling {
        Sampling {
            pages,
            watched: BTreeSet::new(),
            touched: HashSet::new(),
            periods: VecDeque::new(),
        }
    }

    /// Begins a period in which `count` pages are watched, fewer if there are not so many.
    /// `below` gives a random number below its argument. Returns them in their order; the
    /// caller makes the next access to each of them noticeable.
    pub fn begin(
        &mut self,
        count: usize,
        mut below: impl FnMut(u64) -> u64,
    ) -> impl Iterator<Item = u64> + '_ {
        self.touched.clear();
        self.watched.clear();
        // Floyd's choice: each set of pages is as likely as any other, in `count` steps.
        for last in self.pages.saturating_sub(count as u64)..self.pages {
            let chosen = below(last + 1);
            if !self.watched.insert(chosen) {
                self.watched.insert(last);
            }
        }
        self.watched.iter().copied()
    }

    /// A page was accessed; counts if it is watched.
    pub fn access(&mut self, page: u64) {
        if self.watched.contains(&page) {
            self.touched.insert(page);
        }
    }

    /// Ends the period.
    pub fn end(&mut self) {
        if self.watched.is_empty() {
            return;
        }
        let (touched, watched) = (self.touched.len() as u128, self.watched.len() as u128);
        self.periods.push_back((u128::from(self.pages) * touched / watched) as u64);
        if self.periods.len() > PERIODS {
            self.periods.pop_front();
        }
        self.watched.clear();
    }

    /// The working set in pages; none before the first period has ended.
    pub fn estimate(&self) -> Option<u64> {
        let periods = self.periods.len() as u64;
        (periods > 0).then(|| self.periods.iter().sum::<u64>() / periods)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small generator; the seed is the choice.
    fn random(mut state: u64) -> impl FnMut(u64) -> u64 {
        move |bound| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % bound
        }
    }

    #[test]
    fn a_sample_tells_how_much_is_in_use() {
        let mut sampling = Sampling::new(100_000);
        let mut below = random(42);
        assert_eq!(sampling.estimate(), None);
        for _ in 0..20 {
            let watched = sampling.begin(500, &mut below).count();
            assert_eq!(watched, 500);
            // The guest uses the first fifth.
            (0..20_000).for_each(|page| sampling.access(page));
            sampling.end();
        }
        let estimate = sampling.estimate().unwrap();
        assert!((18_000..22_000).contains(&estimate), "{estimate}");
    }

    #[test]
    fn every_page_is_watched_when_there_are_few() {
        let mut sampling = Sampling::new(3);
        assert_eq!(sampling.begin(100, |_| 0).collect::<Vec<_>>(), [0, 1, 2]);
        sampling.access(1);
        sampling.access(1);
        sampling.access(7);
        sampling.end();
        assert_eq!(sampling.estimate(), Some(1));
    }
}
