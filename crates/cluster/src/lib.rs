//! Parts of a VM that a snapshot of its group has, and how they get back into one: memory and disks
//! of a [`Machine`](understudy_machine::Machine), captured into a store and filled in again. What
//! is decided is in `understudy_snapshot`; who does it when is the daemon's.
//!
//! | module | is |
//! |---|---|
//! | [`messages`] | what hosts say to each other about snapshots and restores |
//! | [`memory`], [`disk`] | captured while the guest runs |
//! | [`kept`] | the same of a protected VM, which its backup stores |
//! | [`part`], [`boot_files`], [`crossing`] | how it is described in the store |
//! | [`fill`], [`disk_fill`], [`early`] | filled in again; what a start waits for comes first ([`Loading`]) |
//! | [`source`] | the way to the store, which all restored guests of a host share |
//! | [`store_keys`] | the keys of encrypted stores |
//! | [`upload`] | the way of what is captured to the store |
//! | [`trial`] | for trials: which memory guests touch |

pub mod boot_files;
pub mod crossing;
pub mod disk;
pub mod disk_fill;
pub mod early;
pub mod fill;
pub mod kept;
mod loading;
pub mod memory;
pub mod messages;
pub mod part;
pub mod source;
pub mod store_keys;
pub mod trial;
pub mod upload;

pub use loading::Loading;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Word to work that it is to end. It looks for that again and again, and so tells whoever waits for it that
/// it goes on.
#[derive(Debug, Default)]
pub struct Stop {
    is_said: AtomicBool,
    looks: AtomicU64,
}

impl Stop {
    /// Says it.
    pub fn say(&self) {
        self.is_said.store(true, Ordering::Release);
    }

    /// Whether it is said.
    pub fn is_said(&self) -> bool {
        self.is_said.load(Ordering::Acquire)
    }

    /// An error once it is said.
    pub fn check(&self) -> Result<(), Stopped> {
        self.looks.fetch_add(1, Ordering::Relaxed);
        Stopped::check(&self.is_said)
    }

    /// How often the work has looked.
    pub fn looks(&self) -> u64 {
        self.looks.load(Ordering::Relaxed)
    }
}

/// Work was told to end.
#[derive(Debug, thiserror::Error)]
#[error("it was stopped")]
pub struct Stopped;

impl Stopped {
    /// An error once `stop` is set.
    pub fn check(stop: &AtomicBool) -> Result<(), Stopped> {
        match stop.load(Ordering::Acquire) {
            true => Err(Stopped),
            false => Ok(()),
        }
    }
}
