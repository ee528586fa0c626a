//! Ownership of VMs: one (host, generation) record for each key, changed by
//! compare-and-swap only.
//!
//! A key is the name of a VM, or of a group that is owned as one. Every answer that does not come
//! is [`Verdict::Unreachable`](understudy_protocol::Verdict): nothing may be concluded from it.
//!
//! Another kind of arbiter is a file beside `file.rs` and `in_etcd.rs`, a variant of
//! [`ArbiterConfig`] and of `arbiter.rs`'s `Kind`, and its section in the daemon's configuration.

mod arbiter;
mod config;
pub mod descriptors;
pub mod etcd;
mod file;
mod identity;
mod in_etcd;
mod key;
pub mod whole_file;

pub use arbiter::{Arbiter, Unreachable};
pub use config::{ArbiterConfig, EtcdConfig, EtcdEndpoints, EtcdTls};
pub use file::try_directory;
pub use identity::{ArbiterId, ArbiterName, MEMORY};
pub use key::Key;
