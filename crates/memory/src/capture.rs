//! Copying written pages.

use crate::{DirtySet, MemoryError, PageStaging, RamBlock};
use understudy_protocol::PAGE_SIZE;

/// The number of pages from which on a second thread repays being woken.
const PARALLEL_PAGES: u64 = 512;

/// Copies the pages of `dirty` into `staging`.
///
/// May be called more than once for an epoch: first while the guest runs (a pre-copy
/// round), then in the pause with what was written since. A page that the guest writes
/// during a copy comes out torn, but since the scan protected it before the copy, the next
/// scan reports it again and its later copy, further back in `staging`, is the truth.
///
/// Within what the pool has ready it neither maps memory nor faults any in.
pub fn capture(
    blocks: &[RamBlock],
    dirty: &DirtySet,
    staging: &mut PageStaging,
) -> Result<(), MemoryError> {
    let parallel = dirty.pages() >= PARALLEL_PAGES;
    staging.add(dirty.runs(), parallel, |run, target| {
        debug_assert_eq!(target.len(), run.count as usize * PAGE_SIZE);
        blocks
            .iter()
            .find(|block| block.id() == run.block)
            .ok_or(MemoryError::UnknownBlock(run.block))?
            .read(run.first, target)
    })
}
