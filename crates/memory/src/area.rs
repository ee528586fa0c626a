//! A piece of a RAM block that one thread scans.
//!
//! What a scan costs is the page table entries that the kernel walks. Memory that the guest
//! never touched has none, and must not get any: to protect it would make a marker of every
//! absent page. So memory whose file has no content stays out of the scans, in units of
//! page tables (2 MiB). The file tells when that changes, whoever made the change and
//! whatever became of the page since: a scan first looks for content where there was none.
//! It then scans the whole of the new table, where nothing is protected yet: the kernel
//! reports every page as written and protects it. Of these only pages with content matter;
//! the others are zero here and on the backup.
//!
//! A call that protects unmaps from KVM every page in its range, written or not: the kernel
//! announces the whole range before it looks. Where KVM runs the guest ([`Reprotect::Runs`]), a
//! first call looks, and further ones protect what it found. What counts is the report of those
//! that protect: what is written between the two is in it, or is still unprotected and is found
//! the next time.

use crate::kernel::{AddressRange, PageRegion, Pagemap, Userfaultfd};
use crate::{DirtySet, MemoryError, RamBlock};
use std::io;
use understudy_protocol::{PAGE_SIZE, PageIndex, PageRun};

/// Memory that one page table maps.
const TABLE_BYTES: u64 = 2 << 20;

/// Number of regions that the kernel reports in one call.
const REGIONS_PER_CALL: usize = 512;

/// The number of written pages along with which one clean page may be protected, to save a call.
const WRITTEN_PER_CLEAN: u64 = 8;

/// The way in which a scan protects again what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reprotect {
    /// Protection in the call that looks: the fewest calls. For a guest that QEMU emulates.
    AtOnce,
    /// Protection run by run, after a look: for KVM, whose mappings of what nobody wrote stay then.
    Runs,
}

/// The memory to scan, and room for the kernel's report.
#[derive(Debug)]
pub(crate) struct ScanArea {
    block: RamBlock,
    range: AddressRange,
    tables: Vec<Table>,
    reprotect: Reprotect,
    regions: Box<[PageRegion]>,
    /// Regions that a look found, for [`Reprotect::Runs`].
    looked: Box<[PageRegion]>,
}

/// The knowledge about the memory that one page table maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Table {
    /// The memory had no content, the last time somebody looked.
    Bare,
    /// The memory got content since the last scan: all of it is new.
    New,
    /// Every write is reported page by page.
    Armed,
}

impl ScanArea {
    /// The part of `block` at `range` of QEMU's addresses.
    pub fn new(block: &RamBlock, range: AddressRange, reprotect: Reprotect) -> ScanArea {
        let tables = (range.end() - 1) / TABLE_BYTES - range.start / TABLE_BYTES + 1;
        let regions = REGIONS_PER_CALL.min(range.pages() as usize);
        let looked = if reprotect == Reprotect::Runs { regions } else { 0 };
        ScanArea {
            block: block.clone(),
            range,
            tables: vec![Table::Bare; tables as usize],
            reprotect,
            regions: vec![PageRegion::default(); regions].into(),
            looked: vec![PageRegion::default(); looked].into(),
        }
    }

    /// Page tables whose entries a scan walks.
    pub fn armed_tables(&self) -> usize {
        self.tables.iter().filter(|&&table| table == Table::Armed).count()
    }

    /// Protects what has content.
    pub fn arm(&mut self, userfaultfd: &Userfaultfd) -> Result<(), MemoryError> {
        self.tables.fill(Table::Bare);
        self.look_for_content()?;
        for range in self.used_ranges() {
            userfaultfd.write_protect(range).map_err(|e| self.error("UFFDIO_WRITEPROTECT", e))?;
        }
        self.new_become_armed();
        Ok(())
    }

    /// Adds the pages written since the last scan to `found`, and protects them again.
    pub fn scan(&mut self, pagemap: &Pagemap, found: &mut DirtySet) -> Result<(), MemoryError> {
        self.look_for_content()?;
        let mut next = self.range.start;
        while let Some(range) = self.next_used(next) {
            match self.reprotect {
                Reprotect::AtOnce => self.protect_written(pagemap, range, found)?,
                Reprotect::Runs => self.protect_runs(pagemap, range, found)?,
            }
            next = range.end();
        }
        self.new_become_armed();
        Ok(())
    }

    /// The number of pages that the next scan would find, without memory touched for the first
    /// time.
    pub fn count(&mut self, pagemap: &Pagemap) -> Result<u64, MemoryError> {
        let mut pages = 0;
        let mut next = self.range.start;
        while let Some(range) = self.next_used(next) {
            next = range.start;
            while next < range.end() {
                let (count, stopped_at) = pagemap
                    .scan_only(next, range.end(), &mut self.regions)
                    .map_err(|e| self.error("PAGEMAP_SCAN", e))?;
                let found = self.regions[..count].iter();
                pages += found.map(|region| region.end - region.start).sum::<u64>();
                next = stopped_at;
            }
        }
        Ok(pages / PAGE_SIZE as u64)
    }

    /// Looks first; protects only where something was written.
    fn protect_runs(
        &mut self,
        pagemap: &Pagemap,
        range: AddressRange,
        found: &mut DirtySet,
    ) -> Result<(), MemoryError> {
        let mut start = range.start;
        while start < range.end() {
            let (count, stopped_at) = pagemap
                .scan_only(start, range.end(), &mut self.looked)
                .map_err(|e| self.error("PAGEMAP_SCAN", e))?;
            let mut next = 0;
            while let Some((run, behind)) = worth_one_call(&self.looked[..count], next) {
                self.protect_written(pagemap, run, found)?;
                next = behind;
            }
            start = stopped_at;
        }
        Ok(())
    }

    /// Finds and protects what was written in `range`.
    fn protect_written(
        &mut self,
        pagemap: &Pagemap,
        range: AddressRange,
        found: &mut DirtySet,
    ) -> Result<(), MemoryError> {
        let mut start = range.start;
        while start < range.end() {
            let (count, stopped_at) = pagemap
                .scan_and_protect(start, range.end(), &mut self.regions)
                .map_err(|e| self.error("PAGEMAP_SCAN", e))?;
            for i in 0..count {
                self.add(self.regions[i], found)?;
            }
            start = stopped_at;
        }
        Ok(())
    }

    /// Adds what the kernel reported.
    fn add(&self, region: PageRegion, found: &mut DirtySet) -> Result<(), MemoryError> {
        let mut start = region.start;
        while start < region.end {
            let table = self.table_at(start);
            let end = region.end.min(self.start_of(table + 1));
            match self.tables[table] {
                Table::Armed => found.push(self.run(start, end)),
                // Protected by now: content that comes after this look is reported next time.
                _ => self.add_content(self.run(start, end), found)?,
            }
            start = end;
        }
        Ok(())
    }

    fn add_content(&self, run: PageRun, found: &mut DirtySet) -> Result<(), MemoryError> {
        let end = run.first.0 + run.count;
        let mut next = run.first;
        while let Some(first) = self.block.next_content(next)?.filter(|page| page.0 < end) {
            found.push(PageRun { first, count: 1, ..run });
            next = PageIndex(first.0 + 1);
        }
        Ok(())
    }

    /// Marks the bare tables that have content now.
    fn look_for_content(&mut self) -> Result<(), MemoryError> {
        let mut table = 0;
        while let Some(bare) = self.position(table, |table| table == Table::Bare) {
            let from = self.run(self.start_of(bare), self.range.end()).first;
            let Some(page) = self.block.next_content(from)? else { break };
            let address = self.block.address_in_qemu() + page.byte_offset();
            if address >= self.range.end() {
                break;
            }
            let found = self.table_at(address);
            if self.tables[found] == Table::Bare {
                self.tables[found] = Table::New;
            }
            table = found + 1;
        }
        Ok(())
    }

    fn new_become_armed(&mut self) {
        let new = self.tables.iter_mut().filter(|table| **table == Table::New);
        new.for_each(|table| *table = Table::Armed);
    }

    fn used_ranges(&self) -> impl Iterator<Item = AddressRange> + '_ {
        std::iter::successors(self.next_used(self.range.start), |range| self.next_used(range.end()))
    }

    /// The first range from `start`, the start of a table, on that has no bare table in it.
    fn next_used(&self, start: u64) -> Option<AddressRange> {
        if start == self.range.end() {
            return None;
        }
        let first = self.position(self.table_at(start), |table| table != Table::Bare)?;
        let behind = self.position(first, |table| table == Table::Bare);
        let start = self.start_of(first);
        let end = self.start_of(behind.unwrap_or(self.tables.len()));
        Some(AddressRange { start, bytes: end - start })
    }

    /// The first table from `from` on that is as wanted.
    fn position(&self, from: usize, wanted: impl Fn(Table) -> bool) -> Option<usize> {
        let found = self.tables[from..].iter().position(|&table| wanted(table))?;
        Some(from + found)
    }

    fn table_at(&self, address: u64) -> usize {
        (address / TABLE_BYTES - self.range.start / TABLE_BYTES) as usize
    }

    /// The start of a table's memory in this area; the area's end for the one behind the last.
    fn start_of(&self, table: usize) -> u64 {
        let start = (self.range.start / TABLE_BYTES + table as u64) * TABLE_BYTES;
        start.clamp(self.range.start, self.range.end())
    }

    fn run(&self, start: u64, end: u64) -> PageRun {
        PageRun {
            block: self.block.id(),
            first: PageIndex((start - self.block.address_in_qemu()) / PAGE_SIZE as u64),
            count: (end - start) / PAGE_SIZE as u64,
        }
    }

    fn error(&self, call: &'static str, source: io::Error) -> MemoryError {
        MemoryError::Tracking { call, name: self.block.name().into(), source }
    }
}

/// The range from region `first` on that one call protects, and the first region behind it.
fn worth_one_call(regions: &[PageRegion], first: usize) -> Option<(AddressRange, usize)> {
    let begin = regions.get(first)?;
    let (mut written, mut clean) = (begin.end - begin.start, 0);
    let mut behind = first + 1;
    while let Some(next) = regions.get(behind) {
        let gap = next.start - regions[behind - 1].end;
        let more = next.end - next.start;
        if (clean + gap) * WRITTEN_PER_CLEAN > written + more {
            break;
        }
        (written, clean, behind) = (written + more, clean + gap, behind + 1);
    }
    let bytes = regions[behind - 1].end - begin.start;
    Some((AddressRange { start: begin.start, bytes }, behind))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn regions(pages: &[(u64, u64)]) -> Vec<PageRegion> {
        let page = PAGE_SIZE as u64;
        let region = |&(start, end)| PageRegion::new(start * page, end * page);
        pages.iter().map(region).collect()
    }

    /// The pages of the calls that protect these regions.
    fn calls(pages: &[(u64, u64)]) -> Vec<(u64, u64)> {
        let (regions, page) = (regions(pages), PAGE_SIZE as u64);
        let first = worth_one_call(&regions, 0);
        std::iter::successors(first, |&(_, behind)| worth_one_call(&regions, behind))
            .map(|(range, _)| (range.start / page, range.end() / page))
            .collect()
    }

    #[test]
    fn clean_pages_are_protected_only_along_with_many_written_ones() {
        assert_eq!(calls(&[]), []);
        assert_eq!(calls(&[(0, 1), (2, 3), (9, 10)]), [(0, 1), (2, 3), (9, 10)]);
        assert_eq!(calls(&[(0, 8), (9, 10), (20, 40)]), [(0, 10), (20, 40)]);
        assert_eq!(calls(&[(0, 4), (5, 9), (11, 12)]), [(0, 9), (11, 12)]);
    }
}
