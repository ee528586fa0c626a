//! The sockets between the daemon and QEMU's monitors.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

/// Monitors that a VM's QEMU has.
pub const MONITORS: usize = 3;

/// The daemon's ends, for [`crate::Monitor::connect`].
#[derive(Debug)]
pub struct MonitorSockets(pub(super) [UnixStream; MONITORS]);

/// QEMU's ends. Drop them when QEMU has inherited them, or its end goes unseen.
#[derive(Debug)]
pub struct QemuEnds([OwnedFd; MONITORS]);

impl MonitorSockets {
    /// Creates pairs of connected sockets.
    pub fn create() -> io::Result<(MonitorSockets, QemuEnds)> {
        let [a, b, c] = [UnixStream::pair()?, UnixStream::pair()?, UnixStream::pair()?];
        Ok((MonitorSockets([a.0, b.0, c.0]), QemuEnds([a.1.into(), b.1.into(), c.1.into()])))
    }

    /// The sockets of another process, from [`crate::Monitor::duplicate`].
    pub fn adopt(sockets: [OwnedFd; MONITORS]) -> MonitorSockets {
        MonitorSockets(sockets.map(UnixStream::from))
    }
}

impl QemuEnds {
    /// The descriptors for [`crate::process::Launch::inherit`].
    pub fn descriptors(&self) -> [BorrowedFd<'_>; MONITORS] {
        self.0.each_ref().map(AsFd::as_fd)
    }

    /// The numbers for [`crate::Resources::monitors`].
    pub fn numbers(&self) -> [RawFd; MONITORS] {
        self.0.each_ref().map(AsRawFd::as_raw_fd)
    }
}
