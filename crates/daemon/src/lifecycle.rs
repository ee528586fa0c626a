//! The life of VMs here: they come and go, lose or keep their protection.

mod machine_events;

use crate::bounded;
use crate::containment;
use crate::host::{Host, PEER_TIMEOUT};
use crate::repair::{self, Wish};
use crate::vm::{EndAsked, FencedVm, PrimaryVm, Vm};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_arbiter::{Arbiter, Unreachable};
use understudy_machine::{Machine, Plan};
use understudy_protocol::VmName;
use understudy_protocol::validity::ImageRole;
use understudy_protocol::{Generation, Lease, PrimaryPhase};
use understudy_replication::records::Record;
use understudy_report::error::{ErrorKind, HostError};
use understudy_report::events::EventKind;
use understudy_session::primary::Event;
use understudy_threads::{lock, within};

/// Time that a machine that has ended may take to be taken apart: what is recorded of it goes to
/// stable storage. A peer with an offer waits for longer.
const FORMER_TIMEOUT: Duration = Duration::from_secs(15);

/// Time for the arbiter to take it that a VM is nobody's any more.
pub(crate) const RELEASED_WITHIN: Duration = Duration::from_secs(5);

impl Host {
    /// Starts a machine, whose name is free.
    pub(crate) fn launch(&self, plan: Plan<'_>) -> anyhow::Result<Arc<Machine>> {
        self.check_installed()?;
        let name = plan.definition.name.clone();
        let launch = || Machine::launch(plan);
        let machine = Arc::new(within(&containment::of_vm(self, &name), launch)?);
        self.vms.note_presence(&name, machine.presence());
        Ok(machine)
    }

    /// The VM's machine is another one.
    pub(crate) fn presences_of(&self, name: &VmName, machine: &Machine) {
        self.vms.note_presence(name, machine.presence());
    }

    /// Waits until the last machine of that name is gone: its sockets, taps and
    /// images are in use until the last thread lets go of it, a moment after
    /// its end.
    pub(crate) fn await_former(&self, name: &VmName) -> Result<(), HostError> {
        let deadline = Instant::now() + FORMER_TIMEOUT;
        while !self.vms.has_former_gone(name) {
            if Instant::now() > deadline {
                let message = format!("the former copy of {name} has not ended yet: try again");
                return Err(HostError::new(ErrorKind::Conflict, message));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Ends a copy that this host keeps, if it does.
    pub(crate) fn drop_kept(&self, name: &VmName, reason: &str) -> Result<(), HostError> {
        match self.vms.get(name) {
            Some(Vm::Primary(vm)) if vm.kept().is_some() => {
                vm.drop_kept(reason);
                self.await_handed_over(&vm)
            }
            _ => Ok(()),
        }
    }

    /// Waits until this host has forgotten a VM that lives elsewhere by the
    /// operator's wish: from then on it may be its backup.
    pub(crate) fn await_handed_over(&self, vm: &PrimaryVm) -> Result<(), HostError> {
        let name = vm.name();
        let deadline = Instant::now() + FORMER_TIMEOUT;
        let is_there =
            |current: &Vm| matches!(current, Vm::Primary(current) if std::ptr::eq(&**current, vm));
        while self.vms.look_at(name, |current| current.is_some_and(is_there)) {
            if Instant::now() > deadline {
                let message = format!("{name} has not ended here yet");
                return Err(HostError::new(ErrorKind::Conflict, message));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// All VMs that run here.
    pub(crate) fn primaries(&self) -> Vec<Arc<PrimaryVm>> {
        self.vms.primaries()
    }

    /// The VM runs here from now on.
    pub(crate) fn add_primary(
        self: &Arc<Self>,
        machine: Arc<Machine>,
        generation: Generation,
        wish: Option<Wish>,
    ) -> Arc<PrimaryVm> {
        let vm = self.new_primary(machine, generation, wish);
        self.show_primary(&vm);
        vm
    }

    /// The VM as one of this host's, which nobody sees yet: what is to be said of it can be noted before.
    pub(crate) fn new_primary(
        &self,
        machine: Arc<Machine>,
        generation: Generation,
        wish: Option<Wish>,
    ) -> Arc<PrimaryVm> {
        let name = machine.definition().name.clone();
        let (events, lease) = (self.events.of(&name), Lease::new(self.config.lease));
        let repair = repair::State::new(wish, self.config.repair.enabled);
        let vm = Arc::new(PrimaryVm::new(machine, generation, repair, events, lease));
        // A record that cannot be read may name another host.
        let copied = self
            .record(&name)
            .map_or(true, |record| record.is_some_and(|record| record.peer.is_some()));
        vm.has_copies.store(copied, Ordering::Release);
        vm
    }

    /// The VM is in `status`, and restores its protection, from now on.
    pub(crate) fn show_primary(self: &Arc<Self>, vm: &Arc<PrimaryVm>) {
        self.vms.put(vm.name(), Vm::Primary(vm.clone()));
        self.watchdog.look();
        if self.config.repair.enabled {
            repair::start(self, vm);
        }
    }

    /// The VM runs here from now on, by this restore.
    pub(crate) fn add_restored(
        self: &Arc<Self>,
        machine: Arc<Machine>,
        generation: Generation,
        restore: &str,
    ) {
        let vm = self.add_primary(machine, generation, None);
        vm.note_restore(restore);
    }

    /// The VM should be protected and is not, for this reason, unless its operator has protected it meanwhile, or wants
    /// no protection any more; `remedy` is his, if it is not protected again without one.
    pub(crate) fn degraded(self: &Arc<Self>, vm: &Arc<PrimaryVm>, reason: String, remedy: &str) {
        let _protecting = lock(&vm.protecting);
        if vm.active_session().is_none() && vm.repairer().wish().is_some() {
            self.begin_degraded(vm, reason, remedy);
        }
    }

    /// The same of a VM of which nobody knows yet.
    pub(crate) fn begin_degraded(
        self: &Arc<Self>,
        vm: &Arc<PrimaryVm>,
        mut reason: String,
        remedy: &str,
    ) {
        if !repair::restore(self, vm, &reason, None) {
            reason += &format!("; not protected until `{remedy}`");
        }
        vm.degrade(reason);
    }

    /// Handles the end of this session.
    pub(crate) fn protection_over(
        self: &Arc<Self>,
        vm: &Arc<PrimaryVm>,
        session: &str,
        phase: PrimaryPhase,
    ) {
        if matches!(phase, PrimaryPhase::Alone(_)) {
            // Its output leaves already: its lease is to begin before anything here waits for storage.
            self.watchdog.look();
            self.note_end_of_lockstep(vm);
            vm.note_distrust();
        }
        match phase {
            PrimaryPhase::Alone(Some(reason)) => {
                vm.events.record(EventKind::ProtectionLost { reason: reason.clone() });
                self.note_generation(vm);
                if vm.has_diverged() {
                    vm.repairer().diverged();
                }
                if !vm.machine().is_alive() {
                    self.dissolve_without(vm);
                    return self.fence(vm, format!("the VM ended: {reason}"));
                }
                repair::restore(self, vm, &reason, Some(session));
            }
            PrimaryPhase::Alone(None) => self.note_generation(vm),
            PrimaryPhase::Halted(reason) => {
                let elsewhere = vm.is_elsewhere();
                // A guest that merely died may be this host's by now, whom the arbiter may have granted it
                // since: that is asked of it before a start.
                self.note_role(vm, if elsewhere { ImageRole::Stale } else { ImageRole::Cut });
                let heir = vm.handed_over_to();
                vm.events.record(match heir.clone() {
                    Some(peer) => EventKind::HandedOver { peer },
                    None => EventKind::Fenced { reason: reason.clone() },
                });
                self.fence_as(vm, reason, elsewhere);
                if heir.is_some() {
                    // Nothing went wrong: this host has nothing to do with it any more.
                    self.vms.remove(vm.name());
                }
            }
            _ => {}
        }
    }

    /// Notes the generation: sole ownership may have come with a new generation. Recovery does
    /// without this note if it has to.
    fn note_generation(&self, vm: &PrimaryVm) {
        fail::fail_point!("note-generation");
        if let Err(error) = self.note_generation_of(&vm.machine(), vm.generation()) {
            warn!(vm = %vm.name(), "{error}");
        }
    }

    /// A guest that lives on carries out all that its log told.
    pub(crate) fn note_end_of_lockstep(&self, vm: &PrimaryVm) {
        if !vm.machine().is_alive() {
            return;
        }
        if let Err(error) = self.records.change(vm.name(), |record| record.in_lockstep = false) {
            warn!(vm = %vm.name(), "the next start of the VM will copy all of its disks: {error}");
        }
    }

    pub(crate) fn note_role(&self, vm: &PrimaryVm, role: ImageRole) {
        self.note(vm, |record| {
            record.image.role = role;
            record.image.generation = vm.generation();
        });
    }

    fn note(&self, vm: &PrimaryVm, change: impl FnOnce(&mut Record)) {
        if let Err(error) = self.records.change(vm.name(), change) {
            warn!(vm = %vm.name(), "{error}");
        }
    }

    /// The VM has ended here, and may be nobody's.
    pub(crate) fn fence(&self, vm: &PrimaryVm, reason: String) {
        self.fence_as(vm, reason, false);
    }

    /// The VM lives elsewhere, or nowhere.
    pub(crate) fn fence_as(&self, vm: &PrimaryVm, reason: String, elsewhere: bool) {
        vm.machine().halt();
        let name = vm.name().to_owned();
        let generation = vm.generation();
        let fenced = FencedVm { name: name.clone(), generation, reason, elsewhere };
        let is_it = |current: Option<&Vm>| matches!(current, Some(Vm::Primary(it)) if std::ptr::eq(&**it, vm));
        self.vms.put_if(&name, Vm::Fenced(Arc::new(fenced)), is_it);
    }

    /// Returns when the backup has forgotten the VM, or cannot take it any more. An end that comes later is a loss of
    /// protection, unless nobody wants that any more.
    pub(crate) fn end_protection(&self, vm: &PrimaryVm) -> Result<(), HostError> {
        let Some(session) = vm.active_session() else { return Ok(()) };
        session.event(Event::Unprotect);
        let is_end = |phase: &PrimaryPhase| {
            matches!(phase, PrimaryPhase::Halted(_) | PrimaryPhase::Alone(_))
        };
        let mut ended = session.wait_for_phase(PEER_TIMEOUT, is_end);
        if ended.is_err() && vm.repairer().wish().is_some() {
            session.event(Event::StillWanted);
            ended = session.wait_for_phase(Duration::ZERO, is_end);
        }
        match ended {
            Ok(PrimaryPhase::Alone(_)) => Ok(()),
            Ok(phase) | Err(phase) => {
                let message = format!("protection of {} did not end: {phase}", vm.name());
                Err(HostError::new(ErrorKind::Unreachable, message))
            }
        }
    }

    /// The VM is nobody's any more; `role` is what its end made of its images. Everything is on
    /// record before it is gone: a daemon that waits for that may end then.
    pub(crate) fn remove_primary(&self, vm: &PrimaryVm, role: ImageRole) {
        self.note_end(vm, role);
        self.forget_primary(vm, role == ImageRole::Cut);
    }

    fn note_end(&self, vm: &PrimaryVm, role: ImageRole) {
        vm.machine().halt();
        // A guest that ends with its daemon comes up with the next one.
        let with_daemon = vm.end_asked() == Some(EndAsked::ByDaemon);
        self.note(vm, |record| {
            record.image.role = role;
            record.image.generation = vm.generation();
            record.wanted &= with_daemon;
        });
    }

    /// The same of a VM whose restore has come to nothing, or has ended with it.
    pub(crate) fn remove_restored(&self, vm: &PrimaryVm, restore: &str) {
        self.note_end(vm, ImageRole::Cut);
        self.end_restore(vm.name(), restore);
        self.forget_primary(vm, true);
    }

    fn forget_primary(&self, vm: &PrimaryVm, cut: bool) {
        self.release(vm.name(), vm.generation());
        vm.events.record(EventKind::Stopped { cut });
        self.vms.remove(vm.name());
    }

    /// Gives a VM up at the arbiter, if that answers: its end is one without that, too.
    pub(crate) fn release(&self, vm: &VmName, generation: Generation) {
        self.release_by(vm, move |arbiter, vm| arbiter.release(vm, generation));
    }

    /// The same if the VM is this host's at that generation.
    pub(crate) fn release_own(&self, vm: &VmName, generation: Generation) {
        self.release_by(vm, move |arbiter, vm| match arbiter.owns(vm, generation)? {
            true => arbiter.release(vm, generation),
            false => Ok(()),
        });
    }

    fn release_by(
        &self,
        vm: &VmName,
        release: impl FnOnce(&Arbiter, &VmName) -> Result<(), Unreachable> + Send + 'static,
    ) {
        let Some(arbiter) = self.arbiter.clone() else { return };
        let name = vm.clone();
        let release = move || {
            // A fail point, for an arbiter whose storage hangs.
            fail::fail_point!("release");
            release(&arbiter, &name)
        };
        let until = Instant::now() + RELEASED_WITHIN;
        let obstacle = match bounded::by(until, format!("release-{vm}"), release) {
            Ok(Some(Ok(()))) => return,
            Ok(Some(Err(error))) => error.to_string(),
            Ok(None) => format!("it has not answered within {} s", RELEASED_WITHIN.as_secs()),
            Err(error) => format!("it cannot be asked: no thread: {error}"),
        };
        warn!(%vm, "has ended here, which the arbiter does not know: {obstacle}");
    }
}

/// Refuses what needs a guest that runs if this one stands still until the arbiter answers.
pub(crate) fn check_goes_on(vm: &PrimaryVm) -> Result<(), HostError> {
    vm.standstill().map_or(Ok(()), |reason| Err(stands_still(vm.name(), &reason)))
}

/// Refuses what cannot begin while another keeper is about to have the VM.
pub(crate) fn check_stays(vm: &PrimaryVm) -> Result<(), HostError> {
    if !vm.is_leaving() {
        return Ok(());
    }
    let message = format!("the keeper of {} is just being replaced: try again", vm.name());
    Err(HostError::new(ErrorKind::Conflict, message))
}

/// Reason why commands about a VM are refused whose guest stands still.
pub(crate) fn stands_still(vm: &VmName, reason: &str) -> HostError {
    let message = format!("{vm} stands still on this host: {reason}");
    HostError::new(ErrorKind::Conflict, message)
}
