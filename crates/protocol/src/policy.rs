//! The policy of when to checkpoint.
//!
//! The adaptive policy takes a checkpoint for the sake of output that waits, one at a time,
//! so that what is sent meanwhile forms the next batch. A checkpoint costs a guest what it
//! would have run in the pause, and some time for each page that it writes again:
//!
//! - An idle guest (it waits for nothing but its own output, or for nothing at all) pays
//!   nothing: the checkpoint is taken at once.
//! - A guest that runs pays by the share of its time that it ran since the last pause: it
//!   gets that share of the time that keeps a guest under full load within the budget, and
//!   of the length that was found to be best ([`EpochLength`](crate::EpochLength)). One that
//!   falls idle before is not made to wait any longer.
//! - Without output, epochs stretch to the longest.
//!
//! By any policy, an epoch in which the guest has written much to its disks ends early.

use crate::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Epochs that reach the backup within this time are no reason to slow a guest down.
const SHORTEST_TARGET: Duration = Duration::from_millis(100);

/// The cost of a written page to a guest beside the pause: the fault at its next write, and what
/// copying and sending take of processors and caches that the guest shares. Measured: 8 to
/// 16 µs on two processors (docs/performance/policy.md).
const PAGE_COST: Duration = Duration::from_micros(5);

/// No more than this is on account of pages: the throughput of a connection whose window is
/// full falls with the length of epochs, and people notice it.
const LONGEST_GAP_FOR_PAGES: Duration = Duration::from_millis(25);

/// The first look at a guest that may fall idle; a look costs some 15 µs.
const SHORTEST_LOOK: Duration = Duration::from_micros(100);

/// The policy of when the primary takes a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Policy {
    /// A fixed rate, as in Remus.
    Interval {
        /// Checkpoints a second, 1 to 1 000.
        hz: u32,
    },
    /// A checkpoint as soon as there is output to release, the last checkpoint is committed, and
    /// the guest is idle or has run for long enough; after `max_epoch_ms` at the latest. Without
    /// output, epochs stretch.
    Adaptive {
        /// The longest epoch, in milliseconds, 1 to 10 000.
        max_epoch_ms: u32,
        /// The most time that a guest that would always run may lose to checkpoints for the
        /// sake of output, in percent, 1 to 90: it stands paused for no more.
        pause_budget_percent: u32,
    },
}

impl Default for Policy {
    fn default() -> Policy {
        Policy::Adaptive { max_epoch_ms: 200, pause_budget_percent: 10 }
    }
}

impl Policy {
    /// Says what is wrong with the policy's numbers, if anything.
    pub fn validate(&self) -> Result<(), String> {
        let check = |name: &str, value: u32, low: u32, high: u32| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(format!("policy: {name} is {value}; it must be {low} to {high}"))
            }
        };
        match *self {
            Policy::Interval { hz } => check("hz", hz, 1, 1_000),
            Policy::Adaptive { max_epoch_ms, pause_budget_percent } => {
                check("max_epoch_ms", max_epoch_ms, 1, 10_000)?;
                check("pause_budget_percent", pause_budget_percent, 1, 90)
            }
        }
    }
}

impl Policy {
    /// The time in which an epoch should reach the backup: an epoch's own length, so that the
    /// link keeps pace, and no less than a slow round trip.
    pub fn transfer_target(&self) -> Duration {
        self.longest_epoch().max(SHORTEST_TARGET)
    }

    /// The longest time for which output waits for the end of its epoch, if that can be captured.
    pub fn longest_epoch(&self) -> Duration {
        match *self {
            Policy::Interval { hz } => Duration::from_secs(1) / hz,
            Policy::Adaptive { max_epoch_ms, .. } => Duration::from_millis(max_epoch_ms.into()),
        }
    }
}

/// The last checkpoint, as the policy sees it.
#[derive(Clone, Copy, Debug)]
pub struct LastCheckpoint {
    /// Time at which its pause began.
    pub started: Time,
    /// Time at which the guest ran again.
    pub resumed: Time,
    /// Pages that the guest had written.
    pub pages: u64,
    /// Bytes that the guest had sent and was given in the epoch that it closed.
    pub carried: u64,
}

/// The activity of the guest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Activity {
    /// Whether nothing of it wants to run, and it waits for no disk.
    pub idle: bool,
    /// The share of its processors' time that it has used since it was resumed, 0 to 1.
    pub busy_share: f64,
}

/// The situation in which a checkpoint is considered.
#[derive(Clone, Copy, Debug)]
pub struct Situation {
    /// The present time.
    pub now: Time,
    /// The last checkpoint.
    pub last: LastCheckpoint,
    /// Length that an epoch of a guest under full load should have.
    pub length: Duration,
    /// Epochs captured and not yet committed.
    pub in_flight: u64,
    /// Time since which frames have been held, if any are.
    pub output_since: Option<Time>,
    /// The guest has written as much to its disks as the backup should keep for one epoch.
    pub full: bool,
}

/// The policy's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Take a checkpoint when this time has come, unless something changes first.
    At(Time),
    /// Ask again at this time: the guest may have fallen idle.
    Look(Time),
    /// Wait until something changes: output, or a commit.
    OnChange,
}

impl Policy {
    /// The number of epochs that may be captured and not committed; with so many none is due.
    pub fn pipeline(&self) -> u64 {
        match self {
            Policy::Interval { .. } => crate::PIPELINE_DEPTH,
            Policy::Adaptive { .. } => 1,
        }
    }

    /// The length that an epoch of a guest under full load should have on account of what its pages
    /// cost, as far as that can be said beforehand.
    pub fn length_by_pages(&self, last: LastCheckpoint) -> Duration {
        let Policy::Adaptive { pause_budget_percent: percent, .. } = *self else {
            return Duration::ZERO;
        };
        // More than these reach the bound in any case.
        let pages = PAGE_COST * last.pages.min(1 << 20) as u32;
        let pause = last.resumed - last.started;
        earned(pause, percent) + earned(pages, percent).min(LONGEST_GAP_FOR_PAGES)
    }

    /// The time at which the next checkpoint is due. `activity` is asked only where it matters.
    pub fn due(&self, situation: &Situation, activity: impl FnOnce() -> Activity) -> Due {
        let Situation { now, last, length, in_flight, output_since, full } = *situation;
        if in_flight >= self.pipeline() {
            return Due::OnChange;
        }
        if full {
            return Due::At(now);
        }
        match *self {
            Policy::Interval { hz } => Due::At(last.started + Duration::from_secs(1) / hz),
            Policy::Adaptive { max_epoch_ms, pause_budget_percent } => {
                let max_epoch = Duration::from_millis(max_epoch_ms.into());
                // Output never waits for more than the longest epoch: one pause that
                // took seconds (a QEMU that stood still) is not the guest's to make up for.
                let gap = earned(last.resumed - last.started, pause_budget_percent);
                let gap = gap.max(length).min(max_epoch);
                let Some(since) = output_since else {
                    return Due::At((last.started + max_epoch).max(last.resumed + gap));
                };
                let activity = activity();
                if activity.idle {
                    return Due::At(now);
                }
                let share = activity.busy_share.clamp(0.0, 1.0);
                let paid = last.resumed + gap.mul_f64(share);
                // It stops as soon as it is told to, in the midst of an answer. The likelier
                // there is more to come, the longer it may finish.
                let settled = since + (last.resumed - last.started).min(gap).mul_f64(share);
                let due = paid.max(settled).min((since + max_epoch).max(last.resumed + gap));
                if due <= now { Due::At(due) } else { Due::Look(due.min(next_look(now, since))) }
            }
        }
    }
}

/// Looks come less often the longer output has waited.
fn next_look(now: Time, since: Time) -> Time {
    now + ((now - since) / 2).max(SHORTEST_LOOK)
}

/// The time that a guest under full load must run so that a cost stays within the budget.
fn earned(cost: Duration, percent: u32) -> Duration {
    cost * (100 - percent) / percent
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
