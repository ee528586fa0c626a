//! Starts and stops VMs.

use crate::admission::open_disks;
use crate::arrivals::Arrival;
use crate::autostart;
use crate::closing::StillOn;
use crate::host::{Host, failed, internal};
use crate::keeper::places::Following;
use crate::lease::{Busy, FormerLease};
use crate::lifecycle::check_stays;
use crate::medium;
use crate::repair::Wish;
use crate::vm::{EndAsked, PrimaryVm, Vm};
use anyhow::Context;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tracing::{info, warn};
use understudy_disk::Disk;
use understudy_machine::Plan;
#[cfg(feature = "fail-points")]
use understudy_machine::home::Home;
use understudy_protocol::validity::ImageRole;
use understudy_protocol::{Generation, Ownership};
use understudy_protocol::{HostName, VmName};
use understudy_qemu::command::Lockstep;
use understudy_qemu::lockstep::LogRole;
use understudy_qemu::{
    Accelerator, Capabilities, CheckedDefinition, ClockBase, CpuNeeds, Role, VmDefinition,
};
use understudy_replication::primary;
use understudy_replication::records::Record;
use understudy_report::error::{ErrorKind, HostError};
use understudy_report::events::EventKind;
use understudy_report::{Mode, VmStatus};
use understudy_threads::{MutexGuard, lock};

/// Its operator waits for a guest to power off as the daemon's end does, and for at least so long.
const POWER_OFF_TIMEOUT: Duration = Duration::from_secs(30);

/// Past of a VM that is started.
#[derive(Default)]
pub(crate) struct Past {
    /// The newest generation known of it.
    newest: Generation,
    /// Its images may be older than another host's: its operator insists on them.
    insisted: bool,
    /// Record of the images that it starts on.
    record: Option<Record>,
    /// A host that has a copy of it, or had one.
    pub peer: Option<HostName>,
    /// The leases of its former owners, as they were when they were over.
    lease: FormerLease,
    /// How it is to be protected; none if its operator is to say so again.
    pub wish: Option<Wish>,
}

impl Past {
    /// Past of a VM which starts on the images of its record, if it has one.
    pub fn of(record: Option<Record>, newest: Generation) -> Past {
        let peer = record.as_ref().and_then(|record| record.peer.clone());
        Past { newest, record, peer, ..Past::default() }
    }

    /// The same after the wait for its former owner.
    pub fn after(self, lease: FormerLease) -> Past {
        Past { lease, ..self }
    }

    /// The same if its operator insists on images that may not be the newest.
    pub fn insisted(self, insisted: bool) -> Past {
        Past { insisted, ..self }
    }

    /// The same of a VM that is to be protected like this.
    pub fn wanting(self, wish: Option<Wish>) -> Past {
        Past { wish, ..self }
    }

    /// Record of the images.
    pub fn record(&self) -> Option<&Record> {
        self.record.as_ref()
    }

    /// How it had to be protected, if nobody has asked for that again.
    fn former_wish(&self) -> Option<Wish> {
        autostart::wish_of(self.record.clone()?).filter(|_| self.wish.is_none())
    }
}

/// Those who owned a VM before the arbiter's word at a generation, and let nothing out any more.
#[derive(Default)]
struct Before {
    /// The generation; none if there is no arbiter.
    at: Option<Generation>,
    lease: FormerLease,
}

impl Before {
    /// The past with them, unless the arbiter has another word by now.
    fn into_past(self, name: &VmName, past: Past) -> Result<Past, HostError> {
        if self.at.is_some_and(|at| at < past.newest) {
            let message = format!(
                "{name} is not started: the arbiter's record of it changed while this host waited for its former owners; \
                 start it again"
            );
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        Ok(past.after(self.lease))
    }
}

impl Host {
    /// Starts a VM on this host, unprotected.
    pub fn vm_start(
        self: &Arc<Self>,
        definition: CheckedDefinition,
    ) -> Result<VmStatus, HostError> {
        hold_in_a_test(&definition.name);
        let name = definition.name.clone();
        let _beginning = self.begin_to_start(&name)?;
        let former = self.await_those_before(&definition)?;
        let adding = self.adding.lock();
        self.take_place_to_start(&name)?;
        self.check_free(&definition)?;
        let past = former.into_past(&name, self.check_images(&definition)?)?;
        self.boot(definition.into(), past, adding)
    }

    /// Starts a VM on this host as its record says, wherever its images lie by now.
    pub fn vm_start_recorded(self: &Arc<Self>, name: &VmName) -> Result<VmStatus, HostError> {
        let _beginning = self.begin_to_start(name)?;
        let definition = self.checked_record(name)?;
        let former = self.await_those_before(&definition)?;
        let adding = self.adding.lock();
        self.take_place_to_start(name)?;
        let definition = self.checked_record(name)?;
        self.check_free(&definition)?;
        let past = former.into_past(name, self.check_images(&definition)?)?;
        self.boot(definition.into(), past, adding)
    }

    /// Keeps the place of a VM that is to be started here, however long others are waited for.
    fn begin_to_start<'a>(
        self: &'a Arc<Self>,
        name: &'a VmName,
    ) -> Result<Option<Following<'a>>, HostError> {
        let _adding = self.adding.lock();
        self.take_place_to_start(name)?;
        Ok(self.begin_in_place(name))
    }

    /// Waits for those who owned a VM before the arbiter's word on it and may not have read that, without the lock `adding`: this
    /// may take as long as a lease.
    fn await_those_before(&self, definition: &VmDefinition) -> Result<Before, HostError> {
        let name = &definition.name;
        {
            let _adding = self.adding.lock();
            self.check_free(definition)?;
        }
        let Some(arbiter) = &self.arbiter else { return Ok(Before::default()) };
        let word = arbiter.current(name);
        let now =
            word.map_err(|error| HostError::new(ErrorKind::Unreachable, error.to_string()))?;
        let at = now.as_ref().map(|now| now.generation).or(Some(Generation(0)));
        // One that is another host's is not started here.
        let may_start =
            |now: &Ownership| now.host.as_ref().is_none_or(|it| *it == self.config.name);
        let Some(now) = now.filter(may_start) else {
            return Ok(Before { at, ..Before::default() });
        };
        let former = self.await_former_owners(name, &now)?;
        let lease = former.map_err(|Busy(host, busy)| {
            let message = format!(
                "{name} cannot be started here: host {host}, which owned it before, {busy}; `understudy vm stop \
                 {name}` there ends it"
            );
            HostError::new(ErrorKind::Conflict, message)
        })?;
        Ok(Before { at, lease })
    }

    /// The VM as it is on this host: its disks are the images that it runs on, or ran on last.
    pub fn definition(&self, name: &VmName) -> Result<VmDefinition, HostError> {
        match self.vms.get(name) {
            Some(Vm::Primary(vm)) => return Ok((*vm.machine().definition_now()).clone()),
            Some(Vm::Backup(session)) => return Ok((*session.machine().definition_now()).clone()),
            Some(Vm::Fenced(_)) | None => {}
        }
        self.recorded_definition(name)
    }

    /// The VM as its record says, which a version may have written that checked less.
    fn checked_record(&self, name: &VmName) -> Result<CheckedDefinition, HostError> {
        CheckedDefinition::try_from(self.recorded_definition(name)?).map_err(|problems| {
            let message = format!(
                "{name} is recorded with a definition that no backup and no restore takes: {problems}; correct \
                 what `understudy vm show {name}` prints, and start it with that: `understudy vm start FILE`"
            );
            HostError::new(ErrorKind::Invalid, message)
        })
    }

    pub(crate) fn recorded_definition(&self, name: &VmName) -> Result<VmDefinition, HostError> {
        self.record(name)?.map(|record| record.definition).ok_or_else(|| {
            let message = format!(
                "host {} has no record of a VM {name:?}: its first start needs its definition, \
                 `understudy vm start FILE`",
                self.config.name
            );
            HostError::new(ErrorKind::NotFound, message)
        })
    }

    /// Starts a VM on its newest images, whose name is free by what was found out under the lock `adding`; not if its
    /// former owner turns out to live.
    pub(crate) fn boot(
        self: &Arc<Self>,
        mut definition: VmDefinition,
        past: Past,
        adding: MutexGuard<'_, ()>,
    ) -> Result<VmStatus, HostError> {
        self.check_stays_up()?;
        // What comes up by itself does so all the same: an unprotected guest is more than none.
        if let Some(problem) = definition.validate().first() {
            let name = &definition.name;
            warn!(vm = %name, "it can be neither protected nor snapshotted: {problem}");
        }
        let machine_type = self.machine_type(&definition)?;
        // Pinned, as the machine is: another host, or a later start, may have another default.
        definition.virtio = Some(definition.virtio_interface());
        let accelerator = self
            .capabilities
            .accelerator(definition.accel)
            .map_err(|error| HostError::new(ErrorKind::Invalid, error.to_string()))?;
        self.capabilities
            .check_cpu(definition.cpu.as_deref())
            .map_err(|error| HostError::new(ErrorKind::Invalid, error.to_string()))?;
        let cpu = CpuNeeds::of(&definition, accelerator);
        if let Err(problem) = Capabilities::check_portable(&cpu) {
            warn!(vm = %definition.name, "it can be neither protected nor restored elsewhere: {problem}");
        }
        self.capabilities
            .check_processor(&cpu)
            .map_err(|error| HostError::new(ErrorKind::Invalid, error.to_string()))?;
        self.check_bridges(&definition.cards)?;
        self.check_memory(definition.memory.bytes())?;
        let lockstep = match definition.lockstep {
            true => Some(self.recording(&definition, accelerator)?),
            false => None,
        };
        let run_dir = self.vm_directory(&definition.name)?;
        medium::settle_drives(&mut definition, &run_dir)?;
        let (_arrival, disks) =
            self.open_aside(adding, &definition, || open_and_sync(&definition, &past, &run_dir))?;
        let _adding = self.adding.lock();
        self.check_stays_up()?;
        let name = definition.name.clone();
        let plan = Plan {
            definition,
            machine_type,
            accelerator,
            run_dir: &run_dir,
            qemu: &self.capabilities.binary,
            agent: self.agent.path(),
            run_as: &self.config.run_as,
            limits: self.config.limits,
            disks,
            role: Role::Fresh,
            lockstep,
            may_be_adopted: self.keeps.is_some(),
            former: None,
            ram: None,
            on_event: self.event_sink(&name),
        };
        let machine = self.launch(plan).map_err(|error| failed("cannot start the VM", &error))?;
        // Everything works: only now the arbiter's record changes.
        let _claim = self.arrivals.begin_claim(&name);
        self.note_claim(&name, &past)?;
        let generation = self.claim_after(&name, past.newest, &past.lease)?;
        fail::fail_point!("claimed", |_| {
            Err(failed("cannot start the VM", &anyhow::anyhow!("a test says so")))
        });
        self.check_former(&name, &past.lease)?;
        self.note_active(&machine, generation, &past, &run_dir)?;
        machine.settle_tpm().map_err(|error| failed("cannot start the VM", &error))?;
        let former_wish = past.former_wish();
        let vm = self.add_primary(machine.clone(), generation, past.wish);
        vm.note_former_wish(former_wish);
        self.join_cluster(&machine, generation);
        machine.ensure_running().map_err(|error| failed("cannot start the guest", &error))?;
        vm.events.record(EventKind::Started);
        Ok(Vm::Primary(vm).status())
    }

    fn check_stays_up(&self) -> Result<(), HostError> {
        if self.is_closing() {
            let message = format!("host {} is shutting down", self.config.name);
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        Ok(())
    }

    /// Opens what a VM has that is about to be here. Its storage may hang: nobody else waits for that, so that its place is
    /// kept by what is returned, and no more by the lock under which it was found to be free.
    pub(crate) fn open_aside<T>(
        &self,
        adding: MutexGuard<'_, ()>,
        definition: &VmDefinition,
        open: impl FnOnce() -> Result<T, HostError>,
    ) -> Result<(Arrival, T), HostError> {
        let arrival = Arrival::expect(&self.arrivals, &self.config.name, definition);
        drop(adding);
        Ok((arrival, open()?))
    }

    /// Notes that this host, whose images are the newest, is about to claim the VM: should nothing come of it they
    /// still are.
    fn note_claim(&self, name: &VmName, past: &Past) -> Result<(), HostError> {
        if past.insisted || self.arbiter.is_none() {
            return Ok(());
        }
        let claim = |record: &mut Record| record.image.claimed_from = Some(past.newest);
        self.records.change(name, claim).map_err(internal)
    }

    /// Settings with which a QEMU of this host records, from now on.
    fn recording(
        &self,
        definition: &VmDefinition,
        accelerator: Accelerator,
    ) -> Result<Lockstep, HostError> {
        self.check_lockstep(definition, accelerator)?;
        Ok(Lockstep { role: LogRole::Record, clock: ClockBase::now() })
    }

    /// Stops a VM: ACPI power-off and a deadline, or at once with `force`.
    pub fn vm_stop(self: &Arc<Self>, name: &VmName, force: bool) -> Result<(), HostError> {
        if self.give_start_up(name) && !self.vms.has(name) {
            return Ok(());
        }
        // It may have been taken back just now.
        if force && self.orphans.give_up(name) && !self.vms.has(name) {
            return self.end_given_up(name);
        }
        if self.forget_the_lost(name) {
            return Ok(());
        }
        match self.vm(name)? {
            Vm::Primary(vm) if vm.kept().is_some() => {
                self.drop_kept(name, "its operator ended it")?;
                self.vms.remove(name);
            }
            Vm::Primary(vm) => {
                check_stays(&vm)?;
                if !force {
                    return self.power_off(&vm);
                }
                fail::fail_point!("save-booted", |directory| {
                    self.save_booted(&vm, &directory.expect("return(DIRECTORY)"))
                });
                vm.ask_for_end(EndAsked::ByOperator);
                self.end_protection(&vm).inspect_err(|_| vm.goes_on_unasked())?;
                self.leave_group(&vm);
                self.remove_primary(&vm, ImageRole::Cut);
            }
            Vm::Backup(session) if force => session.give_up("the operator ended the backup"),
            Vm::Backup(session) => {
                let message = format!(
                    "this host only backs {name} up: run `understudy unprotect {name}` on {}, \
                     or use --force to end the backup here",
                    session.primary
                );
                return Err(HostError::new(ErrorKind::Conflict, message));
            }
            Vm::Fenced(_) => self.forget_lost(name),
        }
        Ok(())
    }

    #[cfg(feature = "fail-points")]
    fn save_booted(&self, vm: &PrimaryVm, directory: &str) -> Result<(), HostError> {
        let save = || {
            let home = Home::existing(&self.vm_directory(vm.name())?)?;
            understudy_machine::booted::save(&vm.machine(), &home, directory.as_ref())
        };
        save().map_err(|error| failed("cannot save the guest", &error))
    }

    fn power_off(self: &Arc<Self>, vm: &Arc<PrimaryVm>) -> Result<(), HostError> {
        let left = self.leave_lockstep(vm)?;
        let off = self.ask_to_power_off(vm);
        if let (Err(error), Some(remedy)) = (&off, left)
            && self.still_runs(vm)
        {
            self.degraded(vm, error.message.clone(), &remedy);
        }
        off
    }

    /// Notes that its operator has the VM end, ends protection in lockstep, and gives the command that begins it again:
    /// the power button is no part of the log, and a backup that follows it would diverge.
    fn leave_lockstep(&self, vm: &PrimaryVm) -> Result<Option<String>, HostError> {
        let _protecting = lock(&vm.protecting);
        // From here on nobody protects it: see `check_not_ending`.
        vm.ask_for_end(EndAsked::ByOperator);
        let follows = |session: &Arc<primary::Session>| session.mode() == Mode::Lockstep;
        let Some(session) = vm.active_session().filter(follows) else { return Ok(None) };
        // Nor is another backup looked for while the guest may be about to end.
        vm.repairer().ended();
        self.end_protection(vm).inspect_err(|_| vm.goes_on_unasked())?;
        Ok(Some(session.membership().remedy()))
    }

    fn ask_to_power_off(&self, vm: &PrimaryVm) -> Result<(), HostError> {
        let (name, bound) = (vm.name(), self.config.power_off_timeout.max(POWER_OFF_TIMEOUT));
        info!(vm = %name, "its operator has it power off");
        let pressed = self.press_and_wait(vm, bound);
        if let Err(StillOn::NotAsked(_) | StillOn::TimeIsOver) = pressed {
            vm.goes_on_unasked();
        }
        let message = match pressed {
            Ok(()) if !self.vms.has(name) => return Ok(()),
            Ok(()) => format!(
                "{name} did not power off here: `understudy status {name}` says what became of it"
            ),
            Err(StillOn::NotAsked(error)) => {
                let message = format!("cannot press the power button of {name}: {error}");
                return Err(HostError::new(ErrorKind::Internal, message));
            }
            Err(StillOn::Hurried) => format!("{name} is being cut: the daemon ends"),
            Err(StillOn::TimeIsOver) => format!(
                "{name} has not powered off within {} s, and may still be about to: look again with \
                 `understudy status {name}`, or end it with --force",
                bound.as_secs()
            ),
        };
        Err(HostError::new(ErrorKind::Conflict, message))
    }
}

/// Opens a VM's images, and brings to stable storage what a mirror was sent last: the guest reads it, and may say so.
fn open_and_sync(
    definition: &VmDefinition,
    past: &Past,
    directory: &Path,
) -> Result<Vec<Arc<Disk>>, HostError> {
    let disks = open_disks(definition, past.record(), directory)?;
    let sync = |disk: &Arc<Disk>| {
        disk.sync().with_context(|| format!("cannot sync {}", disk.path().display()))
    };
    let synced = disks.iter().try_for_each(sync);
    synced.map_err(|error| failed("cannot start the VM", &error))?;
    Ok(disks)
}

/// A test has a VM's start wait here for as long as there is a file of its name in the directory that the fail point names.
fn hold_in_a_test(_vm: &VmName) {
    fail::fail_point!("start", |directory| {
        let file = Path::new(&directory.unwrap_or_default()).join(_vm.as_str());
        while file.exists() {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
}
