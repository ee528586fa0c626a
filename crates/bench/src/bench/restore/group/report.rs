//! The group's section: its figures, and its text.

use crate::bench::restore::aim::Aim;
use crate::bench::suite::statistics::median;
use crate::bench::suite::table::number;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use understudy_report::cluster::Backoff;

/// Back-off is to be so long, in milliseconds, with any number of VMs.
const MEAN_AIM_MS: f64 = 70.0;
const MAX_AIM_MS: f64 = 140.0;
/// The mode that one gets.
const DEFAULT: &str = "hot";

/// Findings of the section. Times are in milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Back-off by the number of VMs, at the default: the greatest maximum of all runs, and the
    /// middle of their means and medians.
    pub backoff_ms: BTreeMap<usize, Backoff>,
    /// Summaries by the number of VMs and the mode: the middle of all runs.
    pub groups: BTreeMap<usize, BTreeMap<String, Summary>>,
    /// The snapshots that were restored.
    pub snapshots: BTreeMap<usize, Snapshot>,
    /// Each restore.
    pub restores: BTreeMap<usize, BTreeMap<String, Vec<Restored>>>,
    /// Measurements that failed.
    pub group_failures: Vec<String>,
}

/// A snapshot of a group.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Snapshot {
    /// Number of VMs.
    pub vms: usize,
    /// Memory of each in MiB.
    pub memory_mib: u32,
    /// Time that it took.
    pub took_ms: f64,
}

/// One restore. What is said of each VM is in their order.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Restored {
    /// Times from the command until each ran.
    pub started_ms: Vec<f64>,
    /// Times until nothing of each was left to load.
    pub restored_ms: Vec<f64>,
    /// Pages that each start waited for.
    pub pages_before_start: Vec<u64>,
    /// Differences of the starts of VMs that pay each other.
    pub backoff_ms: Backoff,
    /// Differences of VMs that had frames in flight to each other at the snapshot; of all pairs if
    /// none had.
    pub line_backoff_ms: Backoff,
    /// The longest wait of each for an answer over TCP, by its own clock.
    pub silence_ms: Backoff,
}

/// Summary of restores in one mode, in the middle.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Number of restores.
    pub runs: usize,
    /// Time until the first VM ran.
    pub first_ms: f64,
    /// Time until a VM ran, in the middle of them.
    pub vm_ms: f64,
    /// Time until the last one ran.
    pub last_ms: f64,
    /// Back-off, as in [`Report::backoff_ms`].
    pub backoff_ms: Backoff,
    /// The same for the silence.
    pub silence_ms: Backoff,
}

/// Pairs that pay each other: each the next two in a ring. Each pair once, but in a ring of three.
pub fn neighbours(count: usize) -> impl Iterator<Item = (usize, usize)> {
    let pairs = (0..count).flat_map(move |one| [1, 2].map(|step| (one, (one + step) % count)));
    pairs.filter(|(one, other)| one != other)
}

impl Snapshot {
    /// Words for the progress.
    pub fn words(&self) -> String {
        format!("{} with {} MiB each in {:.0} ms", self.vms, self.memory_mib, self.took_ms)
    }
}

impl Restored {
    /// Words for the progress.
    pub fn words(&self) -> String {
        let last = self.started_ms.iter().copied().fold(0.0, f64::max);
        format!(
            "all ran after {last:.0} ms, back-off {:.0} ms on average and {:.0} ms at most, \
             silence {:.0} ms at most",
            self.backoff_ms.mean, self.backoff_ms.max, self.silence_ms.max
        )
    }
}

impl Summary {
    fn of(runs: &[Restored]) -> Option<Summary> {
        let middle = |figure: &dyn Fn(&Restored) -> f64| {
            median(&runs.iter().map(figure).collect::<Vec<f64>>())
        };
        let least = |times: &[f64]| times.iter().copied().fold(f64::INFINITY, f64::min);
        let most = |times: &[f64]| times.iter().copied().fold(0.0, f64::max);
        let backoff = |of: fn(&Restored) -> Backoff| {
            Some(Backoff {
                mean: middle(&|run| of(run).mean)?,
                max: most(&runs.iter().map(|run| of(run).max).collect::<Vec<f64>>()),
                median: middle(&|run| of(run).median)?,
            })
        };
        Some(Summary {
            runs: runs.len(),
            first_ms: middle(&|run| least(&run.started_ms))?,
            vm_ms: middle(&|run| median(&run.started_ms).unwrap_or_default())?,
            last_ms: middle(&|run| most(&run.started_ms))?,
            backoff_ms: backoff(|run| run.backoff_ms)?,
            silence_ms: backoff(|run| run.silence_ms)?,
        })
    }
}

impl Report {
    /// Concludes from all restores.
    pub fn conclude(&mut self) {
        for (&count, modes) in &self.restores {
            let of =
                |(mode, runs): (&String, &Vec<Restored>)| Some((mode.clone(), Summary::of(runs)?));
            let summaries: BTreeMap<String, Summary> = modes.iter().filter_map(of).collect();
            if let Some(default) = summaries.get(DEFAULT) {
                self.backoff_ms.insert(count, default.backoff_ms);
            }
            self.groups.insert(count, summaries);
        }
    }

    /// Aims of the section.
    pub fn aims(&self) -> Vec<Aim> {
        let of = |(count, backoff): (&usize, &Backoff)| {
            let what = |which| format!("{which} back-off of {count} VMs, ms");
            [
                Aim::at_most(what("mean"), backoff.mean, MEAN_AIM_MS),
                Aim::at_most(what("greatest"), backoff.max, MAX_AIM_MS),
            ]
        };
        self.backoff_ms.iter().flat_map(of).collect()
    }
}

/// The section for a terminal.
pub fn table(report: &Report) -> String {
    let mut text = format!(
        "Groups; ms: until the first, a middle, the last VM ran; back-off; silence of TCP\n\n\
         {:<4} {:<12} {:>8} {:>8} {:>8}   {:>22} {:>22} {:>5}\n",
        "VMs", "", "first", "middle", "last", "mean/median/max", "mean/median/max", "runs"
    );
    let three =
        |of: &Backoff| format!("{}/{}/{}", number(of.mean), number(of.median), number(of.max));
    for (count, modes) in &report.groups {
        for (mode, summary) in modes {
            let _ = writeln!(
                text,
                "{count:<4} {mode:<12} {:>8} {:>8} {:>8}   {:>22} {:>22} {:>5}",
                number(summary.first_ms),
                number(summary.vm_ms),
                number(summary.last_ms),
                three(&summary.backoff_ms),
                three(&summary.silence_ms),
                summary.runs,
            );
        }
    }
    for snapshot in report.snapshots.values() {
        let _ = writeln!(text, "snapshot of {}", snapshot.words());
    }
    text
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn report() -> Report {
        let restored = |started_ms: [f64; 4]| {
            let differences = neighbours(4).map(|(a, b)| (started_ms[a] - started_ms[b]).abs());
            Restored {
                backoff_ms: Backoff::of(differences.collect()),
                line_backoff_ms: Backoff::default(),
                silence_ms: Backoff { mean: 5.0, max: 9.0, median: 4.0 },
                started_ms: started_ms.to_vec(),
                restored_ms: Vec::new(),
                pages_before_start: vec![7; 4],
            }
        };
        let mut report = Report::default();
        let snapshot = Snapshot { vms: 4, memory_mib: 96, took_ms: 6000.0 };
        report.snapshots.insert(4, snapshot);
        let hot = vec![restored([500.0, 510.0, 520.0, 530.0]), restored([700.0; 4])];
        let modes = [("hot".to_owned(), hot), ("lazy".to_owned(), vec![restored([0.0; 4])])];
        report.restores.insert(4, modes.into());
        report.conclude();
        report
    }

    #[test]
    fn each_pays_the_next_two() {
        assert_eq!(
            neighbours(4).filter(|(one, _)| *one == 3).collect::<Vec<_>>(),
            [(3, 0), (3, 1)]
        );
        assert_eq!(neighbours(2).collect::<Vec<_>>(), [(0, 1), (1, 0)]);
        assert_eq!(neighbours(1).count(), 0);
    }

    #[test]
    fn the_greatest_of_all_runs_and_the_middle_of_their_means_count() {
        let report = report();
        // 10 20 10 20 10 20 30 20 of the first run, nothing of the second.
        assert_eq!(report.backoff_ms[&4], Backoff { mean: 8.75, max: 30.0, median: 10.0 });
        let hot = report.groups[&4]["hot"];
        assert_eq!((hot.first_ms, hot.vm_ms, hot.last_ms), (600.0, 607.5, 615.0));
        assert!(report.aims().iter().all(|aim| aim.reached), "{:?}", report.aims());
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["backoff_ms"]["4"]["max"], 30.0);
        let text = table(&report);
        assert!(text.contains("8.75/10.0/30.0") && text.contains("4 with 96 MiB"), "{text}");
    }
}
