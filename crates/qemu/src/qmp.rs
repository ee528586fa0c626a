//! QEMU's monitor protocol.
//!
//! Each QEMU has three monitors, socket pairs that it inherits. Two are for
//! commands, used by the thread that checkpoints, without any hand-over between
//! threads: while one stops the guest, the other is ready to save its devices.
//! The third is for events, which are heard beside all that ([`Events`]).

mod connection;
mod device_state;
mod events;
mod medium;
mod monitor;
mod ram_blocks;
mod sockets;

pub use connection::{QemuVersion, QmpError};
pub use device_state::DeviceState;
pub use events::{Events, VmEvent};
pub use medium::EjectError;
pub use monitor::{Checkpoint, Monitor};
pub use qapi::qmp::RunState;
pub use ram_blocks::RamBlockInfo;
pub use sockets::{MONITORS, MonitorSockets, QemuEnds};

pub(crate) use connection::Connection;
