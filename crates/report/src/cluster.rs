//! The requests of users about clusters, and the reports that they get.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use understudy_protocol::{GroupName, HostName, VmName};
use understudy_snapshot::{
    Compression, Incarnation, Mode, SnapshotNumber, TraceTime, WorkingSetFactor,
};

/// The progress of loading a restored VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FillReport {
    /// Its memory; "stalled" and "complete" are about its disks too.
    #[serde(flatten)]
    pub memory: FillState,
    /// Blocks of its disks that are there.
    pub disk_blocks: u64,
    /// Blocks of its disks that have content in the snapshot.
    pub all_disk_blocks: u64,
}

/// A snapshot is to be taken.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SnapshotRequest {
    /// The store where it is kept; the group's own store without.
    pub store: Option<String>,
    /// Name that its user gives it; retention never deletes it then.
    pub label: Option<String>,
    /// The compression of its chunks.
    pub compression: Compression,
    /// Time for which first accesses to memory are traced after the pause, in milliseconds, a minute at
    /// most; 7 s without.
    pub trace_ms: Option<TraceTime>,
    /// Trace repeated accesses too: for `--mode working-set`.
    pub recency: bool,
}

/// A snapshot that exists.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SnapshotReport {
    /// The group.
    pub group: GroupName,
    /// Its number.
    pub number: SnapshotNumber,
    /// Name that its user gave it.
    pub label: Option<String>,
    /// The store where it is.
    pub store: String,
    /// Time at which it was taken, in seconds since 1970.
    pub taken_at: u64,
    /// The members.
    pub members: Vec<SnapshotMember>,
    /// The reason why it cannot be restored, if that is so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub damage: Option<String>,
}

/// A member of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SnapshotMember {
    /// The VM.
    pub vm: VmName,
    /// The host that it ran on.
    pub host: HostName,
    /// Bytes of its memory.
    pub memory: u64,
}

/// A snapshot is to be restored.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RestoreRequest {
    /// Number of the snapshot; the last without.
    pub number: Option<SnapshotNumber>,
    /// The store where it is; the group's own store without.
    pub store: Option<String>,
    /// The mode of the restore.
    pub mode: Mode,
    /// The part of the working set that is loaded before the start.
    pub working_set: WorkingSetFactor,
    /// The hosts that members may be restored on; where they ran without.
    pub onto: Vec<HostName>,
    /// Hosts that do not answer are down for good, says the operator: what the arbiter's record
    /// says that they run does not run.
    pub force: bool,
    /// Whether to answer only when all of the memory is loaded.
    pub wait: bool,
}

/// A restored group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RestoreReport {
    /// The group.
    pub group: GroupName,
    /// The snapshot.
    pub number: SnapshotNumber,
    /// The group's incarnation from now on.
    pub incarnation: Incarnation,
    /// The mode in which it was restored.
    pub mode: Mode,
    /// The members.
    pub members: Vec<RestoredMember>,
    /// Differences of the starts of members that had frames in flight to each other; of all
    /// members if none had.
    pub backoff_ms: Backoff,
    /// Warnings of what did not go as it should, and did no harm.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// A restored member. Times are since the command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RestoredMember {
    /// The VM.
    pub vm: VmName,
    /// The host that runs it.
    pub host: HostName,
    /// Pages that its start waited for.
    pub pages_before_start: u64,
    /// Milliseconds until it could start.
    pub loaded_ms: f64,
    /// Milliseconds until it ran.
    pub started_ms: f64,
    /// Milliseconds until nothing was left to load, if that was waited for.
    pub restored_ms: Option<f64>,
}

/// Milliseconds for which members spoke to others that did not run yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Backoff {
    /// Mean of all pairs.
    pub mean: f64,
    /// The longest.
    pub max: f64,
    /// The median.
    pub median: f64,
}

impl Backoff {
    /// Makes that of these differences.
    pub fn of(mut differences: Vec<f64>) -> Backoff {
        differences.sort_by(f64::total_cmp);
        let Some(&max) = differences.last() else { return Backoff::default() };
        let mean = differences.iter().sum::<f64>() / differences.len() as f64;
        Backoff { mean, max, median: differences[differences.len() / 2] }
    }
}

/// The result of a check of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VerifyReport {
    /// The group.
    pub group: GroupName,
    /// The snapshot.
    pub number: SnapshotNumber,
    /// Chunks that were read and checked.
    pub chunks: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// The problems; empty if the snapshot is whole.
    pub problems: Vec<String>,
}

/// The result of a deletion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeleteReport {
    /// The group.
    pub group: GroupName,
    /// The snapshot.
    pub number: SnapshotNumber,
    /// The fate of its chunks.
    pub chunks: String,
}

/// The progress of loading a restored member's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FillState {
    /// Pages that are there.
    pub pages: u64,
    /// Pages that have content in the snapshot.
    pub all: u64,
    /// The reason why the guest may stand still, if the store does not answer.
    pub stalled: Option<String>,
    /// Whether nothing is left to load.
    pub complete: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: the VM could not be protected for a day.
    #[test]
    fn nobody_asks_for_a_trace_of_a_day() {
        let request =
            |ms: u64| serde_json::from_str::<SnapshotRequest>(&format!("{{\"trace_ms\": {ms}}}"));
        assert_eq!(request(60_000).unwrap().trace_ms.map(u64::from), Some(60_000));
        let error = request(86_400_000).unwrap_err().to_string();
        assert!(
            error.contains("86400000 ms is not how long") && error.contains("0 to 60 s"),
            "{error}"
        );
    }
}
