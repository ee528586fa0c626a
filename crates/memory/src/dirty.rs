//! Sets of pages to be copied.

use understudy_protocol::{BlockId, PageIndex, PageRun};

/// Pages to be copied, as runs. Keeps its memory when cleared, so that it can be filled
/// again in the pause without allocating.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DirtySet {
    runs: Vec<PageRun>,
    pages: u64,
}

impl DirtySet {
    /// An empty set.
    pub fn new() -> DirtySet {
        DirtySet::default()
    }

    /// How many pages are in the set.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// True if no page is in the set.
    pub fn is_empty(&self) -> bool {
        self.pages == 0
    }

    /// The pages, as runs in the order they were added.
    pub fn runs(&self) -> &[PageRun] {
        &self.runs
    }

    /// Adds a run; one that continues the last is joined to it. Pages added twice are
    /// copied twice.
    pub fn push(&mut self, run: PageRun) {
        self.pages += run.count;
        match self.runs.last_mut() {
            Some(last) if last.block == run.block && last.first.0 + last.count == run.first.0 => {
                last.count += run.count;
            }
            _ => self.runs.push(run),
        }
    }

    /// Adds all runs of `other`.
    pub fn append(&mut self, other: &DirtySet) {
        self.runs.extend_from_slice(&other.runs);
        self.pages += other.pages;
    }

    /// Puts the runs in order, each page once.
    pub(crate) fn tidy(&mut self) {
        let ordered = |runs: &[PageRun]| runs.is_sorted_by(|a, b| end_of(a) <= start_of(b));
        if ordered(&self.runs) {
            return;
        }
        self.runs.sort_unstable_by_key(start_of);
        self.runs.dedup_by(|next, last| {
            let overlaps = start_of(next) <= end_of(last);
            if overlaps {
                last.count = last.count.max(next.first.0 + next.count - last.first.0);
            }
            overlaps
        });
        self.pages = self.runs.iter().map(|run| run.count).sum();
    }

    /// Divides a tidy set: `inside` gets the pages that `other`, which is tidy too, has as well, and
    /// `outside` the rest. Both are emptied first.
    pub(crate) fn divide(&self, other: &DirtySet, inside: &mut DirtySet, outside: &mut DirtySet) {
        (inside.clear(), outside.clear());
        let mut others = other.runs.iter().peekable();
        for run in &self.runs {
            let mut rest = *run;
            while rest.count > 0 {
                while others.next_if(|other| end_of(other) <= start_of(&rest)).is_some() {}
                let next = others.peek().filter(|other| start_of(other) < end_of(&rest));
                let Some(other) = next else {
                    outside.push(rest);
                    break;
                };
                let before = other.first.0.saturating_sub(rest.first.0);
                if before > 0 {
                    outside.push(PageRun { count: before, ..rest });
                }
                let first = rest.first.0 + before;
                let end = (rest.first.0 + rest.count).min(other.first.0 + other.count);
                inside.push(PageRun { first: PageIndex(first), count: end - first, ..rest });
                rest = PageRun {
                    first: PageIndex(end),
                    count: rest.first.0 + rest.count - end,
                    ..rest
                };
            }
        }
    }

    /// Empties the set; its memory is kept.
    pub fn clear(&mut self) {
        self.runs.clear();
        self.pages = 0;
    }

    /// Moves at most `limit` pages into `part`, which is emptied first: a first
    /// synchronisation goes piece by piece, because staging memory is bounded. The pieces
    /// come from the end of the set.
    pub fn take(&mut self, limit: u64, part: &mut DirtySet) {
        part.clear();
        while part.pages < limit {
            let Some(last) = self.runs.last_mut() else {
                return;
            };
            let count = last.count.min(limit - part.pages);
            last.count -= count;
            part.push(PageRun { first: PageIndex(last.first.0 + last.count), count, ..*last });
            if last.count == 0 {
                self.runs.pop();
            }
            self.pages -= count;
        }
    }
}

fn start_of(run: &PageRun) -> (BlockId, u64) {
    (run.block, run.first.0)
}

fn end_of(run: &PageRun) -> (BlockId, u64) {
    (run.block, run.first.0 + run.count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn run(block: u16, first: u64, count: u64) -> PageRun {
        PageRun { block: BlockId(block), first: PageIndex(first), count }
    }

    #[test]
    fn neighbouring_runs_of_a_block_are_joined() {
        let mut set = DirtySet::new();
        set.push(run(0, 1, 2));
        set.push(run(0, 3, 1));
        set.push(run(1, 4, 1));
        set.push(run(1, 6, 1));
        assert_eq!(set.runs(), [run(0, 1, 3), run(1, 4, 1), run(1, 6, 1)]);
        assert_eq!(set.pages(), 5);
    }

    #[test]
    fn taking_pieces_yields_every_page_once() {
        let mut set = DirtySet::new();
        set.push(run(0, 0, 10));
        set.push(run(0, 20, 5));
        set.push(run(2, 0, 4));
        let (mut part, mut seen) = (DirtySet::new(), Vec::new());
        while !set.is_empty() {
            set.take(7, &mut part);
            assert!(part.pages() == 7 || set.is_empty());
            for run in part.runs() {
                seen.extend((0..run.count).map(|i| (run.block.0, run.first.0 + i)));
            }
        }
        seen.sort_unstable();
        let expected: Vec<_> = (0..10)
            .chain(20..25)
            .map(|page| (0, page))
            .chain((0..4).map(|page| (2, page)))
            .collect();
        assert_eq!(seen, expected);
    }

    fn sets() -> impl Strategy<Value = DirtySet> {
        let runs = proptest::collection::vec((0u16..2, 0u64..60, 1u64..9), 0..12);
        runs.prop_map(|runs| {
            let mut set = DirtySet::new();
            runs.into_iter().for_each(|(block, first, count)| set.push(run(block, first, count)));
            set
        })
    }

    fn pages(set: &DirtySet) -> Vec<(u16, u64)> {
        let pages = |run: &PageRun| {
            let (block, first) = (run.block.0, run.first.0);
            (first..first + run.count).map(move |page| (block, page))
        };
        let pages: Vec<_> = set.runs().iter().flat_map(pages).collect();
        assert_eq!(set.pages(), pages.len() as u64);
        pages
    }

    proptest! {
        #[test]
        fn a_tidy_set_has_each_page_once_and_is_divided_by_another(a in sets(), b in sets()) {
            let of = |set: &DirtySet| pages(set).into_iter().collect::<BTreeSet<_>>();
            let (had, other) = (of(&a), of(&b));
            let (mut a, mut b) = (a, b);
            (a.tidy(), b.tidy());
            prop_assert!(pages(&a).into_iter().eq(had.iter().copied()), "{a:?}");
            let (mut inside, mut outside) = (a.clone(), DirtySet::new());
            a.divide(&b, &mut inside, &mut outside);
            prop_assert!(pages(&inside).into_iter().eq(had.intersection(&other).copied()));
            prop_assert!(pages(&outside).into_iter().eq(had.difference(&other).copied()));
        }
    }
}
