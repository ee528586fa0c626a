//! The working set as it is stored: pages in the order of their first access.

use super::bytes::{Malformed, Reader};
use serde::{Deserialize, Serialize};
use understudy_protocol::{BlockId, PageIndex};

/// A page of a member's memory.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Page {
    /// Its RAM block.
    pub block: BlockId,
    /// Index of the page in the block.
    pub index: PageIndex,
}

/// Most bytes of a queue of a member with so many pages.
pub(crate) fn most_bytes(pages: u64) -> u64 {
    8 + RUN_BYTES as u64 * pages.min(MOST_QUEUED)
}

/// Pages in the order in which they should be loaded, each once, and how many of them are
/// the working set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkingSet {
    /// The queue, first accesses first.
    pub queue: Vec<Page>,
    /// Size of the working set in pages (HotRestore: 0.7 sampled + 0.3 traced). May be more
    /// than the queue has: what follows the queue is then loaded in the order of the memory.
    pub size: u64,
}

const RUN_BYTES: usize = 2 + 8 + 4;

/// A number of pages larger than any queue has, whose accesses are traced for seconds: 128 GiB of
/// memory.
const MOST_QUEUED: u64 = 1 << 25;

impl WorkingSet {
    /// Encodes it as it is stored: runs of neighbouring pages.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.size.to_le_bytes().to_vec();
        let continues = |a: &Page, b: &Page| a.block == b.block && a.index.0 + 1 == b.index.0;
        for run in self.queue.chunk_by(continues) {
            bytes.extend(run[0].block.0.to_le_bytes());
            bytes.extend(run[0].index.0.to_le_bytes());
            bytes.extend((run.len() as u32).to_le_bytes());
        }
        bytes
    }

    /// Decodes what [`WorkingSet::encode`] made. `most` is how many pages the member has: a run of
    /// few bytes stands for many pages, and a queue has none twice. Nor has it all of a very large memory.
    pub fn decode(bytes: &[u8], most: u64) -> Result<WorkingSet, Malformed> {
        let mut reader = Reader(bytes);
        let size = reader.u64()?;
        if size > most {
            return Err(Malformed("the working set is larger than the memory"));
        }
        let longest = most.min(MOST_QUEUED);
        let mut queue = Vec::with_capacity(reader.0.len() / RUN_BYTES);
        while !reader.0.is_empty() {
            let (block, first) = (BlockId(reader.u16()?), reader.u64()?);
            let count = u64::from(reader.u32()?);
            if count == 0 {
                return Err(Malformed("a run of the queue has no page"));
            }
            if count > longest.saturating_sub(queue.len() as u64) || first > u64::MAX - count {
                return Err(Malformed("the queue has more pages than there can be"));
            }
            let pages = (first..first + count).map(PageIndex);
            queue.extend(pages.map(|index| Page { block, index }));
        }
        Ok(WorkingSet { queue, size })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_order_survives(pages in proptest::collection::vec((0..3u16, 0..40u64), 0..100)) {
            let page = |(block, index)| Page { block: BlockId(block), index: PageIndex(index) };
            let set = WorkingSet { queue: pages.into_iter().map(page).collect(), size: 77 };
            prop_assert_eq!(WorkingSet::decode(&set.encode(), 100), Ok(set));
        }

        #[test]
        fn any_bytes_are_decoded_or_refused(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            if let Ok(set) = WorkingSet::decode(&bytes, 1000) {
                prop_assert!(set.queue.len() <= 1000);
            }
        }
    }

    #[test]
    fn a_long_run_does_not_allocate_what_is_not_there() {
        let bytes = [&[0; 18][..], &u32::MAX.to_le_bytes()].concat();
        assert!(WorkingSet::decode(&bytes, 1 << 20).is_err());
        assert!(WorkingSet::decode(&[0; 22], 1 << 20).is_err(), "a run of none");
        assert!(WorkingSet::decode(&bytes, 1 << 32).is_err(), "a memory of 16 TiB");
        assert!(WorkingSet::decode(&u64::MAX.to_le_bytes(), 1 << 20).is_err());
    }
}
