//! QEMU's monitor protocol.
//!
//! Each QEMU has two monitors, both socket pairs that it inherits: one for
//! commands, used by the thread that checkpoints, without any hand-over between
//! threads; one for events, read by a thread of its own.

mod connection;
mod device_state;
mod events;
mod monitor;
mod ram_blocks;

pub use connection::{QemuVersion, QmpError};
pub use device_state::DeviceState;
pub use events::{VmEvent, watch_events};
pub use monitor::{Checkpoint, Monitor};
pub use qapi::qmp::RunState;
pub use ram_blocks::RamBlockInfo;

pub(crate) use connection::Connection;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// Both ends of one monitor's socket.
#[derive(Debug)]
pub struct MonitorSocket {
    /// The daemon's end, for [`Monitor::connect`] or [`watch_events`].
    pub ours: UnixStream,
    /// QEMU's end: pass it on, then drop it, or the end of QEMU goes unseen.
    pub qemus: OwnedFd,
}

impl MonitorSocket {
    /// A new pair of connected sockets.
    pub fn pair() -> io::Result<MonitorSocket> {
        let (ours, qemus) = UnixStream::pair()?;
        Ok(MonitorSocket { ours, qemus: qemus.into() })
    }
}
