//! Reads of only what the page cache already holds.
//!
//! The NBD server serves such reads on the connection's own thread and gives only
//! the others, which wait for the device, to its reader threads. nix does not wrap
//! `preadv2` and `cachestat`, hence the unsafe calls.
#![allow(unsafe_code)]

use nix::errno::Errno;
use nix::libc;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Outcome of [`read_cached`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Cached {
    /// Number of bytes that were read, at least one.
    Bytes(usize),
    /// The offset is at or beyond the end of the file.
    EndOfFile,
    /// The next byte must come from the device.
    Absent,
    /// The file system cannot tell.
    Unknown,
}

/// Reads from `offset` what can be had without waiting for the device.
pub(crate) fn read_cached(file: impl AsFd, buffer: &mut [u8], offset: u64) -> io::Result<Cached> {
    let offset = libc::off_t::try_from(offset).map_err(|_| Errno::EINVAL)?;
    let vector = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: the vector describes `buffer`, which is exclusively borrowed for the
    // whole call, and the kernel writes at most `iov_len` bytes to it.
    let read =
        unsafe { libc::preadv2(file.as_fd().as_raw_fd(), &vector, 1, offset, libc::RWF_NOWAIT) };
    match Errno::result(read) {
        Ok(0) => Ok(Cached::EndOfFile),
        Ok(count) => Ok(Cached::Bytes(count as usize)),
        Err(Errno::EAGAIN | Errno::EINTR) => Ok(Cached::Absent),
        Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => Ok(Cached::Unknown),
        Err(error) => Err(error.into()),
    }
}

/// Number of the system call, the same on all of Linux's architectures. libc does not have it for all.
const SYS_CACHESTAT: libc::c_long = 451;

/// Whether the page cache holds all of a range that is not empty. No where the kernel (before
/// 6.5) or the file system cannot tell.
pub(crate) fn is_cached(file: impl AsFd, offset: u64, len: u64) -> bool {
    // SAFETY: sysconf has no preconditions.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
    let range = [offset, len];
    let mut pages = CachedPages::default();
    // SAFETY: the kernel reads `struct cachestat_range`, two 64-bit numbers, and writes
    // `struct cachestat`, five of them; both live through the call.
    let result = unsafe {
        libc::syscall(SYS_CACHESTAT, file.as_fd().as_raw_fd(), range.as_ptr(), &raw mut pages, 0)
    };
    let last = (offset + len - 1) / page;
    result == 0 && pages.cached == last - offset / page + 1
}

/// The kernel's `struct cachestat`.
#[repr(C)]
#[derive(Default)]
struct CachedPages {
    cached: u64,
    /// Pages that are dirty, under writeback, evicted, recently evicted.
    others: [u64; 4],
}
