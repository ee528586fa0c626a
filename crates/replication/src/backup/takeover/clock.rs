//! The clock of where the time of a take-over goes.

use crate::clock;
use std::sync::atomic::{AtomicU64, Ordering};
use understudy_report::TakeoverReport;

/// A take-over's stages, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The primary seems lost; the arbiter is asked.
    Suspected,
    /// The arbiter has given the VM to this host.
    Granted,
    /// All of the log is executed, in lockstep.
    Executed,
    /// All that was acknowledged is on the disks, and the activation record is written.
    Activated,
    /// The guest runs.
    Live,
}

const STAGES: usize = Stage::Live as usize + 1;

/// The time at which each stage was reached, in nanoseconds of [`clock`]; 0 if it was not.
#[derive(Debug, Default)]
pub struct Clock([AtomicU64; STAGES]);

impl Clock {
    /// The stage is reached now, unless it was before.
    pub fn reach(&self, stage: Stage) {
        let now = clock::now().0.as_nanos() as u64;
        // It fails if it was reached before.
        let _ =
            self.0[stage as usize].compare_exchange(0, now, Ordering::AcqRel, Ordering::Acquire);
    }

    /// The stages' lengths in milliseconds; 0 for one that was not reached.
    pub fn report(&self) -> TakeoverReport {
        let reached = |stage: Stage| self.0[stage as usize].load(Ordering::Acquire);
        let between = |from: Stage, to: Stage| match (reached(from), reached(to)) {
            (0, _) | (_, 0) => 0.0,
            (from, to) => to.saturating_sub(from) as f64 / 1e6,
        };
        TakeoverReport {
            planned: false,
            arbiter_ms: between(Stage::Suspected, Stage::Granted),
            log_ms: between(Stage::Granted, Stage::Executed),
            lag_ms: 0.0,
            activation_ms: between(Stage::Executed, Stage::Activated),
            restart_ms: between(Stage::Activated, Stage::Live),
            total_ms: between(Stage::Suspected, Stage::Live),
            outage_ms: 0.0,
            injected_frames: 0,
            resent_frames: 0,
        }
    }
}
