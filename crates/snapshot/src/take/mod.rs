//! The taking of a snapshot of a group: one coordinator, a cohort for each member on the host
//! that runs it. All members are in it, or there is none.
//!
//! ```text
//! coordinator                                  cohort
//!     ── PREPARE n ──▶    arms write protection while the guest runs
//!     ◀─ PREPARED ───
//!     ── TAKE ───────▶    pause, capture, go on (see crate::cut for the moment)
//!     ◀─ TAKEN ──────     saves by copy-on-write and in the background, traces first accesses
//!     ◀─ SAVED ──────     all its chunks are in the store, its log of frames is complete
//!   publish: the manifest is written
//!     ── COMMIT ─────▶    the next snapshot is saved as the difference from this one
//! ```
//!
//! Until the manifest is written a failure of any member gives the snapshot up for all: what
//! was written is swept, and the guests go on, as they do all the time. Once it is written, the
//! snapshot exists whatever happens. A cohort that never hears which of the two it was treats
//! the snapshot as given up: it saves more the next time than it need.

mod cohort;
mod coordinator;
mod gate;

pub use cohort::{TakeAction, TakeCohort, TakeCohortPhase, TakeEvent};
pub use coordinator::{Taker, TakerAction, TakerEvent, TakerPhase};
pub use gate::Gate;

use crate::SnapshotNumber;
use crate::format::Blob;
use crate::graph::Crossing;
use serde::{Deserialize, Serialize};

/// An order of the coordinator to a cohort.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TakeOrder {
    /// A snapshot is to be taken soon.
    Prepare,
    /// The snapshot is to be taken now. Said again while the member saves, to learn how it goes.
    Take,
    /// The snapshot exists.
    Commit,
    /// The snapshot is given up.
    Abandon,
}

/// A report of a cohort to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TakeReport {
    /// The member prepares.
    Preparing,
    /// The member could take the snapshot.
    Prepared,
    /// The snapshot was taken; the member saves.
    Taken,
    /// All is in the store.
    Saved(Part),
    /// The member knows that the snapshot exists.
    Committed,
    /// The member has failed, and its guest goes on.
    Failed {
        /// The reason.
        why: String,
    },
    /// The member has given the snapshot up as it was told.
    Abandoned,
}

/// One member's part, whole in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Its [`MemberManifest`](crate::MemberManifest).
    pub manifest: Blob,
    /// The frames in flight to it, by sender.
    pub crossings: Vec<Crossing>,
}

/// An order or a report, and the snapshot that it is about: what comes late must not be taken
/// for something about the next one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct About<T> {
    /// The snapshot.
    pub number: SnapshotNumber,
    /// The order or report.
    pub said: T,
}

#[cfg(test)]
mod tests;
