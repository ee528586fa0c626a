//! Least recently used, for comparison.

use crate::format::Page;
use std::collections::{BTreeMap, HashMap};

/// The pages that were accessed last, so many at most.
#[derive(Clone, Debug)]
pub struct Recency {
    size: usize,
    now: u64,
    last_access: HashMap<Page, u64>,
    order: BTreeMap<u64, Page>,
}

impl Recency {
    /// Keeps `size` pages, at least one.
    pub fn new(size: usize) -> Recency {
        assert!(size > 0, "no room for a page");
        Recency { size, now: 0, last_access: HashMap::new(), order: BTreeMap::new() }
    }

    /// The guest reads or writes a page.
    pub fn access(&mut self, page: Page) {
        self.now += 1;
        if let Some(before) = self.last_access.insert(page, self.now) {
            self.order.remove(&before);
        }
        self.order.insert(self.now, page);
        if self.order.len() > self.size {
            let oldest = self.order.pop_first();
            oldest.and_then(|(_, page)| self.last_access.remove(&page));
        }
    }

    /// The pages, the one accessed last first.
    pub fn pages(&self) -> Vec<Page> {
        self.order.values().rev().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::{BlockId, PageIndex};

    #[test]
    fn the_page_that_was_not_touched_for_longest_leaves() {
        let page = |index| Page { block: BlockId(0), index: PageIndex(index) };
        let mut recency = Recency::new(3);
        for index in [1, 2, 3, 1, 4] {
            recency.access(page(index));
        }
        assert_eq!(recency.pages(), [4, 1, 3].map(page));
    }
}
