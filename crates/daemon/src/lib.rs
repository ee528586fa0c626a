//! The host daemon: VMs, primaries, backups and the links between hosts.

pub mod config;
mod error;
mod host;
pub mod report;

pub use error::{ErrorKind, HostError};
pub use host::Host;
