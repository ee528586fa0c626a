//! The guest of the queue's section, and what is measured of one load.

use super::super::pair::begin;
use super::super::stage::{LIMIT, Stage, Taken};
use super::load::Load;
use super::report::{Faults, Figures};
use super::score::{AtHalf, AtSize, ByShare, Noted, PARTS, SIZES, not_loaded};
use crate::bench::words;
use crate::cli::BenchRestoreArgs;
use crate::parts::scene_options;
use anyhow::{Context, Result, ensure};
use serde::de::DeserializeOwned;
use std::path::Path;
use std::time::Duration;
use std::{fs, thread};
use tempfile::TempDir;
use understudy_lab::scene::{GuestKind, VM};
use understudy_lab::{SceneOptions, wait_for};
use understudy_protocol::literal;
use understudy_report::cluster::{RestoreRequest, SnapshotRequest};
use understudy_report::traces::{RestoreTrace, SnapshotTrace};
use understudy_snapshot::{Mode, SnapshotNumber, TraceTime};

/// Time for a load to be what it is for long.
const SETTLE: Duration = Duration::from_secs(3);
/// Time for its working set to be sampled, in periods of 7 s.
const SAMPLED: Duration = Duration::from_secs(29);
const QUICKLY_SAMPLED: Duration = Duration::from_secs(15);

/// The bench guest, and a snapshot of it before it did anything.
pub struct Testbed {
    stage: Stage,
    idle: SnapshotNumber,
    sampled: Duration,
    /// Directory of traces, which is removed when dropped.
    traces: TempDir,
}

impl Testbed {
    /// Boots the guest.
    pub fn start(args: &BenchRestoreArgs) -> Result<Testbed> {
        let options = SceneOptions {
            kind: GuestKind::Bench,
            memory_mib: args.memory_mib,
            accel: Some("tcg".to_owned()),
            ..scene_options(args.guest.as_deref()).map_err(words)?
        };
        options.check()?;
        let traces = tempfile::Builder::new().prefix("understudy-traces-").tempdir()?;
        let stage = Stage::start(args, options, Some(traces.path()))?;
        let idle = stage.snapshot(untraced())?.number;
        let sampled = if args.quick { QUICKLY_SAMPLED } else { SAMPLED };
        Ok(Testbed { stage, idle, sampled, traces })
    }

    /// Ends of the logs.
    pub fn diagnostics(&self) -> String {
        self.stage.scene().diagnostics()
    }

    /// Ends all, and proves that nothing is left.
    pub fn end(self) -> Result<()> {
        self.stage.end()
    }

    /// All of one load, on a guest that begins as it was after its boot.
    pub fn measure(&self, load: Load, shares: &[f64]) -> Result<Figures> {
        self.watched(RestoreRequest { wait: true, ..of(self.idle) })?;
        self.stage.await_answer()?;
        let (first, last) = load.lines();
        let lines: Vec<String> = first.iter().chain([&last]).map(|&line| line.to_owned()).collect();
        let pid = begin(self.stage.scene().shell()?, &lines)?;
        thread::sleep(SETTLE);
        // From the first snapshot on its memory is guarded, and so it is sampled.
        self.stage.snapshot(untraced())?;
        thread::sleep(self.sampled);
        let runs = self.stage.scene().shell()?.run(&format!("kill -0 {pid}"))?;
        ensure!(runs.code == 0, "it has ended: {}", runs.text);
        let taken = self.stage.snapshot(SnapshotRequest::default())?;
        let compared =
            self.stage.snapshot(SnapshotRequest { recency: true, ..Default::default() })?;
        let path = SnapshotTrace::path(self.traces.path(), &literal(VM));
        let accesses = read::<SnapshotTrace>(&path)?.accesses;
        let compared = Noted { accesses, touched: self.touched(compared.number)? };
        let queue: Vec<u64> = taken.working_set.queue.iter().map(|page| page.index.0).collect();
        let as_taken = Noted { accesses: queue, touched: self.touched(taken.number)? };
        let faults = self.faults(&taken, &as_taken, shares)?;
        let working_set = taken.working_set.size as f64;
        let at = |size: u64| AtSize::of(size.max(1), &as_taken, &compared);
        Ok(Figures {
            traced: as_taken.accesses.len() as u64,
            touched: as_taken.touched.len() as u64,
            working_set: taken.working_set.size,
            sampled: taken.sampled,
            sizes: SIZES.map(at).to_vec(),
            at_half: AtHalf::of(&as_taken, &compared),
            of_working_set: PARTS.map(|part| at((working_set * part).round() as u64)).to_vec(),
            faults,
        })
    }

    /// Pages that the guest touches after it is restored with all its memory.
    fn touched(&self, number: SnapshotNumber) -> Result<Vec<u64>> {
        let eager = RestoreRequest { mode: Mode::Eager, ..of(number) };
        self.watched(eager)?.touched.context("accesses were not noted")
    }

    /// Pages that are missing when it is restored with such shares of its working set.
    fn faults(&self, taken: &Taken, noted: &Noted, shares: &[f64]) -> Result<ByShare<Faults>> {
        let queue = &noted.accesses;
        let mut faults = ByShare::new();
        for &share in shares {
            let working_set = share.try_into()?;
            let trace = self.watched(RestoreRequest { working_set, ..of(taken.number) })?;
            // By the estimate, which is what the product loads; and no more than was noted.
            let loaded = taken.working_set.size as f64 * share / queue.len().max(1) as f64;
            let not_loaded = not_loaded(queue, loaded, &noted.touched);
            faults.insert(share.to_string(), Faults { not_loaded, waits: trace.waits });
        }
        Ok(faults)
    }

    /// Ends the guest, restores it, and returns what was noted of it then.
    fn watched(&self, request: RestoreRequest) -> Result<RestoreTrace> {
        self.stage.end_guest()?;
        let path = RestoreTrace::path(self.traces.path(), &literal(VM));
        let _: std::io::Result<()> = fs::remove_file(&path);
        self.stage.restore(request)?;
        wait_for("what the guest touches", LIMIT, || Ok(path.exists().then_some(())))?;
        read(&path)
    }
}

fn untraced() -> SnapshotRequest {
    SnapshotRequest { trace_ms: Some(TraceTime::NONE), ..Default::default() }
}

fn of(number: SnapshotNumber) -> RestoreRequest {
    RestoreRequest { number: Some(number), ..Default::default() }
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let bytes = fs::read(path).with_context(|| format!("no trace {}", path.display()))?;
    Ok(serde_json::from_slice(&bytes)?)
}
