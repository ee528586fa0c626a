//! The pages that a guest writes in every epoch.
//!
//! Protection finds out whether a page was written, at the price of a fault of the guest and of a change of its page
//! table entry. For a page that is written in every epoch that is known beforehand: it stays unprotected, counts as
//! written, and is copied. From time to time each is protected all the same, or a page that is not written any more
//! would be copied for ever.

use crate::DirtySet;
use understudy_protocol::{BlockId, PageIndex, PageRun};

/// The epochs running in which a page was found from which on it is hot.
const HOT_AFTER: u8 = 3;

/// Fewer hot pages, or a smaller part of an epoch, do not repay a look before each scan protects.
const FEWEST_HOT: usize = 32;
const LEAST_PART: usize = 2;

/// The most pages that are hot: each is copied while the guest stands still.
const MOST_HOT: usize = 512;

/// An epoch of more pages than this teaches nothing: to sort them costs more than is gained.
const MOST_FOUND: u64 = 4096;

/// Each epoch tries one in so many of the hot pages, each of them in turn: so many neighbours together, which take
/// fewer calls.
const TRIED_PART: u64 = 16;
const NEIGHBOURS: u64 = 4;

/// Learns from what each epoch's scans found.
#[derive(Debug, Default)]
pub(crate) struct HotPages {
    /// The last epoch's pages in order, each with the number of epochs running in which it was found.
    streaks: Vec<(Page, u8)>,
    /// The hot ones that the next scans leave unprotected, in order.
    runs: Vec<PageRun>,
    pages: u64,
    /// The part that is tried next.
    turn: u64,
    /// Room for an epoch's pages.
    found: Vec<Page>,
    next: Vec<(Page, u8)>,
}

type Page = (BlockId, PageIndex);

impl HotPages {
    /// The number of pages that the next scans leave unprotected.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Those of them in `block` from `first` on, in order; a run may begin before `first`.
    pub fn from(&self, block: BlockId, first: PageIndex) -> &[PageRun] {
        let of_block = &self.runs[self.runs.partition_point(|run| run.block < block)..];
        let of_block = &of_block[..of_block.partition_point(|run| run.block == block)];
        &of_block[of_block.partition_point(|run| run.first.0 + run.count <= first.0)..]
    }

    /// An epoch is over whose scans found these pages, hot ones included.
    pub fn learn(&mut self, found: &DirtySet) {
        self.runs.clear();
        self.pages = 0;
        if found.pages() > MOST_FOUND {
            self.streaks.clear();
            return;
        }
        self.count(found);
        self.choose();
    }

    /// Counts on for what was found again, and forgets what was not.
    fn count(&mut self, found: &DirtySet) {
        self.found.clear();
        self.found.extend(found.runs().iter().copied().flat_map(pages_of));
        self.found.sort_unstable();
        self.found.dedup();
        self.next.clear();
        let mut before = self.streaks.iter().peekable();
        for &page in &self.found {
            while before.next_if(|(earlier, _)| *earlier < page).is_some() {}
            let streak = before.next_if(|(same, _)| *same == page).map_or(0, |(_, streak)| *streak);
            self.next.push((page, (streak + 1).min(HOT_AFTER)));
        }
        std::mem::swap(&mut self.streaks, &mut self.next);
    }

    fn choose(&mut self) {
        let hot = self.streaks.iter().filter(|(_, streak)| *streak == HOT_AFTER).take(MOST_HOT);
        if hot.clone().count() < FEWEST_HOT.max(self.streaks.len() / LEAST_PART) {
            return;
        }
        let turn = self.turn;
        self.turn = (turn + 1) % TRIED_PART;
        let is_tried = |page: PageIndex| page.0 / NEIGHBOURS % TRIED_PART == turn;
        for &((block, first), _) in hot.filter(|((_, page), _)| !is_tried(*page)) {
            self.pages += 1;
            match self.runs.last_mut() {
                Some(last) if last.block == block && last.first.0 + last.count == first.0 => {
                    last.count += 1;
                }
                _ => self.runs.push(PageRun { block, first, count: 1 }),
            }
        }
    }
}

fn pages_of(run: PageRun) -> impl Iterator<Item = Page> {
    (0..run.count).map(move |i| (run.block, PageIndex(run.first.0 + i)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    fn set(pages: impl IntoIterator<Item = Range<u64>>) -> DirtySet {
        let mut set = DirtySet::new();
        for pages in pages {
            let count = pages.end - pages.start;
            set.push(PageRun { block: BlockId(0), first: PageIndex(pages.start), count });
        }
        set
    }

    fn hot(hot: &HotPages) -> Vec<u64> {
        let runs = hot.from(BlockId(0), PageIndex(0)).iter();
        runs.flat_map(|run| run.first.0..run.first.0 + run.count).collect()
    }

    /// Learns what was found so often that each page has been tried, and those that were tried first are back.
    fn learn_long(pages: &mut HotPages, found: &DirtySet) {
        (0..u64::from(HOT_AFTER) + TRIED_PART).for_each(|_| pages.learn(found));
    }

    #[test]
    fn pages_are_hot_that_were_written_in_three_epochs_running() {
        let mut pages = HotPages::default();
        for found in [[0..50, 100..120], [0..50, 200..220], [0..50, 100..120]] {
            assert_eq!(pages.pages(), 0);
            pages.learn(&set(found));
        }
        let found = hot(&pages);
        assert!(found.len() >= 46 && found.iter().all(|page| *page < 50), "{found:?}");
        pages.learn(&set([0..40, 100..120]));
        let found = hot(&pages);
        assert!(found.len() >= 36 && found.iter().all(|page| *page < 40), "{found:?}");
        assert_eq!(pages.pages(), found.len() as u64);
    }

    #[test]
    fn each_hot_page_is_tried_within_sixteen_epochs() {
        for count in [32, 33, 100, 511] {
            let mut pages = HotPages::default();
            (0..HOT_AFTER).for_each(|_| pages.learn(&set([0..count])));
            let mut tried = vec![false; count as usize];
            for _ in 0..TRIED_PART {
                pages.learn(&set([0..count]));
                let left = hot(&pages);
                assert_eq!(pages.pages(), left.len() as u64);
                assert!(left.len() * 4 >= count as usize * 3, "{count}: {}", left.len());
                let missing = (0..count).filter(|page| !left.contains(page));
                missing.for_each(|page| tried[page as usize] = true);
            }
            assert!(tried.iter().all(|tried| *tried), "{count}: {tried:?}");
        }
    }

    #[test]
    fn few_are_not_worth_it_many_are_too_much_and_a_large_epoch_forgets() {
        let mut pages = HotPages::default();
        learn_long(&mut pages, &set([0..31]));
        assert_eq!(pages.pages(), 0, "few");
        learn_long(&mut pages, &set((0..1500).map(|page| 2 * page..2 * page + 1)));
        assert_eq!(pages.pages(), 0, "512 are no half of 1500");
        learn_long(&mut pages, &set((0..1000).map(|page| 2 * page..2 * page + 1)));
        let most = MOST_HOT as u64;
        assert!((most * 9 / 10..=most).contains(&pages.pages()), "{}", pages.pages());
        pages.learn(&set([0..MOST_FOUND + 1]));
        assert_eq!(pages.pages(), 0);
        pages.learn(&set([0..100]));
        assert_eq!(pages.pages(), 0);
    }

    #[test]
    fn runs_are_found_by_block_and_page() {
        let mut pages = HotPages::default();
        let mut found = set([4..37, 40..42]);
        found.push(PageRun { block: BlockId(2), first: PageIndex(5), count: 2 });
        (0..HOT_AFTER).for_each(|_| pages.learn(&found));
        // Those at 0, 64 and so on are tried.
        let from = |block, first| {
            let runs = pages.from(BlockId(block), PageIndex(first)).iter();
            runs.map(|run| (run.first.0, run.count)).collect::<Vec<_>>()
        };
        assert_eq!(from(0, 0), [(4, 33), (40, 2)]);
        assert_eq!(from(0, 36), [(4, 33), (40, 2)]);
        assert_eq!(from(0, 37), [(40, 2)]);
        assert_eq!(from(1, 0), []);
        assert_eq!(from(2, 6), [(5, 2)]);
    }
}
