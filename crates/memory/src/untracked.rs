//! Blocks that the kernel cannot track, found changed by comparison.

use crate::{DirtySet, MemoryError, RamBlock};
use std::{io, mem};
use understudy_protocol::{PAGE_SIZE, PageIndex, PageRun};

/// Comparing more than this at every checkpoint would lengthen the pause noticeably.
const MOST_BYTES: u64 = 1 << 20;

/// A small block whose writes are found by comparing its content with what it was.
#[derive(Debug)]
pub(crate) struct ComparedBlock {
    block: RamBlock,
    last: Vec<u8>,
    now: Vec<u8>,
}

impl ComparedBlock {
    /// Takes a block that could not be registered because of `reason`.
    pub fn new(block: &RamBlock, reason: io::Error) -> Result<ComparedBlock, MemoryError> {
        if block.bytes() > MOST_BYTES {
            return Err(MemoryError::NotTrackable {
                name: block.name().into(),
                bytes: block.bytes(),
                source: reason,
            });
        }
        tracing::info!(
            "RAM block {} is compared at each checkpoint, as the kernel cannot track it: {reason}",
            block.name()
        );
        let bytes = block.pages() as usize * PAGE_SIZE;
        Ok(ComparedBlock { block: block.clone(), last: vec![0; bytes], now: vec![0; bytes] })
    }

    /// Notes the present content.
    pub fn arm(&mut self) -> Result<(), MemoryError> {
        self.block.read(PageIndex(0), &mut self.last)
    }

    /// Adds the pages that changed since the last call.
    pub fn scan(&mut self, dirty: &mut DirtySet) -> Result<(), MemoryError> {
        self.block.read(PageIndex(0), &mut self.now)?;
        let pages = self.now.chunks_exact(PAGE_SIZE);
        for (page, (now, last)) in (0..).zip(pages.zip(self.last.chunks_exact(PAGE_SIZE))) {
            if now != last {
                dirty.push(PageRun { block: self.block.id(), first: PageIndex(page), count: 1 });
            }
        }
        mem::swap(&mut self.now, &mut self.last);
        Ok(())
    }
}
