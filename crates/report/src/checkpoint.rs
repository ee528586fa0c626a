//! What checkpoints cost a guest: its pauses, the time that its output waits, and the frames that travel with epochs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use understudy_protocol::Epoch;

/// Percentiles of the checkpoint pause over the last epochs, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PauseReport {
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Longest since protection began.
    pub max: f64,
}

/// The parts of one checkpoint's pause. Milliseconds, except the counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CheckpointTiming {
    /// The epoch that the checkpoint closed.
    pub epoch: Epoch,
    /// The part of its processors that the guest had, in percent; 100 is no limit.
    pub vcpu_percent: u32,
    /// Pages copied while the guest was paused.
    pub pages: u64,
    /// Pages copied just before the pause, while the guest ran.
    pub precopied_pages: u64,
    /// QMP `stop`, until the guest stands still.
    pub stop_ms: f64,
    /// Finding the written pages.
    pub scan_ms: f64,
    /// Copying them.
    pub copy_ms: f64,
    /// Waiting for the device state after the copy.
    pub blob_ms: f64,
    /// QMP `cont`, until the guest runs.
    pub cont_ms: f64,
    /// The whole pause.
    pub total_ms: f64,
    /// Time from the end of the pause until the backup's acknowledgement.
    pub replicate_ms: f64,
    /// Time that the epoch's first output had waited when the pause began; none if there was none.
    #[serde(default)]
    pub output_waited_ms: Option<f64>,
}

/// The time that output waits: the first of each of the last epochs that had any, in milliseconds.
/// What follows it in the same epoch waits for less.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OutputReport {
    /// Time until the pause that ends its epoch, at the median …
    pub to_checkpoint_p50: f64,
    /// … and at the 99th percentile.
    pub to_checkpoint_p99: f64,
    /// Time until it leaves the host, at the median …
    pub to_release_p50: f64,
    /// … and at the 99th percentile.
    pub to_release_p99: f64,
}

/// The throttling of a guest that writes faster than the link carries.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ThrottleReport {
    /// The part of its processors that the guest may use, in percent; 100 is no limit.
    pub vcpu_percent: u32,
    /// The reason why the guest cannot be slowed down although it should be. Its epochs grow, and
    /// its output waits for them.
    pub unavailable: Option<String>,
    /// Epochs that were cut short since protection began.
    pub cut_short: u64,
    /// Written pages that the link and the backup take in a second, as far as it is known.
    pub link_pages_per_second: Option<u64>,
}

/// Frames that travel to the backup with the epoch in which the guest sent them, so that a
/// take-over does not lose what waited for its commit. Counts since protection began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OutboundReport {
    /// Frames that were carried; on the backup those of committed epochs.
    pub frames: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Frames, on the primary, over an epoch's bound, which the guest may have to repeat.
    pub left_out: u64,
}

/// Copies of what the guest receives, which the primary sends to the backup so that a
/// take-over does not lose them. Counts since protection began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct InboundReport {
    /// Frames that were forwarded.
    pub frames: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Frames over the bound, or without a connection: a client that sent one may have to
    /// repeat it after a take-over.
    pub dropped: u64,
    /// Frames, on the backup, of epochs that are not committed.
    pub kept_frames: u64,
    /// Their bytes.
    pub kept_bytes: u64,
}
