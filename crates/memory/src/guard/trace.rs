//! The trace of the pages that are accessed first after a cut.

use super::bitmap::{PageBitmap, WORD_PAGES, joined, runs};
use understudy_protocol::PageIndex;

/// Pages between two accessed ones that are dropped with them: a call for each costs more.
const GAP: u64 = 32;

/// The first access to a page after the cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirstAccess {
    /// The page.
    pub page: PageIndex,
    /// The content of the page at the cut.
    pub content: Option<Box<[u8]>>,
}

/// Notes accesses while it lives.
#[derive(Debug)]
pub(super) struct Trace {
    /// Two sets in turn: before the cut, pages that are mapped again. After it: pages that were
    /// accessed.
    touched: PageBitmap,
    limit: usize,
    order: Vec<FirstAccess>,
    /// All accesses that were noticed, repeated ones too, if they are wanted.
    every: Option<Vec<PageIndex>>,
    has_begun: bool,
}

impl Trace {
    /// Creates one for so many pages; keeps `limit` first accesses.
    pub fn new(pages: u64, limit: usize, every_access: bool) -> Trace {
        Trace {
            touched: PageBitmap::new(pages),
            limit,
            order: Vec::new(),
            every: every_access.then(Vec::new),
            has_begun: false,
        }
    }

    /// The cut is taken. Returns the runs that are mapped again.
    pub fn begin(&mut self) -> Vec<(u64, u64)> {
        self.has_begun = true;
        let touched = &self.touched;
        let mapped = (0..touched.words()).flat_map(|word| {
            let base = word as u64 * WORD_PAGES;
            runs(touched.take(word)).map(move |(first, count)| (base + first, count))
        });
        joined(mapped, GAP).collect()
    }

    /// A page is accessed. Whether it comes into the queue now: its content is wanted.
    pub fn access(&mut self, page: u64) -> bool {
        let is_first = self.touched.set(page);
        if !self.has_begun {
            return false;
        }
        if let Some(every) = &mut self.every {
            every.push(PageIndex(page));
        }
        if !is_first || self.is_full() {
            return false;
        }
        self.order.push(FirstAccess { page: PageIndex(page), content: None });
        true
    }

    /// The content of the last page that came into the queue.
    pub fn keep(&mut self, content: Box<[u8]>) {
        if let Some(last) = self.order.last_mut() {
            last.content = Some(content);
        }
    }

    pub fn is_full(&self) -> bool {
        self.order.len() >= self.limit
    }

    pub fn take_every(&mut self) -> Vec<PageIndex> {
        self.every.as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub fn into_order(self) -> Vec<FirstAccess> {
        self.order
    }
}
