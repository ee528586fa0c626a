//! The last versions sent, of the pages sent most recently.

use crate::Page;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use understudy_protocol::{BlockId, PageIndex};

/// Pages by address. One that was not used since its turn came last makes room for a new one: of those used
/// all the time each stays, and to use one costs no more than to find it.
///
/// Memory is taken as it fills: [`understudy_protocol::PAGE_SIZE`] and some 30 bytes a page.
#[derive(Debug)]
pub struct PageCache {
    capacity: usize,
    places: HashMap<u64, u32, Folding>,
    addresses: Vec<u64>,
    /// Whether the page of a place was used since its turn came last.
    used: Vec<bool>,
    pages: Vec<Page>,
    /// The place whose turn is next.
    turn: usize,
}

impl PageCache {
    /// An empty cache of up to `capacity` pages; at least one.
    pub fn new(capacity: u32) -> PageCache {
        PageCache {
            capacity: capacity.max(1) as usize,
            places: HashMap::with_hasher(Folding::new()),
            addresses: Vec::new(),
            used: Vec::new(),
            pages: Vec::new(),
            turn: 0,
        }
    }

    /// The cached version of a page, which is used.
    pub fn get(&mut self, block: BlockId, index: PageIndex) -> Option<&mut Page> {
        let place = *self.places.get(&address(block, index))? as usize;
        self.used[place] = true;
        Some(&mut self.pages[place])
    }

    /// Adds a page that is not in the cache.
    pub fn insert(&mut self, block: BlockId, index: PageIndex, page: &Page) {
        let address = address(block, index);
        let place = if self.pages.len() < self.capacity {
            if self.pages.is_empty() {
                // Address space; memory comes with the first write to it.
                self.pages.reserve_exact(self.capacity);
            }
            self.addresses.push(address);
            self.used.push(false);
            self.pages.push(*page);
            self.pages.len() - 1
        } else {
            let place = self.make_room();
            self.addresses[place] = address;
            self.pages[place] = *page;
            place
        };
        self.places.insert(address, place as u32);
    }

    /// Forgets all pages and gives their memory back.
    pub fn clear(&mut self) {
        *self = PageCache::new(self.capacity as u32);
    }

    /// Takes the first page away, from the one on whose turn it is, that was not used.
    fn make_room(&mut self) -> usize {
        loop {
            let place = self.turn;
            self.turn = (place + 1) % self.capacity;
            if !std::mem::take(&mut self.used[place]) {
                self.places.remove(&self.addresses[place]);
                return place;
            }
        }
    }
}

/// A page's address as one number: guests have less than 2^48 pages.
fn address(block: BlockId, index: PageIndex) -> u64 {
    u64::from(block.0) << 48 ^ index.0
}

/// Hashes one number by one multiplication. The seed is secret: a guest chooses its pages.
#[derive(Clone, Copy, Debug)]
struct Folding(u64);

impl Folding {
    fn new() -> Folding {
        Folding(RandomState::new().hash_one(0))
    }
}

impl BuildHasher for Folding {
    type Hasher = Folding;
    fn build_hasher(&self) -> Folding {
        *self
    }
}

impl Hasher for Folding {
    fn write_u64(&mut self, number: u64) {
        // 2^64 divided by the golden ratio: no pattern in its bits.
        let product = u128::from(self.0 ^ number) * 0x9e37_79b9_7f4a_7c15;
        self.0 = product as u64 ^ (product >> 64) as u64;
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;
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

    #[test]
    fn pages_that_are_used_all_the_time_outlast_any_number_of_others() {
        let mut cache = PageCache::new(100);
        let mut others = 1000..;
        for round in 0..200 {
            for hot in 0..60 {
                assert_eq!(use_page(&mut cache, hot), round > 0, "page {hot} in round {round}");
            }
            others.by_ref().take(35).for_each(|page| assert!(!use_page(&mut cache, page)));
        }
    }

    #[test]
    fn hashes_of_neighbours_are_spread() {
        // The low bits choose the place in the table, the high ones tell those at one place apart.
        for shift in [0, 57] {
            let hash = Folding::new();
            let places = (0..128u64).map(|page| (hash.hash_one(page) >> shift) & 0x7f);
            let different = places.collect::<HashSet<_>>().len();
            assert!(different > 40, "{different} of 128 from bit {shift} on");
        }
    }

    proptest! {
        #[test]
        fn it_holds_what_was_used_since_its_turn(
            capacity in 1usize..6,
            uses in proptest::collection::vec(0u64..8, 0..60),
        ) {
            let mut cache = PageCache::new(capacity as u32);
            // From the one on whose turn it is: page, and whether it was used since.
            let mut expected: Vec<(u64, bool)> = Vec::new();
            for page in uses {
                let known = expected.iter().position(|&(other, _)| other == page);
                prop_assert_eq!(use_page(&mut cache, page), known.is_some());
                match known {
                    Some(at) => expected[at].1 = true,
                    None => {
                        while expected.len() == capacity {
                            let (first, was_used) = expected.remove(0);
                            if was_used {
                                expected.push((first, false));
                            }
                        }
                        expected.push((page, false));
                    }
                }
            }
        }
    }
}
