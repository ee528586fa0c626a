//! Succession: a VM goes on in another QEMU on the same host.
//!
//! QEMU decides when it starts whether it counts instructions, and whether it records or
//! replays them: one that took over from a log can record none. So the VM is moved before it
//! gets a backup again. The next QEMU maps the same memory and reads the same disks; the
//! guest stands still while device state and small RAM blocks move. The former QEMU has ended
//! before the next one runs the guest; until then it goes on if anything fails.

use crate::containment;
use crate::host::{Host, failed};
use crate::vm::PrimaryVm;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing::{info, warn};
use understudy_machine::home::Home;
use understudy_machine::succession::hand_over;
use understudy_machine::{Machine, Plan};
use understudy_qemu::command::Lockstep;
use understudy_qemu::lockstep::LogRole;
use understudy_qemu::{ClockBase, Role, TickRate};
use understudy_replication::primary::Next;
use understudy_report::Mode;
use understudy_report::error::HostError;
use understudy_threads::within;

impl Host {
    /// Sees to it that the VM's QEMU can have a backup that keeps up in this way. The caller
    /// holds [`PrimaryVm::protecting`], and the VM is not protected.
    pub(crate) fn make_fit(
        self: &Arc<Self>,
        vm: &Arc<PrimaryVm>,
        mode: Mode,
    ) -> Result<(), HostError> {
        let former = vm.machine();
        self.check_mode(&former, mode)?;
        let clock = match former.lockstep() {
            Some(Lockstep { role: LogRole::Replay, clock }) => clock.clone(),
            None if mode == Mode::Lockstep => {
                ClockBase::now().with_tick_rate(TickRate::of_this_host())
            }
            _ => return Ok(()),
        };
        let recording = Lockstep { role: LogRole::Record, clock };
        self.move_to_another_qemu(vm, &former, recording).map_err(|error| {
            let error = failed("the VM cannot be moved into another QEMU", &error);
            vm.events.note(error.to_string());
            error
        })
    }

    fn move_to_another_qemu(
        self: &Arc<Self>,
        vm: &Arc<PrimaryVm>,
        former: &Arc<Machine>,
        lockstep: Lockstep,
    ) -> anyhow::Result<()> {
        let Next { machine: next, adopt } = self.launch_next(vm, former, lockstep)?;
        let paused = hand_over(former, &next, || Ok(()))?;
        adopt(&next);
        if let Err(error) = next.ensure_running() {
            self.dissolve_without(vm);
            self.fence(vm, format!("its new QEMU does not run it: {error:#}"));
            return Err(error);
        }
        let paused = paused.elapsed().as_secs_f64() * 1e3;
        info!(vm = %vm.name(), "goes on in another QEMU; stood still for {paused:.1} ms");
        Ok(())
    }

    /// Starts the QEMU in which a VM of this host is to go on; the former runs it meanwhile.
    pub(crate) fn launch_next(
        self: &Arc<Self>,
        vm: &Arc<PrimaryVm>,
        former: &Arc<Machine>,
        lockstep: Lockstep,
    ) -> anyhow::Result<Next> {
        let directory = self.vm_directory(vm.name())?;
        let (machine, adopted) = self.launch_beside(former, &directory, lockstep)?;
        let (host, vm) = (self.clone(), vm.clone());
        let adopt = move |next: &Arc<Machine>| {
            vm.succeed(next.clone());
            adopted.set(&host, next, &directory);
            vm.events.note("goes on in another QEMU, which records");
        };
        Ok(Next { machine, adopt: Box::new(adopt) })
    }

    /// Starts a QEMU on the memory and the disks of another one of this host.
    pub(crate) fn launch_beside(
        self: &Arc<Self>,
        former: &Machine,
        directory: &Path,
        lockstep: Lockstep,
    ) -> anyhow::Result<(Arc<Machine>, Adopted)> {
        self.check_installed()?;
        // Until the VM is its own, nothing that happens to it happens to the VM.
        let adopted = Adopted::default();
        let name = &former.definition().name;
        let (is_adopted, sink) = (adopted.0.clone(), self.event_sink(name));
        let plan = Plan {
            definition: (*former.definition_now()).clone(),
            machine_type: former.machine_type().to_owned(),
            accelerator: former.accelerator(),
            run_dir: directory,
            qemu: &self.capabilities.binary,
            agent: self.agent.path(),
            run_as: &self.config.run_as,
            limits: self.config.limits,
            disks: former.disks(),
            role: Role::Standby,
            lockstep: Some(lockstep),
            may_be_adopted: false,
            former: Some(former),
            ram: None,
            on_event: Arc::new(move |event| {
                if is_adopted.load(Ordering::Acquire) {
                    sink(event);
                }
            }),
        };
        let launched = within(&containment::of_vm(self, name), || Machine::launch(plan));
        Ok((Arc::new(launched?), adopted))
    }
}

/// Whether a QEMU that was started beside another one has its place.
#[derive(Clone, Default)]
pub(crate) struct Adopted(Arc<AtomicBool>);

impl Adopted {
    /// Gives the VM this machine; the former one has ended.
    pub(crate) fn set(&self, host: &Host, machine: &Machine, directory: &Path) {
        let vm = &machine.definition().name;
        host.presences_of(vm, machine);
        self.0.store(true, Ordering::Release);
        if let Err(error) = Home::replace(directory) {
            warn!(%vm, "the directory of the former QEMU stays: {error}");
        }
    }
}
