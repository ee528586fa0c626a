//! The guest's main memory: a memfd that QEMU and the daemon both map.

use crate::MemoryError;
use crate::block::MAIN_MEMORY;
use crate::mapping::SharedMapping;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::fstat;
use nix::sys::uio::pread;
use nix::unistd::{Whence, ftruncate, lseek};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use understudy_protocol::{PAGE_SIZE, PageIndex, PageRun};

/// Unit in which the kernel counts what a file takes up, whatever the file system's block size.
const BLOCK_BYTES: u64 = 512;

/// Name of such memory, by which it is found among what a process has open.
const NAME: &str = "understudy-guest-ram";

/// The guest's main memory.
///
/// It is a memfd: it has no name in any file system, and it is gone with the last process
/// that holds it. It is sealed against any change of size, so that a mapping of it cannot
/// be cut short. Give QEMU the descriptor by number ([`GuestRam::fd`]; it is close-on-exec,
/// so clear that in the child) and let it open
/// `memory-backend-file,mem-path=/proc/self/fd/N,share=on,prealloc=off`.
///
/// Pages that nobody wrote are holes and cost nothing. Reading them through a mapping would
/// allocate them, so find content with [`GuestRam::data_runs`] first.
///
/// What the daemon writes here is not seen by a [`crate::DirtyTracker`], which watches
/// QEMU's mapping.
#[derive(Debug)]
pub struct GuestRam {
    memfd: OwnedFd,
    map: SharedMapping,
    bytes: u64,
}

impl GuestRam {
    /// Creates empty memory of `bytes`, a positive multiple of [`PAGE_SIZE`].
    pub fn create(bytes: u64) -> Result<GuestRam, MemoryError> {
        let size = usize::try_from(bytes)
            .ok()
            .filter(|size| size % PAGE_SIZE == 0)
            .and_then(NonZeroUsize::new)
            .ok_or(MemoryError::RamSize(bytes))?;
        Self::create_sealed(size).map_err(|source| MemoryError::Ram {
            action: "cannot create",
            bytes,
            source,
        })
    }

    fn create_sealed(size: NonZeroUsize) -> io::Result<GuestRam> {
        let bytes = size.get() as u64;
        // The kernel's huge pages are not asked for: they would make a 2 MiB unit of every
        // first write, on both hosts.
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let memfd = memfd_create(NAME, flags)?;
        let length = i64::try_from(bytes).map_err(|_| Errno::EFBIG)?;
        ftruncate(&memfd, length)?;
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&memfd, FcntlArg::F_ADD_SEALS(seals))?;
        let map = SharedMapping::new(&memfd, size)?;
        Ok(GuestRam { memfd, map, bytes })
    }

    /// Memory that another process has created so, and kept open.
    pub fn adopt(memfd: OwnedFd) -> Result<GuestRam, MemoryError> {
        let found = fstat(&memfd).map_err(io::Error::from).and_then(|status| {
            let size = usize::try_from(status.st_size).ok().and_then(NonZeroUsize::new);
            let size = size.ok_or(io::ErrorKind::InvalidData)?;
            Ok((size, SharedMapping::new(&memfd, size)?))
        });
        let explain = |source| MemoryError::Ram { action: "cannot map", bytes: 0, source };
        let (size, map) = found.map_err(explain)?;
        Ok(GuestRam { memfd, map, bytes: size.get() as u64 })
    }

    /// Forgets which pages this process has looked at, so that its end, which comes soon, does not take
    /// as long as there are many. QEMU has its own mapping.
    pub fn forget_pages(&self) -> io::Result<()> {
        self.map.forget_pages()
    }

    /// The memfd, for QEMU to inherit.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memfd.as_fd()
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Size in pages.
    pub fn pages(&self) -> u64 {
        self.bytes / PAGE_SIZE as u64
    }

    /// Bytes that it takes up in this host's memory now.
    pub fn resident_bytes(&self) -> Result<u64, MemoryError> {
        let status = fstat(&self.memfd).map_err(|e| MemoryError::Ram {
            action: "cannot look at",
            bytes: self.bytes,
            source: e.into(),
        })?;
        Ok(status.st_blocks as u64 * BLOCK_BYTES)
    }

    /// Bytes that the memory of all guests which a process has open takes up now, whoever has written it. What cannot be
    /// looked at counts as nothing.
    pub fn bytes_held_by(process: u32) -> u64 {
        let link = format!("/memfd:{NAME}");
        let open = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
        let of_guests = open.map(|entry| entry.path()).filter(|path| {
            fs::read_link(path).is_ok_and(|target| target.to_string_lossy().starts_with(&link))
        });
        // It may be open more than once.
        let by_inode: BTreeMap<u64, u64> = of_guests
            .filter_map(|path| fs::metadata(path).ok())
            .map(|found| (found.ino(), found.blocks() * BLOCK_BYTES))
            .collect();
        by_inode.into_values().sum()
    }

    /// The runs of pages that have content, in order; all other pages are zero.
    ///
    /// While the guest runs, pages written after the iterator passed them are not in it:
    /// arm a [`crate::DirtyTracker`] first.
    pub fn data_runs(&self) -> impl Iterator<Item = Result<PageRun, MemoryError>> + '_ {
        let mut offset = 0;
        std::iter::from_fn(move || {
            let run = self.next_data(offset).transpose()?;
            offset = match &run {
                Ok(run) => (run.first.0 + run.count) * PAGE_SIZE as u64,
                Err(_) => self.bytes, // An error is the last item.
            };
            Some(run.map_err(|source| MemoryError::Ram {
                action: "cannot find the content of",
                bytes: self.bytes,
                source,
            }))
        })
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<PageRun>> {
        let start = match lseek(&self.memfd, offset as i64, Whence::SeekData) {
            Ok(start) => start as u64,
            Err(Errno::ENXIO) => return Ok(None), // Nothing but a hole, or the end.
            Err(e) => return Err(e.into()),
        };
        let end = lseek(&self.memfd, start as i64, Whence::SeekHole)? as u64;
        let first = start / PAGE_SIZE as u64;
        Ok(Some(PageRun {
            block: MAIN_MEMORY,
            first: PageIndex(first),
            count: end.div_ceil(PAGE_SIZE as u64) - first,
        }))
    }

    /// The first page with content from `from` on.
    ///
    /// Fast, however far it is: the kernel skips holes. The end of a run of data takes it
    /// as long as the run is.
    pub(crate) fn next_data_page(&self, from: PageIndex) -> Result<Option<PageIndex>, MemoryError> {
        match lseek(&self.memfd, from.byte_offset() as i64, Whence::SeekData) {
            Ok(offset) => Ok(Some(PageIndex(offset as u64 / PAGE_SIZE as u64))),
            Err(Errno::ENXIO) => Ok(None), // Nothing but a hole, or the end.
            Err(e) => Err(MemoryError::Ram {
                action: "cannot find the content of",
                bytes: self.bytes,
                source: e.into(),
            }),
        }
    }

    /// Copies whole pages from `first` on into `into`.
    ///
    /// The guest may be writing them: the copy is then a mix of old and new. That is fine
    /// for pages that were protected before the copy, since such a write is reported by the
    /// next scan and the page is copied again, at the latest while the guest is paused.
    pub(crate) fn read(&self, first: PageIndex, into: &mut [u8]) {
        self.map.copy_out(first.byte_offset() as usize, into);
    }

    /// The same, and what nobody wrote stays a hole.
    pub(crate) fn peek(&self, first: PageIndex, into: &mut [u8]) -> Result<(), MemoryError> {
        let (mut offset, bytes) = (first.byte_offset() as i64, into.len() as u64);
        let mut rest = into;
        while !rest.is_empty() {
            let read = match pread(&self.memfd, rest, offset) {
                Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
                Err(Errno::EINTR) => Ok(0),
                result => result.map_err(io::Error::from),
            };
            let read =
                read.map_err(|source| MemoryError::Ram { action: "cannot read", bytes, source })?;
            offset += read as i64;
            rest = &mut rest[read..];
        }
        Ok(())
    }

    /// Writes whole pages from `first` on.
    ///
    /// # Panics
    /// If they reach beyond its end.
    pub fn write(&self, first: PageIndex, from: &[u8]) {
        self.map.copy_in(first.byte_offset() as usize, from);
    }

    /// Writes a part of a page, from offset `at` of it on.
    pub(crate) fn write_part(&self, page: PageIndex, at: usize, from: &[u8]) {
        self.map.copy_in(page.byte_offset() as usize + at, from);
    }

    /// Makes pages zero by giving them back to the system.
    pub(crate) fn discard(&self, first: PageIndex, count: u64) -> Result<(), MemoryError> {
        let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let bytes = count * PAGE_SIZE as u64;
        fallocate(&self.memfd, mode, first.byte_offset() as i64, bytes as i64)
            .map_err(|e| MemoryError::Ram { action: "cannot discard", bytes, source: e.into() })
    }
}
