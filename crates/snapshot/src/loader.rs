//! The loading of a restored member's memory, and its order: what the guest waits for
//! first, then the queue of first accesses, then the rest.
//!
//! A chunk is read whole, and everything in it is filled in: a guest that faults on a buffer of
//! a device gets the buffer's neighbours with it (HotRestore, DMA cluster), and pages of the
//! queue lie side by side.

use crate::ChunkId;
use crate::format::{AreaMap, Page};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use understudy_protocol::{BlockId, PageIndex, PageRun};

/// The need of a page that the guest has touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demand {
    /// The page is zero: fill it with zeros, at once.
    Zero,
    /// Its chunk has been filled in: wake who waits.
    Filled,
    /// Its chunk comes next.
    Coming,
}

/// Pages to be filled from a chunk's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    /// The pages.
    pub pages: PageRun,
    /// Offset of the first one's content in the chunk, in units; the others follow.
    pub slot: u16,
}

/// Decides what is read next. Whoever reads may read several chunks at once.
#[derive(Debug)]
pub struct Loader {
    maps: BTreeMap<BlockId, AreaMap>,
    /// Pages that are filled from each chunk.
    fills: HashMap<ChunkId, Vec<Fill>>,
    /// Chunks that the guest waits for.
    demanded: VecDeque<ChunkId>,
    /// All chunks in the order of the queue, then of the memory.
    planned: VecDeque<ChunkId>,
    /// Chunks, of those in the order of the queue, that hold what is loaded before the start.
    before_start: HashSet<ChunkId>,
    asked: HashSet<ChunkId>,
    filled: HashSet<ChunkId>,
    pages: u64,
}

impl Loader {
    /// Creates one for the RAM blocks of a member. The first `before_start` pages of the queue, and if it has
    /// not so many the first of the memory behind them, are what the start waits for.
    pub fn new(maps: BTreeMap<BlockId, AreaMap>, queue: &[Page], before_start: u64) -> Loader {
        let mut fills: HashMap<ChunkId, Vec<Fill>> = HashMap::new();
        for (&block, map) in &maps {
            for extent in map.extents() {
                let place = map.place(extent);
                let pages = PageRun { block, first: PageIndex(extent.first), count: extent.count };
                fills.entry(place.chunk).or_default().push(Fill { pages, slot: place.slot });
            }
        }
        let mut loader = Loader {
            maps,
            fills,
            demanded: VecDeque::new(),
            planned: VecDeque::new(),
            before_start: HashSet::new(),
            asked: HashSet::new(),
            filled: HashSet::new(),
            pages: 0,
        };
        loader.plan(queue, before_start);
        loader
    }

    fn plan(&mut self, queue: &[Page], mut before_start: u64) {
        let mut known = HashSet::new();
        let mut in_queue = HashSet::new();
        for page in queue.iter().filter(|page| in_queue.insert(**page)) {
            // Zeros count: they are filled in without being read.
            let early = before_start > 0;
            before_start = before_start.saturating_sub(1);
            if let Some(chunk) = self.chunk_of(*page) {
                if known.insert(chunk) {
                    self.planned.push_back(chunk);
                }
                if early {
                    self.before_start.insert(chunk);
                }
            }
        }
        let rest: Vec<(ChunkId, u64)> = self
            .maps
            .values()
            .flat_map(|map| {
                map.extents().iter().map(|extent| (map.place(extent).chunk, extent.count))
            })
            .collect();
        for (chunk, count) in rest {
            if known.insert(chunk) {
                self.planned.push_back(chunk);
                if before_start > 0 {
                    self.before_start.insert(chunk);
                }
                before_start = before_start.saturating_sub(count);
            }
        }
    }

    fn chunk_of(&self, page: Page) -> Option<ChunkId> {
        self.maps.get(&page.block)?.find(page.index.0).map(|place| place.chunk)
    }

    /// The guest, or a device of it, waits for a page.
    pub fn demand(&mut self, page: Page) -> Demand {
        let Some(chunk) = self.chunk_of(page) else { return Demand::Zero };
        if self.filled.contains(&chunk) {
            return Demand::Filled;
        }
        if !self.asked.contains(&chunk) && !self.demanded.contains(&chunk) {
            self.demanded.push_back(chunk);
        }
        Demand::Coming
    }

    /// The chunk that is to be read next, if any.
    pub fn next_chunk(&mut self) -> Option<ChunkId> {
        if let Some(next) = self.next_demanded() {
            return Some(next);
        }
        loop {
            let next = self.planned.pop_front()?;
            if self.asked.insert(next) {
                return Some(next);
            }
        }
    }

    /// The chunk that is to be read next of those that the start waits for; none if all of them
    /// are asked for. They are the first of the plan.
    pub fn next_before_start(&mut self) -> Option<ChunkId> {
        while let Some(&next) = self.planned.front() {
            if self.asked.contains(&next) {
                self.planned.pop_front();
                continue;
            }
            if !self.before_start.contains(&next) {
                return None;
            }
            self.planned.pop_front();
            self.asked.insert(next);
            return Some(next);
        }
        None
    }

    /// The chunk that is to be read next of those that somebody waits for.
    pub fn next_demanded(&mut self) -> Option<ChunkId> {
        loop {
            let next = self.demanded.pop_front()?;
            if self.asked.insert(next) {
                return Some(next);
            }
        }
    }

    /// A chunk has been read: what to fill in. Nothing if that was done before.
    pub fn read(&mut self, chunk: ChunkId) -> &[Fill] {
        let fills = self.fills.get(&chunk).map_or(&[][..], Vec::as_slice);
        match self.filled.insert(chunk) {
            true => {
                self.before_start.remove(&chunk);
                self.pages += fills.iter().map(|fill| fill.pages.count).sum::<u64>();
                fills
            }
            false => &[],
        }
    }

    /// A chunk could not be read: it is the next again. Whoever waits for it goes on waiting.
    pub fn failed(&mut self, chunk: ChunkId) {
        if !self.filled.contains(&chunk) && self.asked.remove(&chunk) {
            self.demanded.push_front(chunk);
        }
    }

    /// Whether all is filled in that the start waits for.
    pub fn may_start(&self) -> bool {
        self.before_start.is_empty()
    }

    /// Whether nothing is left to load. What is not filled in then is zero.
    pub fn is_complete(&self) -> bool {
        self.filled.len() == self.fills.len()
    }

    /// Pages that there are to fill in.
    pub fn all(&self) -> u64 {
        self.fills.values().flatten().map(|fill| fill.pages.count).sum()
    }

    /// Pages filled in so far.
    pub fn pages(&self) -> u64 {
        self.pages
    }
}

#[cfg(test)]
#[path = "loader_tests.rs"]
mod tests;
