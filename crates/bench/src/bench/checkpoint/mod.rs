//! `understudy-lab bench checkpoint`: what a checkpoint costs the processors of both hosts, thread by
//! thread.
//!
//! Either the test guest rewrites a known number of pages between checkpoints at a fixed rate, or a
//! workload of the suite runs in the bench guest under the default policy. Processor time is the
//! kernel's own account; what else is counted does not depend on how fast the machine is.

mod account;
mod calls;
mod table;

use super::suite::protection::{Stretch, Watch};
use super::suite::statistics::quantile;
use super::workload::bed;
use super::workloads::Scale;
use super::{on_scene, patient, words};
use crate::cli::BenchCheckpointArgs;
use crate::parts::scene_options;
use account::{Account, Done, Process, ThreadName};
use anyhow::{Context, Result, ensure};
use calls::CallCount;
use serde::Serialize;
use std::thread;
use std::time::Duration;
use understudy_client::{Client, Exit, Failure, output};
use understudy_lab::scene::{GuestKind, VM};
use understudy_lab::{Scene, SceneOptions, wait_for};
use understudy_protocol::Policy;
use understudy_report::{CheckpointTiming, ProtectRequest};

/// The first checkpoints of a load are not measured: its memory comes into being.
const WARM_UP: Duration = Duration::from_secs(2);

/// Time that keepers and their QEMUs may take to end.
const KEEPERS_END: Duration = Duration::from_secs(20);

/// Figures that one round measured; `--json` prints a list of these.
#[derive(Clone, Debug, Serialize)]
pub struct Round {
    /// Load that ran in the guest.
    pub load: String,
    /// Whether the VM had keepers.
    pub keepers: bool,
    /// Checkpoints that were committed meanwhile.
    pub checkpoints: u64,
    /// Seconds that it took.
    pub seconds: f64,
    /// Pages that a checkpoint copied in its pause.
    pub pages: f64,
    /// Pages that it copied before it.
    pub precopied_pages: f64,
    /// Bytes to the backup for each checkpoint.
    pub bytes: f64,
    /// Pause in milliseconds, at the median.
    pub pause_p50_ms: f64,
    /// Pause in milliseconds, at the 99th percentile.
    pub pause_p99_ms: f64,
    /// Milliseconds from the end of the pause to the backup's acknowledgement, at the median.
    pub commit_p50_ms: f64,
    /// Milliseconds from the one to the other, at the 99th percentile.
    pub commit_p99_ms: f64,
    /// The workload's own figure, if one ran.
    pub figure: Option<f64>,
    /// Work that each thread did for each checkpoint.
    pub threads: Vec<Thread>,
}

/// Work that the threads of one name in one process did for each checkpoint, on average.
#[derive(Clone, Debug, Serialize)]
pub struct Thread {
    /// The process.
    pub process: &'static str,
    /// The thread's name.
    pub name: String,
    /// Microseconds that it ran.
    pub ran_us: f64,
    /// Microseconds that it was ready to run, and did not.
    pub waited_us: f64,
    /// Times that it slept.
    pub slept: f64,
    /// Page faults.
    pub faults: f64,
    /// System calls, if they were counted.
    pub calls: Option<f64>,
}

/// Measures and prints.
pub fn run(args: &BenchCheckpointArgs, json: bool) -> Result<Exit, Failure> {
    let mut options = patient(scene_options(args.guest.as_deref())?);
    if args.workload.is_some() {
        options.kind = GuestKind::Bench;
    }
    options.pinned = args.pinned;
    let rounds = measure_all(&options, args)
        .map_err(|error| Failure::internal(format!("the benchmark failed: {error:#}")))?;
    output::show(json, &rounds, |rounds| table::table(rounds))?;
    Ok(Exit::Ok)
}

fn measure_all(options: &SceneOptions, args: &BenchCheckpointArgs) -> Result<Vec<Round>> {
    if !args.keepers {
        return on_scene(options.clone(), |scene| measure(scene, args, args.rounds));
    }
    let kept = with_keepers(options.clone());
    let mut rounds = Vec::new();
    for _ in 0..args.rounds {
        for (options, keepers) in [(options, false), (&kept, true)] {
            let measured = on_scene(options.clone(), |scene| {
                let measured = measure(scene, args, 1)?;
                if keepers {
                    end_keepers(scene)?;
                }
                Ok(measured)
            })?;
            ensure!(
                measured.iter().all(|round| round.keepers == keepers),
                "the VM has other processes"
            );
            rounds.extend(measured);
        }
    }
    Ok(rounds)
}

fn with_keepers(mut options: SceneOptions) -> SceneOptions {
    for daemon in options.daemons.values_mut() {
        daemon.settings.insert_str(0, "keepers = true\n");
    }
    options
}

/// Keepers outlive their daemons.
fn end_keepers(scene: &Scene) -> Result<()> {
    scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
    for host in ["a", "b"] {
        let host = scene.host(host)?;
        let alone = || Ok((host.namespace().processes()? == [host.pid()]).then_some(()));
        wait_for("the VM's processes to end", KEEPERS_END, alone)?;
    }
    Ok(())
}

fn measure(scene: &Scene, args: &BenchCheckpointArgs, rounds: u32) -> Result<Vec<Round>> {
    scene.start_guest("a")?;
    scene.await_guest()?;
    let primary = Client::new(scene.host("a")?.socket()).map_err(words)?;
    match args.workload {
        Some(workload) => {
            let console = scene.console("a")?;
            let bed = bed(scene, &console);
            workload.prepare(&bed)?;
            let bench = Bench::protect(scene, primary, args, None)?;
            let load = || Ok(Some(workload.run(&bed, Scale::Quick)?.value));
            bench.rounds(workload.name(), rounds, load)
        }
        None => {
            let hz = args.hz;
            let mut shell = scene.shell()?;
            // A little more often than there are checkpoints, so that each finds every page written.
            let interval = 1000 / hz * 9 / 10;
            shell.start(&format!("exec guest-tools dirty {} {interval}", args.pages))?;
            let bench = Bench::protect(scene, primary, args, Some(Policy::Interval { hz }))?;
            thread::sleep(WARM_UP);
            let span = Duration::from_secs(args.seconds);
            let load = || {
                thread::sleep(span);
                Ok(None)
            };
            bench.rounds(&format!("{} pages", args.pages), rounds, load)
        }
    }
}

struct Bench<'a> {
    primary: Client,
    processes: Vec<Process>,
    keepers: bool,
    args: &'a BenchCheckpointArgs,
}

impl<'a> Bench<'a> {
    fn protect(
        scene: &Scene,
        primary: Client,
        args: &'a BenchCheckpointArgs,
        policy: Option<Policy>,
    ) -> Result<Bench<'a>> {
        let request = ProtectRequest { to: "b".to_owned(), policy, ..Default::default() };
        primary.protect(VM, &request).map_err(words)?;
        scene.await_protected("a", |_| ())?;
        let status = primary.vm_status(VM).map_err(words)?;
        let backup = Client::new(scene.host("b")?.socket()).map_err(words)?;
        let backup = backup.vm_status(VM).map_err(words)?.keeper_pid;
        let keepers = status.keeper_pid.is_some() && backup.is_some();
        let daemons = [scene.host("a")?.pid(), scene.host("b")?.pid()];
        let mut processes = vec![
            Process { name: "primary", pid: status.keeper_pid.unwrap_or(daemons[0]) },
            Process { name: "qemu", pid: status.qemu_pid.context("there is no QEMU")? },
            Process { name: "backup", pid: backup.unwrap_or(daemons[1]) },
        ];
        if keepers {
            processes.extend(daemons.map(|pid| Process { name: "daemons", pid }));
        }
        Ok(Bench { primary, processes, keepers, args })
    }

    fn rounds(
        &self,
        name: &str,
        rounds: u32,
        mut load: impl FnMut() -> Result<Option<f64>>,
    ) -> Result<Vec<Round>> {
        (0..rounds).map(|_| self.round(name, &mut load)).collect()
    }

    fn round(&self, name: &str, load: impl FnOnce() -> Result<Option<f64>>) -> Result<Round> {
        let count = self.args.calls.then(|| CallCount::begin(&self.processes)).transpose()?;
        let (watch, accounts) = (Watch::begin(&self.primary)?, Account::look(&self.processes)?);
        let figure = load()?;
        let done = Account::look(&self.processes)?.since(&accounts);
        let calls = count.map(CallCount::end).transpose()?;
        let Stretch { checkpoints, sent, took, timings } = watch.end(&self.primary)?;
        ensure!(checkpoints > 0 && !timings.is_empty(), "no checkpoint in {took:.1?}");
        let each = |sum: u64| sum as f64 / checkpoints as f64;
        let thread = |((process, name), done): (ThreadName, Done)| Thread {
            process,
            ran_us: each(done.ran_ns) / 1e3,
            waited_us: each(done.waited_ns) / 1e3,
            slept: each(done.slept),
            faults: each(done.faults),
            calls: calls.as_ref().map(|calls| {
                each(calls.get(&(process, name.clone())).copied().unwrap_or_default())
            }),
            name,
        };
        let mean = |of: fn(&CheckpointTiming) -> u64| {
            timings.iter().map(of).sum::<u64>() as f64 / timings.len() as f64
        };
        let at = |share, of: fn(&CheckpointTiming) -> f64| {
            let values: Vec<f64> = timings.iter().map(of).collect();
            quantile(&values, share).unwrap_or_default()
        };
        Ok(Round {
            load: name.to_owned(),
            keepers: self.keepers,
            checkpoints,
            seconds: took.as_secs_f64(),
            pages: mean(|timing| timing.pages),
            precopied_pages: mean(|timing| timing.precopied_pages),
            bytes: each(sent),
            pause_p50_ms: at(0.5, |timing| timing.total_ms),
            pause_p99_ms: at(0.99, |timing| timing.total_ms),
            commit_p50_ms: at(0.5, |timing| timing.replicate_ms),
            commit_p99_ms: at(0.99, |timing| timing.replicate_ms),
            figure,
            threads: done.into_iter().map(thread).collect(),
        })
    }
}
