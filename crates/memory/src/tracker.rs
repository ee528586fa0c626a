//! Finding the pages that the guest wrote.

use crate::area::{Reprotect, ScanArea};
use crate::kernel::{AddressRange, Pagemap, Userfaultfd};
use crate::untracked::ComparedBlock;
use crate::{DirtySet, MAIN_MEMORY, MemoryError, RamBlock, workers};
use std::sync::Arc;
use understudy_protocol::PAGE_SIZE;

/// Part of a block that one thread scans at a time.
const SLICE_BYTES: u64 = 128 << 20;

/// The number of page tables (2 MiB of touched memory each) from which on several threads repay
/// being woken.
const PARALLEL_TABLES: usize = 128;

/// Sees every write to a machine's RAM blocks, whoever makes it inside QEMU: vCPUs, device
/// emulation, system calls such as disk reads.
///
/// The kernel write-protects the pages and notes the first write to each, without anybody
/// having to answer (userfaultfd's asynchronous write-protection); a scan of the page tables
/// collects the notes and protects again. Blocks that the kernel cannot protect are compared
/// with their last content if they are small.
///
/// It sees writes, not discards of pages (`FALLOC_FL_PUNCH_HOLE`), so a machine must have no
/// device that discards memory, such as a balloon.
///
/// Tracking ends when the tracker is dropped.
#[derive(Debug)]
pub struct DirtyTracker {
    pid: i32,
    userfaultfd: Arc<Userfaultfd>,
    pagemap: Pagemap,
    tracked: Vec<TrackedBlock>,
    slices: Vec<Slice>,
    /// So many of them, the first ones, are of main memory.
    main_slices: usize,
    compared: Vec<ComparedBlock>,
}

#[derive(Debug)]
struct TrackedBlock {
    block: RamBlock,
    range: AddressRange,
}

impl DirtyTracker {
    /// Registers `blocks` of QEMU's process `pid`, main memory first, whose agent made `userfaultfd`.
    ///
    /// Nothing is seen before [`DirtyTracker::arm`].
    pub fn attach(
        pid: i32,
        userfaultfd: Arc<Userfaultfd>,
        blocks: &[RamBlock],
        reprotect: Reprotect,
    ) -> Result<DirtyTracker, MemoryError> {
        let pagemap = Pagemap::open(pid).map_err(|source| MemoryError::Process {
            action: "open the page map of",
            pid,
            address: 0,
            bytes: 0,
            source,
        })?;
        let mut tracker = DirtyTracker {
            pid,
            userfaultfd,
            pagemap,
            tracked: Vec::new(),
            slices: Vec::new(),
            main_slices: 0,
            compared: Vec::new(),
        };
        for block in blocks {
            tracker.add(block, reprotect)?;
        }
        Ok(tracker)
    }

    fn add(&mut self, block: &RamBlock, reprotect: Reprotect) -> Result<(), MemoryError> {
        let range = AddressRange {
            start: block.address_in_qemu(),
            // QEMU's mappings end on page borders, so a last partial page is all the block's.
            bytes: block.pages() * PAGE_SIZE as u64,
        };
        match self.userfaultfd.register(range) {
            Ok(()) => {
                self.tracked.push(TrackedBlock { block: block.clone(), range });
                self.slices.extend(Slice::divide(block, range, reprotect));
                if block.id() == MAIN_MEMORY {
                    self.main_slices = self.slices.len();
                }
            }
            Err(source) => self.compared.push(ComparedBlock::new(block, source)?),
        }
        Ok(())
    }

    /// Protects all memory that has content. From now on every write is seen, and reported by
    /// the next [`DirtyTracker::scan`]. Takes some 10 ms per GiB; the guest may run meanwhile.
    pub fn arm(&mut self) -> Result<(), MemoryError> {
        for Slice { area, .. } in &mut self.slices {
            area.arm(&self.userfaultfd)?;
        }
        self.compared.iter_mut().try_for_each(ComparedBlock::arm)
    }

    /// Finds the pages written since the last scan (or [`DirtyTracker::arm`]) and protects
    /// them again. `dirty` is emptied first.
    ///
    /// What is reported was written, or read for the first time: a page comes into being then.
    ///
    /// With the guest paused, what it finds is the rest of an epoch. Once `dirty` has grown to size,
    /// nothing is allocated.
    pub fn scan(&mut self, dirty: &mut DirtySet) -> Result<(), MemoryError> {
        self.scan_alive(dirty, Part::Everything)
    }

    /// The same of main memory alone, for a pre-copy round while the guest runs: of the other blocks few pages are
    /// written, which the pause finds.
    pub fn scan_before(&mut self, dirty: &mut DirtySet) -> Result<(), MemoryError> {
        self.scan_alive(dirty, Part::MainMemory)
    }

    fn scan_alive(&mut self, dirty: &mut DirtySet, part: Part) -> Result<(), MemoryError> {
        dirty.clear();
        let scanned = self.scan_part(dirty, part);
        // Last, so that it vouches for all of the scan: an epoch in which QEMU died must not
        // look like one in which nothing was written.
        let alive = self.pagemap.check_alive();
        alive.map_err(|source| MemoryError::QemuGone { pid: self.pid, source })?;
        scanned
    }

    fn scan_part(&mut self, dirty: &mut DirtySet, part: Part) -> Result<(), MemoryError> {
        let tables: usize = self.slices.iter().map(|slice| slice.area.armed_tables()).sum();
        let (slices, compared) = match part {
            Part::Everything => (&mut self.slices[..], &mut self.compared[..]),
            Part::MainMemory => (&mut self.slices[..self.main_slices], &mut [][..]),
        };
        if tables >= PARALLEL_TABLES {
            scan_in_parallel(slices, &self.pagemap, dirty)?;
        } else {
            for Slice { area, .. } in slices {
                area.scan(&self.pagemap, dirty)?;
            }
        }
        compared.iter_mut().try_for_each(|block| block.scan(dirty))
    }

    /// The approximate number of pages that the next scan will find: memory that is touched for the
    /// first time is not counted. Changes nothing; the guest may run.
    pub fn count(&mut self) -> Result<u64, MemoryError> {
        self.slices.iter_mut().map(|slice| slice.area.count(&self.pagemap)).sum()
    }

    /// Ends tracking: writes run at full speed again and are no longer seen.
    pub fn detach(mut self) -> Result<(), MemoryError> {
        self.unregister_all()
    }

    fn unregister_all(&mut self) -> Result<(), MemoryError> {
        let mut result = Ok(());
        for block in self.tracked.drain(..) {
            if let Err(source) = self.userfaultfd.unregister(block.range) {
                let name = block.block.name().into();
                result = Err(MemoryError::Tracking { call: "UFFDIO_UNREGISTER", name, source });
            }
        }
        result
    }
}

impl Drop for DirtyTracker {
    fn drop(&mut self) {
        if let Err(e) = self.unregister_all() {
            // Most likely QEMU has ended, and its memory with it.
            tracing::debug!("end of tracking: {e}");
        }
    }
}

/// The part of a machine's memory that a scan is about.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Everything,
    MainMemory,
}

fn scan_in_parallel(
    slices: &mut [Slice],
    pagemap: &Pagemap,
    dirty: &mut DirtySet,
) -> Result<(), MemoryError> {
    workers::for_each(slices, |Slice { area, written }| {
        written.clear();
        area.scan(pagemap, written)
    })?;
    slices.iter().for_each(|slice| dirty.append(&slice.written));
    Ok(())
}

/// A part of a tracked block.
#[derive(Debug)]
struct Slice {
    area: ScanArea,
    /// The pages that a parallel scan found here.
    written: DirtySet,
}

impl Slice {
    fn divide(
        block: &RamBlock,
        whole: AddressRange,
        reprotect: Reprotect,
    ) -> impl Iterator<Item = Slice> {
        (0..whole.bytes.div_ceil(SLICE_BYTES)).map(move |i| {
            let offset = i * SLICE_BYTES;
            let range = AddressRange {
                start: whole.start + offset,
                bytes: SLICE_BYTES.min(whole.bytes - offset),
            };
            Slice { area: ScanArea::new(block, range, reprotect), written: DirtySet::new() }
        })
    }
}
