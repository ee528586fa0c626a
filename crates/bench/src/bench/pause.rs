//! `understudy-lab bench pause`: how long a checkpoint stops the guest, against the
//! pages that the guest wrote since the last one (Remus, figure 5).
//!
//! Two daemons of the product, each in a network namespace, and a Linux
//! guest that rewrites a known number of pages over and over while its host
//! takes checkpoints at a fixed rate. The times are the daemon's own.

use super::kvm_counts::{KvmCounts, KvmMachine};
use super::machine::{Machine, load_average};
use super::memory::DaemonMemory;
use super::migration::Migrations;
use super::report::{PauseBench, Point};
use super::{on_scene, patient, words};
use crate::cli::{BenchPauseArgs, Writer};
use crate::parts::scene_options;
use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use std::thread;
use std::time::{Duration, Instant};
use understudy_client::{Client, Exit, Failure, FailureKind, output};
use understudy_lab::scene::VM;
use understudy_lab::{GuestShell, Scene, SceneOptions, patience};
use understudy_protocol::{Epoch, PAGE_SIZE, Policy};
use understudy_report::ErrorKind;
use understudy_report::{CheckpointTiming, ProtectRequest};

/// Memory that the guest's own system needs beside the pages to write.
const SYSTEM_MIB: u64 = 160;
/// The first epochs of a load are not measured: its memory comes into being.
const WARM_UP: Duration = Duration::from_secs(2);
/// Time between two looks at the daemons.
const GLANCE: Duration = Duration::from_millis(200);
/// Time for the backup to end a session of protection.
const STAND_DOWN_LIMIT: Duration = Duration::from_secs(10);
/// Time for one epoch; times the machine's patience.
const EPOCH_LIMIT: Duration = Duration::from_secs(10);

/// Measures and prints.
pub fn run(args: &BenchPauseArgs, json: bool) -> Result<Exit, Failure> {
    check(args)?;
    let options = scene_options(args.guest.as_deref())?;
    let bench = measure(options, args)
        .map_err(|error| Failure::internal(format!("the benchmark failed: {error:#}")))?;
    output::show(json, &bench, PauseBench::table)?;
    Ok(Exit::Ok)
}

fn check(args: &BenchPauseArgs) -> Result<(), Failure> {
    let memory = args.memory.iter().min().copied().unwrap_or_default();
    let room = u64::from(memory).saturating_sub(SYSTEM_MIB) << 20;
    match args.points.iter().max() {
        Some(&most) if most.saturating_mul(PAGE_SIZE as u64) > room => {
            let message = format!(
                "--points {most}: a guest with --memory {memory} has room for {} pages beside its \
                 system; give it more memory or ask for fewer pages",
                room / PAGE_SIZE as u64
            );
            Err(Failure::new(FailureKind::Host(ErrorKind::Invalid), message))
        }
        _ => Ok(()),
    }
}

/// Measures on scenes of its own, one for each size of guest.
pub(super) fn measure(options: SceneOptions, args: &BenchPauseArgs) -> Result<PauseBench> {
    let options = patient(options);
    let progress = Progress::new(args);
    let mut result: Option<PauseBench> = None;
    for &memory_mib in &args.memory {
        let options = SceneOptions { memory_mib, ..options.clone() };
        let bench = measure_guest(options, args, &progress)?;
        match &mut result {
            Some(result) => result.points.extend(bench.points),
            None => result = Some(bench),
        }
    }
    result.context("no size of guest to measure")
}

/// The scene is gone when this returns, whatever happened.
fn measure_guest(
    options: SceneOptions,
    args: &BenchPauseArgs,
    progress: &Progress,
) -> Result<PauseBench> {
    let (memory_mib, guest_files) = (options.memory_mib, options.guest_files.clone());
    progress.doing(&format!("two hosts; Linux boots on one of them, with {memory_mib} MiB"));
    on_scene(options, |scene| {
        let mut bench = Bench::begin(scene, progress, memory_mib)?;
        if args.migrations > 0 {
            progress.doing("the same guest boots without the product, to be migrated");
            bench.migrations = Some(Migrations::begin(scene.lab(), &guest_files, memory_mib)?);
        }
        bench.points(args)
    })
}

/// Checkpoints that were watched, the daemons' memory meanwhile, and what KVM counted.
type Watched = (Vec<CheckpointTiming>, (DaemonMemory, DaemonMemory), Option<KvmCounts>);

struct Bench<'a> {
    scene: &'a Scene,
    progress: &'a Progress,
    memory_mib: u32,
    primary: Client,
    shell: GuestShell,
    migrations: Option<Migrations<'a>>,
}

impl<'a> Bench<'a> {
    fn begin(scene: &'a Scene, progress: &'a Progress, memory_mib: u32) -> Result<Bench<'a>> {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let primary = Client::new(scene.host("a")?.socket()).map_err(words)?;
        let shell = scene.shell()?;
        Ok(Bench { scene, progress, memory_mib, primary, shell, migrations: None })
    }

    fn points(&mut self, args: &BenchPauseArgs) -> Result<PauseBench> {
        let status = self.primary.status().map_err(words)?;
        let vm = self.primary.vm_status(VM).map_err(words)?;
        let qemu_pid = vm.qemu_pid.context("the guest has no QEMU")?;
        let machine = Machine::look(status.version, status.qemu_version, qemu_pid);
        let kvm = KvmMachine::find(qemu_pid);
        let mut points = Vec::new();
        for (pages, writer) in loads(args) {
            let load = Load { pages, writer, hz: rate(pages) };
            let mut point = self.point(load, args.epochs, kvm.as_ref())?;
            if let Some(migrations) = &mut self.migrations {
                self.progress.doing(&format!("{pages} pages: migrating the guest"));
                let pid = load.start(migrations.shell())?;
                point.migration = Some(migrations.downtimes(args.migrations)?);
                stop_load(migrations.shell(), pid)?;
            }
            self.progress.measured(&point);
            points.push(point);
        }
        Ok(PauseBench { machine, points })
    }

    /// One session of protection with one load.
    fn point(&mut self, load: Load, epochs: usize, kvm: Option<&KvmMachine>) -> Result<Point> {
        let Load { pages, writer, hz } = load;
        self.progress.doing(&format!("{pages} pages an epoch: protecting the guest"));
        self.protect(hz)?;
        self.scene.await_protected("a", |_| ())?;
        let pid = load.start(&mut self.shell)?;
        thread::sleep(WARM_UP);
        let (timings, memory, counts) = self.watch(pages, epochs, kvm)?;
        stop_load(&mut self.shell, pid)?;
        self.primary.unprotect(VM).map_err(words)?;
        let mut point = Point::from_timings(self.memory_mib, pages, hz, &timings);
        point.writer = writer;
        (point.primary_memory, point.backup_memory) = memory;
        point.kvm = counts;
        point.load_average = load_average();
        Ok(point)
    }

    /// Host b refuses for as long as it still stands down from the last session.
    fn protect(&self, hz: u32) -> Result<()> {
        let policy = Some(Policy::Interval { hz });
        let request = ProtectRequest { to: "b".to_owned(), policy, ..Default::default() };
        let begun = Instant::now();
        loop {
            match self.primary.protect(VM, &request) {
                Ok(_) => return Ok(()),
                Err(failure) if begun.elapsed() > STAND_DOWN_LIMIT * patience() => {
                    return Err(words(failure));
                }
                Err(_) => thread::sleep(GLANCE),
            }
        }
    }

    /// Collects the next `epochs` committed checkpoints.
    fn watch(&self, pages: u64, epochs: usize, kvm: Option<&KvmMachine>) -> Result<Watched> {
        let pids = (self.scene.host("a")?.pid(), self.scene.host("b")?.pid());
        let mut memory = (DaemonMemory::default(), DaemonMemory::default());
        let mut timings = Vec::new();
        let mut last = self.timings_after(Epoch(0))?.last().map_or(Epoch(0), |last| last.epoch);
        let mut newest = Instant::now();
        let mut counts = kvm.and_then(KvmMachine::watch);
        while timings.len() < epochs {
            thread::sleep(GLANCE);
            let new = self.timings_after(last)?;
            if let Some(timing) = new.last() {
                (last, newest) = (timing.epoch, Instant::now());
            }
            let limit = EPOCH_LIMIT * patience();
            ensure!(newest.elapsed() < limit, "no checkpoint for {limit:?}");
            timings.extend(new);
            memory.0.update(pids.0)?;
            memory.1.update(pids.1)?;
            counts.iter_mut().for_each(|counts| counts.glance());
            self.progress.measuring(pages, timings.len().min(epochs));
        }
        let counts = counts.and_then(|counts| counts.end(&timings));
        timings.truncate(epochs);
        Ok((timings, memory, counts))
    }

    fn timings_after(&self, epoch: Epoch) -> Result<Vec<CheckpointTiming>> {
        let mut timings = self.primary.timings(VM).map_err(words)?;
        timings.retain(|timing| timing.epoch > epoch);
        Ok(timings)
    }
}

/// Load of the guest while its checkpoints are measured.
#[derive(Clone, Copy)]
struct Load {
    pages: u64,
    /// None for an idle guest.
    writer: Option<Writer>,
    /// Checkpoints a second.
    hz: u32,
}

impl Load {
    /// Starts it; an idle guest has none.
    fn start(self, shell: &mut GuestShell) -> Result<Option<u32>> {
        let interval_ms = match self.writer {
            None => return Ok(None),
            // A little more often than there are epochs, so that each sees every page written.
            Some(Writer::Bursts) => 1000 / self.hz * 9 / 10,
            Some(Writer::Continuous) => 0,
        };
        let pages = self.pages;
        shell.start(&format!("exec guest-tools dirty {pages} {interval_ms}")).map(Some)
    }
}

/// Loads that are measured: each number of pages with each writer.
fn loads(args: &BenchPauseArgs) -> impl Iterator<Item = (u64, Option<Writer>)> {
    args.points.iter().flat_map(|&pages| {
        let writers = args.writers.iter().map(|&writer| Some(writer));
        let idle = (pages == 0).then_some(None);
        idle.into_iter()
            .chain(writers.filter(move |_| pages > 0))
            .map(move |writer| (pages, writer))
    })
}

fn stop_load(shell: &mut GuestShell, load: Option<u32>) -> Result<()> {
    match load {
        Some(pid) => shell.run(&format!("kill {pid}")).map(drop),
        None => Ok(()),
    }
}

/// Checkpoints a second: as many as leave time to send the pages in between.
fn rate(pages: u64) -> u32 {
    match pages {
        0..2_000 => 40,
        2_000..20_000 => 10,
        _ => 2,
    }
}

/// A bar on stderr, or a line for each point where none can be drawn.
struct Progress {
    bar: ProgressBar,
    done: std::cell::Cell<u64>,
}

impl Progress {
    fn new(args: &BenchPauseArgs) -> Progress {
        let style = ProgressStyle::with_template("[{bar:40}] {percent:>3} %  {msg}");
        let style = style.expect("the template is well-formed").progress_chars("=> ");
        let all = args.memory.len() * loads(args).count() * args.epochs;
        let bar = ProgressBar::new(all as u64).with_style(style);
        Progress { bar, done: std::cell::Cell::new(0) }
    }

    fn doing(&self, what: &str) {
        if self.bar.is_hidden() {
            eprintln!("{what}");
        }
        self.bar.set_message(what.to_owned());
    }

    fn measuring(&self, pages: u64, epochs: usize) {
        self.bar.set_message(format!("{pages} pages an epoch: {epochs} epochs measured"));
        self.bar.set_position(self.done.get() + epochs as u64);
    }

    fn measured(&self, point: &Point) {
        if self.bar.is_hidden() {
            eprintln!(
                "{} pages an epoch, {}: {:.2} ms, median of {}",
                point.pages,
                point.writer_name(),
                point.total_ms,
                point.epochs
            );
        }
        self.done.set(self.done.get() + point.epochs as u64);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_pages_than_the_guest_has_are_refused() {
        let memory = vec![512];
        let args = |points| BenchPauseArgs {
            epochs: 100,
            points,
            memory: memory.clone(),
            writers: vec![Writer::Bursts, Writer::Continuous],
            migrations: 3,
            guest: None,
        };
        assert!(check(&args(vec![0, 50_000])).is_ok());
        let failure = check(&args(vec![0, 100_000])).unwrap_err();
        assert!(failure.message.contains("room for 90112 pages"), "{}", failure.message);
    }

    #[test]
    fn an_idle_guest_has_one_point_and_a_busy_one_a_point_for_each_writer() {
        let args = BenchPauseArgs {
            epochs: 1,
            points: vec![0, 100],
            memory: vec![512],
            writers: vec![Writer::Bursts, Writer::Continuous],
            migrations: 0,
            guest: None,
        };
        let expected = [(0, None), (100, Some(Writer::Bursts)), (100, Some(Writer::Continuous))];
        assert_eq!(loads(&args).collect::<Vec<_>>(), expected);
    }
}
