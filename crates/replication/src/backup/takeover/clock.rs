//! Where the time of a take-over goes.

use std::time::Instant;
use understudy_report::TakeoverReport;
use understudy_threads::{Mutex, lock};

/// A take-over's stages, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The primary seems lost; the arbiter is asked.
    Suspected,
    /// The arbiter has given the VM to this host.
    Granted,
    /// In lockstep: all of the log is executed.
    Executed,
    /// All that was acknowledged is on the disks, and the activation record is written.
    Activated,
    /// The guest runs.
    Live,
}

const STAGES: usize = Stage::Live as usize + 1;

/// When each stage was reached.
#[derive(Debug, Default)]
pub struct Clock(Mutex<[Option<Instant>; STAGES]>);

impl Clock {
    /// The stage is reached now, unless it was before.
    pub fn reach(&self, stage: Stage) {
        lock(&self.0)[stage as usize].get_or_insert_with(Instant::now);
    }

    /// The stages' lengths in milliseconds; 0 for one that was not reached.
    pub fn report(&self) -> TakeoverReport {
        let reached = *lock(&self.0);
        let between = |from: Stage, to: Stage| {
            let (from, to) = (reached[from as usize], reached[to as usize]);
            from.zip(to).map_or(0.0, |(from, to)| (to - from).as_secs_f64() * 1e3)
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
