//! The distcc section: its figures, and its text.

use crate::bench::suite::statistics::median;
use crate::bench::suite::table::number;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use understudy_report::cluster::Backoff;

/// Findings of the section. Times are in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Time that a build takes before the snapshot.
    pub build_ms: f64,
    /// Each mode: the middle of its restores.
    pub modes: BTreeMap<String, Summary>,
    /// Each restore.
    pub restores: BTreeMap<String, Vec<Restored>>,
}

/// One restore, after which the build that was under way has ended well.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Restored {
    /// Times from the command until each VM ran; the one that builds is the first.
    pub started_ms: Vec<f64>,
    /// Differences of its start and those of the others.
    pub backoff_ms: Backoff,
    /// Time from the command until the build that was under way at the snapshot had ended.
    pub finished_ms: f64,
    /// Time that the build after it took.
    pub next_build_ms: f64,
}

/// Summary of restores in one mode, in the middle.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Number of restores.
    pub runs: usize,
    /// Time until all VMs ran.
    pub started_ms: f64,
    /// The greatest of each restore.
    pub backoff_ms: f64,
    /// Time as in [`Restored::finished_ms`].
    pub finished_ms: f64,
    /// Time as in [`Restored::next_build_ms`].
    pub next_build_ms: f64,
}

impl Restored {
    fn last_ms(&self) -> f64 {
        self.started_ms.iter().copied().fold(0.0, f64::max)
    }

    /// Words for the progress.
    pub fn words(&self) -> String {
        format!(
            "all ran after {:.0} ms, back-off {:.0} ms at most; the build ended after {:.0} ms, \
             the next one took {:.0} ms",
            self.last_ms(),
            self.backoff_ms.max,
            self.finished_ms,
            self.next_build_ms
        )
    }
}

impl Summary {
    fn of(runs: &[Restored]) -> Option<Summary> {
        let middle =
            |figure: fn(&Restored) -> f64| median(&runs.iter().map(figure).collect::<Vec<f64>>());
        Some(Summary {
            runs: runs.len(),
            started_ms: middle(Restored::last_ms)?,
            backoff_ms: middle(|run| run.backoff_ms.max)?,
            finished_ms: middle(|run| run.finished_ms)?,
            next_build_ms: middle(|run| run.next_build_ms)?,
        })
    }
}

impl Report {
    /// Report of nothing yet, but what is normal.
    pub fn new(build_ms: f64) -> Report {
        Report { build_ms, modes: BTreeMap::new(), restores: BTreeMap::new() }
    }

    /// Concludes from all restores.
    pub fn conclude(&mut self) {
        let of = |(mode, runs): (&String, &Vec<Restored>)| Some((mode.clone(), Summary::of(runs)?));
        self.modes = self.restores.iter().filter_map(of).collect();
    }
}

/// The section for a terminal.
pub fn table(report: &Report) -> String {
    let mut text = format!(
        "Distcc, {} ms for a build before the snapshot; ms until all three VMs ran, back-off, \
         until the build had ended, and for the next one\n\n{:<12} {:>8} {:>8} {:>8} {:>8} {:>5}\n",
        number(report.build_ms),
        "",
        "run",
        "back-off",
        "ended",
        "next",
        "runs"
    );
    for (mode, summary) in &report.modes {
        let _ = writeln!(
            text,
            "{mode:<12} {:>8} {:>8} {:>8} {:>8} {:>5}",
            number(summary.started_ms),
            number(summary.backoff_ms),
            number(summary.finished_ms),
            number(summary.next_build_ms),
            summary.runs
        );
    }
    text
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn report() -> Report {
        let restored = |started_ms: [f64; 3], finished_ms| Restored {
            backoff_ms: Backoff::of(vec![started_ms[1] - started_ms[0], 5.0]),
            started_ms: started_ms.to_vec(),
            finished_ms,
            next_build_ms: 9_000.0,
        };
        let mut report = Report::new(8_000.0);
        let hot = vec![
            restored([700.0, 710.0, 705.0], 6_000.0),
            restored([700.0, 720.0, 705.0], 9_000.0),
            restored([700.0, 770.0, 705.0], 7_000.0),
        ];
        report.restores.insert("hot".to_owned(), hot);
        report.conclude();
        report
    }

    #[test]
    fn the_middle_of_the_last_starts_and_of_the_greatest_back_offs_counts() {
        let hot = report().modes["hot"];
        assert_eq!((hot.runs, hot.started_ms, hot.backoff_ms), (3, 720.0, 20.0));
        assert_eq!((hot.finished_ms, hot.next_build_ms), (7_000.0, 9_000.0));
        let text = table(&report());
        assert!(text.contains("Distcc, 8000 ms") && text.contains("7000"), "{text}");
    }
}
