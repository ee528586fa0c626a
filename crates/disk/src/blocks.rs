//! A set of blocks of a disk: a bit for each.

use std::ops::Range;
use understudy_protocol::PAGE_SIZE;

/// Bytes of a block, the unit in which snapshots store disks.
pub const BLOCK_BYTES: u64 = PAGE_SIZE as u64;

/// A set of blocks of one disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockSet {
    disk_bytes: u64,
    words: Vec<u64>,
}

impl BlockSet {
    /// No block of a disk of so many bytes.
    pub fn none(disk_bytes: u64) -> BlockSet {
        let words = vec![0; disk_bytes.div_ceil(BLOCK_BYTES).div_ceil(64) as usize];
        BlockSet { disk_bytes, words }
    }

    /// All its blocks.
    pub fn all(disk_bytes: u64) -> BlockSet {
        let mut set = BlockSet::none(disk_bytes);
        set.insert(0..set.blocks());
        set
    }

    /// Blocks of the disk; the last one may be short.
    pub fn blocks(&self) -> u64 {
        self.disk_bytes.div_ceil(BLOCK_BYTES)
    }

    /// Adds blocks.
    pub fn insert(&mut self, blocks: Range<u64>) {
        self.each_word(blocks, |word, mask| *word |= mask);
    }

    /// Removes blocks; says how many were there.
    pub fn remove(&mut self, blocks: Range<u64>) -> u64 {
        let mut removed = 0;
        self.each_word(blocks, |word, mask| {
            removed += u64::from((*word & mask).count_ones());
            *word &= !mask;
        });
        removed
    }

    /// Adds all blocks of another set of the same disk.
    pub fn merge(&mut self, other: &BlockSet) {
        debug_assert_eq!(self.disk_bytes, other.disk_bytes);
        self.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word |= other);
    }

    /// Number of blocks.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// The first block of the set within a range, and those that follow it without a gap.
    pub fn next_run(&self, within: Range<u64>) -> Option<Range<u64>> {
        let end = within.end.min(self.blocks());
        let first = self.find(within.start, end, |word| word)?;
        Some(first..self.find(first, end, |word| !word).unwrap_or(end))
    }

    /// All runs within a range.
    pub fn runs(&self, within: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let mut at = within.start;
        std::iter::from_fn(move || {
            let run = self.next_run(at..within.end)?;
            at = run.end;
            Some(run)
        })
    }

    /// The blocks that a range of bytes touches.
    pub fn touched(&self, offset: u64, len: u64) -> Range<u64> {
        offset / BLOCK_BYTES..(offset + len).div_ceil(BLOCK_BYTES)
    }

    /// The blocks that a range of bytes covers.
    pub fn covered(&self, offset: u64, len: u64) -> Range<u64> {
        let end = match offset + len {
            end if end == self.disk_bytes => self.blocks(),
            end => end / BLOCK_BYTES,
        };
        offset.div_ceil(BLOCK_BYTES)..end
    }

    /// The bits of these blocks and their neighbours, and where they lie among those of all.
    pub(crate) fn to_bytes(&self, blocks: Range<u64>) -> (u64, Vec<u8>) {
        let (first, end) = (blocks.start / 64, blocks.end.div_ceil(64));
        let words = &self.words[first as usize..end.max(first) as usize];
        (first * 8, words.iter().flat_map(|word| word.to_le_bytes()).collect())
    }

    /// Set from the bits of all blocks; none if they are more or fewer.
    pub(crate) fn from_bytes(disk_bytes: u64, bytes: &[u8]) -> Option<BlockSet> {
        let mut set = BlockSet::none(disk_bytes);
        if bytes.len() != set.words.len() * 8 {
            return None;
        }
        for (word, bytes) in set.words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().ok()?);
        }
        let beyond = set.words.len() as u64 * 64 - set.blocks();
        let sound = set.words.last().is_none_or(|last| u64::from(last.leading_zeros()) >= beyond);
        sound.then_some(set)
    }

    /// Offset and length in bytes of a run of blocks on the disk.
    pub fn bytes(&self, blocks: &Range<u64>) -> (u64, usize) {
        let offset = blocks.start * BLOCK_BYTES;
        (offset, ((blocks.end * BLOCK_BYTES).min(self.disk_bytes) - offset) as usize)
    }

    /// The first block from `from` on, before `end`, whose bit is set in what `of` makes of
    /// its word.
    fn find(&self, from: u64, end: u64, of: impl Fn(u64) -> u64) -> Option<u64> {
        let mut at = from;
        while at < end {
            let rest = of(self.words[(at / 64) as usize]) >> (at % 64);
            if rest != 0 {
                at += u64::from(rest.trailing_zeros());
                return Some(at).filter(|&at| at < end);
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }

    fn each_word(&mut self, blocks: Range<u64>, mut change: impl FnMut(&mut u64, u64)) {
        let (mut at, end) = (blocks.start, blocks.end.min(self.blocks()));
        while at < end {
            let count = (64 - at % 64).min(end - at);
            let mask = (u64::MAX >> (64 - count)) << (at % 64);
            change(&mut self.words[(at / 64) as usize], mask);
            at += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn a_set_of_blocks_is_a_set(
            disk_bytes in 1..200 * BLOCK_BYTES,
            changes in proptest::collection::vec((any::<bool>(), 0..220u64, 0..90u64), 0..20),
            within in (0..220u64, 0..220u64),
        ) {
            let mut set = BlockSet::none(disk_bytes);
            let mut expected = BTreeSet::new();
            for (insert, first, count) in changes {
                let blocks = first..first + count;
                if insert {
                    set.insert(blocks.clone());
                    expected.extend(blocks.filter(|&block| block < set.blocks()));
                } else {
                    set.remove(blocks.clone());
                    expected.retain(|block| !blocks.contains(block));
                }
            }
            prop_assert_eq!(set.count(), expected.len() as u64);
            let (_, bytes) = set.to_bytes(0..set.blocks());
            prop_assert_eq!(BlockSet::from_bytes(disk_bytes, &bytes), Some(set.clone()));
            prop_assert_eq!(BlockSet::from_bytes(disk_bytes + 300 * BLOCK_BYTES, &bytes), None);
            let within = within.0..within.1;
            let runs: Vec<_> = set.runs(within.clone()).collect();
            prop_assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start), "{:?}", runs);
            let found: BTreeSet<u64> = runs.into_iter().flatten().collect();
            expected.retain(|block| within.contains(block));
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn the_last_block_of_a_disk_may_be_short() {
        let set = BlockSet::all(2 * BLOCK_BYTES + 512);
        assert_eq!((set.blocks(), set.count()), (3, 3));
        assert_eq!(set.bytes(&(1..3)), (BLOCK_BYTES, BLOCK_BYTES as usize + 512));
        assert_eq!(set.covered(BLOCK_BYTES, BLOCK_BYTES + 512), 1..3);
        assert_eq!(set.covered(1, BLOCK_BYTES + 510), 1..1);
        assert_eq!(set.touched(1, BLOCK_BYTES), 0..2);
    }
}
