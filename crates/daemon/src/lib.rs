//! The host daemon: VMs, primaries, backups and the links between hosts.

mod admission;
mod arbiter_watch;
mod arrivals;
mod boot;
mod closing;
pub mod config;
pub mod containment;
mod expiry;
mod gate;
mod group;
mod hand_back;
mod host;
mod incoming;
mod lifecycle;
mod medium;
mod membership;
mod memory_pressure;
mod orphans;
mod peers;
pub mod probe;
mod protection;
mod pulse;
mod recover;
mod repair;
mod room;
pub mod setup;
pub mod snapshot;
mod succession;
mod survey;
mod turn;
mod vm;
mod webhook;

pub use host::{ADDRESS_PATIENCE, Host};
pub use pulse::Pulse;
pub use understudy_link::{pki, tls::ApiTls};
pub use understudy_machine::custody;
