//! The figures that have a laboratory of their own: pause, compression, fail-over.

use super::store::Measured;
use super::variant::Subject;
use crate::bench::failover::{self, ClientKind};
use crate::bench::workloads::Better;
use crate::bench::{compression, pause, words};
use crate::cli::{BenchCompressionArgs, BenchPauseArgs};
use crate::demo::scene_options;
use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use understudy_encoding::DEFAULT_CACHE_PAGES;

/// How much of each figure is measured.
struct Size {
    pause_points: &'static [u64],
    pause_epochs: usize,
    migrations: u32,
    compression_rounds: u32,
    compression_seconds: u64,
    kills: u32,
    cuts: u32,
}

const FULL: Size = Size {
    pause_points: &[0, 100, 1_000, 10_000, 50_000],
    pause_epochs: 100,
    migrations: 3,
    compression_rounds: 3,
    compression_seconds: 10,
    kills: 30,
    cuts: 10,
};
const QUICK: Size = Size {
    pause_points: &[0, 1_000, 10_000],
    pause_epochs: 30,
    migrations: 1,
    compression_rounds: 1,
    compression_seconds: 4,
    kills: 4,
    cuts: 2,
};
/// The guest whose pause is measured.
const PAUSE_MEMORY_MIB: u32 = 512;
/// As often as in Remus's figure.
const COMPRESSION_HZ: u32 = 20;

/// Measures a subject that has a laboratory of its own.
pub fn measure(subject: Subject, guest: Option<&Path>, quick: bool) -> Result<Measured> {
    let size = if quick { &QUICK } else { &FULL };
    match subject {
        Subject::Pause => measure_pause(guest, size),
        Subject::Compression => measure_compression(guest, size),
        Subject::Failover => measure_failover(guest, size),
        _ => bail!("{subject} is measured in the suite's guest"),
    }
}

fn measure_pause(guest: Option<&Path>, size: &Size) -> Result<Measured> {
    let args = BenchPauseArgs {
        epochs: size.pause_epochs,
        points: size.pause_points.to_vec(),
        memory: vec![PAUSE_MEMORY_MIB],
        migrations: size.migrations,
        guest: guest.map(PathBuf::from),
    };
    let bench = pause::measure(scene_options(guest).map_err(words)?, &args)?;
    let idle = bench.points.first().context("no pause was measured")?;
    let at =
        |point: &crate::bench::report::Point| (format!("{}_pages_ms", point.pages), point.total_ms);
    figure(idle.total_ms, "ms", Better::Lower, bench.points.iter().map(at).collect(), &bench)
}

fn measure_compression(guest: Option<&Path>, size: &Size) -> Result<Measured> {
    let args = BenchCompressionArgs {
        rounds: size.compression_rounds,
        seconds: size.compression_seconds,
        hz: COMPRESSION_HZ,
        cache_pages: DEFAULT_CACHE_PAGES,
        guest: guest.map(PathBuf::from),
    };
    let bench = compression::measure(&args).map_err(words)?;
    let ways = [("general", &bench.general), ("xor", &bench.xor), ("hybrid", &bench.hybrid)];
    let details = ways.map(|(name, way)| (format!("{name}_ratio"), way.ratio)).into();
    figure(bench.hybrid.ratio, ": 1", Better::Higher, details, &bench)
}

fn measure_failover(guest: Option<&Path>, size: &Size) -> Result<Measured> {
    let options = scene_options(guest).map_err(words)?;
    let quiet = |_: usize, _: usize, _: &str| {};
    let bench = failover::measure(options, ClientKind::Records, size.kills, size.cuts, quiet)?;
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
