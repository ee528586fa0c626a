//! The report about a VM in lockstep.

use crate::comparison::ComparisonCounts;
use crate::requests::DiskReads;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A VM in lockstep, as one of its hosts sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LockstepReport {
    /// Milliseconds for which the backup has had log that it has not executed.
    pub lag_ms: f64,
    /// Instructions that the primary is known to be ahead.
    pub lag_instructions: u64,
    /// Log of the last seconds, in Mbit/s.
    pub log_mbit_s: f64,
    /// Frames that wait for the acknowledgement of their log.
    pub held_frames: u64,
    /// Whether QEMU stands still for the log: a primary's because the backup takes no more, a
    /// backup's because there is none.
    pub blocked: bool,
    /// Source from which the backup gets what its guest reads from its disks.
    #[serde(default)]
    pub disk_reads: DiskReads,
    /// Data of disk reads that travel, in Mbit/s before they are compressed. Not part of
    /// `log_mbit_s`.
    #[serde(default)]
    pub disk_read_mbit_s: f64,
    /// Counts of the backup's comparisons; none before the first time, and none on a backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub comparison: Option<ComparisonCounts>,
}
