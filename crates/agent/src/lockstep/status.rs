// SPDX-License-Identifier: GPL-2.0-or-later
//! What the daemon sees of the log without asking: one page of shared memory.

use std::ffi::c_int;
use std::io;
use std::sync::atomic::AtomicU64;

/// First word of the page; `understudy_lockstep` reads the same.
const MAGIC: u64 = u64::from_le_bytes(*b"USTDYLK1");

/// Words are written by the agent alone, read by the daemon.
#[repr(C)]
pub struct Status {
    magic: AtomicU64,
    /// Primary: bytes of log that QEMU has written and that left through the agent.
    /// Backup: bytes of log that QEMU has taken, without what its buffer still holds.
    pub position: AtomicU64,
    /// Since when QEMU stands still for the log (primary: no room, backup: none left), in
    /// nanoseconds of the monotonic clock; 0 if it does not.
    pub blocked_since: AtomicU64,
    /// Nanoseconds that it stood still, without the present wait.
    pub blocked: AtomicU64,
    /// Instructions executed, as of the last event.
    pub instructions: AtomicU64,
    /// Kind of the event that replay waits to execute.
    pub event: AtomicU64,
    /// Frames that the guest has sent.
    pub frames: AtomicU64,
}

impl Status {
    /// Maps the page that the daemon made.
    pub fn map(fd: c_int) -> io::Result<&'static Status> {
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                std::mem::size_of::<Status>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd,
                0,
            )
        };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a page of zeroes is a good `Status`; it is never unmapped.
        let status = unsafe { &*page.cast::<Status>() };
        status.magic.store(MAGIC, std::sync::atomic::Ordering::Release);
        Ok(status)
    }
}

/// The monotonic clock, in nanoseconds.
pub fn now() -> u64 {
    // SAFETY: fills the plain structure that it gets.
    let time = unsafe {
        let mut time: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time);
        time
    };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
