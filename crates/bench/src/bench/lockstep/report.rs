//! The result of `bench lockstep`: the paper's two tables, beside this machine's figures.

use super::Sample;
use super::log::LogFigures;
use super::plan::{Subject, Variant};
use super::testbed::Taken;
use crate::bench::machine::Machine;
use crate::bench::suite::statistics::{Summary, median, ratio};
use crate::bench::suite::store::Run;
use crate::bench::workloads::{Better, Scale, TRANSFER, Workload};
use serde::Serialize;
use std::collections::BTreeMap;

/// Ratio that is aimed at.
pub const LEAST_RATIO: f64 = 0.95;
/// Most log of an idle guest, in Mbit/s.
pub const MOST_IDLE_LOG: f64 = 0.5;
/// Most log of a workload that does not receive much, in Mbit/s.
pub const MOST_LOG: f64 = 20.0;
/// The 99th percentile, in milliseconds.
pub const MOST_LAG_MS: f64 = 100.0;
/// The median, in milliseconds.
pub const MOST_ADDED_MS: f64 = 1.5;

/// Conditions under which the figures are to be read.
const CONDITIONS: &[&str] = &[
    "both hosts, both QEMUs and the clients share this machine's processors",
    "tcg and icount: QEMU with a tap and a raw file; icount: as lockstep's, without a log",
    "pair: icount twice at once, each with its own clients; what the machine has for two guests",
    "record: lockstep's guest while it is not protected",
    "ratio: speed beside icount; times are this machine's, not the guest's",
    "medians of the rounds; spread: half of greatest minus least",
];

/// Everything that was found; `--json` prints it as it is.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Machine on which everything was measured.
    pub machine: Machine,
    /// The program, the agent and the guest's image: a hash over all of them.
    pub build: String,
    /// `full` or `quick`.
    pub scale: String,
    /// Conditions under which to read it.
    pub conditions: &'static [&'static str],
    /// The shape of VMware FT's table 1.
    pub workloads: BTreeMap<Subject, Row>,
    /// The log of an idle guest, in millions of bits a second.
    pub idle_log_mbit_s: Option<f64>,
    /// The shape of its table 2.
    pub network: BTreeMap<Subject, Link>,
    /// Times of round trips, in milliseconds.
    pub latency: Option<Latency>,
    /// A file read from the disk, in millions of bytes a second.
    pub disk_reads: Option<DiskReads>,
    /// Processes that wanted to run in the last minute, at the end.
    pub load_average: Option<f64>,
    /// Measurements that failed, and why.
    pub errors: Vec<String>,
}

/// One workload.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Speed in lockstep, as a part of the same guest's with counted instructions and no log.
    pub ratio: Option<f64>,
    /// Speed in lockstep, as a part of the same guest's on plain QEMU.
    pub ratio_to_tcg: Option<f64>,
    /// Speed in lockstep, as a part of two such guests' that run at once.
    pub ratio_to_pair: Option<f64>,
    /// Its log, in millions of bits a second.
    pub log_mbit_s: Option<f64>,
    /// Lag of the backup, in milliseconds: the median.
    pub lag_ms_p50: Option<f64>,
    /// The 99th percentile.
    pub lag_ms_p99: Option<f64>,
    /// The unit of the figures.
    pub unit: &'static str,
    /// Direction in which they are good.
    pub better: Better,
    /// The figures.
    pub variants: BTreeMap<Variant, Runs>,
}

/// A workload's figures in one variant.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Runs {
    /// The middle one.
    pub median: f64,
    /// Half the distance between the least and the greatest.
    pub spread: f64,
    /// The least.
    pub min: f64,
    /// The greatest.
    pub max: f64,
    /// Number of runs.
    pub runs: usize,
}

/// One TCP connection, one way; in millions of bits a second.
#[derive(Clone, Debug, Serialize)]
pub struct Link {
    /// Speed with counted instructions and no log.
    pub base: Option<f64>,
    /// Speed in lockstep.
    pub ft: Option<f64>,
    /// Speed on plain QEMU.
    pub tcg: Option<f64>,
    /// Ratio and log; the figures are seconds.
    #[serde(flatten)]
    pub row: Row,
}

/// A file that is read from the disk, past the guest's page cache: the backup reads its own
/// mirror, or gets what was read with the log.
#[derive(Clone, Debug, Serialize)]
pub struct DiskReads {
    /// The unit of the figures.
    pub unit: &'static str,
    /// The ratio to counted instructions without a log, where the backup reads too.
    pub ratio: Option<f64>,
    /// The same, where what was read is in the log.
    pub ratio_log: Option<f64>,
    /// The figures.
    pub variants: BTreeMap<Variant, Reads>,
}

/// Disk reads in one variant.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Reads {
    /// Speeds.
    #[serde(flatten)]
    pub runs: Runs,
    /// Log that went to the backup, in lockstep.
    pub log_mbit_s: Option<f64>,
    /// Lag of the backup, in milliseconds: the median.
    pub lag_ms_p50: Option<f64>,
    /// The 99th percentile.
    pub lag_ms_p99: Option<f64>,
}

/// Request and response, one after the other, in milliseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Latency {
    /// Time that lockstep adds at the median to an idle guest with counted instructions.
    pub added_by_lockstep_ms: Option<f64>,
    /// Time that checkpoints add at the median to an idle guest on plain QEMU.
    pub added_by_checkpoints_ms: Option<f64>,
    /// Medians of `p50_idle`, `p99_idle`, `p50_load`, `p99_load`.
    pub variants: BTreeMap<Variant, BTreeMap<&'static str, f64>>,
}

impl Report {
    /// Report of all samples.
    pub fn of(run: &Run, scale: Scale, samples: &[Sample]) -> Report {
        let mut report = Report {
            machine: run.machine.clone(),
            build: run.build.clone(),
            scale: run.scale.clone(),
            conditions: CONDITIONS,
            workloads: BTreeMap::new(),
            idle_log_mbit_s: None,
            network: BTreeMap::new(),
            latency: None,
            disk_reads: None,
            load_average: crate::bench::machine::load_average(),
            errors: samples.iter().filter_map(error).collect(),
        };
        let mut subjects: Vec<Subject> = samples.iter().map(|one| one.step.subject).collect();
        subjects.dedup();
        for subject in subjects {
            let of: Taking<'_> = samples.iter().filter_map(|one| taken(one, subject)).collect();
            report.add(subject, scale, &of);
        }
        report
    }

    fn add(&mut self, subject: Subject, scale: Scale, taken: &Taking<'_>) {
        match subject.workload() {
            None if subject == Subject::DiskReads => self.disk_reads = Some(disk_reads(taken)),
            None => self.idle_log_mbit_s = over_logs(taken, |log| log.mbit_s),
            Some(Workload::Latency) => self.latency = Some(latency(taken)),
            Some(workload) => {
                let row = row(workload, taken);
                if let Subject::Transmit | Subject::Receive = subject {
                    self.network.insert(subject, link(row, scale));
                } else {
                    self.workloads.insert(subject, row);
                }
            }
        }
    }

    /// Whether all that was asked for has a figure.
    pub fn is_complete(&self) -> bool {
        self.errors.is_empty()
    }
}

/// Measurements of one subject.
type Taking<'a> = Vec<(Variant, &'a Taken)>;

fn taken(sample: &Sample, subject: Subject) -> Option<(Variant, &Taken)> {
    let taken = sample.outcome.as_ref().ok()?;
    (sample.step.subject == subject).then_some((sample.step.variant, taken))
}

fn error(sample: &Sample) -> Option<String> {
    Some(format!("{}: {}", sample.step, sample.outcome.as_ref().err()?))
}

fn row(workload: Workload, taken: &Taking<'_>) -> Row {
    let mut values: BTreeMap<Variant, Vec<f64>> = BTreeMap::new();
    for (variant, taken) in taken {
        values.entry(*variant).or_default().extend(taken.sample.iter().map(|one| one.value));
    }
    let runs = |(variant, values): (Variant, Vec<f64>)| Some((variant, Runs::of(&values)?));
    let variants: BTreeMap<Variant, Runs> = values.into_iter().filter_map(runs).collect();
    let of = |variant| variants.get(&variant).map(|runs: &Runs| runs.median);
    let beside = |base| ratio(of(Variant::Lockstep)?, of(base)?, workload.better());
    Row {
        ratio: beside(Variant::Icount),
        ratio_to_tcg: beside(Variant::Tcg),
        ratio_to_pair: beside(Variant::Pair),
        log_mbit_s: over_logs(taken, |log| log.mbit_s),
        lag_ms_p50: over_logs(taken, |log| log.lag_ms_p50),
        lag_ms_p99: over_logs(taken, |log| log.lag_ms_p99),
        unit: workload.unit(),
        better: workload.better(),
        variants,
    }
}

impl Runs {
    fn of(values: &[f64]) -> Option<Runs> {
        let summary = Summary::of(values)?;
        let Summary { median, min, max, runs } = summary;
        Some(Runs { median, spread: summary.spread(), min, max, runs })
    }
}

/// The median over the runs in lockstep.
fn over_logs(taken: &Taking<'_>, figure: impl Fn(LogFigures) -> f64) -> Option<f64> {
    let values: Vec<f64> = taken.iter().filter_map(|(_, taken)| taken.log.map(&figure)).collect();
    median(&values)
}

fn link(row: Row, scale: Scale) -> Link {
    let megabits = scale.of(TRANSFER.0, TRANSFER.1) as f64 * 8.0;
    let rate = |variant| row.variants.get(&variant).map(|runs| megabits / runs.median);
    Link { base: rate(Variant::Icount), ft: rate(Variant::Lockstep), tcg: rate(Variant::Tcg), row }
}

fn latency(taken: &Taking<'_>) -> Latency {
    let mut values: BTreeMap<Variant, BTreeMap<&'static str, Vec<f64>>> = BTreeMap::new();
    for (variant, taken) in taken {
        let Some(sample) = &taken.sample else { continue };
        let figures = values.entry(*variant).or_default();
        figures.entry("p50_idle").or_default().push(sample.value);
        for figure in &sample.more {
            figures.entry(figure.name).or_default().push(figure.value);
        }
    }
    let medians = |(variant, figures): (Variant, BTreeMap<&'static str, Vec<f64>>)| {
        let of = |(name, values): (&'static str, Vec<f64>)| Some((name, median(&values)?));
        (variant, figures.into_iter().filter_map(of).collect())
    };
    let variants: BTreeMap<Variant, BTreeMap<_, _>> = values.into_iter().map(medians).collect();
    let idle = |variant| variants.get(&variant)?.get("p50_idle").copied();
    let added = |variant, base| Some(idle(variant)? - idle(base)?);
    Latency {
        added_by_lockstep_ms: added(Variant::Lockstep, Variant::Icount),
        added_by_checkpoints_ms: added(Variant::Checkpoint, Variant::Tcg),
        variants,
    }
}

fn disk_reads(taken: &Taking<'_>) -> DiskReads {
    let mut of_variant: BTreeMap<Variant, Taking<'_>> = BTreeMap::new();
    for &(variant, one) in taken {
        of_variant.entry(variant).or_default().push((variant, one));
    }
    let reads = |(variant, taken): (Variant, Taking<'_>)| {
        let speeds: Vec<f64> =
            taken.iter().filter_map(|(_, one)| Some(one.sample.as_ref()?.value)).collect();
        let reads = Reads {
            runs: Runs::of(&speeds)?,
            log_mbit_s: over_logs(&taken, |log| log.mbit_s),
            lag_ms_p50: over_logs(&taken, |log| log.lag_ms_p50),
            lag_ms_p99: over_logs(&taken, |log| log.lag_ms_p99),
        };
        Some((variant, reads))
    };
    let variants: BTreeMap<Variant, Reads> = of_variant.into_iter().filter_map(reads).collect();
    let of = |variant| variants.get(&variant).map(|reads: &Reads| reads.runs.median);
    let beside = |variant| ratio(of(variant)?, of(Variant::Icount)?, Better::Higher);
    DiskReads {
        unit: "MB/s",
        ratio: beside(Variant::Lockstep),
        ratio_log: beside(Variant::LockstepLog),
        variants,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::plan::{Step, plan};
    use super::*;
    use crate::bench::suite::store::tests::run;
    use crate::bench::workloads::{Figure, Sample as Figures};

    /// Everything once; lockstep takes twice as long, or does half as much.
    pub fn report() -> Report {
        let taken = |step: Step| {
            let slow = step.variant == Variant::Lockstep;
            let worse = |workload: Workload| match workload.better() {
                Better::Lower => 8.0,
                Better::Higher => 2.0,
            };
            let p99 = Figure { name: "p99_idle", unit: "ms", better: Better::Lower, value: 9.0 };
            let value = match step.subject.workload() {
                Some(workload) if slow => Some(worse(workload)),
                Some(_) => Some(4.0),
                None if step.subject == Subject::Idle => None,
                None if step.variant == Variant::LockstepLog => Some(1.0),
                None => Some(if slow { 2.0 } else { 4.0 }),
            };
            let sample = value.map(|value| Figures { value, more: vec![p99] });
            let log = LogFigures { mbit_s: 3.0, lag_ms_p50: 1.0, lag_ms_p99: 7.0 };
            Taken { sample, log: slow.then_some(log) }
        };
        let failed = Step { round: 2, subject: Subject::Web, variant: Variant::Tcg };
        let sample = |step| {
            let outcome =
                if step == failed { Err("QEMU ended".to_owned()) } else { Ok(taken(step)) };
            Sample { step, outcome }
        };
        let samples: Vec<Sample> = plan(&[], &[], 2).into_iter().map(sample).collect();
        Report::of(&run(), Scale::Full, &samples)
    }

    #[test]
    fn the_json_has_the_documented_shape() {
        let json = serde_json::to_value(report()).unwrap();
        for subject in ["cpu", "compile", "database", "web"] {
            let row = &json["workloads"][subject];
            for field in ["ratio", "log_mbit_s", "lag_ms_p50", "lag_ms_p99"] {
                assert!(row[field].is_number(), "{subject} {field}: {row}");
            }
            assert_eq!(
                (&row["ratio"], &row["variants"]["icount"]["runs"]),
                (&0.5.into(), &2.into())
            );
        }
        assert_eq!(json["idle_log_mbit_s"], 3.0);
        // 50 MB in 4 s and in 8.
        for way in ["transmit", "receive"] {
            let link = &json["network"][way];
            assert_eq!((&link["base"], &link["ft"]), (&100.0.into(), &50.0.into()));
        }
        let reads = &json["disk_reads"];
        assert_eq!((&reads["ratio"], &reads["ratio_log"]), (&0.5.into(), &0.25.into()));
        assert_eq!(reads["variants"]["lockstep"]["lag_ms_p99"], 7.0);
        assert!(reads["variants"]["icount"]["log_mbit_s"].is_null(), "{reads}");
        assert_eq!(json["latency"]["added_by_lockstep_ms"], 4.0);
        assert_eq!(json["latency"]["added_by_checkpoints_ms"], 0.0);
        assert_eq!(json["latency"]["variants"]["checkpoint"]["p99_idle"], 9.0);
    }

    #[test]
    fn what_failed_is_told() {
        let report = report();
        assert!(!report.is_complete());
        assert_eq!(report.errors, ["round 2, web, tcg: QEMU ended"]);
        assert_eq!(report.workloads[&Subject::Web].variants[&Variant::Tcg].runs, 1);
    }
}
