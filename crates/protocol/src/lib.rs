//! The sans-I/O core: epochs, output commit, ownership, policies and the wire format.
//!
//! Nothing in this crate reads a clock, a file or a socket: the daemon and the
//! simulator drive the same code.

/// Whether this bug is planted: never, but in the simulator (`mutant`). For this crate, and for
/// those that decide by it.
#[cfg(feature = "mutants")]
#[macro_export]
macro_rules! planted {
    ($mutant:ident) => {
        $crate::mutant::is_planted($crate::mutant::Mutant::$mutant)
    };
}
/// Whether this bug is planted: never. The simulator's is `understudy-protocol-planted`.
#[cfg(not(feature = "mutants"))]
#[macro_export]
macro_rules! planted {
    ($mutant:ident) => {
        false
    };
}

pub mod adoption;
pub mod autostart;
mod backup;
mod delivery;
mod detector;
mod epoch_length;
mod frames;
mod group;
mod inbound;
mod lease;
#[cfg(feature = "mutants")]
pub mod mutant;
mod names;
mod outbound;
mod output;
mod ownership;
mod paths;
mod policy;
mod primary;
pub mod repair;
mod room;
mod silence;
mod spoken;
mod staging;
mod stillness;
mod throttle;
mod time;
mod units;
pub mod validity;
mod window;
pub mod wire;

pub use backup::{Backup, BackupAction, BackupEvent, BackupPhase};
pub use delivery::{Behind, EPOCH_BOUND, Headway};
pub use detector::{Beats, Detector, TICK, heartbeat_interval};
pub use epoch_length::{EndedEpoch, EpochLength};
pub use frames::{Allowance, CardFrames, KEPT_FOR};
pub use group::{Arrival, Gate, GroupStaging, GroupStep, Rendezvous};
pub use inbound::{FORWARDED_BYTES, Kept};
pub use lease::{
    Lease, LeaseAction, LeaseAnswer, LeaseErrand, LeaseSight, LeaseWatch, Renewal, Stake,
};
pub use names::{GroupName, HostName, NameError, VmName, literal};
pub use outbound::{CARRIED_BYTES, Carried};
pub use output::Output;
pub use ownership::{Ownership, Verdict};
pub use paths::{PathAction, PathEvent, PathState, Paths};
pub use policy::{Activity, Due, LastCheckpoint, Policy, Situation};
pub use primary::{PIPELINE_DEPTH, Primary, PrimaryAction, PrimaryEvent, PrimaryPhase, STALL};
pub use room::{EpochRoom, QueueRoom, Turn};
pub use silence::{DISK_BOUND, Silence};
pub use spoken::Spoken;
pub use staging::{EpochDigest, EpochEnd, EpochSums, StagedEpoch, Staging};
pub use stillness::{PeerClock, Stillness};
pub use throttle::{MOST_PRECOPIED_PAGES, Throttle};
pub use time::Time;
pub use units::*;
pub use window::{Count, ReceiveWindow, SendWindow, WrongCount};
