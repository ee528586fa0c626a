//! All sections' results.

use super::aim::Aim;
use super::{cost, distcc, group, modes, queries, queue};
use crate::bench::machine::{Machine, load_average};
use crate::bench::suite::table::number;
use crate::cli::BenchRestoreArgs;
use serde::Serialize;
use std::fmt::Write;
use std::path::Path;
use understudy_qemu::Capabilities;

/// Program that runs all guests.
const QEMU: &str = "qemu-system-x86_64";
const ACCELERATOR: &str = "tcg";

/// Everything that `bench restore` found; `--json` prints it as it is. Times are by this machine's
/// clock. What was not asked for is not there.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Machine on which everything was measured.
    pub machine: Machine,
    /// Megabytes a second that came from the store of each host; as many as it gave if nothing is
    /// said.
    pub store_mb_s: Option<f64>,
    /// One VM.
    #[serde(flatten)]
    pub modes: Option<modes::Report>,
    /// Findings on queues.
    #[serde(flatten)]
    pub queue: Option<queue::Report>,
    /// Findings on groups.
    #[serde(flatten)]
    pub group: Option<group::Report>,
    /// A service's first answers.
    #[serde(flatten)]
    pub queries: Option<queries::Report>,
    /// A distributed compile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distcc: Option<distcc::Report>,
    /// Costs of a snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<cost::Report>,
    /// Aims, and whether they were reached.
    pub aims: Vec<Aim>,
    /// Measurements that failed.
    pub failures: Vec<String>,
    /// Processes that wanted to run in the last minute, at the end.
    pub load_average: Option<f64>,
}

impl Report {
    /// Report of nothing yet.
    pub fn new(args: &BenchRestoreArgs) -> Report {
        let version = Capabilities::probe(Path::new(QEMU));
        let version =
            version.map_or_else(|_| "unknown".to_owned(), |qemu| qemu.version.to_string());
        Report {
            machine: Machine::here(version, ACCELERATOR.to_owned()),
            store_mb_s: args.store_speed,
            modes: None,
            queue: None,
            group: None,
            queries: None,
            distcc: None,
            cost: None,
            aims: Vec::new(),
            failures: Vec::new(),
            load_average: None,
        }
    }

    /// All sections that were asked for have been measured.
    pub fn finish(&mut self) {
        let aims = [
            self.modes.as_ref().map(modes::Report::aims),
            self.queue.as_ref().map(queue::Report::aims),
            self.group.as_ref().map(group::Report::aims),
        ];
        self.aims = aims.into_iter().flatten().flatten().collect();
        let failures = [
            self.modes.as_ref().map(|modes| &modes.mode_failures),
            self.queue.as_ref().map(|queue| &queue.queue_failures),
            self.group.as_ref().map(|group| &group.group_failures),
        ];
        let failures: Vec<String> = failures.into_iter().flatten().flatten().cloned().collect();
        self.failures.extend(failures);
        self.load_average = load_average();
    }

    /// Whether all was measured.
    pub fn is_complete(&self) -> bool {
        self.failures.is_empty()
    }
}

/// The report for a terminal.
pub fn table(report: &Report) -> String {
    let store = report
        .store_mb_s
        .map_or("as fast as it is".to_owned(), |speed| format!("slowed to {} MB/s", number(speed)));
    let sections = [
        report.modes.as_ref().map(modes::table),
        report.queue.as_ref().map(queue::table),
        report.group.as_ref().map(group::table),
        report.queries.as_ref().map(queries::table),
        report.distcc.as_ref().map(distcc::table),
        report.cost.as_ref().map(cost::table),
    ];
    let mut text = format!("Snapshots and restore; the store is {store}\n\n");
    for section in sections.into_iter().flatten() {
        text += &section;
        text += "\n";
    }
    for aim in &report.aims {
        let reached = if aim.reached { "reached" } else { "not reached" };
        let _ = writeln!(text, "aim: {}: {}, {reached}", aim.what, number(aim.measured));
    }
    for failure in &report.failures {
        let _ = writeln!(text, "not measured: {failure}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_put_together_under_the_names_that_are_known() {
        let machine = Machine::here("10.0.2".to_owned(), "tcg".to_owned());
        let mut report = Report {
            machine,
            store_mb_s: Some(50.0),
            modes: Some(modes::tests::report()),
            queue: Some(queue::tests::report()),
            group: Some(group::tests::report()),
            queries: Some(queries::tests::report()),
            distcc: Some(distcc::tests::report()),
            cost: Some(cost::tests::report()),
            aims: Vec::new(),
            failures: vec!["cost: no power".to_owned()],
            load_average: None,
        };
        report.finish();
        let json = serde_json::to_value(&report).unwrap();
        for pointer in [
            "/hit_rate_as_taken",
            "/hit_rate_at_half_as_taken",
            "/hit_rate_at_half/fafl",
            "/hit_rate/fafl",
            "/hit_rate/lru",
            "/hit_rate/clock",
            "/restore_ms/hot",
            "/backoff_ms/4/mean",
            "/wss_reduction",
            "/pause_ms",
            "/queries/hot/mean_ms",
            "/wss_reduction_traced",
            "/distcc/modes/hot/finished_ms",
            "/cost/snapshot/slow_down",
        ] {
            assert!(json.pointer(pointer).is_some(), "{pointer} in {json:#}");
        }
        assert!(!report.is_complete());
        assert_eq!(report.failures.len(), 2, "{:?}", report.failures);
        let text = table(&report);
        for words in ["slowed to 50.0 MB/s", "not reached", "hot ", "Queues", "Groups", "Queries"] {
            assert!(text.contains(words), "{words} in\n{text}");
        }
        assert!(text.contains("not measured: round 1") && text.contains("no power"), "{text}");
    }

    #[test]
    fn what_was_not_asked_for_is_not_there() {
        let machine = Machine::here("10.0.2".to_owned(), "tcg".to_owned());
        let report = Report {
            machine,
            store_mb_s: None,
            modes: None,
            queue: None,
            group: Some(group::tests::report()),
            queries: None,
            distcc: None,
            cost: None,
            aims: Vec::new(),
            failures: Vec::new(),
            load_average: None,
        };
        let json = serde_json::to_value(&report).unwrap();
        assert!(json.get("restore_ms").is_none() && json.get("cost").is_none(), "{json:#}");
        assert!(!table(&report).contains("Queues"));
    }
}
