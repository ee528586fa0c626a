//! Planted bugs: the driver does what it must not, and the checks must notice.
//!
//! The product has none of this: each is a deviation of the simulated host
//! from what the core told it to do.

use serde::Serialize;

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mutant {
    /// The backup acknowledges an epoch whose end has not arrived.
    AckBeforeStaged,
    /// The primary releases the epoch after the one that was acknowledged too.
    ReleaseEarly,
    /// The backup goes live without asking the arbiter.
    SkipArbiter,
    /// The backup applies data as it arrives, not when the epoch is whole.
    ApplyPartialEpoch,
    /// A checkpoint closes its epoch without a barrier in the output.
    LoseBarrier,
    /// The primary takes each heartbeat for a sign that its epochs move.
    HeartbeatsSuffice,
    /// A winner that cannot start the VM keeps it.
    KeepTheGrant,
    /// A copy that was handed back lets output out before that is on record.
    OpenBeforeRecord,
    /// A primary whose guest cannot be saved contests the VM.
    ContestWhenSick,
    /// A standby whose disk hangs contests the VM.
    ContestUnfit,
}

impl Mutant {
    /// All of them.
    pub const ALL: [Mutant; 10] = [
        Mutant::AckBeforeStaged,
        Mutant::ReleaseEarly,
        Mutant::SkipArbiter,
        Mutant::ApplyPartialEpoch,
        Mutant::LoseBarrier,
        Mutant::HeartbeatsSuffice,
        Mutant::KeepTheGrant,
        Mutant::OpenBeforeRecord,
        Mutant::ContestWhenSick,
        Mutant::ContestUnfit,
    ];
}
