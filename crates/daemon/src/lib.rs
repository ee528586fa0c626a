//! The host daemon: VMs, primaries, backups and the links between hosts.

mod admission;
mod arbiter;
mod backup;
mod cgroup;
mod channel;
mod clock;
pub mod config;
mod doorbell;
mod error;
pub mod etcd;
mod group;
mod handshake;
mod heartbeat;
mod home;
mod host;
mod incoming;
mod lifecycle;
mod link;
mod machine;
mod membership;
mod paths;
mod pause;
pub mod pki;
mod primary;
mod records;
mod recover;
mod repair;
pub mod report;
mod resync;
mod room;
mod survey;
mod sync;
mod tls;
mod vm;

pub use error::{ErrorKind, HostError};
pub use host::Host;
