//! `understudy-lab bench readme`: the tables of README.md and docs/performance.md, and the plots
//! beside them, made of one report, so that all say what was measured, of which commit, and the same.

mod plots;
mod tables;

use super::papers::Aim;
use super::variant::{Subject, Variant};
use crate::bench::machine::Machine;
use crate::bench::workloads::Better;
use crate::cli::BenchReadmeArgs;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use tables::{performance, readme};
use understudy_client::{Exit, Failure};

const BEGIN: &str = "<!-- made by `make readme-table`: begin -->\n";
const END: &str = "<!-- made by `make readme-table`: end -->\n";
/// The report that the tables are made of, as it is kept.
const KEPT: &str = "docs/performance/suite.json";
const README: &str = "README.md";
const PERFORMANCE: &str = "docs/performance.md";
/// Subjects that reports of earlier suites lack.
const LATER: [Subject; 4] =
    [Subject::Pgbench1, Subject::Pgbench4, Subject::Pgbench32, Subject::Redis];
/// The processor seconds of the first host, daemon and QEMU, among the details of a figure.
const PRIMARY_SIDE: &str = "cpu_primary_s";
/// Detail that has those of the second host.
const BACKUP_SIDE: &str = "cpu_backup_s";
/// Variants that the tables cannot do without.
const NEEDED: [Variant; 3] = [Variant::Unprotected, Variant::Adaptive, Variant::Plain];

/// The part of a report that the tables need; `report.json` has it, and more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Figures {
    /// Commit that was built.
    commit: Option<String>,
    /// Note on what else must be known: in the file that is kept, written by hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    machine: Machine,
    scale: String,
    /// Conditions that everybody who reads the figures must know; the first says who had which
    /// processors.
    #[serde(default)]
    conditions: Vec<String>,
    workloads: BTreeMap<Subject, BTreeMap<Variant, Figure>>,
    /// Another run, in which all hosts shared all processors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shared: Option<Shared>,
}

/// Figures that stand beside a run with a processor for each host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Shared {
    source: String,
    /// Speeds under the default policy, as [`Figures::speed`] has it.
    speeds: BTreeMap<Subject, f64>,
}

/// A subject in a variant. Older reports that were kept as text have ratios without medians.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Figure {
    #[serde(skip_serializing_if = "Option::is_none")]
    median: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unit: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    better: Option<Better>,
    #[serde(skip_serializing_if = "Option::is_none")]
    spread: Option<f64>,
    runs: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    replication_mbit_s: Option<f64>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    details: BTreeMap<String, f64>,
    /// Data that the plots are made of.
    #[serde(skip_serializing_if = "Value::is_null")]
    extra: Value,
}

/// Writes both tables, and keeps the part of the report that they are made of.
pub fn run(args: &BenchReadmeArgs) -> Result<Exit, Failure> {
    write(args)
        .map_err(|error| Failure::internal(format!("the tables were not made: {error:#}")))?;
    eprintln!("{README} and {PERFORMANCE} have the figures of {}", args.report.display());
    Ok(Exit::Ok)
}

fn write(args: &BenchReadmeArgs) -> Result<()> {
    let mut figures = read(&args.report)?;
    figures.commit = args.commit.clone().or(figures.commit);
    figures.note = args.note.clone().or(figures.note);
    if let Some(path) = &args.shared {
        figures.shared = Some(read(path)?.shared_by_all()?);
    }
    // All is made before anything is written.
    let mut pages = Vec::new();
    for (name, block) in [(README, readme(&figures)?), (PERFORMANCE, performance(&figures)?)] {
        let path = args.root.join(name);
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let text = replaced(&text, &block).with_context(|| path.display().to_string())?;
        pages.push((path, text));
    }
    for (name, plot) in plots::all(&figures)? {
        pages.push((args.root.join(name), plot));
    }
    pages.push((args.root.join(KEPT), serde_json::to_string_pretty(&figures.kept())? + "\n"));
    for (path, text) in pages {
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Reads a report, and refuses one that leaves cells of the tables empty.
fn read(path: &Path) -> Result<Figures> {
    let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let figures: Figures = serde_json::from_slice(&text)
        .with_context(|| format!("{} is no report of `understudy-lab bench`", path.display()))?;
    for subject in figures.subjects() {
        for variant in NEEDED {
            ensure!(
                figures.speed(subject, variant).is_some(),
                "{} has no figure of {subject} in {variant}: measure all workloads with \
                 `--variants {}`",
                path.display(),
                NEEDED.map(|variant| variant.to_string()).join(",")
            );
        }
    }
    Ok(figures)
}

fn workloads() -> impl Iterator<Item = Subject> {
    Subject::all().iter().copied().filter(|subject| subject.own_variant().is_none())
}

/// `text` with `block` between the two marks.
fn replaced(text: &str, block: &str) -> Result<String> {
    let (before, rest) = text.split_once(BEGIN).context("the mark of the table's begin is gone")?;
    let (_, after) = rest.split_once(END).context("the mark of the table's end is gone")?;
    Ok(format!("{before}{BEGIN}{block}{END}{after}"))
}

impl Figures {
    /// The workloads of the tables.
    fn subjects(&self) -> impl Iterator<Item = Subject> {
        let measured = |subject: &Subject| self.workloads.contains_key(subject);
        workloads().filter(move |subject| !LATER.contains(subject) || measured(subject))
    }

    fn figure(&self, subject: Subject, variant: Variant) -> Option<&Figure> {
        self.workloads.get(&subject)?.get(&variant)
    }

    /// Speed beside the unprotected guest; of [`Subject::Latency`] the milliseconds that are added.
    fn speed(&self, subject: Subject, variant: Variant) -> Option<f64> {
        let figure = self.figure(subject, variant)?;
        if subject != Subject::Latency {
            return if variant == Variant::Unprotected { Some(1.0) } else { figure.ratio };
        }
        Some(figure.median? - self.figure(subject, Variant::Unprotected)?.median?)
    }

    /// The same beside plain QEMU.
    fn beside_plain(&self, subject: Subject, variant: Variant) -> Option<f64> {
        let (ours, plain) = (self.speed(subject, variant)?, self.speed(subject, Variant::Plain)?);
        Some(if subject == Subject::Latency { ours - plain } else { ours / plain })
    }

    /// [`Figures::speed`] under the default policy, in the run that has no processor for each host.
    fn shared_speed(&self, subject: Subject) -> Option<f64> {
        self.shared.as_ref()?.speeds.get(&subject).copied()
    }

    fn met(&self, subject: Subject, variant: Variant, aim: Aim) -> Option<bool> {
        let speed = self.speed(subject, variant)?;
        Some(match aim {
            Aim::Ratio(least) => speed >= least,
            Aim::AddedMs(most) => speed <= most,
            Aim::AtMost(most) => self.figure(subject, variant)?.median? <= most,
        })
    }

    /// Number of times that the workloads were run: the least and the most.
    fn rounds(&self) -> String {
        let all = workloads().filter_map(|subject| self.workloads.get(&subject));
        let runs: Vec<usize> = all.flat_map(BTreeMap::values).map(|figure| figure.runs).collect();
        let least = runs.iter().copied().min().unwrap_or(0);
        let most = runs.iter().copied().max().unwrap_or(0);
        match (least, most) {
            (1, 1) => "one round".to_owned(),
            (least, most) if least == most => format!("{most} rounds"),
            (least, most) => format!("{least} to {most} rounds"),
        }
    }

    /// Processor seconds of a side for the same work, beside those of the unprotected guest's host.
    fn processors(&self, subject: Subject, variant: Variant, side: &str) -> Option<f64> {
        let seconds = |variant, side: &str| {
            let figure = self.figure(subject, variant)?;
            let work = if subject.workload()?.is_timed() { figure.median? } else { 1.0 };
            Some(figure.details.get(side)? / work)
        };
        Some(seconds(variant, side)? / seconds(Variant::Unprotected, PRIMARY_SIDE)?)
    }

    /// Drops what no table and no plot has.
    fn kept(mut self) -> Figures {
        for (subject, cells) in &mut self.workloads {
            let plotted = matches!(subject, Subject::Pause | Subject::Failover);
            for figure in cells.values_mut().filter(|_| !plotted) {
                figure.extra = Value::Null;
            }
        }
        self
    }

    fn shared_by_all(&self) -> Result<Shared> {
        let speed = |subject: Subject| Some((subject, self.speed(subject, Variant::Adaptive)?));
        Ok(Shared { source: self.source()?, speeds: self.subjects().filter_map(speed).collect() })
    }

    fn source(&self) -> Result<String> {
        let Some(commit) = &self.commit else {
            bail!("the report does not say of which commit it is: say it with --commit")
        };
        let Machine { cpu, cpus, kernel, qemu, accel, .. } = &self.machine;
        Ok(format!(
            "commit `{commit}`, {}, {cpu}, {cpus} CPUs, Linux {kernel}, QEMU {qemu} ({accel})",
            self.rounds()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
    }

    #[test]
    fn the_tables_are_what_the_kept_report_makes() {
        let figures = read(&root().join(KEPT)).unwrap();
        let blocks = [(README, readme(&figures)), (PERFORMANCE, performance(&figures))];
        for (name, block) in blocks {
            let text = fs::read_to_string(root().join(name)).unwrap();
            let made = replaced(&text, &block.unwrap()).unwrap();
            assert_eq!(text, made, "{name}: `make readme-table` makes it anew");
        }
        for (name, plot) in plots::all(&figures).unwrap() {
            let kept = fs::read_to_string(root().join(&name)).unwrap();
            assert!(kept == plot, "{name}: `make readme-table` makes it anew");
        }
    }

    fn args(root: &Path, report: &Path, commit: Option<&str>) -> BenchReadmeArgs {
        BenchReadmeArgs {
            report: report.to_owned(),
            commit: commit.map(str::to_owned),
            note: None,
            shared: None,
            root: root.to_owned(),
        }
    }

    /// Every workload with medians as `report.json` has them: 10 unprotected, 12.5 protected,
    /// 8 on plain QEMU.
    fn report() -> serde_json::Value {
        let figure = |median: f64| {
            serde_json::json!({"median": median, "unit": "s", "better": "lower", "spread": 0.5,
                "runs": 1, "ratio": 10.0 / median, "aim": {"aim": "x", "met": null}})
        };
        let cells = serde_json::json!({"unprotected": figure(10.0), "adaptive": figure(12.5),
            "plain": figure(8.0)});
        let workloads: BTreeMap<Subject, serde_json::Value> =
            workloads().map(|subject| (subject, cells.clone())).collect();
        serde_json::json!({"machine": super::super::store::tests::run().machine, "build": "01",
            "scale": "quick", "conditions": [], "workloads": workloads})
    }

    fn copy() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("docs/performance")).unwrap();
        for name in [README, PERFORMANCE, KEPT] {
            fs::copy(root().join(name), folder.path().join(name)).unwrap();
        }
        folder
    }

    #[test]
    fn a_report_of_the_suite_replaces_what_is_between_the_marks() {
        let folder = copy();
        let path = folder.path().join("report.json");
        fs::write(&path, report().to_string()).unwrap();
        write(&args(folder.path(), &path, Some("abc1234"))).unwrap();
        let readme = fs::read_to_string(folder.path().join(README)).unwrap();
        // 8 s on plain QEMU, 12.5 protected: 0.64; 0.80 of the unprotected 10.
        assert!(readme.contains("| plain QEMU | 0.64 | 0.64 |"), "{readme}");
        assert!(readme.contains("| Understudy, unprotected | 0.80 | 0.80 |"), "{readme}");
        assert!(readme.contains("commit `abc1234`, one round, a processor, 2 CPUs"), "{readme}");
        let old = fs::read_to_string(root().join(README)).unwrap();
        let outside = |text: &str| replaced(text, "").unwrap();
        assert_eq!(outside(&readme), outside(&old));
        // What is kept makes the same tables again.
        write(&args(folder.path(), &folder.path().join(KEPT), None)).unwrap();
        assert_eq!(fs::read_to_string(folder.path().join(README)).unwrap(), readme);
    }

    #[test]
    fn what_no_whole_table_can_be_made_of_changes_nothing() {
        let folder = copy();
        let path = folder.path().join("report.json");
        let refused = |report: &serde_json::Value, commit| {
            fs::write(&path, report.to_string()).unwrap();
            format!("{:#}", write(&args(folder.path(), &path, commit)).unwrap_err())
        };
        assert!(refused(&report(), None).contains("--commit"));
        let mut partial = report();
        partial["workloads"]["web"]["plain"]["ratio"] = serde_json::Value::Null;
        let error = refused(&partial, Some("abc"));
        assert!(error.contains("web in plain") && error.contains("--variants"), "{error}");
        assert!(refused(&serde_json::json!({}), Some("abc")).contains("is no report"));
        for name in [README, PERFORMANCE, KEPT] {
            let [now, before] = [folder.path(), &root()].map(|at| fs::read(at.join(name)).unwrap());
            assert_eq!(now, before, "{name}");
        }
    }
}
