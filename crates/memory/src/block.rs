//! RAM blocks: the pieces of memory that make up a machine.

use crate::{DirtySet, GuestRam, MemoryError, ProcessMemory};
use std::sync::Arc;
use understudy_protocol::{BlockId, PAGE_SIZE, PageIndex, PageRun};

/// The block of the guest's main memory.
pub const MAIN_MEMORY: BlockId = BlockId(0);

/// One RAM block of a machine, as `x-query-ramblock` lists it.
///
/// All of a machine's blocks must travel to the backup: without ROMs and ACPI tables a
/// guest runs on, but dies at its next reboot.
#[derive(Clone, Debug)]
pub struct RamBlock {
    id: BlockId,
    name: String,
    address_in_qemu: u64,
    bytes: u64,
    source: Source,
}

#[derive(Clone, Debug)]
enum Source {
    /// Memory shared with the daemon.
    Main(Arc<GuestRam>),
    /// Private memory of QEMU.
    Auxiliary(Arc<ProcessMemory>),
}

impl RamBlock {
    /// Main memory, which QEMU has mapped at `address_in_qemu`.
    pub fn main(name: impl Into<String>, address_in_qemu: u64, ram: Arc<GuestRam>) -> RamBlock {
        RamBlock {
            id: MAIN_MEMORY,
            name: name.into(),
            address_in_qemu,
            bytes: ram.bytes(),
            source: Source::Main(ram),
        }
    }

    /// A block in QEMU's private memory: a ROM, ACPI tables, video memory. `bytes` (its used
    /// length) need not be a multiple of the page size.
    pub fn auxiliary(
        id: BlockId,
        name: impl Into<String>,
        address_in_qemu: u64,
        bytes: u64,
        qemu: Arc<ProcessMemory>,
    ) -> RamBlock {
        RamBlock { id, name: name.into(), address_in_qemu, bytes, source: Source::Auxiliary(qemu) }
    }

    /// The block's number, the same on both hosts.
    pub fn id(&self) -> BlockId {
        self.id
    }

    /// QEMU's name of the block.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The block's address in QEMU's address space.
    pub fn address_in_qemu(&self) -> u64 {
        self.address_in_qemu
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Size in pages; the last one may be cut short.
    pub fn pages(&self) -> u64 {
        self.bytes.div_ceil(PAGE_SIZE as u64)
    }

    /// Adds to `set` what a first synchronisation must send: the content of main memory,
    /// whose holes are zero on a new backup too, and the whole of an auxiliary block, where
    /// the backup's QEMU has content of its own.
    pub fn add_content_to(&self, set: &mut DirtySet) -> Result<(), MemoryError> {
        match &self.source {
            Source::Main(ram) => ram.data_runs().try_for_each(|run| {
                set.push(run?);
                Ok(())
            }),
            Source::Auxiliary(_) => {
                set.push(PageRun { block: self.id, first: PageIndex(0), count: self.pages() });
                Ok(())
            }
        }
    }

    /// The first page from `from` on that may have content; all before it are zero.
    pub(crate) fn next_content(&self, from: PageIndex) -> Result<Option<PageIndex>, MemoryError> {
        match &self.source {
            Source::Main(ram) => ram.next_data_page(from),
            Source::Auxiliary(_) => Ok(Some(from)),
        }
    }

    /// Reads whole pages from `first` on, as many as fit `into`, which must be a multiple of
    /// [`PAGE_SIZE`]. The part of a last page beyond the block's end reads as zero.
    ///
    /// While the guest runs a page may come out half old, half new; see [`crate::capture`].
    pub fn read(&self, first: PageIndex, into: &mut [u8]) -> Result<(), MemoryError> {
        self.check(first, into.len())?;
        match &self.source {
            Source::Main(ram) => {
                ram.read(first, into);
                Ok(())
            }
            Source::Auxiliary(qemu) => {
                let inside = self.inside(first, into.len());
                into[inside..].fill(0);
                qemu.read(self.address_of(first), &mut into[..inside])
            }
        }
    }

    /// The same, and pages of main memory that nobody wrote stay holes: for whoever reads all.
    pub fn peek(&self, first: PageIndex, into: &mut [u8]) -> Result<(), MemoryError> {
        match &self.source {
            Source::Main(ram) => {
                self.check(first, into.len())?;
                ram.peek(first, into)
            }
            Source::Auxiliary(_) => self.read(first, into),
        }
    }

    /// Writes whole pages from `first` on; `from` must be a multiple of [`PAGE_SIZE`]. What
    /// lies beyond the block's end is dropped.
    pub fn write(&self, first: PageIndex, from: &[u8]) -> Result<(), MemoryError> {
        self.check(first, from.len())?;
        match &self.source {
            Source::Main(ram) => {
                ram.write(first, from);
                Ok(())
            }
            Source::Auxiliary(qemu) => {
                let inside = self.inside(first, from.len());
                qemu.write(self.address_of(first), &from[..inside])
            }
        }
    }

    /// Writes `from` at offset `at` of a page, not beyond the page; what lies beyond the block's end is
    /// dropped.
    pub fn write_part(&self, page: PageIndex, at: usize, from: &[u8]) -> Result<(), MemoryError> {
        assert!(at + from.len() <= PAGE_SIZE, "a part lies in its page");
        self.check_pages(page, 1)?;
        match &self.source {
            Source::Main(ram) => {
                ram.write_part(page, at, from);
                Ok(())
            }
            Source::Auxiliary(qemu) => {
                let inside = self.inside(page, PAGE_SIZE).saturating_sub(at).min(from.len());
                qemu.write(self.address_of(page) + at as u64, &from[..inside])
            }
        }
    }

    /// Makes `count` pages zero from `first` on; those of main memory are given back to the
    /// system.
    pub fn clear(&self, first: PageIndex, count: u64) -> Result<(), MemoryError> {
        self.check_pages(first, count)?;
        match &self.source {
            Source::Main(ram) => ram.discard(first, count),
            Source::Auxiliary(_) => (first.0..first.0 + count)
                .try_for_each(|page| self.write(PageIndex(page), &[0; PAGE_SIZE])),
        }
    }

    fn address_of(&self, page: PageIndex) -> u64 {
        self.address_in_qemu + page.byte_offset()
    }

    /// The number of the `bytes` from page `first` on that belong to the block.
    fn inside(&self, first: PageIndex, bytes: usize) -> usize {
        // At most `bytes`, so it fits.
        (self.bytes - first.byte_offset()).min(bytes as u64) as usize
    }

    fn check(&self, first: PageIndex, bytes: usize) -> Result<(), MemoryError> {
        assert_eq!(bytes % PAGE_SIZE, 0, "blocks are accessed in whole pages");
        self.check_pages(first, (bytes / PAGE_SIZE) as u64)
    }

    fn check_pages(&self, first: PageIndex, count: u64) -> Result<(), MemoryError> {
        match first.0.checked_add(count) {
            Some(end) if end <= self.pages() => Ok(()),
            _ => Err(MemoryError::OutsideBlock {
                block: self.id,
                first,
                last: PageIndex(first.0.saturating_add(count.saturating_sub(1))),
                pages: self.pages(),
            }),
        }
    }
}
