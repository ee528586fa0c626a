//! `understudy-lab bench throttle`: what becomes of a guest that writes faster than the link
//! carries (Remus, section 3.4), with and without its vCPUs being slowed down.

use super::machine::{Machine, load_average};
use super::{DETECTION, on_scene, words};
use crate::cli::BenchThrottleArgs;
use crate::parts::scene_options;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};
use understudy_client::{Client, Exit, Failure, output};
use understudy_lab::scene::{ECHO_PORT, VM};
use understudy_lab::{HostOptions, Scene, SceneOptions, in_namespace};
use understudy_report::VmStatus;

/// Noise is not made smaller by any encoding.
const MAKE_NOISE: &str = "for i in 1 2; do dd if=/dev/urandom of=/tmp/$i bs=4k";
const LOAD: &str = "while :; do cat /tmp/1 > /tmp/out; cat /tmp/2 > /tmp/out; done";
/// Time for the load to come into being and the throttle to settle.
const WARM_UP: Duration = Duration::from_secs(10);
/// Pause between two questions to the guest.
const PACE: Duration = Duration::from_millis(20);
/// Time for one answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Everything that `bench throttle` found; `--json` prints it as it is.
#[derive(Clone, Debug, Serialize)]
pub struct ThrottleBench {
    /// Machine on which everything was measured.
    pub machine: Machine,
    /// Speed of the link in Mbit/s.
    pub link_mbits: u32,
    /// Pages that the guest fills with noise without rest.
    pub pages: u64,
    /// The guest at full speed.
    pub without: Measured,
    /// The guest slowed down.
    pub with: Measured,
}

/// Means over the time of one measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// Seconds measured.
    pub seconds: f64,
    /// Length of an epoch in milliseconds.
    pub epoch_ms: f64,
    /// Pages that an epoch wrote.
    pub epoch_pages: f64,
    /// Written pages a second that the backup got.
    pub dirty_pages_per_second: f64,
    /// Bandwidth that the backup got, in Mbit/s.
    pub bandwidth_mbits: f64,
    /// The part of its processors that the guest had, in percent.
    pub vcpu_percent: f64,
    /// Epochs cut short since protection began.
    pub cut_short: u64,
    /// A question over TCP and its answer, in milliseconds.
    pub latency_p50_ms: f64,
    /// Its 99th percentile.
    pub latency_p99_ms: f64,
    /// Questions answered.
    pub answers: usize,
    /// Processes that wanted to run in the last minute, at the end.
    pub load_average: Option<f64>,
}

/// Measures and prints.
pub fn run(args: &BenchThrottleArgs, json: bool) -> Result<Exit, Failure> {
    let options = scene_options(args.guest.as_deref())?;
    let bench = measure(&options, args)
        .map_err(|error| Failure::internal(format!("the benchmark failed: {error:#}")))?;
    output::show(json, &bench, ThrottleBench::table)?;
    Ok(Exit::Ok)
}

fn measure(options: &SceneOptions, args: &BenchThrottleArgs) -> Result<ThrottleBench> {
    eprintln!("a guest at full speed over {} Mbit/s", args.link);
    let (machine, without) = measure_guest(options, args, true)?;
    eprintln!("the same guest, slowed down");
    let (_, with) = measure_guest(options, args, false)?;
    Ok(ThrottleBench { machine, link_mbits: args.link, pages: args.pages, without, with })
}

/// The scene is gone when this returns, whatever happened.
fn measure_guest(
    options: &SceneOptions,
    args: &BenchThrottleArgs,
    without_control_groups: bool,
) -> Result<(Machine, Measured)> {
    let mut options = options.clone();
    for host in &options.hosts {
        let settings = DETECTION.to_owned();
        let daemon = HostOptions { settings, without_control_groups, ..Default::default() };
        options.daemons.insert(host.clone(), daemon);
    }
    on_scene(options, |scene| measure_scene(scene, args))
}

fn measure_scene(scene: &Scene, args: &BenchThrottleArgs) -> Result<(Machine, Measured)> {
    scene.protected_guest("a", "b")?;
    let primary = Client::new(scene.host("a")?.socket()).map_err(words)?;
    let host = primary.status().map_err(words)?;
    let look = || primary.vm_status(VM).map_err(words);
    let qemu_pid = look()?.qemu_pid.context("the guest has no QEMU")?;
    let machine = Machine::look(host.version, host.qemu_version, qemu_pid);
    scene.lab().limit_speed("b", args.link)?;
    let address = scene.guest(ECHO_PORT);
    let mut echo = in_namespace(&scene.lab().client(), || TcpStream::connect(address))??;
    echo.set_nodelay(true)?;
    echo.set_read_timeout(Some(ANSWER_LIMIT))?;
    let mut shell = scene.shell()?;
    shell.run(&format!("{MAKE_NOISE} count={}; done", args.pages))?;
    shell.start(LOAD)?;
    thread::sleep(WARM_UP);
    let (begun, before) = (Instant::now(), look()?);
    let span = Duration::from_secs(args.seconds);
    let latencies = converse(&mut echo, span)?;
    let (elapsed, after) = (begun.elapsed(), look()?);
    let mut timings = primary.timings(VM).map_err(words)?;
    timings.retain(|timing| timing.epoch > before.epoch && timing.epoch <= after.epoch);
    ensure!(!timings.is_empty(), "no checkpoint in {elapsed:?}");
    let mean = |value: &dyn Fn(usize) -> f64| {
        (0..timings.len()).map(value).sum::<f64>() / timings.len() as f64
    };
    let seconds = elapsed.as_secs_f64();
    let epoch_pages = mean(&|i| (timings[i].pages + timings[i].precopied_pages) as f64);
    let measured = Measured {
        seconds,
        epoch_ms: seconds * 1e3 / timings.len() as f64,
        epoch_pages,
        dirty_pages_per_second: epoch_pages * timings.len() as f64 / seconds,
        bandwidth_mbits: sent_mbits(&before, &after) / seconds,
        vcpu_percent: mean(&|i| timings[i].vcpu_percent.into()),
        cut_short: after.throttle.map_or(0, |throttle| throttle.cut_short),
        latency_p50_ms: quantile(&latencies, 0.5),
        latency_p99_ms: quantile(&latencies, 0.99),
        answers: latencies.len(),
        load_average: load_average(),
    };
    Ok((machine, measured))
}

fn sent_mbits(before: &VmStatus, after: &VmStatus) -> f64 {
    after.bytes_sent.saturating_sub(before.bytes_sent) as f64 * 8.0 / 1e6
}

/// Asks the guest's echo server for so long; the sorted times of its answers in milliseconds.
fn converse(echo: &mut TcpStream, span: Duration) -> Result<Vec<f64>> {
    let begun = Instant::now();
    let mut latencies = Vec::new();
    while begun.elapsed() < span {
        let asked = Instant::now();
        echo.write_all(b"?")?;
        echo.read_exact(&mut [0])?;
        latencies.push(asked.elapsed().as_secs_f64() * 1e3);
        thread::sleep(PACE);
    }
    latencies.sort_by(f64::total_cmp);
    Ok(latencies)
}

fn quantile(sorted: &[f64], share: f64) -> f64 {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}

impl ThrottleBench {
    /// The table for people.
    pub fn table(&self) -> String {
        let Machine { cpu, cpus, kernel, qemu, accel, understudy, .. } = &self.machine;
        let mut text = format!(
            "{cpu}, {cpus} CPUs, Linux {kernel}, QEMU {qemu} ({accel}), understudy {understudy}\n\
             link of {} Mbit/s; the guest fills {} pages with noise without rest\n\n",
            self.link_mbits, self.pages
        );
        text +=
            "           vCPU %  epoch ms  pages/epoch  pages/s  Mbit/s  latency p50 ms  p99 ms\n";
        for (name, m) in [("full speed", &self.without), ("slowed", &self.with)] {
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "{name:10} {:6.0} {:9.0} {:12.0} {:8.0} {:7.1} {:15.0} {:7.0}",
                m.vcpu_percent,
                m.epoch_ms,
                m.epoch_pages,
                m.dirty_pages_per_second,
                m.bandwidth_mbits,
                m.latency_p50_ms,
                m.latency_p99_ms,
            );
        }
        text
    }
}
