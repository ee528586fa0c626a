// SPDX-License-Identifier: GPL-2.0-or-later
//! QEMU's dirty log, for the daemon: pages that KVM has seen the guest write, and that QEMU's own
//! devices have written. It is what a live migration works with, and QEMU keeps no other.
//!
//! KVM protects its own mappings for it and keeps them: a page written again costs the guest one
//! short fault (none with Intel's page-modification log), and one that is only read costs nothing.

use crate::qemu_symbols::function;
use std::ffi::c_void;
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};
use understudy_agent_protocol::{DirtyArea, DirtyBlock, DirtyOutcome, DirtyWish, bitmap_words};

/// `GLOBAL_DIRTY_MIGRATION`: whose log it is. Nobody migrates a machine that the daemon runs.
const MIGRATION_LOG: u32 = 1;
/// `DIRTY_MEMORY_MIGRATION`: which of QEMU's bitmaps.
const MIGRATION_BITMAP: u32 = 2;

const PAGE_SIZE: u64 = 4096;

/// The beginning of QEMU's `DirtyBitmapSnapshot`, behind which is the bitmap: the first and the
/// last address of RAM that it is about.
#[repr(C)]
struct Snapshot {
    start: u64,
    end: u64,
}

/// The functions of QEMU that it takes.
#[derive(Clone, Copy)]
pub struct QemuDirtyLog {
    start: unsafe extern "C" fn(u32, *mut *mut c_void) -> bool,
    stop: unsafe extern "C" fn(u32),
    region_of: unsafe extern "C" fn(*mut c_void, *mut u64) -> *mut c_void,
    ram_address: unsafe extern "C" fn(*mut c_void) -> u64,
    logged: unsafe extern "C" fn(*mut c_void) -> u8,
    take: unsafe extern "C" fn(*mut c_void, u64, u64, u32) -> *mut Snapshot,
    free: unsafe extern "C" fn(*mut c_void),
}

impl QemuDirtyLog {
    /// Finds them, or names what is missing.
    pub fn find() -> Result<QemuDirtyLog, String> {
        // SAFETY: declared so in QEMU's headers system/memory.h and system/ram_addr.h, and glib's
        // gmem.h.
        unsafe {
            Ok(QemuDirtyLog {
                start: function(c"memory_global_dirty_log_start")?,
                stop: function(c"memory_global_dirty_log_stop")?,
                region_of: function(c"memory_region_from_host")?,
                ram_address: function(c"memory_region_get_ram_addr")?,
                logged: function(c"memory_region_get_dirty_log_mask")?,
                take: function(c"memory_region_snapshot_and_clear_dirty")?,
                free: function(c"g_free")?,
            })
        }
    }

    /// Does what the daemon wants, with what is behind the page.
    ///
    /// # Safety
    ///
    /// The caller runs in QEMU's main loop, with the big lock.
    pub unsafe fn serve(&self, wish: DirtyWish, area: DirtyArea<'_>) -> DirtyOutcome {
        // SAFETY: as the caller vouches.
        unsafe {
            match wish {
                DirtyWish::Begin => self.begin(area),
                DirtyWish::Collect => self.collect(area),
                DirtyWish::End => {
                    (self.stop)(MIGRATION_LOG);
                    DirtyOutcome::Done
                }
            }
        }
    }

    /// # Safety
    ///
    /// As for [`QemuDirtyLog::serve`].
    unsafe fn begin(&self, area: DirtyArea<'_>) -> DirtyOutcome {
        let mut error = std::ptr::null_mut();
        // SAFETY: as the caller vouches; QEMU stores the reason there, which its log has as well.
        if !unsafe { (self.start)(MIGRATION_LOG, &mut error) } {
            return DirtyOutcome::Refused;
        }
        // To QEMU all memory is written at first.
        // SAFETY: as the caller vouches.
        let outcome = unsafe { self.collect(area) };
        for bitmap in area.bitmaps(area.pages()) {
            bitmap.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        }
        if outcome != DirtyOutcome::Done {
            // SAFETY: as the caller vouches.
            unsafe { (self.stop)(MIGRATION_LOG) };
        }
        outcome
    }

    /// # Safety
    ///
    /// As for [`QemuDirtyLog::serve`].
    unsafe fn collect(&self, area: DirtyArea<'_>) -> DirtyOutcome {
        let mut blocks = area.blocks.iter().zip(area.bitmaps(area.pages()));
        let all = area.bitmaps(area.pages()).count() == area.blocks.len();
        // SAFETY: as the caller vouches.
        let collected = blocks.all(|(block, bitmap)| unsafe { self.add(block, bitmap) });
        if all && collected { DirtyOutcome::Done } else { DirtyOutcome::NotCovered }
    }

    /// Adds to `bitmap` what was written to a block, which is protected again. False if it is no
    /// block that the log covers.
    ///
    /// # Safety
    ///
    /// As for [`QemuDirtyLog::serve`].
    unsafe fn add(&self, block: &DirtyBlock, bitmap: &[AtomicU64]) -> bool {
        let host = block.address.load(Ordering::Relaxed) as usize as *mut c_void;
        let pages = block.pages.load(Ordering::Relaxed);
        let mut offset = 0;
        // SAFETY: as the caller vouches. A pointer that is in none of QEMU's blocks gives null.
        let (region, start) = unsafe {
            let region = (self.region_of)(host, &mut offset);
            if region.is_null() || offset != 0 {
                return false;
            }
            (region, (self.ram_address)(region))
        };
        let words = bitmap_words(pages);
        // SAFETY: as the caller vouches.
        let mask = unsafe { (self.logged)(region) };
        if mask & (1 << MIGRATION_BITMAP) == 0 || bitmap.len() != words {
            return false;
        }
        // SAFETY: as the caller vouches; the region has a block, whose first page it is, and the
        // bitmap is QEMU's until it is freed. QEMU gives whole words: blocks begin with one.
        unsafe {
            let snapshot = (self.take)(region, 0, pages * PAGE_SIZE, MIGRATION_BITMAP);
            let Snapshot { start: first, end } = snapshot.read();
            let fits = first == start && end.saturating_sub(first) / PAGE_SIZE == words as u64 * 64;
            if fits {
                let found = slice::from_raw_parts(snapshot.add(1).cast::<u64>(), words);
                for (word, &found) in bitmap.iter().zip(found).filter(|(_, found)| **found != 0) {
                    word.fetch_or(found, Ordering::Relaxed);
                }
            }
            (self.free)(snapshot.cast());
            fits
        }
    }
}

/// The mapping of what is behind the page, as long as QEMU lives.
#[derive(Clone, Copy)]
pub struct Area {
    start: *const u8,
    bytes: usize,
}

impl Area {
    /// Area behind the page of a mapping.
    ///
    /// # Safety
    ///
    /// `start` is mapped for `bytes`, for good, and aligned to 8 bytes.
    pub unsafe fn at(start: *const u8, bytes: usize) -> Area {
        Area { start, bytes }
    }

    /// Area with a table of so many blocks.
    pub fn with(&self, blocks: u32) -> Option<DirtyArea<'static>> {
        // SAFETY: `at` was told so.
        unsafe { DirtyArea::at(self.start, self.bytes, blocks as usize) }
    }
}
