//! The reports of the daemon to its users, and their requests: the types behind `status`, `--json`
//! and the API, events, and what is counted.
//!
//! | module | is |
//! |---|---|
//! | [`status`] | how hosts and VMs are |
//! | [`checkpoint`] | what checkpoints cost a guest |
//! | [`lockstep`] | how VMs in lockstep are |
//! | [`limits`] | what a QEMU may use of its host |
//! | [`requests`] | what is asked for |
//! | [`recovery`] | what `recover` found and did |
//! | [`cluster`] | snapshots and restores |
//! | [`comparison`] | two machines in lockstep, compared |
//! | [`events`] | what happened |
//! | [`traces`] | which memory a guest touches, for trials |
//! | [`meters`] | what is counted for a monitoring system |
//! | [`upgrade`] | what an upgrade does to VMs |
//! | [`error`] | errors that reach the user |

pub mod checkpoint;
pub mod cluster;
pub mod comparison;
pub mod error;
pub mod events;
pub mod limits;
pub mod lockstep;
pub mod meters;
pub mod recovery;
pub mod requests;
pub mod status;
pub mod traces;
pub mod upgrade;

pub use checkpoint::*;
pub use cluster::{FillReport, FillState};
pub use comparison::{ComparisonCounts, ComparisonReport, Difference, Part};
pub use error::{ErrorKind, HostError};
pub use limits::LimitsReport;
pub use lockstep::LockstepReport;
pub use meters::Meters;
pub use recovery::{RecoverReport, ValidImages};
pub use requests::{
    AgainRequest, DiskReads, GroupRequest, MediumRequest, Mode, ProtectRequest, RecoverRequest,
    StartRequest,
};
pub use status::*;
