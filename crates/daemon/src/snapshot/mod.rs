//! Snapshots of groups, and their restore: the daemon's part (docs/cluster.md). What is decided
//! about them is in `understudy_snapshot`; here orders and reports are carried between hosts,
//! and carried out.
//!
//! | module | is |
//! |--------|----|
//! | [`take`], [`restore`] | one member, on its host: a cohort and its threads |
//! | [`command`], [`taker`], [`restorer`] | the daemon that got the command: a coordinator |
//! | [`library`] | what is in a store: list, delete, verify |
//! | [`capture`] | all of one member that a snapshot has |
//! | [`words`], [`exchange`] | what hosts say to each other, and how |
//! | [`prepare`] | from a part of a snapshot to a VM that runs |
//! | [`placement`] | who may be restored where, asked before anything is started |
//! | [`memory`], [`fill`], [`disk`] | what is captured, and filled in again |
//! | [`frames`] | frames between members, and those in flight |
//! | [`report`] | what users ask for and are told |

mod capture;
mod command;
mod disk;
mod exchange;
mod fill;
pub(crate) mod frames;
mod library;
mod memory;
mod placement;
mod prepare;
pub mod report;
mod restore;
mod restorer;
mod take;
mod taker;
mod words;

pub(crate) use exchange::serve;
pub(crate) use placement::Question;

use crate::sync::lock;
use restore::Restoring;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use take::Taking;

/// What a store gives in a second, as long as nothing was read from it.
const ASSUMED_SPEED: u64 = 100_000_000;

/// What a host does for snapshots and restores, by VM.
#[derive(Default)]
pub(crate) struct Snapshots {
    takings: Mutex<BTreeMap<String, Arc<Taking>>>,
    restorings: Mutex<BTreeMap<String, Arc<Restoring>>>,
    /// Bytes a second that were read from a store last; 0 if that is not known.
    speed: AtomicU64,
}

impl Snapshots {
    /// Bytes a second that this host reads from a store.
    fn speed(&self) -> u64 {
        match self.speed.load(Ordering::Relaxed) {
            0 => ASSUMED_SPEED,
            known => known,
        }
    }

    /// Whether a restore of the VM is under way.
    pub(crate) fn is_restoring(&self, vm: &str) -> bool {
        let restoring = lock(&self.restorings).get(vm).cloned();
        restoring.is_some_and(|restoring| restoring.is_under_way())
    }

    /// Whether a snapshot of the VM is under way.
    pub(crate) fn is_taking(&self, vm: &str) -> bool {
        let taking = lock(&self.takings).get(vm).cloned();
        taking.is_some_and(|taking| taking.is_under_way())
    }

    /// How far the memory of a restored VM is there; none if it was not restored, or is whole.
    pub(crate) fn filling(&self, vm: &str) -> Option<fill::FillState> {
        let restoring = lock(&self.restorings).get(vm).cloned();
        restoring?.fill_state().filter(|state| !state.complete)
    }
}

/// Work was told to end.
#[derive(Debug, thiserror::Error)]
#[error("it was stopped")]
struct Stopped;

impl Stopped {
    /// An error once `stop` is set.
    fn check(stop: &AtomicBool) -> Result<(), Stopped> {
        match stop.load(Ordering::Acquire) {
            true => Err(Stopped),
            false => Ok(()),
        }
    }
}

/// Seconds since 1970.
fn unix_now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
