//! The ways to restore, to compare them and to choose.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::str::FromStr;
use std::time::Duration;

/// The mode in which a group is restored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// All memory before the start.
    Eager,
    /// No memory before the start; all on demand.
    Lazy,
    /// The pages that statistical sampling gives, most recently used pages first.
    WorkingSet,
    /// The queue of first accesses, each member started when it is loaded.
    HotNoLine,
    /// The queue of first accesses, and the restore line.
    #[default]
    Hot,
}

impl Mode {
    /// Whether members start in the order of [`StartOrder`](crate::StartOrder), with sizes
    /// moved by [`Plan`](crate::Plan).
    pub fn has_line(self) -> bool {
        self == Mode::Hot
    }

    /// Pages that a member should load before its start. `estimated` is its working set,
    /// `sampled` what sampling alone says, `all` its memory.
    pub fn pages_before_start(
        self,
        factor: WorkingSetFactor,
        estimated: u64,
        sampled: u64,
        all: u64,
    ) -> u64 {
        let pages = match self {
            Mode::Eager => all,
            Mode::Lazy => 0,
            Mode::WorkingSet => sampled,
            Mode::HotNoLine | Mode::Hot => (estimated as f64 * factor.0).round() as u64,
        };
        pages.min(all)
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Mode, String> {
        Ok(match text {
            "eager" => Mode::Eager,
            "lazy" => Mode::Lazy,
            "working-set" => Mode::WorkingSet,
            "hot-no-line" => Mode::HotNoLine,
            "hot" => Mode::Hot,
            _ => {
                return Err(format!(
                    "{text:?} is no way to restore; there are eager, lazy, working-set, \
                     hot-no-line and hot"
                ));
            }
        })
    }
}

/// The part of the working set that is loaded before the start, 0 to 2; half of it by default.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "f64", into = "f64")]
pub struct WorkingSetFactor(f64);

/// A factor that is not between 0 and 2.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not how much of the working set can be loaded before the start: give 0 to 2")]
pub struct BadWorkingSet(String);

impl Default for WorkingSetFactor {
    fn default() -> WorkingSetFactor {
        WorkingSetFactor(0.5)
    }
}

impl TryFrom<f64> for WorkingSetFactor {
    type Error = BadWorkingSet;

    fn try_from(factor: f64) -> Result<WorkingSetFactor, BadWorkingSet> {
        match (0.0..=2.0).contains(&factor) {
            true => Ok(WorkingSetFactor(factor)),
            false => Err(BadWorkingSet(factor.to_string())),
        }
    }
}

impl From<WorkingSetFactor> for f64 {
    fn from(factor: WorkingSetFactor) -> f64 {
        factor.0
    }
}

impl FromStr for WorkingSetFactor {
    type Err = BadWorkingSet;

    fn from_str(text: &str) -> Result<WorkingSetFactor, BadWorkingSet> {
        let factor: f64 = text.parse().map_err(|_| BadWorkingSet(format!("{text:?}")))?;
        factor.try_into()
    }
}

/// Time for which first accesses to memory are traced after a snapshot's pause, in milliseconds: 0 to
/// 60 000; 7 000 by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "u64", into = "u64")]
pub struct TraceTime(u64);

/// A time of more than a minute.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not how long first accesses can be traced: give 0 to 60 seconds")]
pub struct BadTraceTime(String);

impl TraceTime {
    /// Nothing is traced.
    pub const NONE: TraceTime = TraceTime(0);
    const MOST_MS: u64 = 60_000;
}

impl Default for TraceTime {
    /// The paper's seven seconds.
    fn default() -> TraceTime {
        TraceTime(7_000)
    }
}

impl TryFrom<u64> for TraceTime {
    type Error = BadTraceTime;

    fn try_from(ms: u64) -> Result<TraceTime, BadTraceTime> {
        match ms <= TraceTime::MOST_MS {
            true => Ok(TraceTime(ms)),
            false => Err(BadTraceTime(format!("{ms} ms"))),
        }
    }
}

impl From<TraceTime> for u64 {
    fn from(time: TraceTime) -> u64 {
        time.0
    }
}

impl From<TraceTime> for Duration {
    fn from(time: TraceTime) -> Duration {
        Duration::from_millis(time.0)
    }
}

impl FromStr for TraceTime {
    type Err = BadTraceTime;

    /// Parses seconds.
    fn from_str(text: &str) -> Result<TraceTime, BadTraceTime> {
        let seconds = text.parse().ok().filter(|seconds| (0.0..=60.0).contains(seconds));
        let seconds: f64 = seconds.ok_or_else(|| BadTraceTime(format!("{text:?}")))?;
        Ok(TraceTime(Duration::from_secs_f64(seconds).as_millis() as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_loads_what_it_says() {
        let pages = |mode: &str, factor: &str| {
            let mode: Mode = mode.parse().unwrap();
            mode.pages_before_start(factor.parse().unwrap(), 2001, 5000, 9000)
        };
        assert_eq!(pages("hot", "0.5"), 1001);
        assert_eq!(pages("hot-no-line", "2"), 4002);
        assert_eq!(pages("working-set", "0.5"), 5000);
        assert_eq!((pages("eager", "0"), pages("lazy", "2")), (9000, 0));
        assert_eq!(Mode::Hot.pages_before_start(Default::default(), u64::MAX, 0, 9000), 9000);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for text in ["-0.1", "2.1", "NaN", "inf", "half"] {
            assert!(text.parse::<WorkingSetFactor>().is_err(), "{text}");
        }
        for text in ["-1", "60.1", "NaN", "inf", "long"] {
            assert!(text.parse::<TraceTime>().is_err(), "{text}");
        }
        assert_eq!("0.5".parse::<TraceTime>(), TraceTime::try_from(500));
        assert!("fast".parse::<Mode>().unwrap_err().contains("hot-no-line"));
    }
}
