//! Succession: a VM goes on in another QEMU on the same host.
//!
//! QEMU decides when it starts whether it counts instructions, and whether it records or
//! replays them: one that took over from a log can record none. So the VM is moved before it
//! gets a backup again. The next QEMU maps the same memory and reads the same disks; the
//! guest stands still while device state and small RAM blocks move. The former QEMU has ended
//! before the next one runs the guest; until then it goes on if anything fails.

use crate::error::HostError;
use crate::home::Home;
use crate::host::{Host, failed};
use crate::machine::{self, Machine};
use crate::report::Mode;
use crate::vm::PrimaryVm;
use anyhow::ensure;
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
            warn!(vm = vm.name(), "{error}");
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
        let directory = self.vm_directory(vm.name())?;
        // Until the VM is its own, nothing that happens to it happens to the VM.
        let adopted = Arc::new(AtomicBool::new(false));
        let (is_adopted, sink) = (adopted.clone(), self.event_sink(vm.name()));
        let next = Machine::launch(machine::Plan {
            definition: former.definition().clone(),
            machine_type: former.machine_type().to_owned(),
            accelerator: former.accelerator(),
            run_dir: &directory,
            qemu: &self.capabilities.binary,
            agent: &self.agent,
            run_as: &self.config.run_as,
            disks: former.disks().to_vec(),
            role: Role::Standby,
            lockstep: Some(lockstep),
            former: Some(former),
            on_event: Box::new(move |event| {
                if is_adopted.load(Ordering::Acquire) {
                    sink(event);
                }
            }),
        })?;
        let next = Arc::new(next);
        let paused = hand_over(former, &next)?;
        self.presences_of(vm.name(), &next);
        vm.succeed(next.clone());
        adopted.store(true, Ordering::Release);
        if let Err(error) = next.ensure_running() {
            self.fence(vm, format!("its new QEMU does not run it: {error:#}"));
            return Err(error);
        }
        let paused = paused.elapsed().as_secs_f64() * 1e3;
        info!(vm = vm.name(), "goes on in another QEMU; stood still for {paused:.1} ms");
        vm.events.note(format!(
            "goes on in another QEMU, which records; it stood still for {paused:.0} ms"
        ));
        if let Err(error) = Home::replace(&directory) {
            warn!(vm = vm.name(), "the directory of the former QEMU stays: {error}");
        }
        Ok(())
    }
}

/// Moves the stopped guest; since when it stands still. On success the former QEMU has ended,
/// else it goes on.
fn hand_over(former: &Machine, next: &Machine) -> anyhow::Result<Instant> {
    check_blocks(former, next)?;
    for port in former.ports() {
        if !port.hold_inbound(INBOUND_PATIENCE) {
            info!(vm = former.definition().name, "QEMU leaves frames unread; they are lost");
        }
    }
    let began = Instant::now();
    let mut monitor = former.monitor();
    let moved = former.pause(&mut monitor, LogErrand::None).and_then(|mut pause| {
        let mut state = Vec::new();
        let moved = pause.saved(&mut state).and_then(|_| {
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
    next.take_ports();
    former.retire();
    Ok(began)
}

/// A test makes a state of it that no QEMU loads.
fn spoil(_state: &mut [u8]) {
    fail::fail_point!("spoil-state", |_| _state[0] ^= 1);
}

fn check_blocks(former: &Machine, next: &Machine) -> anyhow::Result<()> {
    let shape = |machine: &Machine| -> Vec<(String, u64)> {
        machine.blocks().iter().map(|block| (block.name().to_owned(), block.bytes())).collect()
    };
    let (ours, theirs) = (shape(former), shape(next));
    ensure!(ours == theirs, "the QEMUs' RAM blocks differ: {ours:?} and {theirs:?}");
    Ok(())
}

/// All but the main memory, which both have mapped.
fn copy_small_blocks(from: &[RamBlock], to: &[RamBlock]) -> anyhow::Result<()> {
    for (from, to) in from.iter().zip(to).skip(1) {
        let mut content = vec![0; usize::try_from(from.pages())? * PAGE_SIZE];
        from.read(PageIndex(0), &mut content)?;
        to.write(PageIndex(0), &content)?;
    }
    Ok(())
}
