//! Replication modes, as the command line names them.

use clap::ValueEnum;
use understudy_report::Mode;

/// Replication modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModeKind {
    /// Checkpoints: the backup gets what the guest wrote, many times a second.
    Checkpoint,
    /// The backup executes the guest's instructions too; for guests with one vCPU, under TCG.
    Lockstep,
}

impl From<ModeKind> for Mode {
    fn from(kind: ModeKind) -> Mode {
        match kind {
            ModeKind::Checkpoint => Mode::Checkpoint,
            ModeKind::Lockstep => Mode::Lockstep,
        }
    }
}
