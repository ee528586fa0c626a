//! When to checkpoint.

use crate::Time;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Epochs that reach the backup within this time are no reason to slow a guest down.
const SHORTEST_TARGET: Duration = Duration::from_millis(100);

/// When the primary takes a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Policy {
    /// A fixed rate, as in Remus.
    Interval {
        /// Checkpoints a second, 1 to 1 000.
        hz: u32,
    },
    /// As soon as there is output to release and the last checkpoint is
    /// committed, inside a pause budget, after `max_epoch_ms` at the latest; without
    /// output, epochs stretch.
    Adaptive {
        /// The longest epoch, in milliseconds, 1 to 10 000.
        max_epoch_ms: u32,
        /// The most time the guest may stand paused, in percent, 1 to 90.
        pause_budget_percent: u32,
    },
}

impl Default for Policy {
    fn default() -> Policy {
        Policy::Adaptive { max_epoch_ms: 200, pause_budget_percent: 25 }
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
        let epoch = match *self {
            Policy::Interval { hz } => Duration::from_secs(1) / hz,
            Policy::Adaptive { max_epoch_ms, .. } => Duration::from_millis(max_epoch_ms.into()),
        };
        epoch.max(SHORTEST_TARGET)
    }
}

/// The last checkpoint, as the policy sees it.
#[derive(Clone, Copy, Debug)]
pub struct LastCheckpoint {
    /// When its pause began.
    pub started: Time,
    /// When the guest ran again.
    pub resumed: Time,
}

/// What the policy says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Take a checkpoint when this time has come, unless something changes first.
    At(Time),
    /// Wait until something changes: output, or a commit.
    OnChange,
}

impl Policy {
    /// When the next checkpoint is due. `in_flight` counts epochs captured and
    /// not yet committed, `output_waits` whether frames are held.
    pub fn due(&self, last: LastCheckpoint, in_flight: u64, output_waits: bool) -> Due {
        match *self {
            Policy::Interval { hz } => {
                if in_flight >= crate::PIPELINE_DEPTH {
                    return Due::OnChange;
                }
                Due::At(last.started + Duration::from_secs(1) / hz)
            }
            Policy::Adaptive { max_epoch_ms, pause_budget_percent } => {
                if in_flight > 0 {
                    return Due::OnChange;
                }
                let max_epoch = Duration::from_millis(max_epoch_ms.into());
                let longest = last.started + max_epoch;
                // Output never waits for more than the longest epoch: one pause that
                // took seconds (a QEMU that stood still) is not the guest's to make up for.
                let gap = budget_gap(last, pause_budget_percent).min(max_epoch);
                let earliest = last.resumed + gap;
                if output_waits { Due::At(earliest) } else { Due::At(longest.max(earliest)) }
            }
        }
    }
}

/// The time the guest must run so that its last pause stays within the budget.
fn budget_gap(last: LastCheckpoint, percent: u32) -> Duration {
    let pause = last.resumed - last.started;
    pause * (100 - percent) / percent
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Time {
        Time(Duration::from_millis(ms))
    }

    const LAST: LastCheckpoint = LastCheckpoint {
        started: Time(Duration::from_millis(1000)),
        resumed: Time(Duration::from_millis(1002)),
    };

    #[test]
    fn interval_keeps_its_rate_and_the_depth() {
        let policy = Policy::Interval { hz: 40 };
        assert_eq!(policy.due(LAST, 0, false), Due::At(at(1025)));
        assert_eq!(policy.due(LAST, 1, true), Due::At(at(1025)));
        assert_eq!(policy.due(LAST, 2, true), Due::OnChange);
    }

    #[test]
    fn adaptive_follows_output_inside_the_budget() {
        let policy = Policy::default();
        assert_eq!(policy.due(LAST, 0, true), Due::At(at(1008)), "2 ms of pause at 25 % cost 6 ms");
        assert_eq!(policy.due(LAST, 0, false), Due::At(at(1200)));
        assert_eq!(policy.due(LAST, 1, true), Due::OnChange, "the batch forms until the commit");
    }

    #[test]
    fn an_epoch_should_arrive_within_its_own_length() {
        let target = |policy: Policy| policy.transfer_target().as_millis();
        assert_eq!(target(Policy::default()), 200);
        assert_eq!(target(Policy::Interval { hz: 2 }), 500);
        assert_eq!(target(Policy::Interval { hz: 1000 }), 100);
    }

    #[test]
    fn one_very_long_pause_does_not_hold_up_output() {
        let last = LastCheckpoint { started: at(1000), resumed: at(11_000) };
        assert_eq!(Policy::default().due(last, 0, true), Due::At(at(11_200)));
    }

    #[test]
    fn wrong_numbers_are_named() {
        assert!(Policy::Interval { hz: 0 }.validate().unwrap_err().contains("hz"));
        let policy = Policy::Adaptive { max_epoch_ms: 10, pause_budget_percent: 100 };
        assert!(policy.validate().unwrap_err().contains("pause_budget_percent"));
        assert!(Policy::default().validate().is_ok());
    }
}
