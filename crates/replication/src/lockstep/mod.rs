//! Lockstep between two hosts: QEMU's log flows from the primary's QEMU to the backup's.
//!
//! A session in lockstep begins as every session does, with the first synchronisation
//! (epoch 0) and a first checkpoint (epoch 1), in whose pause the log begins. From then on
//! its epochs are batches of log:
//!
//! | | |
//! |---|---|
//! | [`primary`] | QEMU → batch → wire; room for what is not acknowledged |
//! | [`evidence`] | what is kept of a backup that has diverged |
//! | [`reads`] | what disk reads gave, with the log if that is asked for |
//! | [`writes`] | which changed blocks both hosts have |
//! | [`compare`] | whether both machines have the same |
//! | [`backup`] | wire → acknowledge → QEMU; lag; the end of the log, and going live |
//!
//! Who may let output out, and who may go on alone, decide the machines of
//! `understudy_protocol`, as in checkpoint mode.

pub mod backup;
pub mod compare;
pub mod evidence;
pub mod primary;
pub mod reads;
pub mod writes;

use crate::clock;
use std::collections::VecDeque;
use std::time::Duration;
use tracing::debug;
use understudy_protocol::Time;
use understudy_qemu::urgency::raise_this_thread;

/// The rate of the log is an average over this span.
const RATE_SPAN: Duration = Duration::from_secs(2);

/// Time between two looks at a count of bytes.
const RATE_STEP: Duration = Duration::from_millis(100);

/// Puts this thread before all ordinary ones: output waits for it, and it does little.
pub fn be_urgent() {
    if let Err(error) = raise_this_thread() {
        debug!("no real-time priority for the log: {error}");
    }
}

/// The rate at which a log grows.
#[derive(Debug, Default)]
struct Rate(VecDeque<(Time, u64)>);

impl Rate {
    /// The log has so many bytes now.
    fn note(&mut self, bytes: u64) {
        let now = clock::now();
        let seen = &mut self.0;
        if seen.back().is_some_and(|&(at, _)| now - at < RATE_STEP) {
            return;
        }
        seen.push_back((now, bytes));
        while seen.front().is_some_and(|&(at, _)| now - at > RATE_SPAN) {
            seen.pop_front();
        }
    }

    fn mbit_s(&self) -> f64 {
        let (Some(first), Some(last)) = (self.0.front(), self.0.back()) else { return 0.0 };
        let seconds = (last.0 - first.0).as_secs_f64();
        if seconds > 0.0 { (last.1 - first.1) as f64 * 8e-6 / seconds } else { 0.0 }
    }
}
