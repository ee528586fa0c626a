// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-or-later
//! QEMU's dirty log: what KVM has seen the guest write, and QEMU has written itself.
//!
//! Behind the [`crate::PausePage`], in the same memfd, the daemon has a table of the machine's RAM
//! blocks and room for a bitmap of each. The agent adds what was written; the daemon takes it out.

use std::mem::size_of;
use std::sync::atomic::{AtomicU64, Ordering};

/// Wish of the daemon for the dirty log; the number is in [`crate::PausePage::dirty_wish`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum DirtyWish {
    /// Begins: from now on every write is noted.
    Begin = 1,
    /// Adds to the bitmaps what was written since the last time.
    Collect = 2,
    /// Ends the log: nothing is noted any more.
    End = 3,
}

impl DirtyWish {
    /// The wish with this number, if there is one.
    pub fn from_number(number: u32) -> Option<DirtyWish> {
        use DirtyWish::*;
        [Begin, Collect, End].into_iter().find(|&wish| wish as u32 == number)
    }
}

/// Outcome of a wish; the number is in [`crate::PausePage::dirty_outcome`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum DirtyOutcome {
    /// Success.
    Done = 0,
    /// Failure: this QEMU does not export what it takes.
    Missing = 1,
    /// QEMU would not begin.
    Refused = 2,
    /// A block of the table is none of QEMU's, or one that its log does not cover.
    NotCovered = 3,
}

impl DirtyOutcome {
    /// The outcome with this number, if there is one: the number comes from QEMU.
    pub fn from_number(number: u32) -> Option<DirtyOutcome> {
        use DirtyOutcome::*;
        [Done, Missing, Refused, NotCovered].into_iter().find(|&known| known as u32 == number)
    }
}

/// A RAM block in the table. The daemon writes it before QEMU hears of it.
#[derive(Debug, Default)]
#[repr(C)]
pub struct DirtyBlock {
    /// Address in QEMU where the block begins.
    pub address: AtomicU64,
    /// Its pages, the last one perhaps in part.
    pub pages: AtomicU64,
}

/// Pages that a word of a bitmap stands for.
pub const PAGES_PER_WORD: u64 = 64;

/// Words of the bitmap of a block with so many pages.
pub fn bitmap_words(pages: u64) -> usize {
    pages.div_ceil(PAGES_PER_WORD) as usize
}

/// Bytes of a table and its bitmaps.
pub fn area_bytes(pages: &[u64]) -> usize {
    let words: usize = pages.iter().map(|&pages| bitmap_words(pages)).sum();
    size_of::<DirtyBlock>() * pages.len() + size_of::<u64>() * words
}

/// The table and the bitmaps of a mapped area, whoever looks at it.
#[derive(Clone, Copy, Debug)]
pub struct DirtyArea<'a> {
    /// The machine's blocks.
    pub blocks: &'a [DirtyBlock],
    /// Bitmap of one after the other.
    words: &'a [AtomicU64],
}

impl<'a> DirtyArea<'a> {
    /// The area that begins at `start`, has so many bytes, and a table of `blocks`. None if it
    /// has no room for that.
    ///
    /// # Safety
    ///
    /// `start` is aligned to 8 bytes and mapped for `bytes`, for reading and writing, as long as
    /// the result lives; nobody accesses it but through atomics.
    pub unsafe fn at(start: *const u8, bytes: usize, blocks: usize) -> Option<DirtyArea<'a>> {
        let table = size_of::<DirtyBlock>().checked_mul(blocks)?;
        let left = bytes.checked_sub(table)?;
        // SAFETY: within what the caller vouches for; the types are atomics, valid whatever they
        // contain.
        let area = unsafe {
            DirtyArea {
                blocks: std::slice::from_raw_parts(start.cast(), blocks),
                words: std::slice::from_raw_parts(start.add(table).cast(), left / size_of::<u64>()),
            }
        };
        Some(area)
    }

    /// The table's numbers of pages.
    pub fn pages(self) -> impl Iterator<Item = u64> + use<'a> {
        self.blocks.iter().map(|block| block.pages.load(Ordering::Relaxed))
    }

    /// The bitmaps of blocks with so many pages each; fewer if there is no room for all.
    pub fn bitmaps(
        self,
        pages: impl IntoIterator<Item = u64>,
    ) -> impl Iterator<Item = &'a [AtomicU64]> {
        let mut left = self.words;
        pages.into_iter().map_while(move |pages| {
            let (bitmap, rest) = left.split_at_checked(bitmap_words(pages))?;
            left = rest;
            Some(bitmap)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_block_has_a_bitmap_of_its_own() {
        let pages = [65, 1, 64];
        let bytes = area_bytes(&pages);
        assert_eq!(bytes, 3 * 16 + 4 * 8);
        let memory: Vec<AtomicU64> = (0..bytes / 8).map(|_| AtomicU64::new(0)).collect();
        // SAFETY: `memory` is as long, and lives longer.
        let at = |blocks| unsafe { DirtyArea::at(memory.as_ptr().cast(), bytes, blocks) };
        let area = at(3).unwrap();
        for (block, pages) in area.blocks.iter().zip(pages) {
            block.pages.store(pages, Ordering::Relaxed);
        }
        let lengths: Vec<_> = area.bitmaps(area.pages()).map(<[_]>::len).collect();
        assert_eq!(lengths, [2, 1, 1]);
        // A table that says more than there is room for.
        area.blocks[1].pages.store(u64::MAX, Ordering::Relaxed);
        assert_eq!(area.bitmaps(area.pages()).count(), 1);
        assert!(at(6).is_none());
    }

    #[test]
    fn numbers_from_the_other_side_are_checked() {
        assert_eq!(DirtyWish::from_number(2), Some(DirtyWish::Collect));
        assert_eq!(DirtyWish::from_number(0), None);
        assert_eq!(DirtyOutcome::from_number(3), Some(DirtyOutcome::NotCovered));
        assert_eq!(DirtyOutcome::from_number(4), None);
    }
}
