//! Whether output waits for its commit.
//!
//! [`Output::Held`] is output commit, and the only mode in which a VM counts as protected.
//! [`Output::Unheld`] exists to measure what holding output costs (the UDESC study's
//! figures 14 and 15): frames leave at once, so a fail-over goes back behind what clients
//! have seen. There is one live copy all the same: without acknowledgements to wait for,
//! the primary lets output go under a lease. Each acknowledgement renews it, counted from
//! the moment its epoch was captured; the backup, which acknowledged later than that, does
//! not contest the VM before the lease has surely run out.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The treatment of the guest's output while a backup stands by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Output {
    /// Every frame waits until its epoch is on the backup.
    #[default]
    Held,
    /// Frames leave at once: no output commit.
    Unheld,
}

impl Output {
    /// Whether this is the default, which is not worth a word on the wire.
    pub fn is_held(&self) -> bool {
        *self == Output::Held
    }
}

/// Time after an epoch's capture for which its acknowledgement lets unheld output go.
pub(crate) const LEASE: Duration = Duration::from_secs(1);

/// Time that the backup waits after its last acknowledgement before it contests a VM whose
/// output is not held: longer than [`LEASE`] by far more than two clocks differ in it.
pub(crate) const LEASE_IS_OVER: Duration = Duration::from_millis(1_100);
