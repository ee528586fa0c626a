//! `understudy-lab bench compression`: what each way to encode pages gains and costs while
//! the guest compiles (Remus, figure 10).
//!
//! The guest builds the same sources over and over with a real compiler. Every way is
//! measured in turn, round after round, so that what else the machine does falls on all.

use super::compression_report::{CompressionBench, Sample, Way};
use super::machine::{Machine, load_average};
use super::{on_scene, patient, words};
use crate::cli::BenchCompressionArgs;
use crate::parts::{guest_files, scene_options};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::path::absolute;
use std::thread;
use std::time::{Duration, Instant};
use understudy_client::{Client, Exit, Failure, FailureKind, output};
use understudy_encoding::{Compression, EncodingPlan};
use understudy_lab::scene::VM;
use understudy_lab::{GuestShell, Scene, SceneOptions};
use understudy_protocol::Policy;
use understudy_report::ErrorKind;
use understudy_report::{CompressionReport, ProtectRequest, VmStatus};

/// File that `guests/toolchain` builds, beside the guest's other files.
const TOOLCHAIN: &str = "toolchain";
/// Builds all sources, for ever; its compiler lives on the second disk.
const BUILD: &str = "while :; do for c in /data2/src/*.c; do c=${c##*/}; \
                     chroot /data2 /usr/bin/gcc -O1 -c /src/$c -o /out/$c.o; done; done";
const PROVE: &str =
    "chroot /data2 /usr/bin/gcc -O1 -c /src/1.c -o /out/1.o && ls -l /data2/out/1.o";
/// The first epochs of a session are not measured: its cache fills.
const WARM_UP: Duration = Duration::from_secs(4);
/// Time between two points of the bandwidth over time.
const GLANCE: Duration = Duration::from_millis(500);
/// Time for the backup to end a session of protection.
const STAND_DOWN_LIMIT: Duration = Duration::from_secs(10);

const WAYS: [(&str, Compression); 4] = [
    ("none", Compression::None),
    ("general", Compression::General),
    ("xor", Compression::Xor),
    ("hybrid", Compression::Hybrid),
];

/// Measures and prints.
pub fn run(args: &BenchCompressionArgs, json: bool) -> Result<Exit, Failure> {
    let bench = measure(args)?;
    output::show(json, &bench, CompressionBench::table)?;
    Ok(Exit::Ok)
}

/// Measures on a scene of its own.
pub(super) fn measure(args: &BenchCompressionArgs) -> Result<CompressionBench, Failure> {
    let files = args.guest.clone().unwrap_or_else(guest_files).join(TOOLCHAIN);
    if !files.is_dir() {
        let words = format!(
            "there is no guest with a compiler in {}: build it with guests/toolchain, or name the \
             directory that has `{TOOLCHAIN}` with --guest DIR or UNDERSTUDY_GUEST=DIR",
            absolute(&files).unwrap_or(files).display()
        );
        return Err(Failure::new(FailureKind::Host(ErrorKind::NotFound), words));
    }
    let options = SceneOptions { disks: 2, ..patient(scene_options(Some(&files))?) };
    on_scene(options, |scene| compare(scene, args))
        .map_err(|error| Failure::internal(format!("the benchmark failed: {error:#}")))
}

fn compare(scene: &Scene, args: &BenchCompressionArgs) -> Result<CompressionBench> {
    scene.start_guest("a")?;
    scene.await_guest()?;
    let primary = Client::new(scene.host("a")?.socket()).map_err(words)?;
    let status = primary.status().map_err(words)?;
    let vm = primary.vm_status(VM).map_err(words)?;
    let qemu_pid = vm.qemu_pid.context("the guest has no QEMU")?;
    let machine = Machine::look(status.version, status.qemu_version, qemu_pid);
    let mut shell = scene.shell()?;
    begin_build(&mut shell)?;
    let mut ways: BTreeMap<&str, Vec<Sample>> = BTreeMap::new();
    for round in 1..=args.rounds {
        for (name, compression) in WAYS {
            eprintln!("round {round} of {}: {name}", args.rounds);
            let plan = EncodingPlan { compression, cache_pages: args.cache_pages };
            let sample = sample(scene, &primary, plan, args)?;
            ways.entry(name).or_default().push(sample);
        }
    }
    let mut way = |name: &str| Way::from_samples(ways.remove(name).unwrap_or_default());
    Ok(CompressionBench {
        none: way("none"),
        general: way("general"),
        xor: way("xor"),
        hybrid: way("hybrid"),
        machine,
        hz: args.hz,
        cache_pages: args.cache_pages,
        rounds: args.rounds,
        seconds: args.seconds,
        load_average: load_average(),
    })
}

fn begin_build(shell: &mut GuestShell) -> Result<()> {
    let proof = shell.run(PROVE)?;
    ensure!(proof.code == 0, "the guest cannot compile: {}", proof.text);
    shell.start(BUILD).map(drop)
}

/// One session of protection with one way to encode.
fn sample(
    scene: &Scene,
    primary: &Client,
    encoding: EncodingPlan,
    args: &BenchCompressionArgs,
) -> Result<Sample> {
    let policy = Some(Policy::Interval { hz: args.hz });
    protect(
        primary,
        &ProtectRequest { to: "b".to_owned(), policy, encoding, ..Default::default() },
    )?;
    scene.await_protected("a", |_| ())?;
    thread::sleep(WARM_UP);
    let (first, began) = (look(primary)?, Instant::now());
    let mut before = (first.0.bytes_sent, began);
    let mut sent_mb_per_s = Vec::new();
    let end = began + Duration::from_secs(args.seconds);
    while Instant::now() < end {
        thread::sleep(GLANCE);
        let now = (primary.vm_status(VM).map_err(words)?.bytes_sent, Instant::now());
        sent_mb_per_s.push(rate(now.0 - before.0, now.1 - before.1));
        before = now;
    }
    let (last, took) = (look(primary)?, began.elapsed());
    primary.unprotect(VM).map_err(words)?;
    let done = last.1.counters - first.1.counters;
    let sent = last.0.bytes_sent - first.0.bytes_sent;
    Ok(Sample::new(done, rate(sent, took), last.0.epoch.0 - first.0.epoch.0, sent_mb_per_s))
}

fn look(primary: &Client) -> Result<(VmStatus, CompressionReport)> {
    let status = primary.vm_status(VM).map_err(words)?;
    let compression = status.compression.context("protection ended")?;
    Ok((status, compression))
}

fn rate(bytes: u64, took: Duration) -> f64 {
    bytes as f64 / 1e6 / took.as_secs_f64()
}

/// Host b refuses for as long as it still stands down from the last session.
fn protect(primary: &Client, request: &ProtectRequest) -> Result<()> {
    let begun = Instant::now();
    loop {
        match primary.protect(VM, request) {
            Ok(_) => return Ok(()),
            Err(failure) if begun.elapsed() > STAND_DOWN_LIMIT => return Err(words(failure)),
            Err(_) => thread::sleep(GLANCE),
        }
    }
}
