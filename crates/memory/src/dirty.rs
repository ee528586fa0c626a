//! Sets of pages to be copied.

use understudy_protocol::{PageIndex, PageRun};

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

    /// The number of pages in the set.
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

    /// Adds all pages of `other`, and leaves each page in it once.
    pub fn unite(&mut self, other: &DirtySet) {
        if other.is_empty() {
            return;
        }
        self.runs.extend_from_slice(&other.runs);
        self.runs.sort_unstable_by_key(|run| (run.block.0, run.first.0));
        self.runs.dedup_by(|next, last| {
            let joins = next.block == last.block && next.first.0 <= last.first.0 + last.count;
            if joins {
                last.count = last.count.max(next.first.0 + next.count - last.first.0);
            }
            joins
        });
        self.pages = self.runs.iter().map(|run| run.count).sum();
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

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::BlockId;

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
    fn united_sets_have_each_page_once() {
        let of = |runs: &[PageRun]| {
            let mut set = DirtySet::new();
            runs.iter().for_each(|run| set.push(*run));
            set
        };
        let mut set = of(&[run(0, 30, 5), run(0, 1, 4), run(1, 7, 1)]);
        set.unite(&of(&[]));
        assert_eq!(set.runs(), [run(0, 30, 5), run(0, 1, 4), run(1, 7, 1)], "as it was");
        set.unite(&of(&[run(1, 6, 1), run(0, 2, 1), run(0, 5, 2), run(0, 33, 9), run(0, 32, 1)]));
        assert_eq!(set.runs(), [run(0, 1, 6), run(0, 30, 12), run(1, 6, 2)]);
        assert_eq!(set.pages(), 20);
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
}
