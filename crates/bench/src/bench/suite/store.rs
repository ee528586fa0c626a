//! The results file: a line of JSON for the run, then one for each measurement, appended
//! as soon as it is there. A run that is interrupted goes on from it.

use super::variant::{Subject, Variant};
use crate::bench::machine::Machine;
use crate::bench::workloads::Better;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The results file, in the suite's folder.
pub const SAMPLES: &str = "samples.jsonl";

/// Facts that must be the same for measurements to belong together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The program, the agent and the guest's image: a hash over all of them.
    pub build: String,
    /// Scale of how often the pause, the compression and the fail-over are measured: `full`, or
    /// `quick` for less often. The workloads are the same.
    pub scale: String,
    /// Whether the primary host had a processor to itself.
    #[serde(default)]
    pub pinned: bool,
    /// The commit that was checked out when the run began, with a `+` if files were changed.
    #[serde(default)]
    pub commit: Option<String>,
    /// Machine on which everything was measured, with versions.
    pub machine: Machine,
}

/// One measurement: the `run`-th of a subject in a variant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Subject that was measured.
    pub subject: Subject,
    /// Way in which the guest was kept.
    pub variant: Variant,
    /// The round of the suite, from 1.
    pub round: u32,
    /// Seconds since 1970 when it ended.
    pub at: u64,
    /// Seconds that it took with all that it needs (protecting, forgetting).
    pub took_seconds: f64,
    /// Processes that wanted to run in the last minute, at the end.
    pub load_average: Option<f64>,
    /// Outcome of it.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// Outcome of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// The measurement has a figure.
    Measured(Measured),
    /// The measurement has none, for this reason. `last` if it is not tried again.
    Failed {
        /// The error.
        error: String,
        /// Whether it is not tried again.
        last: bool,
    },
}

/// Figures of a workload, and of its protection meanwhile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// The figure.
    pub value: f64,
    /// Its unit.
    pub unit: String,
    /// Direction in which it is good.
    pub better: Better,
    /// Further figures, by name.
    #[serde(default)]
    pub details: BTreeMap<String, f64>,
    /// Figures of a protected guest.
    #[serde(default)]
    pub protection: Option<ProtectionFigures>,
    /// Data that belong to the figure, too: tables, distributions.
    #[serde(default)]
    pub extra: Value,
}

/// Figures that the daemon counted while a workload ran.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProtectionFigures {
    /// Millions of bits a second that were sent to the backup.
    pub replication_mbit_s: f64,
    /// Checkpoints committed a second.
    pub checkpoints_per_s: f64,
    /// The checkpoints' pauses: the median, in milliseconds; none without a checkpoint.
    pub pause_p50_ms: Option<f64>,
    /// Their 99th percentile.
    pub pause_p99_ms: Option<f64>,
}

/// The results file of one run, open for more.
pub struct Store {
    file: File,
    run: Run,
    samples: Vec<Sample>,
}

/// Beginning of a store.
#[derive(Debug, PartialEq, Eq)]
pub enum Beginning {
    /// Nothing was there, or it was not wanted.
    New,
    /// Measurements of the same run were there.
    Resumed,
    /// Measurements of another run were there; they were kept under this name.
    SetAside {
        /// Words on what is different.
        why: String,
        /// Path of the old results.
        kept: PathBuf,
    },
}

impl Store {
    /// Opens the results in `folder`, which is made if need be. With `fresh`, or if what is
    /// there belongs to another run, it begins anew and keeps the old file beside.
    ///
    /// # Errors
    /// If files cannot be read or written, or if a complete line cannot be decoded.
    pub fn open(folder: &Path, run: &Run, fresh: bool) -> Result<(Store, Beginning)> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let path = folder.join(SAMPLES);
        let Some((of, samples)) = read(&path)? else {
            return Ok((Store::create(&path, run)?, Beginning::New));
        };
        let why = if fresh { Some("--fresh".to_owned()) } else { difference(&of, run) };
        if let Some(why) = why {
            let kept = set_aside(&path, &of)?;
            let store = Store::create(&path, run)?;
            return Ok((store, Beginning::SetAside { why, kept }));
        }
        let file = File::options().append(true).open(&path);
        let file = file.with_context(|| format!("cannot write {}", path.display()))?;
        let begun = if samples.is_empty() { Beginning::New } else { Beginning::Resumed };
        Ok((Store { file, run: run.clone(), samples }, begun))
    }

    fn create(path: &Path, run: &Run) -> Result<Store> {
        let file = File::options().append(true).create(true).truncate(false).open(path);
        let file = file.with_context(|| format!("cannot write {}", path.display()))?;
        let mut store = Store { file, run: run.clone(), samples: Vec::new() };
        store.append(run)?;
        Ok(store)
    }

    /// Adds a measurement, for good.
    pub fn add(&mut self, sample: Sample) -> Result<()> {
        self.append(&sample)?;
        self.samples.push(sample);
        Ok(())
    }

    fn append(&mut self, line: &impl Serialize) -> Result<()> {
        let mut text = serde_json::to_string(line)?;
        text.push('\n');
        let written = self.file.write_all(text.as_bytes()).and_then(|()| self.file.sync_data());
        written.context("cannot write the results file")
    }

    /// The run that all samples belong to.
    pub fn run(&self) -> &Run {
        &self.run
    }

    /// All measurements, oldest first.
    pub fn samples(&self) -> &[Sample] {
        &self.samples
    }
}

/// The file's run and measurements; none if there is no file, or not one whole line in it.
/// A last line without its end is what an interrupted write left: it is cut off.
fn read(path: &Path) -> Result<Option<(Run, Vec<Sample>)>> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        read => read.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
    if whole < bytes.len() {
        let file = File::options().write(true).open(path)?;
        file.set_len(whole as u64).with_context(|| format!("cannot mend {}", path.display()))?;
    }
    let mut lines = bytes[..whole].split_inclusive(|&byte| byte == b'\n').enumerate();
    let damaged = |number: usize| {
        format!("line {} of {} cannot be decoded; --fresh begins anew", number + 1, path.display())
    };
    let Some((_, first)) = lines.next() else { return Ok(None) };
    let run = serde_json::from_slice(first).with_context(|| damaged(0))?;
    let parse = |(number, line): (usize, &[u8])| {
        serde_json::from_slice(line).with_context(|| damaged(number))
    };
    Ok(Some((run, lines.map(parse).collect::<Result<_>>()?)))
}

/// Difference that keeps measurements of two runs apart; none if they belong together.
fn difference(old: &Run, new: &Run) -> Option<String> {
    let what = if old.build != new.build {
        format!("they are of another build ({}; this is {})", old.build, new.build)
    } else if old.scale != new.scale {
        format!("they are of scale {}, not {}", old.scale, new.scale)
    } else if old.pinned != new.pinned {
        "only one of them has pinned hosts".to_owned()
    } else if old.machine != new.machine {
        "they are of another machine, or other versions".to_owned()
    } else {
        return None;
    };
    Some(what)
}

/// Keeps old results beside, under a name that is free.
fn set_aside(path: &Path, run: &Run) -> Result<PathBuf> {
    let name =
        |n: u32| path.with_file_name(format!("samples-{}-{}-{n}.jsonl", run.scale, run.build));
    let free = (1..1000).map(name).find(|name| !name.exists());
    let kept = free.context("there are too many old results; remove some")?;
    ensure!(!run.build.contains('/') && !run.scale.contains('/'), "the results name no build");
    fs::rename(path, &kept).with_context(|| format!("cannot rename {}", path.display()))?;
    Ok(kept)
}

#[cfg(test)]
pub(in crate::bench) mod tests {
    use super::*;

    pub fn run() -> Run {
        let machine = Machine {
            cpu: "a processor".into(),
            cpus: 2,
            memory_mib: 1024,
            kernel: "6.18".into(),
            qemu: "10.0.2".into(),
            accel: "tcg".into(),
            understudy: "0.1.0".into(),
        };
        Run { build: "0123".into(), scale: "full".into(), pinned: false, commit: None, machine }
    }

    /// A measurement of so many seconds.
    pub fn seconds(subject: Subject, variant: Variant, round: u32, value: f64) -> Sample {
        let measured = Measured {
            value,
            unit: "s".into(),
            better: Better::Lower,
            details: BTreeMap::from([("events".to_owned(), value * 2.0)]),
            protection: variant.protection().map(|_| ProtectionFigures {
                replication_mbit_s: 12.5,
                checkpoints_per_s: 9.0,
                pause_p50_ms: Some(1.5),
                pause_p99_ms: Some(3.0),
            }),
            extra: Value::Null,
        };
        sample(subject, variant, round, Outcome::Measured(measured))
    }

    pub fn sample(subject: Subject, variant: Variant, round: u32, outcome: Outcome) -> Sample {
        let (at, took_seconds, load_average) = (1_700_000_000, 10.0, Some(1.0));
        Sample { subject, variant, round, at, took_seconds, load_average, outcome }
    }

    fn failed() -> Sample {
        let outcome = Outcome::Failed { error: "no \"guest\"\nanswered".into(), last: true };
        sample(Subject::Web, Variant::Plain, 1, outcome)
    }

    fn open(folder: &Path, run: &Run) -> (Store, Beginning) {
        Store::open(folder, run, false).unwrap()
    }

    #[test]
    fn an_interrupted_run_goes_on_where_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let (mut store, begun) = open(folder.path(), &run());
        assert_eq!(begun, Beginning::New);
        let all = [seconds(Subject::Cpu, Variant::Adaptive, 1, 2.0), failed()];
        for sample in &all {
            store.add(sample.clone()).unwrap();
        }
        drop(store);
        let (store, begun) = open(folder.path(), &run());
        assert_eq!(begun, Beginning::Resumed);
        assert_eq!((store.samples(), store.run()), (&all[..], &run()));
    }

    #[test]
    fn a_torn_last_line_is_cut_off_and_what_comes_after_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(SAMPLES);
        let sample = seconds(Subject::Cpu, Variant::Adaptive, 1, 2.0);
        open(folder.path(), &run()).0.add(sample.clone()).unwrap();
        let whole = fs::read(&path).unwrap();
        let line = serde_json::to_vec(&failed()).unwrap();
        for torn in [1, line.len() / 2, line.len()] {
            fs::write(&path, [&whole[..], &line[..torn]].concat()).unwrap();
            let (mut store, begun) = open(folder.path(), &run());
            assert_eq!((begun, store.samples().len()), (Beginning::Resumed, 1), "{torn} bytes");
            store.add(failed()).unwrap();
            assert_eq!(open(folder.path(), &run()).0.samples(), [sample.clone(), failed()]);
        }
        // The first line itself.
        fs::write(&path, &whole[..20]).unwrap();
        let (store, begun) = open(folder.path(), &run());
        assert_eq!((begun, store.samples().len()), (Beginning::New, 0));
    }

    #[test]
    fn another_build_scale_or_machine_begins_anew_and_keeps_the_old_results() {
        let folder = tempfile::tempdir().unwrap();
        let build = Run { build: "4567".into(), ..run() };
        let scale = Run { scale: "quick".into(), ..build.clone() };
        let machine = Machine { qemu: "10.1".into(), ..run().machine };
        let machine = Run { machine, ..scale.clone() };
        let pinned = Run { pinned: true, ..machine.clone() };
        open(folder.path(), &run()).0.add(failed()).unwrap();
        let others =
            [(build, "another build"), (scale, "quick"), (machine, "machine"), (pinned, "pinned")];
        for (other, says) in others {
            let (mut store, begun) = open(folder.path(), &other);
            let Beginning::SetAside { why, kept } = begun else { panic!("{begun:?}") };
            assert!(why.contains(says), "{why}");
            assert_eq!(read(&kept).unwrap().unwrap().1, [failed()]);
            assert!(store.samples().is_empty());
            store.add(failed()).unwrap();
        }
        let (store, begun) = Store::open(folder.path(), &run(), true).unwrap();
        assert!(matches!(begun, Beginning::SetAside { .. }) && store.samples().is_empty());
    }

    #[test]
    fn a_damaged_line_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let (mut store, _) = open(folder.path(), &run());
        store.append(&"nonsense").unwrap();
        store.add(failed()).unwrap();
        let error = Store::open(folder.path(), &run(), false).err().unwrap();
        assert!(format!("{error:#}").contains("line 2 of"), "{error:#}");
    }
}
