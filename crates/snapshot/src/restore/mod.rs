//! The restore of a group (HotRestore, restore protocol): one coordinator, a cohort for each
//! member on the host that will run it.
//!
//! ```text
//! coordinator                                  cohort
//!     ── LOAD pages ─▶    prepares QEMU, loads that much of the queue
//!     ◀─ LOAD_FIN ──      goes on loading while it waits
//!     ── START ─────▶     frames in flight delivered, device state loaded, runs
//!     ◀─ START_FIN ─      loads the rest in the order of the queue, on demand first
//!     ── SETTLE ────▶     all members run, and it is decided that they stay
//!     ◀─ RESTORE_FIN ─    all is loaded
//! ```
//!
//! Orders are repeated and answered with the present state, so that lost messages do no harm.
//! Until all members have started, one failure ends the restore for all: what was started is
//! stopped, the snapshot is as it was, and the restore can be tried again. Afterwards a
//! failure is the failed VM's alone. Between the two lies a decision that the arbiter keeps, so
//! that all come to the same: that the members stay (the coordinator, once all have started), or
//! that they do not (a cohort that has started its VM and hears nothing from the coordinator).
//! Whoever is first has decided. A cohort that has not started its VM gives it up without asking.

mod cohort;
mod coordinator;
mod decision;
mod former;

pub use cohort::{Cohort, CohortAction, CohortEvent, CohortPhase};
pub use coordinator::{Line, RestoreAction, RestoreEvent, RestorePhase, Restorer};
pub use decision::Decision;
pub use former::Former;

use serde::{Deserialize, Serialize};

/// An order of the coordinator to a cohort.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// LOAD: load so many pages of the queue, and everything else that a start needs.
    Load {
        /// Pages.
        pages: u64,
    },
    /// START: let the VM run.
    Start,
    /// SETTLE: all members run, the restore will not be taken back.
    Settle,
    /// The restore has failed: stop the VM, discard what was loaded.
    Abort,
}

impl Order {
    /// Whether a host that knows nothing of the restore begins it with this. One that was told of before its
    /// daemon began, or is long over, is not begun again.
    pub fn begins(self) -> bool {
        matches!(self, Order::Load { .. })
    }
}

/// A report of a cohort to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Report {
    /// The member loads, and has got so far.
    Loading {
        /// Pages.
        pages: u64,
    },
    /// LOAD_FIN: it could start.
    LoadFin,
    /// The member is about to start.
    Starting,
    /// START_FIN: the VM runs.
    StartFin,
    /// RESTORE_FIN: the VM runs, and nothing is left to load.
    RestoreFin,
    /// The member is given up, and not everything is discarded yet.
    Ending,
    /// The member has failed, and discarded everything.
    Failed {
        /// The reason.
        why: String,
    },
    /// The member has discarded everything as it was told.
    Aborted,
}

#[cfg(test)]
mod tests;
