//! When to checkpoint.

use serde::{Deserialize, Serialize};

/// When the primary takes a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Policy {
    /// A fixed rate, as in Remus.
    Interval {
        /// Checkpoints a second, 1 to 1 000.
        hz: u32,
    },
    /// As soon as there is output to release and the last checkpoint is
    /// committed, inside a pause budget; without output, epochs stretch.
    Adaptive {
        /// The longest epoch, in milliseconds, 1 to 10 000.
        max_epoch_ms: u32,
        /// The most time the guest may stand paused, in percent, 1 to 90.
        pause_budget_percent: u32,
    },
}

impl Default for Policy {
    fn default() -> Policy {
        Policy::Adaptive { max_epoch_ms: 200, pause_budget_percent: 25 }
    }
}
