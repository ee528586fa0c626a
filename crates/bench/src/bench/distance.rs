//! `understudy-lab bench distance`: what a backup far away costs (SecondSite).
//!
//! A client appends records, each after the last acknowledgement, while the way
//! to the backup delays every byte and carries 100 Mbit/s.

use super::machine::{Machine, load_average};
use super::{DETECTION, on_scene, words};
use crate::cli::BenchDistanceArgs;
use crate::parts::scene_options;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::fmt::Write;
use std::thread;
use std::time::{Duration, Instant};
use understudy_client::{Client, Exit, Failure, output};
use understudy_lab::scene::{RECORDS_PORT, VM};
use understudy_lab::{HostOptions, LongLine, RecordClient, Scene, wait_for};

const DELAYS_MS: [u64; 5] = [0, 1, 5, 20, 50];
const BITS_PER_SECOND: u64 = 100_000_000;
const MEMORY_MIB: u32 = 256;
/// Time for the backup to have forgotten the guest.
const LIMIT: Duration = Duration::from_secs(60);
/// Records at the start of a measurement that do not count.
const WARM_UP: usize = 5;

/// Costs of one distance.
#[derive(Clone, Debug, Serialize)]
pub struct Distance {
    /// Milliseconds that every byte takes to the backup, and back; none: unprotected.
    pub delay_ms: Option<u64>,
    /// Records that were acknowledged a second.
    pub records_per_second: f64,
    /// Time from a record to its acknowledgement: the median, in milliseconds.
    pub p50_ms: f64,
    /// The 99th percentile.
    pub p99_ms: f64,
    /// Checkpoints committed a second.
    pub checkpoints_per_second: f64,
    /// Bytes sent to the backup a second.
    pub bytes_per_second: f64,
}

/// Everything that `bench distance` found; `--json` prints it as it is.
#[derive(Clone, Debug, Serialize)]
pub struct DistanceBench {
    /// Machine on which everything was measured.
    pub machine: Machine,
    /// Bits that the line carries in a second.
    pub bits_per_second: u64,
    /// The guest's memory in MiB.
    pub guest_memory_mib: u32,
    /// Seconds of each measurement.
    pub seconds: u64,
    /// Processes that wanted to run in the last minute, at the end.
    pub load_average: Option<f64>,
    /// Distances: unprotected, then each delay.
    pub distances: Vec<Distance>,
}

/// Measures and prints.
pub fn run(args: &BenchDistanceArgs, json: bool) -> Result<Exit, Failure> {
    let mut options = scene_options(args.guest.as_deref())?;
    options.memory_mib = MEMORY_MIB;
    let peers = format!("[peers]\nb = \"{}\"\n", LongLine::address());
    for (host, peers) in [("a", peers.as_str()), ("b", "")] {
        let settings = format!("{DETECTION}{peers}");
        options.daemons.insert(host.to_owned(), HostOptions { settings, ..Default::default() });
    }
    eprintln!("two hosts and a long line; the guest boots");
    let bench = on_scene(options, |scene| measure(scene, args))
        .map_err(|error| Failure::internal(format!("the benchmark failed: {error:#}")))?;
    output::show(json, &bench, DistanceBench::table)?;
    Ok(Exit::Ok)
}

fn measure(scene: &Scene, args: &BenchDistanceArgs) -> Result<DistanceBench> {
    let line = LongLine::lay(scene.lab(), "b", BITS_PER_SECOND)?;
    scene.start_guest("a")?;
    scene.await_guest()?;
    let primary = Client::new(scene.host("a")?.socket()).map_err(words)?;
    let mut distances = vec![records(scene, &primary, args, None)?];
    for delay in DELAYS_MS {
        line.set_delay(Duration::from_millis(delay));
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        let distance = records(scene, &primary, args, Some(delay))?;
        eprintln!("{delay} ms: {:.0} records a second", distance.records_per_second);
        distances.push(distance);
        primary.unprotect(VM).map_err(words)?;
        wait_for("host b to forget the guest", LIMIT, || {
            Ok(scene.status("b").is_err().then_some(()))
        })?;
    }
    let status = primary.status().map_err(words)?;
    let vm = primary.vm_status(VM).map_err(words)?;
    Ok(DistanceBench {
        machine: Machine::look(
            status.version,
            status.qemu_version,
            vm.qemu_pid.context("the guest has no QEMU")?,
        ),
        bits_per_second: BITS_PER_SECOND,
        guest_memory_mib: MEMORY_MIB,
        seconds: args.seconds,
        load_average: load_average(),
        distances,
    })
}

fn records(
    scene: &Scene,
    primary: &Client,
    args: &BenchDistanceArgs,
    delay_ms: Option<u64>,
) -> Result<Distance> {
    let client = RecordClient::start(scene.lab(), scene.guest(RECORDS_PORT), Duration::ZERO)?;
    let (begun, before) = (Instant::now(), primary.vm_status(VM).map_err(words)?);
    thread::sleep(Duration::from_secs(args.seconds));
    let (elapsed, after) = (begun.elapsed(), primary.vm_status(VM).map_err(words)?);
    let report = client.stop();
    ensure!(report.connection_survived(), "the client: {:?}", report.error());
    let acks: Vec<Instant> = report.acks().map(|ack| ack.at).collect();
    ensure!(acks.len() > WARM_UP + 1, "only {} records in {elapsed:?}", acks.len());
    // Each was sent when the one before it was acknowledged.
    let mut times: Vec<f64> =
        acks[WARM_UP..].windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1000.0).collect();
    times.sort_by(f64::total_cmp);
    let percentile = |percent: usize| times[(times.len() - 1) * percent / 100];
    let per_second = |before: u64, after: u64| (after - before) as f64 / elapsed.as_secs_f64();
    Ok(Distance {
        delay_ms,
        records_per_second: acks.len() as f64 / elapsed.as_secs_f64(),
        p50_ms: percentile(50),
        p99_ms: percentile(99),
        checkpoints_per_second: per_second(before.checkpoints, after.checkpoints),
        bytes_per_second: per_second(before.bytes_sent, after.bytes_sent),
    })
}

impl DistanceBench {
    /// The table for people.
    pub fn table(&self) -> String {
        let Machine { cpu, cpus, kernel, qemu, accel, understudy, .. } = &self.machine;
        let mut text = format!(
            "{cpu}, {cpus} CPUs, Linux {kernel}, QEMU {qemu} ({accel}), understudy {understudy}\n\
             a guest of {} MiB; {} Mbit/s to the backup; {} s each\n\n\
             delay     records/s  p50 ms  p99 ms  checkpoints/s  MB/s\n",
            self.guest_memory_mib,
            self.bits_per_second / 1_000_000,
            self.seconds
        );
        for row in &self.distances {
            let delay = row.delay_ms.map_or("bare".to_owned(), |delay| format!("{delay} ms"));
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "{delay:8} {:10.1} {:7.1} {:7.1} {:14.1} {:5.2}",
                row.records_per_second,
                row.p50_ms,
                row.p99_ms,
                row.checkpoints_per_second,
                row.bytes_per_second / 1e6,
            );
        }
        text
    }
}
