//! Succession: a VM goes on in another QEMU on the same host.
//!
//! QEMU decides when it starts whether it counts instructions, and whether it records or
//! replays them: one that took over from a log can record none. So the VM is moved before it
//! gets a backup again. The next QEMU maps the same memory and reads the same disks; the
//! guest stands still while device state and small RAM blocks move. The former QEMU has ended
//! before the next one runs the guest; until then it goes on if anything fails.

use crate::containment;
use crate::error::HostError;
use crate::home::Home;
use crate::host::{Host, failed};
use crate::machine::{self, Machine};
use crate::primary::Next;
use crate::report::Mode;
use crate::vm::PrimaryVm;
use anyhow::ensure;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tracing::{info, warn};
use understudy_memory::RamBlock;
use understudy_protocol::{PAGE_SIZE, PageIndex};
use understudy_qemu::command::Lockstep;
use understudy_qemu::counting::count_instructions;
use understudy_qemu::lockstep::{LogErrand, LogRole};
use understudy_qemu::{ClockBase, Role, TickRate};
use understudy_threads::within;

/// QEMU takes a frame in microseconds; one whose card is full takes no more anyhow.
const INBOUND_PATIENCE: Duration = Duration::from_millis(20);

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
        // Until the VM is its own, nothing that happens to it happens to the VM.
        let adopted = Adopted::default();
        let name = &former.definition().name;
        let (is_adopted, sink) = (adopted.0.clone(), self.event_sink(name));
        let plan = machine::Plan {
            definition: (*former.definition_now()).clone(),
            machine_type: former.machine_type().to_owned(),
            accelerator: former.accelerator(),
            run_dir: directory,
            qemu: &self.capabilities.binary,
            agent: &self.agent,
            run_as: &self.config.run_as,
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

/// Moves the stopped guest; since when it stands still. On success the former QEMU has ended,
/// else it goes on. `while_stopped` is called when it has written all that it will.
pub(crate) fn hand_over(
    former: &Machine,
    next: &Machine,
    while_stopped: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<Instant> {
    check_blocks(former, next)?;
    for port in former.ports() {
        if !port.hold_inbound(INBOUND_PATIENCE) {
            info!(vm = %former.definition().name, "QEMU leaves frames unread; they are lost");
        }
    }
    let began = Instant::now();
    let mut monitor = former.monitor();
    let moved = former.pause(&mut monitor, LogErrand::None).and_then(|mut pause| {
        let mut state = Vec::new();
        let moved = pause.saved(&mut state).and_then(|_| {
            while_stopped()?;
            if let (None, Some(lockstep)) = (former.lockstep(), next.lockstep()) {
                let rate = lockstep.clock.tick_rate().unwrap_or(TickRate(1 << 32));
                count_instructions(&mut state, rate)?;
            }
            copy_small_blocks(former.blocks(), next.blocks())?;
            spoil(&mut state);
            next.load(&state)
        });
        if moved.is_err() {
            pause.resume()?;
        }
        moved
    });
    if let Err(error) = moved {
        former.ports().iter().for_each(|port| port.resume_inbound());
        return Err(error.context("it goes on as it was"));
    }
    drop(monitor);
    next.take_place();
    former.retire();
    Ok(began)
}

/// A test makes a state of it that no QEMU loads.
fn spoil(_state: &mut [u8]) {
    fail::fail_point!("spoil-state", |_| _state[0] ^= 1);
}

pub(crate) fn check_blocks(former: &Machine, next: &Machine) -> anyhow::Result<()> {
    let shape = |machine: &Machine| -> Vec<(String, u64)> {
        machine.blocks().iter().map(|block| (block.name().to_owned(), block.bytes())).collect()
    };
    let (ours, theirs) = (shape(former), shape(next));
    ensure!(ours == theirs, "the QEMUs' RAM blocks differ: {ours:?} and {theirs:?}");
    Ok(())
}

/// All but the main memory, which both have mapped.
pub(crate) fn copy_small_blocks(from: &[RamBlock], to: &[RamBlock]) -> anyhow::Result<()> {
    for (from, to) in from.iter().zip(to).skip(1) {
        let mut content = vec![0; usize::try_from(from.pages())? * PAGE_SIZE];
        from.read(PageIndex(0), &mut content)?;
        to.write(PageIndex(0), &content)?;
    }
    Ok(())
}
