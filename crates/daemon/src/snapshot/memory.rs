//! A member's memory, captured for one snapshot.
//!
//! So far in the simplest way: all of it is copied while the guest stands still, and saved
//! when it runs again. Nothing is traced; the working set is empty.

use super::Stopped;
use crate::machine::Machine;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use understudy_memory::{CapturedPages, DirtySet, PageStaging, StagingPool, capture};
use understudy_protocol::BlockId;
use understudy_snapshot::{
    AreaMap, Compression, Lane, NewChunk, Packed, Packer, Store, WorkingSet,
};

/// Chunks that are handed to the store at once.
const BATCH: usize = 64;

/// How a capture is made.
#[derive(Clone, Copy, Debug)]
pub struct CaptureOptions {
    /// How chunks are packed.
    pub compression: Compression,
}

/// One member's memory, for one snapshot. Dropped at any time, it leaves nothing behind in QEMU.
pub struct MemoryCapture {
    machine: Arc<Machine>,
    options: CaptureOptions,
    pages: CapturedPages,
}

/// What was saved.
pub struct SavedMemory {
    /// Where each RAM block's content is.
    pub areas: BTreeMap<BlockId, AreaMap>,
    /// The queue of first accesses.
    pub working_set: WorkingSet,
    /// Pages by their last access, if that was traced.
    pub recent: Option<WorkingSet>,
    /// What became of the pages.
    pub packed: Packed,
}

impl MemoryCapture {
    /// Prepares while the guest runs.
    pub fn arm(machine: &Arc<Machine>, options: CaptureOptions) -> anyhow::Result<MemoryCapture> {
        Ok(MemoryCapture { machine: machine.clone(), options, pages: CapturedPages::default() })
    }

    /// The guest stands still: the snapshot's content is fixed from here on.
    pub fn take(&mut self) -> anyhow::Result<()> {
        let blocks = self.machine.blocks();
        let mut all = DirtySet::new();
        for block in blocks {
            block.add_content_to(&mut all)?;
        }
        let mut staging = PageStaging::new(StagingPool::new(0)?);
        capture(blocks, &all, &mut staging)?;
        self.pages = staging.take();
        Ok(())
    }

    /// The guest runs: saves all to the store. `base` is where the content of the last
    /// snapshot that exists is.
    pub fn save(
        self,
        store: &Store,
        _base: Option<&BTreeMap<BlockId, AreaMap>>,
        stop: &AtomicBool,
    ) -> anyhow::Result<SavedMemory> {
        let blocks = self.machine.blocks();
        let mut packers: BTreeMap<BlockId, Packer> =
            blocks.iter().map(|block| (block.id(), Packer::new())).collect();
        let mut full: Vec<NewChunk> = Vec::new();
        for page in self.pages.chunks.iter().flat_map(|chunk| chunk.pages()) {
            let packer = packers.get_mut(&page.block).expect("a page is of a block");
            full.extend(packer.put(page.index.0, page.bytes, Lane::Rest));
            if full.len() >= BATCH {
                Stopped::check(stop)?;
                store.put_chunks(std::mem::take(&mut full), self.options.compression)?;
            }
        }
        let mut saved = SavedMemory {
            areas: BTreeMap::new(),
            working_set: WorkingSet::default(),
            recent: None,
            packed: Packed::default(),
        };
        for block in blocks {
            let packer = packers.remove(&block.id()).expect("each block has one");
            let (last, map, packed) = packer.finish(&AreaMap::zeros(block.pages()));
            full.extend(last);
            saved.areas.insert(block.id(), map);
            saved.packed.put += packed.put;
            saved.packed.zeros += packed.zeros;
            saved.packed.duplicates += packed.duplicates;
        }
        store.put_chunks(full, self.options.compression)?;
        Ok(saved)
    }
}
