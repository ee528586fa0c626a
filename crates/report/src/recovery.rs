//! The answer of `recover`.

use crate::status::VmStatus;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use understudy_protocol::{Generation, HostName, VmName};

/// The report of what `recover` found and did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RecoverReport {
    /// The VM.
    pub vm: VmName,
    /// The valid images, if they can be told.
    pub valid: Option<ValidImages>,
    /// The reason why it is these, or why they cannot be told.
    pub reason: String,
    /// The evidence: what each host and the arbiter said, a line each.
    pub evidence: Vec<String>,
    /// The VM, if it was started.
    pub status: Option<VmStatus>,
}

/// Images that hold a VM's newest state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ValidImages {
    /// The host that has them.
    pub host: HostName,
    /// The generation at which the guest ran on them.
    pub generation: Generation,
    /// The paths of the images, in the order of the VM's disks.
    pub images: Vec<std::path::PathBuf>,
}
