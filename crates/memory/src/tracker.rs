//! Finding the pages that the guest wrote.

use crate::kernel::{AddressRange, PageRegion, Pagemap, Userfaultfd};
use crate::untracked::ComparedBlock;
use crate::{DirtySet, MemoryError, RamBlock, workers};
use std::io;
use std::sync::Arc;
use understudy_protocol::{BlockId, PAGE_SIZE, PageIndex, PageRun};

/// Part of a block that one thread scans at a time.
const SLICE_BYTES: u64 = 64 << 20;

/// From this much memory on, several threads repay being woken.
const PARALLEL_BYTES: u64 = 256 << 20;

/// How many regions the kernel reports in one call.
const REGIONS_PER_CALL: usize = 512;

/// Sees every write to a machine's RAM blocks, whoever makes it inside QEMU: vCPUs, device
/// emulation, system calls such as disk reads.
///
/// The kernel write-protects the pages and notes the first write to each, without anybody
/// having to answer (userfaultfd's asynchronous write-protection); a scan of the page tables
/// collects the notes and protects again. Blocks that the kernel cannot protect are compared
/// with their last content if they are small.
///
/// Tracking ends when the tracker is dropped.
#[derive(Debug)]
pub struct DirtyTracker {
    pid: i32,
    userfaultfd: Arc<Userfaultfd>,
    pagemap: Pagemap,
    tracked: Vec<TrackedBlock>,
    slices: Vec<Slice>,
    compared: Vec<ComparedBlock>,
}

#[derive(Debug)]
struct TrackedBlock {
    name: String,
    range: AddressRange,
}

impl DirtyTracker {
    /// Registers `blocks` of QEMU's process `pid`, whose agent made `userfaultfd`.
    ///
    /// Nothing is seen before [`DirtyTracker::arm`].
    pub fn attach(
        pid: i32,
        userfaultfd: Arc<Userfaultfd>,
        blocks: &[RamBlock],
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
            compared: Vec::new(),
        };
        for block in blocks {
            tracker.add(block)?;
        }
        Ok(tracker)
    }

    fn add(&mut self, block: &RamBlock) -> Result<(), MemoryError> {
        let range = AddressRange {
            start: block.address_in_qemu(),
            // QEMU's mappings end on page borders, so a last partial page is all the block's.
            bytes: block.pages() * PAGE_SIZE as u64,
        };
        match self.userfaultfd.register(range) {
            Ok(()) => {
                self.tracked.push(TrackedBlock { name: block.name().into(), range });
                self.slices.extend(Slice::divide(block.id(), range));
            }
            Err(source) => self.compared.push(ComparedBlock::new(block, source)?),
        }
        Ok(())
    }

    /// Protects all pages. From now on every write is seen, and reported by the next
    /// [`DirtyTracker::scan`]. Takes some 10 ms per GiB; the guest may run meanwhile.
    pub fn arm(&mut self) -> Result<(), MemoryError> {
        for block in &self.tracked {
            self.userfaultfd
                .write_protect(block.range)
                .map_err(|e| block.error("UFFDIO_WRITEPROTECT", e))?;
        }
        self.compared.iter_mut().try_for_each(ComparedBlock::arm)
    }

    /// Finds the pages written since the last scan (or [`DirtyTracker::arm`]) and protects
    /// them again. `dirty` is emptied first.
    ///
    /// With the guest running this is a pre-copy round; with the guest paused, what it finds
    /// is the rest. Once `dirty` has grown to size, nothing is allocated.
    pub fn scan(&mut self, dirty: &mut DirtySet) -> Result<(), MemoryError> {
        dirty.clear();
        let bytes: u64 = self.tracked.iter().map(|block| block.range.bytes).sum();
        if bytes >= PARALLEL_BYTES {
            self.scan_in_parallel(dirty)?;
        } else {
            for Slice { area, .. } in &mut self.slices {
                area.scan(&self.pagemap, dirty)
                    .map_err(|e| scan_error(&self.tracked, area.range, e))?;
            }
        }
        self.compared.iter_mut().try_for_each(|block| block.scan(dirty))?;
        // Last, so that it vouches for all of the scan: an epoch in which QEMU died must not
        // look like one in which nothing was written.
        let alive = self.pagemap.check_alive();
        alive.map_err(|source| MemoryError::QemuGone { pid: self.pid, source })
    }

    fn scan_in_parallel(&mut self, dirty: &mut DirtySet) -> Result<(), MemoryError> {
        let (pagemap, tracked) = (&self.pagemap, &self.tracked);
        workers::for_each(&mut self.slices, |Slice { area, written }| {
            written.clear();
            area.scan(pagemap, written).map_err(|e| scan_error(tracked, area.range, e))
        })?;
        for slice in &self.slices {
            dirty.append(&slice.written);
        }
        Ok(())
    }

    /// Ends tracking: writes run at full speed again and are no longer seen.
    pub fn detach(mut self) -> Result<(), MemoryError> {
        self.unregister_all()
    }

    fn unregister_all(&mut self) -> Result<(), MemoryError> {
        let mut result = Ok(());
        for block in self.tracked.drain(..) {
            if let Err(e) = self.userfaultfd.unregister(block.range) {
                result = Err(block.error("UFFDIO_UNREGISTER", e));
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

impl TrackedBlock {
    fn error(&self, call: &'static str, source: io::Error) -> MemoryError {
        MemoryError::Tracking { call, name: self.name.clone(), source }
    }
}

fn scan_error(tracked: &[TrackedBlock], range: AddressRange, source: io::Error) -> MemoryError {
    let block = tracked
        .iter()
        .find(|block| block.range.start <= range.start && range.end() <= block.range.end());
    MemoryError::Tracking {
        call: "PAGEMAP_SCAN",
        name: block.map_or_else(String::new, |block| block.name.clone()),
        source,
    }
}

/// A part of a tracked block.
#[derive(Debug)]
struct Slice {
    area: ScanArea,
    /// What a parallel scan found here.
    written: DirtySet,
}

/// Where to scan, and room for the kernel's report.
#[derive(Debug)]
struct ScanArea {
    block: BlockId,
    block_start: u64,
    range: AddressRange,
    regions: Box<[PageRegion]>,
}

impl Slice {
    fn divide(block: BlockId, whole: AddressRange) -> impl Iterator<Item = Slice> {
        (0..whole.bytes.div_ceil(SLICE_BYTES)).map(move |i| {
            let offset = i * SLICE_BYTES;
            let range = AddressRange {
                start: whole.start + offset,
                bytes: SLICE_BYTES.min(whole.bytes - offset),
            };
            let regions = REGIONS_PER_CALL.min(range.pages() as usize);
            Slice {
                area: ScanArea {
                    block,
                    block_start: whole.start,
                    range,
                    regions: vec![PageRegion::default(); regions].into(),
                },
                written: DirtySet::new(),
            }
        })
    }
}

impl ScanArea {
    fn scan(&mut self, pagemap: &Pagemap, found: &mut DirtySet) -> io::Result<()> {
        let mut start = self.range.start;
        while start < self.range.end() {
            let (count, stopped_at) =
                pagemap.scan_and_protect(start, self.range.end(), &mut self.regions)?;
            for region in &self.regions[..count] {
                found.push(PageRun {
                    block: self.block,
                    first: PageIndex((region.start - self.block_start) / PAGE_SIZE as u64),
                    count: (region.end - region.start) / PAGE_SIZE as u64,
                });
            }
            start = stopped_at;
        }
        Ok(())
    }
}
