//! The kernel's interfaces for tracking: userfaultfd and `PAGEMAP_SCAN`, as in
//! `<linux/userfaultfd.h>` and `<linux/fs.h>` of Linux 6.7.
#![allow(unsafe_code)] // ioctls on structures defined here.

use crate::MemoryError;
use nix::errno::Errno;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use understudy_protocol::PAGE_SIZE;

pub(crate) const UFFD_API: u64 = 0xAA;
pub(crate) const FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
pub(crate) const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const FEATURE_WP_ASYNC: u64 = 1 << 15;
const TRACKING_FEATURES: u64 =
    FEATURE_WP_HUGETLBFS_SHMEM | FEATURE_WP_UNPOPULATED | FEATURE_WP_ASYNC;

pub(crate) const REGISTER_MODE_WP: u64 = 1 << 1;
pub(crate) const WRITEPROTECT_MODE_WP: u64 = 1 << 0;

const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
const PM_SCAN_CHECK_WPASYNC: u64 = 1 << 1;
const PAGE_IS_WRITTEN: u64 = 1 << 1;

#[repr(C)]
pub(crate) struct UffdioApi {
    pub api: u64,
    pub features: u64,
    pub ioctls: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UffdioRange {
    pub start: u64,
    pub len: u64,
}

#[repr(C)]
pub(crate) struct UffdioRegister {
    pub range: UffdioRange,
    pub mode: u64,
    pub ioctls: u64,
}

#[repr(C)]
pub(crate) struct UffdioWriteProtect {
    pub range: UffdioRange,
    pub mode: u64,
}

/// A run of addresses that `PAGEMAP_SCAN` found.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PageRegion {
    pub start: u64,
    pub end: u64,
    categories: u64,
}

#[cfg(test)]
impl PageRegion {
    pub fn new(start: u64, end: u64) -> PageRegion {
        PageRegion { start, end, categories: PAGE_IS_WRITTEN }
    }
}

#[repr(C)]
#[derive(Default)]
struct PmScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

nix::ioctl_readwrite!(uffdio_api, 0xAA, 0x3F, UffdioApi);
nix::ioctl_readwrite!(uffdio_register, 0xAA, 0x00, UffdioRegister);
nix::ioctl_read!(uffdio_unregister, 0xAA, 0x01, UffdioRange);
nix::ioctl_read!(uffdio_wake, 0xAA, 0x02, UffdioRange);
nix::ioctl_readwrite!(uffdio_writeprotect, 0xAA, 0x06, UffdioWriteProtect);
nix::ioctl_readwrite!(pagemap_scan, b'f', 16, PmScanArg);

/// A range of addresses in the tracked process, on page borders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddressRange {
    pub start: u64,
    pub bytes: u64,
}

impl AddressRange {
    pub fn end(self) -> u64 {
        self.start + self.bytes
    }

    pub fn pages(self) -> u64 {
        self.bytes / PAGE_SIZE as u64
    }

    pub fn raw(self) -> UffdioRange {
        UffdioRange { start: self.start, len: self.bytes }
    }
}

/// A userfaultfd of QEMU's address space, with the features for tracking writes.
///
/// It uses write-protection in its asynchronous form: the kernel lets a write through at
/// once and only remembers it, so no thread has to answer faults.
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnedFd,
}

impl Userfaultfd {
    /// Takes a fresh userfaultfd and asks the kernel for the tracking features, which is
    /// possible once per descriptor.
    pub(crate) fn negotiate(fd: OwnedFd) -> Result<Userfaultfd, MemoryError> {
        let mut api = UffdioApi { api: UFFD_API, features: TRACKING_FEATURES, ioctls: 0 };
        // SAFETY: `api` is the structure that UFFDIO_API reads and writes.
        unsafe { uffdio_api(fd.as_raw_fd(), &mut api) }.map_err(|e| {
            MemoryError::Kernel(format!(
                "userfaultfd has no asynchronous write-protection of shared memory ({e})"
            ))
        })?;
        Ok(Userfaultfd { fd })
    }

    /// Adopts one that another process has made so.
    pub(crate) fn adopt(fd: OwnedFd) -> Userfaultfd {
        Userfaultfd { fd }
    }

    pub(crate) fn duplicate(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    /// A userfaultfd of this process, for trying out the kernel.
    pub(crate) fn of_this_process() -> Result<Userfaultfd, MemoryError> {
        // SAFETY: the call takes one flag word and touches no memory of ours.
        let fd =
            unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        let fd = Errno::result(fd).map_err(|e| {
            MemoryError::Kernel(format!(
                "cannot create a userfaultfd ({e}); run as root or set sysctl \
                 vm.unprivileged_userfaultfd=1"
            ))
        })?;
        // SAFETY: the kernel just gave us this descriptor; nobody else owns it.
        Self::negotiate(unsafe { OwnedFd::from_raw_fd(fd as i32) })
    }

    /// Makes the range trackable. Nothing is protected yet.
    pub(crate) fn register(&self, range: AddressRange) -> io::Result<()> {
        let mut register = UffdioRegister { range: range.raw(), mode: REGISTER_MODE_WP, ioctls: 0 };
        // SAFETY: `register` is the structure that UFFDIO_REGISTER reads and writes; it
        // changes no content of any memory.
        unsafe { uffdio_register(self.fd.as_raw_fd(), &mut register) }?;
        Ok(())
    }

    /// Ends tracking of the range, and wakes whoever waits on it.
    ///
    /// The wake is needed although unregistering wakes too: a fault in flight may queue
    /// itself after that, and a vCPU would hang for good.
    pub(crate) fn unregister(&self, range: AddressRange) -> io::Result<()> {
        let mut raw = range.raw();
        // SAFETY: both calls read an address range and change no content of any memory.
        let (unregistered, woken) = unsafe {
            let unregistered = uffdio_unregister(self.fd.as_raw_fd(), &mut raw);
            raw = range.raw();
            (unregistered, uffdio_wake(self.fd.as_raw_fd(), &mut raw))
        };
        unregistered?;
        woken?;
        Ok(())
    }

    /// Write-protects every page of the range, present or not.
    pub(crate) fn write_protect(&self, range: AddressRange) -> io::Result<()> {
        let mut protect = UffdioWriteProtect { range: range.raw(), mode: WRITEPROTECT_MODE_WP };
        loop {
            // SAFETY: `protect` is the structure that UFFDIO_WRITEPROTECT reads; it changes
            // no content of any memory, and in asynchronous mode no write is held up.
            match unsafe { uffdio_writeprotect(self.fd.as_raw_fd(), &mut protect) } {
                Ok(_) => return Ok(()),
                // QEMU is changing its mappings at this moment: the kernel asks to try again.
                Err(Errno::EAGAIN) => continue,
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// The page tables of a process, as `/proc/PID/pagemap` lets them be scanned.
#[derive(Debug)]
pub(crate) struct Pagemap {
    file: File,
}

impl Pagemap {
    pub fn open(pid: i32) -> io::Result<Pagemap> {
        let file = File::open(format!("/proc/{pid}/pagemap"))?;
        Ok(Pagemap { file })
    }

    /// An error if the process has ended.
    ///
    /// A scan cannot tell: the kernel finds no mappings left, and so nothing written.
    pub fn check_alive(&self) -> io::Result<()> {
        // Any entry will do. The kernel gives none once the address space is being torn
        // down, so if there is one now, all earlier scans saw an intact one.
        let mut entry = [0; size_of::<u64>()];
        match self.file.read_at(&mut entry, 0)? {
            0 => Err(Errno::ESRCH.into()),
            _ => Ok(()),
        }
    }

    /// Finds written pages from `start` on and protects them again, in one step, until
    /// `end` or until `found` is full. Gives how many regions it found and where it stopped.
    ///
    /// The two masks must be exactly WRITTEN: the kernel then also reports pages whose
    /// mapping was dropped after a write (reclaim, swap), which it would miss otherwise.
    pub fn scan_and_protect(
        &self,
        start: u64,
        end: u64,
        found: &mut [PageRegion],
    ) -> io::Result<(usize, u64)> {
        self.scan(PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC, start, end, found)
    }

    /// The same, and protects nothing.
    pub fn scan_only(
        &self,
        start: u64,
        end: u64,
        found: &mut [PageRegion],
    ) -> io::Result<(usize, u64)> {
        self.scan(PM_SCAN_CHECK_WPASYNC, start, end, found)
    }

    fn scan(
        &self,
        flags: u64,
        start: u64,
        end: u64,
        found: &mut [PageRegion],
    ) -> io::Result<(usize, u64)> {
        let mut arg = PmScanArg {
            size: size_of::<PmScanArg>() as u64,
            flags,
            start,
            end,
            vec: found.as_mut_ptr() as u64,
            vec_len: found.len() as u64,
            category_mask: PAGE_IS_WRITTEN,
            return_mask: PAGE_IS_WRITTEN,
            ..PmScanArg::default()
        };
        // SAFETY: `arg` is the structure that PAGEMAP_SCAN reads and writes, and `vec` with
        // `vec_len` is `found`, borrowed mutably for the call.
        let regions = unsafe { pagemap_scan(self.file.as_raw_fd(), &mut arg) }?;
        Ok((regions as usize, arg.walk_end))
    }
}
