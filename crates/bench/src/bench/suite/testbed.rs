//! The laboratory of the workloads: two hosts, a guest that the daemon manages and the same
//! guest on plain QEMU. Both are booted once; the one whose turn it is not stands still.

use super::figures::{self, Repetitions};
use super::plan::Step;
use super::protection::{self, Watch};
use super::store::Measured;
use super::variant::{Subject, Variant};
use crate::bench::machine::{ProcessorTimes, ProcessorUse};
use crate::bench::workloads::{Bed, Door, Figure, Scale};
use crate::bench::{patient, words};
use crate::cli::SuiteArgs;
use crate::parts::{guest_files, scene_options};
use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;
use understudy_client::Client;
use understudy_lab::scene::{ECHO_PORT, GuestKind, SHELL_PORT, TBENCH_PORT, VM, WEB_PORT};
use understudy_lab::{
    BenchGuest, Colo, ColoError, GUEST_ADDRESS, Lab, PlainGuest, PlainOptions, Scene,
};

/// A guest that ran on after it had stood still catches up with its timers.
pub const SETTLE: Duration = Duration::from_secs(1);

/// The servers that the workloads need.
pub const SERVERS: [u16; 4] = [SHELL_PORT, ECHO_PORT, TBENCH_PORT, WEB_PORT];
/// Lets the variant without output buffering be asked for.
const EXPERIMENTS: &str = "[experiments]\nallow_unheld_output = true\n";

/// Files that the guests of the workloads are made of, as far as it is there.
pub fn files(guest: &Path) -> Vec<PathBuf> {
    let bench = BenchGuest::files(guest, GUEST_ADDRESS);
    bench.map_or_else(|_| Vec::new(), |bench| vec![bench.kernel, bench.initrd, bench.image])
}

/// Measures step after step on a testbed that it makes when there is none.
pub struct Bench {
    guest: Option<PathBuf>,
    output: PathBuf,
    repetitions: Repetitions,
    /// Whether the primary host has a processor to itself.
    pinned: bool,
    testbed: Option<Testbed>,
    /// Reason why COLO does not run here, once that is known.
    refusal: Option<ColoError>,
}

impl Bench {
    /// Bench for what was asked for; logs of what fails go beside the results.
    pub fn new(args: &SuiteArgs, repetitions: Repetitions) -> Bench {
        Bench {
            guest: args.guest.clone(),
            output: args.output.clone(),
            repetitions,
            pinned: args.pinned,
            testbed: None,
            refusal: None,
        }
    }

    /// One measurement. After an error the next one has a fresh testbed.
    pub fn measure(&mut self, step: &Step) -> Result<Measured> {
        if step.subject.own_variant().is_some() {
            self.end()?;
            return figures::measure(step.subject, self.guest.as_deref(), self.repetitions);
        }
        if step.variant == Variant::Colo {
            return self.measure_colo(step.subject);
        }
        let mut testbed = match self.testbed.take() {
            Some(testbed) => testbed,
            None => Testbed::start(self.guest.as_deref(), self.pinned)?,
        };
        match testbed.measure(step) {
            Ok(measured) => {
                self.testbed = Some(testbed);
                Ok(measured)
            }
            Err(error) => {
                let name = format!("{}-{}-{}.log", step.subject, step.variant, step.round);
                let log = self.output.join(name);
                fs::write(&log, testbed.scene.diagnostics()).context("cannot write a log")?;
                Err(error.context(format!("see {}", log.display())))
            }
        }
    }

    /// A workload under COLO, in a laboratory of its own. Where COLO does not run it is
    /// tried but once.
    fn measure_colo(&mut self, subject: Subject) -> Result<Measured> {
        if let Some(refusal) = &self.refusal {
            return Err(refusal.clone().into());
        }
        self.end()?;
        let guest_files = self.guest.clone().unwrap_or_else(guest_files);
        let options = PlainOptions::bench_guest(&guest_files)?;
        let mut lab = Lab::new(&["a", "b"])?;
        if self.pinned {
            lab.pin()?;
        }
        let colo = Colo::start(&lab, &options, &SERVERS);
        let colo = colo.inspect_err(|refusal| self.refusal = Some(refusal.clone()))?;
        let bed = Bed {
            lab: &lab,
            address: colo.address(),
            door: Door::Console(colo.console()),
            guest_files: &guest_files,
        };
        let measured = prepare(&bed, subject).and_then(|()| work(&bed, subject));
        // If COLO has ended meanwhile, the figure is none of COLO's.
        colo.check()?;
        measured
    }

    /// Ends the testbed, and proves that nothing of it is left.
    pub fn end(&mut self) -> Result<()> {
        self.testbed.take().map_or(Ok(()), Testbed::end)
    }
}

/// Guest that runs; the other one stands still.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Managed,
    Plain,
}

struct Testbed {
    // Before the scene, on whose host it runs: fields are dropped in order.
    plain: Option<PlainGuest>,
    turn: Side,
    primary: Client,
    backup: Client,
    qemu: Pid,
    /// The managed guest's console.
    console: PathBuf,
    /// Path of the guests' files.
    guest: PathBuf,
    scene: Scene,
}

impl Testbed {
    /// Boots the managed guest on host a; host b will be its backup.
    fn start(guest: Option<&Path>, pinned: bool) -> Result<Testbed> {
        let mut options = patient(scene_options(guest).map_err(words)?);
        options.kind = GuestKind::Bench;
        options.pinned = pinned;
        for host in options.daemons.values_mut() {
            host.settings += EXPERIMENTS;
        }
        let guest = options.guest_files.clone();
        let scene = Scene::start(options)?;
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = |host| Client::new(scene.host(host)?.socket()).map_err(words);
        let (primary, backup) = (client("a")?, client("b")?);
        let pid =
            primary.vm_status(VM).map_err(words)?.qemu_pid.context("the guest has no QEMU")?;
        let qemu = Pid::from_raw(pid.try_into()?);
        let console = scene.console("a")?;
        Ok(Testbed {
            plain: None,
            turn: Side::Managed,
            primary,
            backup,
            qemu,
            console,
            guest,
            scene,
        })
    }

    fn measure(&mut self, step: &Step) -> Result<Measured> {
        let plain = step.variant == Variant::Plain;
        self.give_turn(if plain { Side::Plain } else { Side::Managed })?;
        prepare(&self.bed(), step.subject)?;
        let Some(request) = step.variant.protection() else {
            return work(&self.bed(), step.subject);
        };
        protection::begin(&self.primary, VM, &request)?;
        let watch = Watch::begin(&self.primary)?;
        let mut measured = work(&self.bed(), step.subject)?;
        measured.protection = Some(watch.end(&self.primary)?.figures());
        protection::end(&self.primary, &self.backup, VM)?;
        Ok(measured)
    }

    /// Lets one guest run and the other stand still.
    fn give_turn(&mut self, side: Side) -> Result<()> {
        if self.turn == side {
            return Ok(());
        }
        match (side, &self.plain) {
            (Side::Managed, plain) => {
                plain.as_ref().map_or(Ok(()), PlainGuest::pause)?;
                kill(self.qemu, Signal::SIGCONT)?;
            }
            (Side::Plain, plain) => {
                // The daemon has all of QEMU's monitors, and no use for a guest that it
                // does not run: the kernel stops the process.
                kill(self.qemu, Signal::SIGSTOP)?;
                match plain {
                    Some(plain) => plain.resume()?,
                    None => self.plain = Some(self.start_plain()?),
                }
            }
        }
        self.turn = side;
        thread::sleep(SETTLE);
        Ok(())
    }

    /// The same guest on host a, without the daemon.
    fn start_plain(&self) -> Result<PlainGuest> {
        let options = PlainOptions::bench_guest(&self.guest)?;
        let plain = PlainGuest::start(self.scene.lab(), "a", &options)?;
        plain.await_boot(self.scene.lab(), &SERVERS)?;
        Ok(plain)
    }

    /// The guest whose turn it is.
    fn bed(&self) -> Bed<'_> {
        let (address, console) = match &self.plain {
            Some(plain) if self.turn == Side::Plain => (plain.address(), plain.console()),
            _ => (GUEST_ADDRESS, &*self.console),
        };
        let (lab, guest_files) = (self.scene.lab(), &*self.guest);
        Bed { lab, address, door: Door::Console(console), guest_files }
    }

    fn end(mut self) -> Result<()> {
        self.give_turn(Side::Managed)?;
        drop(self.plain.take());
        self.scene.finish()
    }
}

fn prepare(bed: &Bed<'_>, subject: Subject) -> Result<()> {
    subject.workload().context("no workload")?.prepare(bed)
}

fn work(bed: &Bed<'_>, subject: Subject) -> Result<Measured> {
    let workload = subject.workload().context("no workload")?;
    let before = ProcessorTimes::look();
    let sample = workload.run_accounted(bed, Scale::Full)?;
    let usage = before.zip(ProcessorTimes::look());
    let usage = usage.and_then(|(before, after)| before.until(after));
    let detail = |figure: &Figure| (format!("{}_{}", figure.name, figure.unit), figure.value);
    let details = sample.more.iter().map(detail).chain(usage.into_iter().flat_map(account));
    Ok(Measured {
        value: sample.value,
        unit: workload.unit().to_owned(),
        better: workload.better(),
        details: details.collect(),
        protection: None,
        extra: Value::Null,
    })
}

/// Whether a figure is what the guest is capable of, or what the processors are.
fn account(usage: ProcessorUse) -> [(String, f64); 2] {
    [("processors_busy".to_owned(), usage.busy), ("processors_stolen".to_owned(), usage.stolen)]
}
