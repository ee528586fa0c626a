//! Tracking, capture and replica together, on memory of this process: `GuestRam` is mapped
//! a second time, and that mapping plays QEMU's.

mod cost;
mod cuts;
mod demand;
mod epochs;
mod still;
mod warm;

use crate::mapping::SharedMapping;
use crate::*;
use std::num::NonZeroUsize;
use std::sync::Arc;
use understudy_encoding::is_zero_page;
use understudy_protocol::{BlockId, PAGE_SIZE, PageIndex, PageRun};

/// A "guest": main memory and the mapping through which it is written.
struct Guest {
    ram: Arc<GuestRam>,
    view: Arc<SharedMapping>,
    blocks: Vec<RamBlock>,
}

impl Guest {
    fn new(pages: usize) -> Guest {
        let bytes = pages * PAGE_SIZE;
        let ram = Arc::new(GuestRam::create(bytes as u64).unwrap());
        let view = SharedMapping::new(ram.fd(), NonZeroUsize::new(bytes).unwrap()).unwrap();
        let blocks = vec![RamBlock::main("ram", view.address(), Arc::clone(&ram))];
        Guest { ram, view: Arc::new(view), blocks }
    }

    /// Tracks all blocks and arms.
    fn track(&self, reprotect: Reprotect) -> DirtyTracker {
        let mut tracker = self.attach(reprotect);
        tracker.arm().unwrap();
        tracker
    }

    fn attach(&self, reprotect: Reprotect) -> DirtyTracker {
        let userfaultfd = Arc::new(Userfaultfd::of_this_process().unwrap());
        DirtyTracker::attach(this_process(), userfaultfd, &self.blocks, reprotect).unwrap()
    }

    /// The guest writes `value` at the start of a page.
    fn write(&self, page: u64, value: u64) {
        self.view.copy_in(page as usize * PAGE_SIZE, &value.to_ne_bytes());
    }

    /// The guest reads a page.
    fn read(&self, page: u64) {
        let mut content = [0; PAGE_SIZE];
        self.view.copy_out(page as usize * PAGE_SIZE, &mut content);
        std::hint::black_box(content);
    }

    /// All of main memory, as the guest sees it.
    fn content(&self) -> Vec<u8> {
        let mut content = vec![0; self.ram.bytes() as usize];
        self.view.copy_out(0, &mut content);
        content
    }
}

fn this_process() -> i32 {
    std::process::id() as i32
}

fn run(first: u64, count: u64) -> PageRun {
    PageRun { block: MAIN_MEMORY, first: PageIndex(first), count }
}

/// The runs that one scan finds.
fn scan(tracker: &mut DirtyTracker) -> Vec<PageRun> {
    let mut dirty = DirtySet::new();
    tracker.scan(&mut dirty).unwrap();
    dirty.runs().to_vec()
}

fn staging() -> PageStaging {
    PageStaging::new(StagingPool::new(DEFAULT_WARM_BYTES).unwrap())
}

/// Applies captured pages to a replica's blocks, as a backup does.
fn apply(pages: &CapturedPages, replica: &[RamBlock]) {
    for page in pages.chunks.iter().flat_map(CapturedChunk::pages) {
        let block = replica.iter().find(|b| b.id() == page.block).unwrap();
        if is_zero_page(page.bytes) {
            block.clear(page.index, 1).unwrap();
        } else {
            block.write(page.index, page.bytes).unwrap();
        }
    }
}

/// An auxiliary block over `memory` of this process.
fn auxiliary(id: u16, memory: &[u8], bytes: u64) -> RamBlock {
    let process = Arc::new(ProcessMemory::open(this_process()).unwrap());
    let address = memory.as_ptr() as u64;
    RamBlock::auxiliary(BlockId(id), "aux", address, bytes, process)
}
