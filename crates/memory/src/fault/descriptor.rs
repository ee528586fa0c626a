//! The kernel's calls on a userfaultfd that reports faults.
#![allow(unsafe_code)] // ioctls on structures defined here.

use crate::MemoryError;
use crate::kernel::{
    AddressRange, FEATURE_WP_HUGETLBFS_SHMEM, FEATURE_WP_UNPOPULATED, REGISTER_MODE_WP, UFFD_API,
    UffdioApi, UffdioRange, UffdioRegister, UffdioWriteProtect, WRITEPROTECT_MODE_WP, uffdio_api,
    uffdio_register, uffdio_unregister, uffdio_wake, uffdio_writeprotect,
};
use nix::errno::Errno;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use understudy_protocol::PAGE_SIZE;

const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
const FEATURE_MINOR_SHMEM: u64 = 1 << 10;
const FEATURES: u64 = FEATURE_WP_HUGETLBFS_SHMEM
    | FEATURE_WP_UNPOPULATED
    | FEATURE_MISSING_SHMEM
    | FEATURE_MINOR_SHMEM;

const REGISTER_MODE_MISSING: u64 = 1 << 0;
const REGISTER_MODE_MINOR: u64 = 1 << 2;
const CONTINUE_MODE_WP: u64 = 1 << 1;

const EVENT_PAGEFAULT: u8 = 0x12;
const PAGEFAULT_WRITE: u64 = 1 << 0;
const PAGEFAULT_WP: u64 = 1 << 1;
const PAGEFAULT_MINOR: u64 = 1 << 2;

/// Faults taken in one read.
const BATCH: usize = 64;

#[repr(C)]
struct UffdioCopy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

#[repr(C)]
struct UffdioZeropage {
    range: UffdioRange,
    mode: u64,
    zeroed: i64,
}

#[repr(C)]
struct UffdioContinue {
    range: UffdioRange,
    mode: u64,
    mapped: i64,
}

/// `struct uffd_msg`, as far as page faults fill it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    thread: u64,
}

nix::ioctl_readwrite!(uffdio_copy, 0xAA, 0x03, UffdioCopy);
nix::ioctl_readwrite!(uffdio_zeropage, 0xAA, 0x04, UffdioZeropage);
nix::ioctl_readwrite!(uffdio_continue, 0xAA, 0x07, UffdioContinue);

/// The events that a range is registered for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// Writes to protected pages.
    Writes,
    /// Writes to protected pages, and accesses to pages with content that QEMU has not mapped.
    WritesAndAccesses,
    /// Accesses to pages without content.
    Missing,
}

/// The access that a thread of QEMU waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Write to a protected page.
    Protected,
    /// The page has content, and is not mapped.
    Unmapped { write: bool },
    /// The page has no content.
    Missing,
}

/// A thread of QEMU that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Address of the fault; the start of a page.
    pub address: u64,
    pub access: Access,
}

/// A userfaultfd of QEMU's address space that reports faults, for one user at a time.
#[derive(Debug)]
pub struct FaultDescriptor {
    fd: OwnedFd,
    in_use: AtomicBool,
}

impl FaultDescriptor {
    /// Takes a fresh, non-blocking userfaultfd and asks the kernel for the features.
    pub(crate) fn negotiate(fd: OwnedFd) -> Result<FaultDescriptor, MemoryError> {
        let mut api = UffdioApi { api: UFFD_API, features: FEATURES, ioctls: 0 };
        // SAFETY: `api` is the structure that UFFDIO_API reads and writes.
        unsafe { uffdio_api(fd.as_raw_fd(), &mut api) }.map_err(|e| {
            MemoryError::Kernel(format!(
                "userfaultfd does not report faults on shared memory ({e})"
            ))
        })?;
        Ok(FaultDescriptor { fd, in_use: AtomicBool::new(false) })
    }

    /// Adopts one that another process has made so.
    pub(crate) fn adopt(fd: OwnedFd) -> FaultDescriptor {
        FaultDescriptor { fd, in_use: AtomicBool::new(false) }
    }

    pub(crate) fn duplicate(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    /// A descriptor of this process, for tests.
    #[cfg(test)]
    pub(crate) fn of_this_process() -> FaultDescriptor {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        use std::os::fd::FromRawFd;
        // SAFETY: the call takes one flag word and gives a descriptor that nobody else owns.
        let fd = unsafe {
            let fd = libc::syscall(libc::SYS_userfaultfd, flags);
            OwnedFd::from_raw_fd(Errno::result(fd).unwrap() as i32)
        };
        FaultDescriptor::negotiate(fd).unwrap()
    }

    /// Reserves it for one user; false if there is one.
    pub(crate) fn claim(&self) -> bool {
        !self.in_use.swap(true, Ordering::AcqRel)
    }

    /// The user is gone.
    pub(crate) fn release(&self) {
        self.in_use.store(false, Ordering::Release);
    }

    /// The descriptor, to wait for faults.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The faults that came in, a batch at most, into `faults`, which is emptied first.
    pub(crate) fn read(&self, faults: &mut Vec<Fault>) -> io::Result<()> {
        faults.clear();
        let mut messages = [Message::default(); BATCH];
        // SAFETY: the kernel fills whole messages, each valid whatever it contains.
        let bytes = unsafe {
            libc::read(self.fd.as_raw_fd(), messages.as_mut_ptr().cast(), size_of_val(&messages))
        };
        let bytes = match Errno::result(bytes) {
            Ok(bytes) => bytes as usize,
            Err(Errno::EAGAIN | Errno::EINTR) => 0,
            Err(e) => return Err(e.into()),
        };
        let pagefaults = messages[..bytes / size_of::<Message>()]
            .iter()
            .filter(|message| message.event == EVENT_PAGEFAULT);
        faults.extend(pagefaults.map(|message| Fault {
            address: message.address & !(PAGE_SIZE as u64 - 1),
            access: match message.flags {
                flags if flags & PAGEFAULT_WP != 0 => Access::Protected,
                flags if flags & PAGEFAULT_MINOR != 0 => {
                    Access::Unmapped { write: flags & PAGEFAULT_WRITE != 0 }
                }
                _ => Access::Missing,
            },
        }));
        Ok(())
    }

    /// Has faults in the range reported. A range that is registered here already is from now on
    /// told of otherwise.
    pub(crate) fn register(&self, range: AddressRange, told: Told) -> io::Result<()> {
        let mode = match told {
            Told::Writes => REGISTER_MODE_WP,
            Told::WritesAndAccesses => REGISTER_MODE_WP | REGISTER_MODE_MINOR,
            Told::Missing => REGISTER_MODE_MISSING,
        };
        let mut register = UffdioRegister { range: range.raw(), mode, ioctls: 0 };
        // SAFETY: `register` is the structure that UFFDIO_REGISTER reads and writes; it changes
        // no content of any memory.
        unsafe { uffdio_register(self.fd.as_raw_fd(), &mut register) }?;
        Ok(())
    }

    /// Ends reports, unprotects everything and wakes whoever waits.
    ///
    /// The wake is needed although unregistering wakes too: a fault in flight may queue itself
    /// after that. For the same reason who reads faults goes on reading for a while.
    pub(crate) fn unregister(&self, range: AddressRange) -> io::Result<()> {
        let mut raw = range.raw();
        // SAFETY: reads an address range and changes no content of any memory.
        let unregistered = unsafe { uffdio_unregister(self.fd.as_raw_fd(), &mut raw) };
        self.wake(range)?;
        unregistered?;
        Ok(())
    }

    /// Lets whoever waits try again.
    pub(crate) fn wake(&self, range: AddressRange) -> io::Result<()> {
        let mut raw = range.raw();
        // SAFETY: as above.
        unsafe { uffdio_wake(self.fd.as_raw_fd(), &mut raw) }?;
        Ok(())
    }

    /// Writes to the range wait from now on.
    pub(crate) fn protect(&self, range: AddressRange) -> io::Result<()> {
        self.set_protection(range, WRITEPROTECT_MODE_WP)
    }

    /// Lets writes to the range pass, and wakes who waits.
    pub(crate) fn unprotect(&self, range: AddressRange) -> io::Result<()> {
        self.set_protection(range, 0)
    }

    fn set_protection(&self, range: AddressRange, mode: u64) -> io::Result<()> {
        let mut protect = UffdioWriteProtect { range: range.raw(), mode };
        again(|| {
            // SAFETY: `protect` is the structure that UFFDIO_WRITEPROTECT reads; it changes no
            // content of any memory.
            unsafe { uffdio_writeprotect(self.fd.as_raw_fd(), &mut protect) }.map(drop)
        })
    }

    /// Maps a page that has content, protected or not, and wakes who waits.
    pub(crate) fn map(&self, page: AddressRange, protected: bool) -> io::Result<()> {
        let mode = if protected { CONTINUE_MODE_WP } else { 0 };
        let mut request = UffdioContinue { range: page.raw(), mode, mapped: 0 };
        again(|| {
            // SAFETY: `request` is the structure that UFFDIO_CONTINUE reads and writes; it
            // changes no content of any memory.
            unsafe { uffdio_continue(self.fd.as_raw_fd(), &mut request) }.map(drop)
        })
    }

    /// Gives pages without content this content, all at once for who looks, and wakes who
    /// waits. Pages that have content keep it.
    pub(crate) fn fill(&self, start: u64, content: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < content.len() {
            let rest = &content[done..];
            let mut copy = UffdioCopy {
                dst: start + done as u64,
                src: rest.as_ptr() as u64,
                len: rest.len() as u64,
                mode: 0,
                copied: 0,
            };
            // SAFETY: `copy` is the structure that UFFDIO_COPY reads and writes; the source is
            // `rest`. What it fills is memory of the guest, into which nobody holds references.
            let result = unsafe { uffdio_copy(self.fd.as_raw_fd(), &mut copy) };
            match result {
                Ok(_) => return Ok(()),
                Err(_) if copy.copied > 0 => done += copy.copied as usize,
                Err(Errno::EAGAIN) => {}
                Err(Errno::EEXIST) => {
                    let page = AddressRange { start: copy.dst, bytes: PAGE_SIZE as u64 };
                    self.wake(page)?;
                    done += PAGE_SIZE;
                }
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// Makes a page without content zero, and wakes who waits.
    pub(crate) fn fill_zero(&self, page: AddressRange) -> io::Result<()> {
        let mut request = UffdioZeropage { range: page.raw(), mode: 0, zeroed: 0 };
        let filled = again(|| {
            // SAFETY: `request` is the structure that UFFDIO_ZEROPAGE reads and writes; it fills
            // memory of the guest only.
            unsafe { uffdio_zeropage(self.fd.as_raw_fd(), &mut request) }.map(drop)
        });
        match filled {
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => self.wake(page),
            other => other,
        }
    }
}

/// Tries again while QEMU is changing its mappings, as the kernel asks for.
fn again(mut call: impl FnMut() -> nix::Result<()>) -> io::Result<()> {
    loop {
        match call() {
            Err(Errno::EAGAIN) => continue,
            other => return other.map_err(io::Error::from),
        }
    }
}
