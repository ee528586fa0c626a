//! Memory mappings that unmap themselves.
#![allow(unsafe_code)] // mmap, and copies to and from what it gives.

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::io;
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;
use std::ptr::NonNull;

/// Owns `bytes` of address space from `start` on.
#[derive(Debug)]
struct Region {
    start: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: a region is plain memory without ties to the thread that mapped it.
unsafe impl Send for Region {}
// SAFETY: sharing a region only shares its address; all access is in the types below, which
// say why theirs is fine.
unsafe impl Sync for Region {}

impl Region {
    /// A fresh mapping, which stays out of core dumps: what is in it is a guest's.
    fn of_guest(start: NonNull<c_void>, bytes: NonZeroUsize) -> io::Result<Region> {
        let region = Region { start, bytes: bytes.get() };
        // SAFETY: the advice changes nothing of what is in the mapping.
        unsafe { madvise(start, region.bytes, MmapAdvise::MADV_DONTDUMP) }?;
        Ok(region)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the region was mapped with this size, and its owner is going away.
        // It cannot fail: address and size are those of a live mapping.
        let _ = unsafe { munmap(self.start, self.bytes) };
    }
}

/// A file mapped `MAP_SHARED`, which other processes write to at any time.
///
/// No reference into it is ever made, only copies through raw pointers: a copy that races
/// with a writer is torn, which callers must (and do) expect, but it is no broken `&[u8]`.
#[derive(Debug)]
pub(crate) struct SharedMapping(Region);

impl SharedMapping {
    /// Maps the first `bytes` of the file, without touching any page of it.
    pub fn new(file: impl AsFd, bytes: NonZeroUsize) -> io::Result<SharedMapping> {
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice affects nothing else.
        let start = unsafe { mmap(None, bytes, protection, flags, file, 0) }?;
        Ok(SharedMapping(Region::of_guest(start, bytes)?))
    }

    /// Copies `into.len()` bytes from `offset` on.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) {
        self.check(offset, into.len());
        // SAFETY: the range was just checked to lie in the mapping; `into` is private memory
        // of ours, so the two do not overlap. The source may change meanwhile (see the type).
        unsafe {
            let source = self.0.start.as_ptr().cast::<u8>().add(offset);
            source.copy_to_nonoverlapping(into.as_mut_ptr(), into.len());
        }
    }

    /// Copies `from` to `offset` and on.
    pub fn copy_in(&self, offset: usize, from: &[u8]) {
        self.check(offset, from.len());
        // SAFETY: as in `copy_out`; nobody holds a reference into the mapping.
        unsafe {
            let target = self.0.start.as_ptr().cast::<u8>().add(offset);
            target.copy_from_nonoverlapping(from.as_ptr(), from.len());
        }
    }

    /// Forgets which pages of the file this process has seen. It sees them again when it looks: they
    /// are the file's, and stay as they are.
    pub fn forget_pages(&self) -> io::Result<()> {
        // SAFETY: of a shared mapping the advice drops no content.
        Ok(unsafe { madvise(self.0.start, self.0.bytes, MmapAdvise::MADV_DONTNEED) }?)
    }

    /// Address in this process.
    pub fn address(&self) -> u64 {
        self.0.start.as_ptr() as u64
    }

    fn check(&self, offset: usize, bytes: usize) {
        let end = offset.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.0.bytes),
            "{bytes} bytes at {offset} lie outside a mapping of {} bytes",
            self.0.bytes
        );
    }
}

/// Private memory straight from the kernel: present before it is used, and given back to
/// the system when dropped, neither of which an allocator promises.
#[derive(Debug)]
pub(crate) struct PrivateMapping(Region);

impl PrivateMapping {
    /// Maps and populates `bytes`.
    pub fn populated(bytes: NonZeroUsize) -> io::Result<PrivateMapping> {
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice affects nothing else.
        let start = unsafe { mmap_anonymous(None, bytes, protection, MapFlags::MAP_PRIVATE) }?;
        let region = Region::of_guest(start, bytes)?;
        // SAFETY: the advice only makes the fresh region's pages present.
        unsafe { madvise(start, bytes.get(), MmapAdvise::MADV_POPULATE_WRITE) }?;
        Ok(PrivateMapping(region))
    }
}

impl Deref for PrivateMapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the region is ours alone, readable, initialised (to zero) by the kernel and
        // lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.0.start.as_ptr().cast(), self.0.bytes) }
    }
}

impl DerefMut for PrivateMapping {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.start.as_ptr().cast(), self.0.bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// The flags of the mapping with an address of this process.
    fn flags(address: u64) -> String {
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let has_it = |line: &str| {
            let (start, end) = line.split_once(' ')?.0.split_once('-')?;
            let number = |text| u64::from_str_radix(text, 16).ok();
            Some((number(start)?..number(end)?).contains(&address))
        };
        let mut lines = maps.lines().skip_while(|line| has_it(line) != Some(true));
        lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap().to_owned()
    }

    // Before, a daemon that crashed left its guests' memory where crashes are collected.
    #[test]
    fn what_is_a_guests_is_in_no_core_dump() {
        let bytes = NonZeroUsize::new(64 << 10).unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes.get() as u64).unwrap();
        let shared = SharedMapping::new(&file, bytes).unwrap();
        let private = PrivateMapping::populated(bytes).unwrap();
        for address in [shared.address(), private.as_ptr() as u64] {
            let flags = flags(address);
            assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
        }
    }
}
