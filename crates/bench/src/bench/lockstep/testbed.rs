//! The laboratory: a guest for each variant, of which one runs at a time.

use super::log::{self, LogFigures};
use super::plan::{Step, Subject, Variant};
use super::reads;
use crate::bench::suite::protection;
use crate::bench::suite::table::number;
use crate::bench::suite::testbed::{SERVERS, SETTLE};
use crate::bench::workloads::{Bed, Better, Door, Sample, Scale};
use crate::bench::{patient, words};
use crate::parts::scene_options;
use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;
use understudy_client::Client;
use understudy_lab::companion::{COMPANION, COMPANION_ADDRESS, Companion};
use understudy_lab::scene::{GuestKind, VM};
use understudy_lab::{GUEST_ADDRESS, PlainGuest, PlainOptions, Scene};
use understudy_report::{DiskReads, Mode, ProtectRequest};

/// Time for which an idle guest is looked at.
const IDLE: Duration = Duration::from_secs(10);

/// Figures that a step measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Taken {
    /// The workload's figures; none of an idle guest.
    pub sample: Option<Sample>,
    /// The log, of a guest in lockstep.
    pub log: Option<LogFigures>,
}

impl Taken {
    /// Words for the progress.
    pub fn words(&self) -> String {
        let figure = self.sample.as_ref().map(|sample| number(sample.value));
        let log = self.log.map(|log| {
            format!(
                "{} Mbit/s of log, lag {} ms, p99 {}",
                number(log.mbit_s),
                number(log.lag_ms_p50),
                number(log.lag_ms_p99)
            )
        });
        figure.into_iter().chain(log).collect::<Vec<_>>().join("; ")
    }
}

/// Measures step after step on a testbed that it makes when there is none.
pub struct Bench {
    guest: Option<PathBuf>,
    scale: Scale,
    testbed: Option<Testbed>,
}

impl Bench {
    /// Bench with the guests' files in `guest`, if not in the usual place.
    pub fn new(guest: Option<PathBuf>, scale: Scale) -> Bench {
        Bench { guest, scale, testbed: None }
    }

    /// One measurement. After an error, which shows the logs, the next one has a fresh testbed.
    pub fn measure(&mut self, step: Step) -> Result<Taken> {
        let mut testbed = match self.testbed.take() {
            Some(testbed) => testbed,
            None => Testbed::start(self.guest.as_deref())?,
        };
        let taken = testbed
            .measure(step, self.scale)
            .inspect_err(|_| eprintln!("{}", testbed.scene.diagnostics()))?;
        self.testbed = Some(testbed);
        Ok(taken)
    }

    /// Ends the testbed, and proves that nothing of it is left.
    pub fn end(&mut self) -> Result<()> {
        self.testbed.take().map_or(Ok(()), Testbed::end)
    }
}

/// A guest that was booted.
enum Guest {
    /// Guest on plain QEMU.
    Plain(Box<PlainGuest>),
    /// The daemon's, unprotected while it is not measured.
    Managed(Managed),
}

struct Managed {
    vm: &'static str,
    address: Ipv4Addr,
}

struct Testbed {
    // Before the scene, on whose host they run: fields are dropped in order.
    guests: BTreeMap<Variant, Guest>,
    /// The second guest of a pair; it runs while both are measured only.
    twin: Option<PlainGuest>,
    /// Variant whose guest runs; the others stand still.
    turn: Option<Variant>,
    companion: Companion,
    primary: Client,
    backup: Client,
    scene: Scene,
}

impl Testbed {
    fn start(guest: Option<&Path>) -> Result<Testbed> {
        let mut options = patient(scene_options(guest).map_err(words)?);
        options.kind = GuestKind::Bench;
        // The same in each variant, and what lockstep needs.
        options.accel = Some("tcg".to_owned());
        options.lockstep = true;
        let scene = Scene::start(options)?;
        let client = |host| Client::new(scene.host(host)?.socket()).map_err(words);
        let (primary, backup) = (client("a")?, client("b")?);
        let companion = Companion::new(&scene)?;
        let (guests, twin, turn) = (BTreeMap::new(), None, None);
        Ok(Testbed { guests, twin, turn, companion, primary, backup, scene })
    }

    fn measure(&mut self, step: Step, scale: Scale) -> Result<Taken> {
        let home = home(step.variant);
        self.give_turn(home)?;
        if step.variant == Variant::Pair {
            return Ok(Taken { sample: self.work_twice(step.subject, scale)?, log: None });
        }
        let guest = &self.guests[&home];
        let work = || self.work(step.subject, guest, scale);
        if step.subject == Subject::DiskReads {
            reads::prepare(&self.bed(guest), scale)?;
        }
        let vm = match guest {
            Guest::Managed(managed) if step.variant != Variant::Record => managed.vm,
            _ => return Ok(Taken { sample: work()?, log: None }),
        };
        let mode = mode(step.variant);
        // A backup that is lost is to be seen, not replaced.
        let disk_reads = disk_reads(step.variant);
        let to = "b".to_owned();
        let to_b = ProtectRequest { to, mode, disk_reads, repair: false, ..Default::default() };
        protection::begin(&self.primary, vm, &to_b)?;
        let taken = match mode {
            Mode::Checkpoint => Taken { sample: work()?, log: None },
            Mode::Lockstep => {
                let (sample, log) = log::during(&self.primary, vm, work)?;
                Taken { sample, log: Some(log) }
            }
        };
        protection::end(&self.primary, &self.backup, vm)?;
        Ok(taken)
    }

    /// Runs a workload.
    fn work(&self, subject: Subject, guest: &Guest, scale: Scale) -> Result<Option<Sample>> {
        let bed = self.bed(guest);
        match subject.workload() {
            Some(workload) => workload.run(&bed, scale).map(Some),
            None if subject == Subject::DiskReads => reads::run(&bed, scale).map(Some),
            None => {
                thread::sleep(IDLE);
                Ok(None)
            }
        }
    }

    /// Runs a workload in both guests of a pair at once, and gives the figures of the slower one.
    fn work_twice(&mut self, subject: Subject, scale: Scale) -> Result<Option<Sample>> {
        let Some(workload) = subject.workload() else { return Ok(None) };
        let twin = match self.twin.take() {
            Some(twin) => {
                twin.resume()?;
                twin
            }
            None => self.boot_twin()?,
        };
        thread::sleep(SETTLE);
        let beds = [self.bed(&self.guests[&Variant::Icount]), self.bed_at(twin.address())];
        let samples = thread::scope(|scope| {
            let working = beds.each_ref().map(|bed| scope.spawn(|| workload.run(bed, scale)));
            working.map(|one| one.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        twin.pause()?;
        self.twin = Some(twin);
        let [one, other] = samples;
        let (one, other) = (one?, other?);
        let one_is_slower = match workload.better() {
            Better::Lower => one.value >= other.value,
            Better::Higher => one.value <= other.value,
        };
        Ok(Some(if one_is_slower { one } else { other }))
    }

    fn boot_twin(&self) -> Result<PlainGuest> {
        let options = PlainOptions::counted_bench_guest(self.scene.guest_files(), 2)?;
        let twin = PlainGuest::start(self.scene.lab(), "b", &options)?;
        twin.await_boot(self.scene.lab(), &SERVERS)?;
        Ok(twin)
    }

    fn bed(&self, guest: &Guest) -> Bed<'_> {
        self.bed_at(match guest {
            Guest::Plain(plain) => plain.address(),
            Guest::Managed(managed) => managed.address,
        })
    }

    /// The same for all.
    fn bed_at(&self, address: Ipv4Addr) -> Bed<'_> {
        Bed {
            lab: self.scene.lab(),
            address,
            door: Door::Network,
            guest_files: self.scene.guest_files(),
        }
    }

    /// Lets one variant's guest run, which is booted if there is none, and all others stand
    /// still.
    fn give_turn(&mut self, variant: Variant) -> Result<()> {
        if self.turn == Some(variant) {
            return Ok(());
        }
        if let Some(before) = self.turn.take() {
            self.halt(&self.guests[&before])?;
        }
        match self.guests.get(&variant) {
            Some(guest) => self.resume(guest)?,
            None => {
                let guest = self.boot(variant)?;
                self.guests.insert(variant, guest);
            }
        }
        self.turn = Some(variant);
        thread::sleep(SETTLE);
        Ok(())
    }

    fn boot(&self, variant: Variant) -> Result<Guest> {
        let files = self.scene.guest_files();
        let options = match variant {
            Variant::Tcg => PlainOptions::bench_guest(files)?,
            Variant::Icount | Variant::Pair => PlainOptions::counted_bench_guest(files, 1)?,
            Variant::Record | Variant::Lockstep | Variant::LockstepLog => {
                self.scene.start_guest("a")?;
                self.scene.await_guest()?;
                return Ok(Guest::Managed(Managed { vm: VM, address: GUEST_ADDRESS }));
            }
            Variant::Checkpoint => {
                self.companion.start(self.scene.host("a")?)?;
                self.companion.await_boot(&self.scene)?;
                return Ok(Guest::Managed(Managed { vm: COMPANION, address: COMPANION_ADDRESS }));
            }
        };
        let plain = PlainGuest::start(self.scene.lab(), "a", &options)?;
        plain.await_boot(self.scene.lab(), &SERVERS)?;
        Ok(Guest::Plain(Box::new(plain)))
    }

    fn halt(&self, guest: &Guest) -> Result<()> {
        match guest {
            Guest::Plain(plain) => plain.pause(),
            // The daemon has all of QEMU's monitors: the kernel stops the process.
            Guest::Managed(managed) => Ok(kill(self.qemu(managed)?, Signal::SIGSTOP)?),
        }
    }

    fn resume(&self, guest: &Guest) -> Result<()> {
        match guest {
            Guest::Plain(plain) => plain.resume(),
            Guest::Managed(managed) => Ok(kill(self.qemu(managed)?, Signal::SIGCONT)?),
        }
    }

    /// Its QEMU of now: lockstep gives a guest another one.
    fn qemu(&self, managed: &Managed) -> Result<Pid> {
        let status = self.primary.vm_status(managed.vm).map_err(words)?;
        let pid = status.qemu_pid.with_context(|| format!("{} has no QEMU", managed.vm))?;
        Ok(Pid::from_raw(pid.try_into()?))
    }

    fn end(mut self) -> Result<()> {
        for (variant, guest) in std::mem::take(&mut self.guests) {
            if self.turn != Some(variant) {
                self.resume(&guest)?;
            }
        }
        self.twin.take().map_or(Ok(()), |twin| twin.resume())?;
        self.scene.finish()
    }
}

/// Mode in which the daemon protects the guest of a variant.
fn mode(variant: Variant) -> Mode {
    match variant {
        Variant::Lockstep | Variant::LockstepLog => Mode::Lockstep,
        _ => Mode::Checkpoint,
    }
}

/// Source from which the backup of a variant gets what its guest reads from its disks.
fn disk_reads(variant: Variant) -> DiskReads {
    match variant {
        Variant::LockstepLog => DiskReads::Log,
        _ => DiskReads::Backup,
    }
}

/// Variant on whose guest a variant is measured.
fn home(variant: Variant) -> Variant {
    match variant {
        Variant::Pair => Variant::Icount,
        Variant::Record | Variant::LockstepLog => Variant::Lockstep,
        other => other,
    }
}
