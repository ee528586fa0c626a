//! The results: medians and ratios out of the samples, as JSON and as a table.

use super::papers::{self, Aim};
use super::statistics::{self, Summary};
use super::store::{Measured, Outcome, Run, Sample};
use super::variant::{Subject, Variant};
use crate::bench::machine::Machine;
use crate::bench::workloads::Better;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// Conditions that everybody who reads the figures must know.
fn conditions(run: &Run) -> Vec<&'static str> {
    let processors = if run.pinned {
        "The primary host has a processor of the machine to itself; the backup, the client and \
         all else share another one."
    } else {
        "Both hosts, the client and the guest share one machine's processors."
    };
    vec![
        processors,
        "A silent peer is suspected after 10 s only; `failover` has its own setting.",
        "All variants are measured in one run, one after the other, round by round, on guests of \
         the same image.",
        "A ratio is beside `unprotected`: 1 is as fast, less is slower. Of `plain` it tells what \
         our data plane costs or gains without protection.",
        "A spread is half the distance between the least and the greatest run.",
    ]
}

/// Everything that the suite found; `--json` prints it as it is.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Machine on which everything was measured, with versions.
    pub machine: Machine,
    /// The build: program, agent and guest image.
    pub build: String,
    /// Scale of how often things were measured: `full`, or `quick` for less often.
    pub scale: String,
    /// The commit that was checked out when the run began, with a `+` if files were changed;
    /// null if it is not known.
    pub commit: Option<String>,
    /// Conditions that everybody who reads the figures must know.
    pub conditions: Vec<&'static str>,
    /// Each subject in each variant that was measured.
    pub workloads: BTreeMap<Subject, BTreeMap<Variant, Cell>>,
}

/// One subject in one variant. What a variant has not is left out or null.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Cell {
    /// The median of the runs.
    pub median: Option<f64>,
    /// Its unit.
    pub unit: Option<String>,
    /// Direction in which it is good.
    pub better: Option<Better>,
    /// Half the distance between the least and the greatest run.
    pub spread: Option<f64>,
    /// The least.
    pub min: Option<f64>,
    /// The greatest.
    pub max: Option<f64>,
    /// Runs with a result.
    pub runs: usize,
    /// Ratio beside `unprotected`: 1 is as fast, less is slower.
    pub ratio: Option<f64>,
    /// Millions of bits a second that were sent to the backup.
    pub replication_mbit_s: Option<f64>,
    /// Checkpoints a second.
    pub checkpoints_per_s: Option<f64>,
    /// The checkpoints' pause in milliseconds: the median.
    pub pause_p50_ms: Option<f64>,
    /// The 99th percentile.
    pub pause_p99_ms: Option<f64>,
    /// Processes that wanted to run, at the ends of the runs: the greatest.
    pub load_average: Option<f64>,
    /// Measurements that failed, those that succeeded when tried again included.
    pub failed: usize,
    /// The last error, if a run has no result because of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Aim for it, and whether it is reached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aim: Option<Judgement>,
    /// Medians of the workload's further figures.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub details: BTreeMap<String, f64>,
    /// Tables and distributions of the figures that have them.
    #[serde(skip_serializing_if = "Value::is_null")]
    pub extra: Value,
}

/// An aim, and whether it is met.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judgement {
    /// The aim in words.
    pub aim: String,
    /// Whether it is met; null if it cannot be told.
    pub met: Option<bool>,
}

impl Report {
    /// Report of all samples of a run.
    pub fn of(run: &Run, samples: &[Sample]) -> Report {
        let mut sorted: BTreeMap<Subject, BTreeMap<Variant, Vec<&Sample>>> = BTreeMap::new();
        for sample in samples {
            let subject = sorted.entry(sample.subject).or_default();
            subject.entry(sample.variant).or_default().push(sample);
        }
        let subject = |(subject, variants): (Subject, BTreeMap<Variant, Vec<&Sample>>)| {
            let cell = |(variant, samples): (Variant, Vec<&Sample>)| (variant, Cell::of(&samples));
            let mut cells: BTreeMap<Variant, Cell> = variants.into_iter().map(cell).collect();
            compare(subject, &mut cells);
            (subject, cells)
        };
        Report {
            machine: run.machine.clone(),
            build: run.build.clone(),
            scale: run.scale.clone(),
            commit: run.commit.clone(),
            conditions: conditions(run),
            workloads: sorted.into_iter().map(subject).collect(),
        }
    }

    /// The cell of a subject in a variant.
    pub fn cell(&self, subject: Subject, variant: Variant) -> Option<&Cell> {
        self.workloads.get(&subject)?.get(&variant)
    }
}

/// Fills what needs the unprotected guest's figure.
fn compare(subject: Subject, cells: &mut BTreeMap<Variant, Cell>) {
    let base = cells.get(&Variant::Unprotected).and_then(|cell| cell.median);
    for (&variant, cell) in cells {
        let (Some(value), Some(better)) = (cell.median, cell.better) else { continue };
        cell.ratio = base.and_then(|base| statistics::ratio(value, base, better));
        let judge = |aim: Aim| Judgement { aim: aim.words(), met: aim.met(value, base, better) };
        cell.aim = papers::aim(subject, variant).map(judge);
    }
}

impl Cell {
    fn of(samples: &[&Sample]) -> Cell {
        let measured: Vec<&Measured> =
            samples.iter().filter_map(|sample| sample.measured()).collect();
        let over = |value: &dyn Fn(&Measured) -> Option<f64>| {
            let values: Vec<f64> = measured.iter().copied().filter_map(value).collect();
            statistics::median(&values)
        };
        let values: Vec<f64> = measured.iter().map(|measured| measured.value).collect();
        let summary = Summary::of(&values);
        let newest = measured.last();
        let names = measured.iter().flat_map(|measured| measured.details.keys());
        let detail = |name: &String| {
            let median = over(&|measured| measured.details.get(name).copied())?;
            Some((name.clone(), median))
        };
        let loads = samples.iter().filter_map(|sample| sample.load_average);
        Cell {
            median: summary.map(|summary| summary.median),
            unit: newest.map(|measured| measured.unit.clone()),
            better: newest.map(|measured| measured.better),
            spread: summary.map(|summary| summary.spread()),
            min: summary.map(|summary| summary.min),
            max: summary.map(|summary| summary.max),
            runs: values.len(),
            ratio: None,
            replication_mbit_s: over(&|one| Some(one.protection?.replication_mbit_s)),
            checkpoints_per_s: over(&|one| Some(one.protection?.checkpoints_per_s)),
            pause_p50_ms: over(&|one| one.protection?.pause_p50_ms),
            pause_p99_ms: over(&|one| one.protection?.pause_p99_ms),
            load_average: loads.reduce(f64::max),
            failed: samples.len() - values.len(),
            error: samples.iter().rev().find_map(|sample| sample.last_error()),
            aim: None,
            details: names.filter_map(detail).collect(),
            extra: newest.map(|measured| measured.extra.clone()).unwrap_or_default(),
        }
    }
}

impl Sample {
    fn measured(&self) -> Option<&Measured> {
        match &self.outcome {
            Outcome::Measured(measured) => Some(measured),
            Outcome::Failed { .. } => None,
        }
    }

    fn last_error(&self) -> Option<String> {
        match &self.outcome {
            Outcome::Failed { error, last: true } => Some(error.clone()),
            _ => None,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::store::tests::{run, sample, seconds};
    use super::*;

    /// Every subject in every variant, half as fast under protection; plain QEMU failed.
    pub fn report() -> Report {
        let mut samples = Vec::new();
        for &subject in Subject::all() {
            for &variant in Variant::all() {
                let failed = Outcome::Failed { error: "QEMU <did> not run".into(), last: true };
                let value = if variant.protection().is_some() { 20.0 } else { 10.0 };
                samples.push(match variant {
                    Variant::Plain => sample(subject, variant, 1, failed),
                    _ => seconds(subject, variant, 1, value),
                });
            }
        }
        Report::of(&run(), &samples)
    }

    #[test]
    fn the_json_has_the_documented_shape() {
        let json = serde_json::to_value(report()).unwrap();
        assert!(json["machine"]["cpu"].is_string() && json["machine"]["qemu"].is_string());
        for subject in ["cpu", "memory", "fileio", "compile", "postmark", "upload", "download"] {
            for variant in ["unprotected", "adaptive", "10", "20", "30", "40", "nobuffer"] {
                let cell = &json["workloads"][subject][variant];
                for field in ["median", "spread", "runs", "ratio"] {
                    assert!(cell[field].is_number(), "{subject} {variant} {field}: {cell}");
                }
                assert_eq!(cell["unit"], "s");
                let protected = variant != "unprotected";
                assert_eq!(cell["replication_mbit_s"].is_number(), protected, "{cell}");
            }
            let plain = &json["workloads"][subject]["plain"];
            assert_eq!(
                (&plain["error"], &plain["runs"]),
                (&"QEMU <did> not run".into(), &0.into())
            );
        }
    }

    #[test]
    fn medians_are_compared_with_the_unprotected_guest_in_both_directions() {
        let report = report();
        let adaptive = report.cell(Subject::Cpu, Variant::Adaptive).unwrap();
        assert_eq!((adaptive.median, adaptive.ratio), (Some(20.0), Some(0.5)));
        assert_eq!(adaptive.aim, Some(Judgement { aim: "≥ 0.97".into(), met: Some(false) }));
        let mut rate = seconds(Subject::Web, Variant::Adaptive, 1, 20.0);
        let mut base = seconds(Subject::Web, Variant::Unprotected, 1, 10.0);
        for sample in [&mut rate, &mut base] {
            let Outcome::Measured(measured) = &mut sample.outcome else { unreachable!() };
            measured.better = Better::Higher;
        }
        let web = Report::of(&run(), &[rate, base]);
        assert_eq!(web.cell(Subject::Web, Variant::Adaptive).unwrap().ratio, Some(2.0));
    }

    #[test]
    fn runs_are_summed_up_and_failures_counted() {
        let failed = Outcome::Failed { error: "once".into(), last: false };
        let samples = [
            seconds(Subject::Cpu, Variant::Adaptive, 1, 1.0),
            sample(Subject::Cpu, Variant::Adaptive, 2, failed),
            seconds(Subject::Cpu, Variant::Adaptive, 2, 3.0),
            seconds(Subject::Cpu, Variant::Adaptive, 3, 9.0),
        ];
        let report = Report::of(&run(), &samples);
        let cell = report.cell(Subject::Cpu, Variant::Adaptive).unwrap();
        assert_eq!((cell.median, cell.spread, cell.runs), (Some(3.0), Some(4.0), 3));
        assert_eq!((cell.failed, &cell.error, cell.ratio), (1, &None, None));
        assert_eq!(cell.details["events"], 6.0);
        assert_eq!(cell.replication_mbit_s, Some(12.5));
    }
}
