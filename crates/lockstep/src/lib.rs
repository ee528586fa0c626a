//! Lockstep mode without I/O or clock (VMware FT; docs/lockstep.md).
//!
//! The primary's QEMU writes a log of everything that is not determined; the backup's QEMU
//! executes the same instructions by it. Who may take over, and when output may leave, is
//! decided by the same machines as in checkpoint mode, [`understudy_protocol::Primary`] and
//! [`understudy_protocol::Backup`]: **a batch of log is their epoch**. Batch 1 is the
//! machine as it was copied; a batch is acknowledged when it was received, before it is
//! replayed, and frames of batch *n* leave when *n* is acknowledged.
//!
//! | what | where |
//! |---|---|
//! | places in the log, and the bounds of its events | [`LogPosition`], [`EventScanner`] |
//! | primary: cuts the log into batches, bounded | [`Batcher`] |
//! | backup: what was acknowledged goes to its QEMU, whole events only, to the last | [`Feed`] |
//! | disk reads whose data travel with the log | [`DiskRead`], [`ReadScript`] |
//! | which changes of the disks both hosts have | [`Written`], [`Rounds`] |
//! | how far the backup is behind, and the primary's share of CPU | [`Lag`], [`Pace`] |
//! | a backup that replays no more | [`Watchdog`] |
//! | both machines compared at a place of the log | [`Comparison`], [`Findings`], [`Inquiry`] |

mod batch;
mod comparison;
mod event;
mod feed;
mod inquiry;
mod lag;
mod pace;
mod position;
mod reads;
mod watchdog;
mod writes;

pub use batch::{Batcher, LogEnd, NotTheEnd};
pub use comparison::{
    BadComparison, CHECKSUM_BYTES, Comparison, EXTENT_BYTES, Finding, Findings, MOST_SPOTS, Place,
    Reading, Spot,
};
pub use event::{BadEvent, END, EventScanner};
pub use feed::{BadMark, Feed, Mark, Rest};
pub use inquiry::{Inquiry, NoResult, Tally};
pub use lag::{Lag, MOST_LAG};
pub use pace::Pace;
pub use position::LogPosition;
pub use reads::{BadRead, DiskRead, ReadDecoder, ReadOutcome, ReadScript};
pub use watchdog::{Signs, Stuck, Watchdog, left_of_ended_log};
pub use writes::{BadCounts, Rounds, Written};
