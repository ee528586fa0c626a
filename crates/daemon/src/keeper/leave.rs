//! Departure of a keeper, whose VM goes to the next one of this host, while the guest runs: its
//! protection ends in order, a custodian has all by which QEMU is held and has the guest stand
//! still, and this process ends. From then on the next keeper alone can let the guest go on.

use super::legacy::{self, Legacy, Readable};
use super::{conflict, order};
use crate::bounded;
use crate::host::{Host, failed, internal};
use crate::lifecycle::check_goes_on;
use crate::vm::{PrimaryVm, Vm};
use std::convert::Infallible;
use std::fmt;
use std::os::unix::net::UnixStream;
use std::process;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use understudy_disk::Disk;
use understudy_machine::Machine;
use understudy_machine::custody::Custody;
use understudy_protocol::{HostName, LeaseAnswer, PrimaryPhase, VmName};
use understudy_report::Mode;
use understudy_report::error::{ErrorKind, HostError};
use understudy_threads::lock;

/// Time for its disks to be brought to stable storage: the daemon does not wait for ever, and whoever leaves a guest
/// then leaves it to nobody.
const SYNC_PATIENCE: Duration = Duration::from_secs(30);
/// Time for what the guest has sent to leave it, once protection has ended.
const OUTPUT_PATIENCE: Duration = Duration::from_secs(2);
/// Time between two looks at that.
const LOOK: Duration = Duration::from_millis(1);

/// A VM that is being left takes no other orders, until this is dropped.
struct Leaving<'a>(&'a PrimaryVm);

impl<'a> Leaving<'a> {
    fn begin(vm: &'a PrimaryVm) -> Result<Leaving<'a>, HostError> {
        match vm.begin_leaving() {
            true => Ok(Leaving(vm)),
            false => {
                Err(conflict(format!("{} is being left to its next keeper already", vm.name())))
            }
        }
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.stay();
    }
}

impl Host {
    /// The VM, if nothing speaks against leaving it to a keeper that reads this.
    pub(super) fn check_leavable(
        &self,
        name: &VmName,
        reads: Readable,
    ) -> Result<Arc<PrimaryVm>, HostError> {
        let refuse = |why: String| Err(conflict(format!("{name} stays in its keeper: {why}")));
        if let Some(group) = self.keeps.as_ref().and_then(|kept| kept.group()) {
            return refuse(format!(
                "it shares it with group {group}, whose VMs change their keeper by a planned fail-over \
                 (`understudy failover {name}`)"
            ));
        }
        if let Vm::Backup(session) = self.vm(name)? {
            let primary = &session.primary;
            return refuse(format!(
                "it is backed up here: `understudy vm stop {name} --force` ends that, and host {primary}, \
                 where it runs, looks for a backup, which gets a new keeper"
            ));
        }
        let vm = self.primary(name)?;
        check_goes_on(&vm)?;
        let machine = vm.machine();
        if let Some(obstacle) = machine.adoption_obstacle() {
            return refuse(format!("{obstacle}; stop it and start it again, or hand it over"));
        }
        reads.check(machine.definition().tpm.is_some(), machine.agent_version())?;
        let snapshots = &self.snapshots;
        if snapshots.is_taking(name)
            || snapshots.is_restoring(name)
            || snapshots.filling(name).is_some()
        {
            return refuse("it is being snapshotted, or restored: try again after that".to_owned());
        }
        if let Some(error) = machine.disk_error() {
            return refuse(format!("the guest stands still: {error}"));
        }
        if machine.is_powered_off() || !machine.is_alive() {
            return refuse("the guest is about to end".to_owned());
        }
        if let Some(session) = vm.active_session() {
            match (session.mode(), session.phase()) {
                (Mode::Lockstep, _) => {
                    return refuse("it is in lockstep: hand it over, or unprotect it".to_owned());
                }
                (Mode::Checkpoint, PrimaryPhase::Protected) => {}
                (Mode::Checkpoint, _) => {
                    return refuse("it is being synchronised, or handed over: wait".to_owned());
                }
            }
        }
        Ok(vm)
    }

    /// Leaves a VM to the next keeper, tells the daemon, and ends this process. An error says why it goes
    /// on here as before.
    pub(super) fn leave_to_next(
        self: &Arc<Self>,
        name: &VmName,
        reads: Readable,
        daemon: &mut UnixStream,
    ) -> HostError {
        match self.try_to_leave(name, reads, daemon) {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    fn try_to_leave(
        self: &Arc<Self>,
        name: &VmName,
        reads: Readable,
        daemon: &mut UnixStream,
    ) -> Result<Infallible, HostError> {
        let vm = self.check_leavable(name, reads)?;
        // In this order: what would begin is refused, and what was under way ends before it is looked at again.
        let leaving = Leaving::begin(&vm)?;
        let protecting = lock(&vm.protecting);
        self.check_leavable(name, reads)?;
        // That may have taken long, and what comes now costs the backup.
        check_awaited(name, daemon)?;
        // Nothing that takes long is found out only when the guest stands still.
        self.prove_ours(&vm)?;
        // While a backup has what they may have lost.
        let synced_until = Instant::now() + SYNC_PATIENCE;
        sync_disks(&vm, synced_until)?;
        let backup = vm.active_session().map(|session| session.peer.clone());
        let alone = self.leave_backup(&vm, backup.as_ref(), synced_until);
        let left = alone.and_then(|()| self.leave(&vm, backup.clone(), daemon));
        drop((protecting, leaving));
        left.inspect_err(|error| {
            if let (Some(_), Some(wish)) = (&backup, vm.repairer().wish()) {
                let reason = format!("its keeper is not replaced: {error}");
                self.degraded(&vm, reason, &wish.command(name));
            }
        })
    }

    /// Ends a VM's protection, if it has a backup; what that left it is on record then.
    fn leave_backup(
        &self,
        vm: &PrimaryVm,
        backup: Option<&HostName>,
        synced_until: Instant,
    ) -> Result<(), HostError> {
        let Some(peer) = backup else { return self.note_what_was_won(vm) };
        self.end_protection(vm)?;
        // Flushes of the last checkpoints are owed, and the next keeper would not know.
        sync_disks(vm, synced_until)?;
        await_output(&vm.machine())?;
        self.note_what_was_won(vm)?;
        vm.events.note(format!("not protected to {peer} while its keeper is replaced"));
        Ok(())
    }

    /// Notes the generation at which the VM is left. Sole ownership may have come with a new one, and whoever notes that
    /// ends with this process.
    fn note_what_was_won(&self, vm: &PrimaryVm) -> Result<(), HostError> {
        self.note_generation_of(&vm.machine(), vm.generation()).map_err(|error| {
            conflict(format!("{} stays in its keeper: {}", vm.name(), error.message))
        })
    }

    /// Whether the arbiter answers, and says that the VM is this host's.
    fn prove_ours(&self, vm: &PrimaryVm) -> Result<(), HostError> {
        match self.ask_for_owner(vm.name(), vm.generation()) {
            LeaseAnswer::Own => Ok(()),
            LeaseAnswer::Moved { why, .. } | LeaseAnswer::Unreachable(why) => {
                let message = format!("{} stays in its keeper: {why}", vm.name());
                Err(HostError::new(ErrorKind::Unreachable, message))
            }
        }
    }

    fn leave(
        &self,
        vm: &PrimaryVm,
        backup: Option<HostName>,
        daemon: &mut UnixStream,
    ) -> Result<Infallible, HostError> {
        let machine = vm.machine();
        let custody = self.entrust(vm, &machine, backup).and_then(|custody| {
            machine.prepare_to_leave()?;
            custody.stop()?;
            Ok(custody)
        });
        // Dropped, the custody is over.
        let custody = custody.map_err(|error| {
            stay(&machine);
            failed(&format!("{} stays in its keeper", vm.name()), &error)
        })?;
        if !self.still_runs(vm) || machine.is_powered_off() || !machine.is_alive() {
            stay(&machine);
            return Err(conflict(format!("{} has just ended", vm.name())));
        }
        // A flush that has failed meanwhile would be made again by the next keeper, and succeed.
        if let Some(disk) = machine.disks().iter().find(|disk| disk.has_lost_writes()) {
            stay(&machine);
            return Err(lost_writes(vm.name(), disk, "it has just failed to sync"));
        }
        check_awaited(vm.name(), daemon).inspect_err(|_| stay(&machine))?;
        // From here on it is the next keeper's.
        machine.leave_to_next();
        custody.leave();
        if let Some(kept) = &self.keeps {
            kept.leave_to_next(vm.name());
        }
        let answer: order::Answer = Ok(None);
        if let Err(error) = order::say(daemon, &answer) {
            // The next keeper, or the next daemon, sees that this process has ended.
            tracing::warn!(vm = %vm.name(), "the daemon does not hear that it was left: {error}");
        }
        // Nothing of it is to be taken apart: that would end QEMU, and remove what is the next keeper's.
        process::exit(0)
    }

    fn entrust(
        &self,
        vm: &PrimaryVm,
        machine: &Machine,
        backup: Option<HostName>,
    ) -> anyhow::Result<Custody> {
        let (note, descriptors) = machine.entrusted()?;
        let legacy = Legacy::new(vm.generation(), backup, note);
        let directory = self.vm_directory(vm.name())?;
        Custody::begin(&legacy::socket(&directory), &legacy, &descriptors)
    }
}

/// Refuses if the daemon has told its operator that the VM stays, and the next keeper to end.
fn check_awaited(vm: &VmName, daemon: &UnixStream) -> Result<(), HostError> {
    match order::has_hung_up(daemon) {
        true => {
            let message =
                format!("{vm} stays in its keeper: the daemon does not wait for it any more");
            Err(conflict(message))
        }
        false => Ok(()),
    }
}

fn stay(machine: &Machine) {
    if let Err(error) = machine.stay() {
        tracing::warn!(vm = %machine.definition().name, "the guest does not go on: {error}");
    }
}

/// Brings all that the guest has written to stable storage, in images that the next keeper finds. That a sync has failed
/// nobody but this process knows: the kernel tells it once. A disk that does not answer holds the thread that waits for it,
/// and not whoever would leave.
fn sync_disks(vm: &PrimaryVm, until: Instant) -> Result<(), HostError> {
    let name = vm.name().clone();
    let disks = vm.machine().disks();
    let sync = move || {
        let sync = |disk: &Arc<Disk>| {
            disk.check_place()
                .map_err(|error| conflict(format!("{name} stays in its keeper: {error}")))?;
            disk.sync().map_err(|error| lost_writes(&name, disk, error))
        };
        disks.iter().try_for_each(sync)
    };
    let name = vm.name();
    match bounded::by(until, format!("sync-{name}"), sync).map_err(internal)? {
        Some(synced) => synced,
        None => Err(conflict(format!(
            "{name} stays in its keeper: its disks have not been synced within {} s: try again once they answer",
            SYNC_PATIENCE.as_secs()
        ))),
    }
}

fn lost_writes(vm: &VmName, disk: &Disk, why: impl fmt::Display) -> HostError {
    let path = disk.path();
    conflict(format!("{vm} stays in its keeper: {} may have lost writes: {why}", path.display()))
}

/// Protection has ended, and nothing waits for a backup any more: waits until all of it has left.
fn await_output(machine: &Machine) -> Result<(), HostError> {
    let deadline = Instant::now() + OUTPUT_PATIENCE;
    let holds = || machine.ports().iter().any(|port| port.held_frames() > 0);
    while holds() {
        if Instant::now() > deadline {
            return Err(conflict("what the guest has sent does not leave".to_owned()));
        }
        thread::sleep(LOOK);
    }
    Ok(())
}
