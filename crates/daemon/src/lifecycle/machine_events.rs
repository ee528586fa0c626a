//! What a VM's machine tells by itself: that it has ended, that its disk fails.

use crate::host::Host;
use crate::vm::{PrimaryVm, Vm};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tracing::{info, warn};
use understudy_machine::disk_error::RETRY_INTERVAL;
use understudy_machine::{MachineEvent, OnEvent};
use understudy_protocol::BackupPhase;
use understudy_protocol::VmName;
use understudy_protocol::validity::ImageRole;
use understudy_replication::backup;
use understudy_report::events::EventKind;
use understudy_session::primary::Event;
use understudy_threads::{lock, spawn};

/// Has the backup, whose disks may be sound, go on with the guest that stands still, or tries the
/// disk again in a moment.
fn disk_failed(vm: Arc<PrimaryVm>, error: &str) {
    let told = |outcome: String| EventKind::DiskError { error: error.to_owned(), outcome };
    vm.events.record_new(told("the guest stands still".to_owned()));
    if let Some(session) = vm.active_session()
        && let Err(obstacle) = session.give_guest_up(error)
    {
        vm.events.record_new(told(obstacle));
    }
    let machine = Arc::downgrade(&vm.machine());
    // Nothing of the VM is to outlive its end meanwhile.
    drop(vm);
    std::thread::sleep(RETRY_INTERVAL);
    if let Some(machine) = machine.upgrade() {
        machine.try_disks_again();
    }
}

impl Host {
    /// Tells the host what happens to a machine, whatever its role then is.
    pub(crate) fn event_sink(self: &Arc<Self>, vm: &VmName) -> OnEvent {
        let host = Arc::downgrade(self);
        let name = vm.to_owned();
        Arc::new(move |event| {
            let Some(host) = host.upgrade() else { return };
            // Off the event thread: ending protection takes its time.
            let (busy, vm, what) = (host.clone(), name.clone(), event.clone());
            if spawn(format!("event-{name}"), move || busy.machine_event(&vm, what)).is_err() {
                match event {
                    // Here is the disk's own thread, which the hand-over needs.
                    MachineEvent::DiskWithholds(error) => {
                        warn!(vm = %name, "{error}; the guest waits for it")
                    }
                    event => host.machine_event(&name, event),
                }
            }
        })
    }

    fn machine_event(self: &Arc<Self>, name: &VmName, event: MachineEvent) {
        info!(vm = %name, "{event:?}");
        match (self.vm(name), event) {
            (Ok(Vm::Primary(vm)), MachineEvent::Notice(text)) => vm.events.note(text),
            (Ok(Vm::Primary(vm)), MachineEvent::Rebooted) => vm.events.record(EventKind::Rebooted),
            (Ok(Vm::Primary(vm)), MachineEvent::Panicked) => {
                vm.events.record(EventKind::GuestPanicked);
            }
            (Ok(Vm::Primary(vm)), MachineEvent::PoweredOff { in_order }) => {
                fail::fail_point!("powered-off");
                vm.events.record(EventKind::PoweredOff);
                if let Err(error) = self.end_protection(&vm) {
                    warn!(vm = %name, "{error}");
                }
                self.leave_group(&vm);
                let role = if in_order { ImageRole::Stopped } else { ImageRole::Cut };
                self.remove_primary(&vm, role);
            }
            (Ok(Vm::Primary(vm)), MachineEvent::DiskFailed(error)) => disk_failed(vm, &error),
            (Ok(Vm::Primary(vm)), MachineEvent::DiskWithholds(error)) => {
                self.leave_failing_disk(vm, error);
            }
            (Ok(Vm::Primary(vm)), MachineEvent::Died(words)) => self.qemu_died(&vm, words),
            (
                Ok(Vm::Backup(session)),
                event @ (MachineEvent::Died(_) | MachineEvent::PoweredOff { .. }),
            ) => {
                if let MachineEvent::Died(words) = &event {
                    session.qemu_died(words);
                }
                if self.has_taken_over_the_dead(name, &session) {
                    self.machine_event(name, event);
                }
            }
            _ => {}
        }
    }

    /// Whether a backup's guest, which has ended, is this host's: it runs before that is decided, since others of its
    /// group are waited for.
    fn has_taken_over_the_dead(&self, name: &VmName, session: &Arc<backup::Session>) -> bool {
        let is_undecided = |vm: &Vm| matches!(vm, Vm::Backup(there) if Arc::ptr_eq(there, session));
        while session.phase() == BackupPhase::Live
            && self.vms.look_at(name, |vm| vm.is_some_and(is_undecided))
        {
            std::thread::sleep(Duration::from_millis(5));
        }
        // A standby that was prepared for the other mode may have ended, and the guest runs in the one before.
        self.primary(name).is_ok_and(|vm| {
            let machine = vm.machine();
            machine.is_powered_off() || !machine.is_alive()
        })
    }

    /// Hands a guest in lockstep, which goes on and waits for a disk, to the backup, whose disks may be
    /// sound; tries again as long as it waits. The first of its requests that fail is enough.
    fn leave_failing_disk(&self, vm: Arc<PrimaryVm>, error: String) {
        if vm.leaves_disk.swap(true, Ordering::AcqRel) {
            return;
        }
        let (name, weak) = (vm.name().to_owned(), Arc::downgrade(&vm));
        let told = |outcome: String| EventKind::DiskError { error: error.clone(), outcome };
        vm.events.record_new(told("the guest waits for it".to_owned()));
        drop(vm);
        let waits = |vm: &Arc<PrimaryVm>| self.still_runs(vm) && vm.machine().waits_for_disk();
        while let Some(vm) = weak.upgrade().filter(waits) {
            match self.failover(&name) {
                Ok(()) => break,
                Err(_) if !self.still_runs(&vm) => break,
                Err(refused) => vm.events.record_new(told(refused.to_string())),
            }
            // Nothing of the VM is to outlive its end meanwhile.
            drop(vm);
            std::thread::sleep(RETRY_INTERVAL);
        }
        if let Some(vm) = weak.upgrade() {
            vm.leaves_disk.store(false, Ordering::Release);
        }
    }

    fn qemu_died(&self, vm: &Arc<PrimaryVm>, words: String) {
        vm.events.record(EventKind::GuestDied { reason: words.clone() });
        match vm.active_session() {
            // The backup takes over: a dead QEMU is a failure of the VM.
            Some(session) => session.event(Event::QemuDied(words)),
            None => {
                self.fence(vm, format!("the VM ended: {words}"));
                // After an attempt to protect them that is under way, which puts back what was wanted.
                let _protecting = lock(&vm.protecting);
                self.dissolve_without(vm);
            }
        }
    }
}
