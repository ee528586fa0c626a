//! Traces of the memory that a guest touches after a snapshot, and after a restore: written for
//! trials (`understudy-lab bench restore`) into the directory that a variable of the daemon's
//! environment names, a file for each VM that the next snapshot or restore of it replaces.

use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use understudy_protocol::VmName;

/// Names the directory.
pub const VARIABLE: &str = "UNDERSTUDY_TRACES";

/// The memory that a guest touched while its snapshot was traced.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotTrace {
    /// Pages of main memory in the order of their accesses; with `recency` a page that is touched
    /// again is there again, every tenth of a second at most.
    pub accesses: Vec<u64>,
}

/// The memory that a guest touched in the first seconds after its restore.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreTrace {
    /// Pages of main memory, each once, in the order of their first access. None if they were
    /// not all there at the start: then it is not seen which of those are touched that are.
    pub touched: Option<Vec<u64>>,
    /// The number of times that it waited for a page that was not there.
    pub waits: u64,
}

impl SnapshotTrace {
    /// The path of a VM's trace.
    pub fn path(directory: &Path, vm: &VmName) -> PathBuf {
        directory.join(format!("{vm}-snapshot.json"))
    }
}

impl RestoreTrace {
    /// The path of a VM's trace.
    pub fn path(directory: &Path, vm: &VmName) -> PathBuf {
        directory.join(format!("{vm}-restore.json"))
    }
}
