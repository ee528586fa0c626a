//! Report on what all runs have shown together.

use serde::Serialize;
use std::path::PathBuf;

/// The result of `understudy-lab chaos`; `--json` prints it as it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Runs that were played.
    pub runs: u64,
    /// Runs whose failure called for a take-over.
    pub called_for: u64,
    /// Runs in which the backup took over.
    pub takeovers: u64,
    /// Runs in which it should have, and did not.
    pub missed: u64,
    /// Acknowledged records that were not on the survivor's disk.
    pub lost: u64,
    /// Runs after which the survivor's file system was damaged.
    pub inconsistent_fs: u64,
    /// Runs in which both copies sent something.
    pub double_live: u64,
    /// Runs in which the guest or a connection to it was lost, or that could not be
    /// played to their end.
    pub broken: u64,
    /// Runs before whose failure protection was lost without any: the product's fault, too.
    pub false_alarms: u64,
    /// Outages that lost primaries caused, as the client saw them.
    pub outage_ms: OutageReport,
    /// The runs that went wrong.
    pub failures: Vec<FailedRun>,
}

/// Outages in milliseconds; none without any.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct OutageReport {
    /// Median.
    pub p50: Option<f64>,
    /// 99th percentile.
    pub p99: Option<f64>,
    /// The longest.
    pub max: Option<f64>,
}

/// A run that went wrong.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FailedRun {
    /// Replays it: `understudy-lab chaos --runs 1 --seed SEED`.
    pub seed: u64,
    /// Fault that was done.
    pub fault: String,
    /// Problem that it showed.
    pub problem: String,
    /// Path of the logs.
    pub logs: PathBuf,
}

impl OutageReport {
    /// Report of outages in milliseconds, in any order.
    pub fn of(mut outages: Vec<f64>) -> OutageReport {
        outages.sort_by(f64::total_cmp);
        // The smallest outage that so many percent do not exceed.
        let percentile = |percent: usize| {
            let rank = (outages.len() * percent).div_ceil(100);
            outages.get(rank.saturating_sub(1)).copied()
        };
        OutageReport { p50: percentile(50), p99: percentile(99), max: percentile(100) }
    }
}

impl Report {
    /// Whether the product kept its promises in every run, and there was something to keep.
    pub fn is_good(&self) -> bool {
        let Report { missed, lost, inconsistent_fs, double_live, broken, false_alarms, .. } = *self;
        [missed, lost, inconsistent_fs, double_live, broken, false_alarms] == [0; 6]
            && !self.proves_nothing()
    }

    /// Whether nobody took over in several runs. One run alone replays whatever its seed draws.
    fn proves_nothing(&self) -> bool {
        self.runs > 1 && self.takeovers == 0
    }

    /// A few aligned lines for people.
    pub fn summary(&self) -> String {
        let ms = |value: Option<f64>| value.map_or("none".to_owned(), |ms| format!("{ms:.0} ms"));
        let OutageReport { p50, p99, max } = self.outage_ms;
        let rows = [
            ("runs", self.runs.to_string()),
            (
                "takeovers",
                format!(
                    "{}, called for {}, missed {}",
                    self.takeovers, self.called_for, self.missed
                ),
            ),
            ("lost records", self.lost.to_string()),
            ("damaged disks", self.inconsistent_fs.to_string()),
            ("both answered", self.double_live.to_string()),
            ("broken runs", self.broken.to_string()),
            ("false alarms", self.false_alarms.to_string()),
            ("outage", format!("p50 {}, p99 {}, max {}", ms(p50), ms(p99), ms(max))),
        ];
        let mut text: String =
            rows.iter().map(|(name, value)| format!("  {name:<14}  {value}\n")).collect();
        if self.proves_nothing() {
            text +=
                "\nno backup took over, so nothing is proven: try more runs, or another --seed\n";
        }
        for FailedRun { seed, fault, problem, logs } in &self.failures {
            text += &format!(
                "\nseed {seed}: {fault}\n  {problem}\n  logs: {}\n  again: understudy-lab chaos --runs 1 --seed {seed}\n",
                logs.display()
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_has_the_documented_fields() {
        let report =
            Report { runs: 3, outage_ms: OutageReport::of(vec![2.0, 1.0]), ..Default::default() };
        let json = serde_json::to_value(report).unwrap();
        for field in ["runs", "takeovers", "lost", "inconsistent_fs", "double_live"] {
            assert!(json[field].is_u64(), "{field}: {json}");
        }
        let outage = serde_json::json!({"p50": 1.0, "p99": 2.0, "max": 2.0});
        assert_eq!(json["outage_ms"], outage);
    }

    #[test]
    fn percentiles_are_outages_that_happened() {
        let report = OutageReport::of((1..=200).rev().map(f64::from).collect());
        assert_eq!((report.p50, report.p99, report.max), (Some(100.0), Some(198.0), Some(200.0)));
        assert_eq!(OutageReport::of(vec![]), OutageReport::default());
        assert_eq!(OutageReport::of(vec![7.0]).p50, Some(7.0));
    }

    #[test]
    fn one_fault_is_enough_to_fail() {
        assert!(Report { runs: 9, takeovers: 5, ..Default::default() }.is_good());
        let bad = [
            Report { false_alarms: 1, ..Default::default() },
            Report { missed: 1, ..Default::default() },
            Report { lost: 1, ..Default::default() },
            Report { inconsistent_fs: 1, ..Default::default() },
            Report { double_live: 1, ..Default::default() },
            Report { broken: 1, ..Default::default() },
        ];
        assert!(bad.iter().all(|report| !report.is_good()));
    }

    #[test]
    fn runs_without_a_takeover_prove_nothing() {
        let report = |runs, takeovers| Report { runs, takeovers, ..Default::default() };
        assert!(!report(2, 0).is_good());
        assert!(report(2, 0).summary().contains("nothing is proven"));
        assert!(report(2, 1).is_good() && !report(2, 1).summary().contains("proven"));
        assert!(report(1, 0).is_good(), "the replay of a failure that calls for none");
    }
}
