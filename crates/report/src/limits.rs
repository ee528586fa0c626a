//! The report of what a QEMU may use of its host.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The most that a VM's QEMU may use of its host. If it takes more memory the kernel ends it, and no
/// other VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LimitsReport {
    /// Memory, the guest's included; none if it is not limited.
    pub memory_bytes: Option<u64>,
    /// Memory that it takes of that now. What its daemon touched first, as it does of a backup's,
    /// is not counted here.
    pub memory_used_bytes: Option<u64>,
    /// Threads; none if they are not limited.
    pub threads: Option<u64>,
    /// Number of open files.
    pub descriptors: u64,
    /// Limits that could not be set, and why.
    pub missing: Vec<String>,
}
