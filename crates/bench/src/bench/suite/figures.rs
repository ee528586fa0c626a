//! The figures that have a laboratory of their own: pause, compression, fail-over.

use super::store::Measured;
use super::variant::Subject;
use crate::bench::failover::{self, ClientKind};
use crate::bench::workloads::Better;
use crate::bench::{compression, pause, words};
use crate::cli::{BenchCompressionArgs, BenchPauseArgs, Writer};
use crate::parts::scene_options;
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use understudy_encoding::DEFAULT_CACHE_PAGES;

/// Choice of how often each figure is measured. What is measured is always the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repetitions {
    /// Times as often as the report of the whole suite has it.
    All,
    /// Few times, for a first look.
    Few,
}

struct Counts {
    pause_epochs: usize,
    migrations: u32,
    compression_rounds: u32,
    kills: u32,
    cuts: u32,
}

impl Repetitions {
    fn counts(self) -> Counts {
        match self {
            Repetitions::All => Counts {
                pause_epochs: 100,
                migrations: 3,
                compression_rounds: 3,
                kills: 30,
                cuts: 10,
            },
            Repetitions::Few => {
                Counts { pause_epochs: 30, migrations: 1, compression_rounds: 1, kills: 4, cuts: 2 }
            }
        }
    }
}

/// Pages written between two checkpoints.
const PAUSE_POINTS: [u64; 5] = [0, 100, 1_000, 10_000, 50_000];
const COMPRESSION_SECONDS: u64 = 10;
/// The guest whose pause is measured.
const PAUSE_MEMORY_MIB: u32 = 512;
/// Rate, as often as in Remus's figure.
const COMPRESSION_HZ: u32 = 20;

/// Measures a subject that has a laboratory of its own.
pub fn measure(
    subject: Subject,
    guest: Option<&Path>,
    repetitions: Repetitions,
) -> Result<Measured> {
    let counts = &repetitions.counts();
    match subject {
        Subject::Pause => measure_pause(guest, counts),
        Subject::Compression => measure_compression(guest, counts),
        Subject::Failover => measure_failover(guest, counts),
        _ => bail!("{subject} is measured in the suite's guest"),
    }
}

fn measure_pause(guest: Option<&Path>, counts: &Counts) -> Result<Measured> {
    let args = BenchPauseArgs {
        epochs: counts.pause_epochs,
        points: PAUSE_POINTS.to_vec(),
        memory: vec![PAUSE_MEMORY_MIB],
        writers: vec![Writer::Bursts, Writer::Continuous],
        migrations: counts.migrations,
        guest: guest.map(PathBuf::from),
    };
    let bench = pause::measure(scene_options(guest).map_err(words)?, &args)?;
    let idle = bench.points.first().context("no pause was measured")?;
    let at = |point: &crate::bench::report::Point| {
        let writer = point.writer.filter(|&writer| writer != Writer::Bursts);
        let writer = writer.map_or(String::new(), |writer| format!("_{}", writer.name()));
        (format!("{}_pages{writer}_ms", point.pages), point.total_ms)
    };
    figure(idle.total_ms, "ms", Better::Lower, bench.points.iter().map(at).collect(), &bench)
}

fn measure_compression(guest: Option<&Path>, counts: &Counts) -> Result<Measured> {
    let args = BenchCompressionArgs {
        rounds: counts.compression_rounds,
        seconds: COMPRESSION_SECONDS,
        hz: COMPRESSION_HZ,
        cache_pages: DEFAULT_CACHE_PAGES,
        guest: guest.map(PathBuf::from),
    };
    let bench = compression::measure(&args).map_err(words)?;
    let ways = [("general", &bench.general), ("xor", &bench.xor), ("hybrid", &bench.hybrid)];
    let details = ways.map(|(name, way)| (format!("{name}_ratio"), way.ratio)).into();
    figure(bench.hybrid.ratio, ": 1", Better::Higher, details, &bench)
}

fn measure_failover(guest: Option<&Path>, counts: &Counts) -> Result<Measured> {
    let options = scene_options(guest).map_err(words)?;
    let quiet = |_: usize, _: usize, _: &str| {};
    let bench = failover::measure(options, ClientKind::Records, counts.kills, counts.cuts, quiet)?;
    let mut details = BTreeMap::new();
    for kind in &bench.distributions {
        let name = kind.failure.name();
        details.insert(format!("{name}_p50_ms"), kind.p50_ms);
        details.insert(format!("{name}_p90_ms"), kind.p90_ms);
        details.insert(format!("{name}_max_ms"), kind.max_ms);
    }
    let kill = *details.get("kill_p50_ms").context("no kill was measured")?;
    figure(kill, "ms", Better::Lower, details, &bench)
}

fn figure(
    value: f64,
    unit: &str,
    better: Better,
    details: BTreeMap<String, f64>,
    extra: &impl Serialize,
) -> Result<Measured> {
    let (unit, extra) = (unit.to_owned(), serde_json::to_value(extra)?);
    Ok(Measured { value, unit, better, details, protection: None, extra })
}
