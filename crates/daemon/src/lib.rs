//! The host daemon: VMs, primaries, backups and the links between hosts.

mod admission;
mod arbiter;
mod backup;
mod channel;
mod clock;
pub mod config;
mod doorbell;
mod error;
mod group;
mod handshake;
mod heartbeat;
mod host;
mod incoming;
mod lifecycle;
mod link;
mod machine;
mod paths;
pub mod pki;
mod primary;
mod records;
mod recover;
pub mod report;
mod resync;
mod room;
mod sync;
mod tls;
mod vm;

pub use error::{ErrorKind, HostError};
pub use host::Host;
