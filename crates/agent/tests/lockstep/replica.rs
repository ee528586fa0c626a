//! The copy of a running machine, made as in checkpoint mode: written pages are found by the
//! tracker, disk writes go to both disks.

use crate::vm::Vm;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use understudy_disk::{Disk, WriteSink, copy_out};
use understudy_memory::{
    CapturedChunk, DirtySet, DirtyTracker, PageStaging, RamBlock, Reprotect, StagingPool, capture,
};
use understudy_protocol::{DiskIndex, PAGE_SIZE, PageIndex};

/// A round that finds fewer pages is the last while the guest runs.
const FEW_PAGES: u64 = 500;
const MOST_ROUNDS: usize = 8;

pub struct Replica {
    from: Vec<RamBlock>,
    to: Vec<RamBlock>,
    tracker: DirtyTracker,
    source: Arc<Disk>,
    staging: PageStaging,
    sink: Arc<BothDisks>,
}

/// Writes to the backup's disk what was written to the primary's.
struct BothDisks(Arc<Disk>);

impl WriteSink for BothDisks {
    fn begin(&self, _: DiskIndex, _: u64, _: u64) {}

    fn write(&self, _: DiskIndex, offset: u64, data: &[u8]) {
        self.0.write(offset, data).unwrap();
    }

    fn zero(&self, _: DiskIndex, offset: u64, len: u64) {
        self.0.zero(offset, len).unwrap();
    }
}

impl Replica {
    pub fn begin(primary: &Vm, backup: &Vm) -> Replica {
        let (from, to) = (primary.blocks.clone(), backup.blocks.clone());
        let names = |blocks: &[RamBlock]| -> Vec<_> {
            blocks.iter().map(|block| (block.name().to_owned(), block.bytes())).collect()
        };
        assert_eq!(names(&from), names(&to), "the same machine");
        let userfaultfd = primary.agent.userfaultfd().clone();
        let tracker =
            DirtyTracker::attach(primary.agent.pid(), userfaultfd, &from, Reprotect::AtOnce)
                .unwrap();
        let sink = Arc::new(BothDisks(backup.disk.clone()));
        primary.disk.set_sink(Some(sink.clone()));
        let source = primary.disk.clone();
        let staging = PageStaging::new(StagingPool::new(8 << 20).unwrap());
        Replica { from, to, tracker, source, staging, sink }
    }

    pub fn copy_while_running(&mut self) {
        self.tracker.arm().unwrap();
        copy_out(&self.source, &*self.sink, &mut |_| {}, &AtomicBool::new(false)).unwrap();
        let mut dirty = DirtySet::new();
        for block in &self.from {
            block.add_content_to(&mut dirty).unwrap();
        }
        for _ in 0..MOST_ROUNDS {
            self.copy(&dirty);
            self.tracker.scan(&mut dirty).unwrap();
            if dirty.pages() < FEW_PAGES {
                break;
            }
        }
        self.copy(&dirty);
    }

    /// The guest stands still: what was written since. The disks are separate from now on.
    pub fn copy_the_rest(mut self) -> u64 {
        let mut dirty = DirtySet::new();
        self.tracker.scan(&mut dirty).unwrap();
        self.copy(&dirty);
        self.source.set_sink(None);
        dirty.pages()
    }

    fn copy(&mut self, dirty: &DirtySet) {
        let mut left = dirty.clone();
        let mut part = DirtySet::new();
        while !left.is_empty() {
            left.take(4096, &mut part);
            capture(&self.from, &part, &mut self.staging).unwrap();
            for page in self.staging.take().chunks.iter().flat_map(CapturedChunk::pages) {
                self.to[usize::from(page.block.0)].write(page.index, page.bytes).unwrap();
            }
        }
    }
}

/// Pages of memory in which two machines differ that stand still.
pub fn memory_differences(one: &Vm, other: &Vm) -> Vec<String> {
    let mut found = Vec::new();
    let (mut a, mut b) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
    for (of_one, of_other) in one.blocks.iter().zip(&other.blocks) {
        for page in (0..of_one.pages()).map(PageIndex) {
            of_one.read(page, &mut a).unwrap();
            of_other.read(page, &mut b).unwrap();
            if a != b {
                found.push(format!("page {page} of {}", of_one.name()));
            }
        }
    }
    found
}

/// Blocks in which their disks differ.
pub fn disk_differences(one: &Vm, other: &Vm) -> Vec<String> {
    let mut found = Vec::new();
    let (mut a, mut b) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
    for offset in (0..one.disk.export_bytes()).step_by(PAGE_SIZE) {
        one.disk.read(offset, &mut a).unwrap();
        other.disk.read(offset, &mut b).unwrap();
        if a != b {
            found.push(format!("the disks at {offset}"));
        }
    }
    found
}
