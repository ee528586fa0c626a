//! A restored member's memory, filled from the store.
//!
//! So far in the simplest way: all of it is loaded before the start, in the order of the queue.

use super::Stopped;
use crate::machine::Machine;
use crate::sync::lock;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use understudy_memory::RamBlock;
use understudy_protocol::BlockId;
use understudy_snapshot::{AreaMap, Fill, Loader, Page, Store, UNIT_BYTES};

/// Chunks that are read at once.
const BATCH: usize = 32;

/// How far the memory of a restored member is there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FillState {
    /// Pages that are there.
    pub pages: u64,
    /// Pages that have content in the snapshot.
    pub all: u64,
    /// Why the guest may stand still, if the store does not answer.
    pub stalled: Option<String>,
    /// Whether nothing is left to load.
    pub complete: bool,
}

/// Fills one member's memory.
pub struct Filler {
    store: Arc<Store>,
    machine: Arc<Machine>,
    loader: Mutex<Loader>,
    all: u64,
}

impl Filler {
    /// For a machine that waits for its device state. The first `before_start` pages of the
    /// queue are what its start waits for.
    pub fn new(
        store: Arc<Store>,
        machine: Arc<Machine>,
        maps: BTreeMap<BlockId, AreaMap>,
        queue: &[Page],
        before_start: u64,
    ) -> Filler {
        let all = maps.values().map(AreaMap::stored).sum();
        let loader = Mutex::new(Loader::new(maps, queue, before_start));
        Filler { store, machine, loader, all }
    }

    /// Loads what the start waits for, while the guest does not exist yet.
    pub fn load_before_start(&self, stop: &AtomicBool) -> anyhow::Result<()> {
        self.clear_auxiliary()?;
        loop {
            Stopped::check(stop)?;
            let next = || lock(&self.loader).next_chunk();
            let batch: Vec<_> = std::iter::from_fn(next).take(BATCH).collect();
            if batch.is_empty() {
                return Ok(());
            }
            self.store.read_chunks(&batch, |chunk, content| {
                let fills = lock(&self.loader).read(chunk).to_vec();
                fills.iter().try_for_each(|fill| self.fill(fill, &content))
            })?;
        }
    }

    /// From here on pages that are missing are the guest's to ask for: to be called before the
    /// device state is loaded.
    pub fn attach(&self) -> anyhow::Result<()> {
        Ok(())
    }

    /// The guest runs: loads the rest; returns when all is there, or `stop` is set.
    pub fn complete(&self, _stop: &AtomicBool) -> anyhow::Result<()> {
        Ok(())
    }

    /// How far it is.
    pub fn state(&self) -> FillState {
        let loader = lock(&self.loader);
        let (pages, complete) = (loader.pages(), loader.is_complete());
        FillState { pages, all: self.all, stalled: None, complete }
    }

    /// QEMU has content of its own in all blocks but the main memory.
    fn clear_auxiliary(&self) -> anyhow::Result<()> {
        for block in self.machine.blocks().iter().skip(1) {
            block.clear(understudy_protocol::PageIndex(0), block.pages())?;
        }
        Ok(())
    }

    fn fill(&self, fill: &Fill, content: &[u8]) -> anyhow::Result<()> {
        let blocks = self.machine.blocks();
        let block = blocks.iter().find(|block: &&RamBlock| block.id() == fill.pages.block);
        let Some(block) = block else { return Ok(()) };
        let from = usize::from(fill.slot) * UNIT_BYTES;
        let to = from + fill.pages.count as usize * UNIT_BYTES;
        let bytes = content.get(from..to);
        let bytes = bytes.ok_or_else(|| anyhow::anyhow!("a chunk of the memory is too short"))?;
        Ok(block.write(fill.pages.first, bytes)?)
    }
}
