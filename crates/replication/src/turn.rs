//! Turning a protected VM from checkpoints to lockstep, or back: what two hosts say about it.
//!
//! The turn is an epoch like others, a checkpoint at whose end the log begins or with which it
//! ends. So at each moment the backup can go live from the last epoch that it acknowledged, by
//! the same rules. What is needed for it, a QEMU that replays or one that records, is started
//! beside the one that there is, before.

use serde::{Deserialize, Serialize};
use understudy_qemu::ClockBase;
use understudy_report::{DiskReads, Mode, ProtectRequest};

/// An order of the primary to its backup.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Start a QEMU for the other way; the one that there is goes on.
    Prepare(Box<Wanted>),
    /// The other way will not be needed.
    Cancel,
}

/// The other way.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Wanted {
    /// Mode in which the backup is to keep up.
    pub mode: Mode,
    /// Source, in lockstep, from which it gets what its guest reads.
    pub disk_reads: DiskReads,
    /// Base of the guest's clocks.
    pub clock: ClockBase,
    /// The build of the primary's QEMU.
    pub qemu_build: Option<String>,
    /// Request of the operator from then on.
    pub wish: ProtectRequest,
}

/// The answer of the backup to it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// The backup is ready.
    Ready,
    /// The backup cannot, for this reason.
    Refused(String),
}
