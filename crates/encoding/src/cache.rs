//! The last versions sent, of the pages sent most recently.

use crate::Page;
use std::collections::HashMap;
use understudy_protocol::{BlockId, PageIndex};

/// Marks the end of the list of slots.
const NONE: u32 = u32::MAX;

/// Pages by address; the one used longest ago makes room for a new one.
///
/// Memory is taken as it fills: [`understudy_protocol::PAGE_SIZE`] and some 50 bytes a page.
#[derive(Debug)]
pub struct PageCache {
    capacity: usize,
    places: HashMap<(BlockId, PageIndex), u32>,
    slots: Vec<Slot>,
    pages: Vec<Page>,
    newest: u32,
    oldest: u32,
}

/// A place in the list from the newest to the oldest.
#[derive(Debug)]
struct Slot {
    address: (BlockId, PageIndex),
    newer: u32,
    older: u32,
}

impl PageCache {
    /// An empty cache of up to `capacity` pages; at least one.
    pub fn new(capacity: u32) -> PageCache {
        PageCache {
            capacity: capacity.max(1) as usize,
            places: HashMap::new(),
            slots: Vec::new(),
            pages: Vec::new(),
            newest: NONE,
            oldest: NONE,
        }
    }

    /// The cached version of a page, which becomes the newest.
    pub fn get(&mut self, block: BlockId, index: PageIndex) -> Option<&mut Page> {
        let place = *self.places.get(&(block, index))?;
        if place != self.newest {
            self.unlink(place);
            self.link(place);
        }
        Some(&mut self.pages[place as usize])
    }

    /// Adds a page that is not in the cache.
    pub fn insert(&mut self, block: BlockId, index: PageIndex, page: &Page) {
        let address = (block, index);
        let place = if self.slots.len() < self.capacity {
            if self.slots.is_empty() {
                // Address space; memory comes with the first write to it.
                self.pages.reserve_exact(self.capacity);
            }
            self.slots.push(Slot { address, newer: NONE, older: NONE });
            self.pages.push(*page);
            self.slots.len() as u32 - 1
        } else {
            let place = self.oldest;
            self.unlink(place);
            self.places.remove(&self.slots[place as usize].address);
            self.slots[place as usize].address = address;
            self.pages[place as usize] = *page;
            place
        };
        self.link(place);
        self.places.insert(address, place);
    }

    /// Forgets all pages and gives their memory back.
    pub fn clear(&mut self) {
        *self = PageCache::new(self.capacity as u32);
    }

    fn unlink(&mut self, place: u32) {
        let Slot { newer, older, .. } = self.slots[place as usize];
        match newer {
            NONE => self.newest = older,
            newer => self.slots[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.slots[older as usize].newer = newer,
        }
    }

    /// Makes an unlinked place the newest.
    fn link(&mut self, place: u32) {
        let older = std::mem::replace(&mut self.newest, place);
        self.slots[place as usize].newer = NONE;
        self.slots[place as usize].older = older;
        match older {
            NONE => self.oldest = place,
            older => self.slots[older as usize].newer = place,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use understudy_protocol::PAGE_SIZE;

    const BLOCK: BlockId = BlockId(0);

    fn use_page(cache: &mut PageCache, page: u64) -> bool {
        let content = [page as u8; PAGE_SIZE];
        match cache.get(BLOCK, PageIndex(page)) {
            Some(cached) => {
                assert!(*cached == content, "page {page} has its own content");
                true
            }
            None => {
                cache.insert(BLOCK, PageIndex(page), &content);
                false
            }
        }
    }

    #[test]
    fn a_page_is_of_its_block() {
        let mut cache = PageCache::new(2);
        use_page(&mut cache, 7);
        assert!(cache.get(BlockId(1), PageIndex(7)).is_none());
        cache.clear();
        assert!(cache.get(BLOCK, PageIndex(7)).is_none());
    }

    proptest! {
        #[test]
        fn it_holds_the_pages_used_last(
            capacity in 1u32..6,
            uses in proptest::collection::vec(0u64..8, 0..60),
        ) {
            let mut cache = PageCache::new(capacity);
            let mut expected: Vec<u64> = Vec::new();
            for page in uses {
                let known = expected.iter().position(|&other| other == page);
                prop_assert_eq!(use_page(&mut cache, page), known.is_some());
                if let Some(at) = known {
                    expected.remove(at);
                } else if expected.len() == capacity as usize {
                    expected.remove(0);
                }
                expected.push(page);
            }
        }
    }
}
