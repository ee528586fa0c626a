//! Protection as the operator asks for it: its begin, its end, the planned fail-over.

use crate::containment;
use crate::hand_back;
use crate::host::{Host, failed, internal};
use crate::lifecycle::check_goes_on;
use crate::repair::{self, Wish};
use crate::vm::{EndAsked, PrimaryVm, Vm};
use std::sync::Arc;
use std::time::Duration;
use understudy_machine::Machine;
use understudy_protocol::VmName;
use understudy_protocol::{Generation, Output, PrimaryPhase};
use understudy_qemu::{Release, VmDefinition};
use understudy_replication::lockstep::compare::comparer::Refusal;
use understudy_replication::membership::Membership;
use understudy_replication::sessions::SessionName;
use understudy_replication::{primary, resync};
use understudy_report::error::{ErrorKind, HostError};
use understudy_report::events::EventKind;
use understudy_report::{ComparisonReport, DiskReads, Mode, ProtectRequest, VmStatus};
use understudy_threads::{lock, within};

/// Time for a planned fail-over: an epoch that moves slowly gets 30 s, and the backup 10 s more
/// (`understudy_protocol`), unless they are configured otherwise; then the arbiter is asked.
const HAND_OVER_TIMEOUT: Duration = Duration::from_secs(50);

/// Says what became of a planned fail-over that has not led to another host.
fn not_handed_over(vm: &VmName, phase: &PrimaryPhase) -> String {
    match phase {
        PrimaryPhase::Alone(Some(reason)) => format!(
            "{vm} was not handed over, and goes on here without having lost anything: {reason}"
        ),
        PrimaryPhase::Protected | PrimaryPhase::HandingOver => format!(
            "{vm} is still being handed over, and nothing is decided yet: `understudy status {vm}` says \
             what comes of it"
        ),
        phase => format!("{vm} was not handed over: {phase}"),
    }
}

impl Host {
    /// Starts protecting a VM; returns when the peer has accepted and the first
    /// synchronisation runs. `status` shows its progress.
    pub fn protect(
        self: &Arc<Self>,
        name: &VmName,
        request: ProtectRequest,
    ) -> Result<VmStatus, HostError> {
        check_disk_reads(&request)?;
        let vm = self.going_primary(name)?;
        let _protecting = lock(&vm.protecting);
        if let Some(session) = vm.active_session()
            && session.peer.eq_ignore_ascii_case(&request.to)
            && session.mode() != request.mode
        {
            self.turn(&vm, &session, &request)?;
            return Ok(Vm::Primary(vm.clone()).status());
        }
        // The operator decides: nothing else is tried meanwhile.
        vm.repairer().ended();
        vm.repairer().trust_lockstep();
        let former = vm.repairer().group();
        let begun = self.begin_alone(&vm, request);
        match (&begun, former) {
            (Ok(()), Some(former)) => self.dissolve(&former, name, "is protected by itself"),
            (Ok(()), None) => {}
            (Err(error), _) if vm.is_degraded() => {
                repair::restore(self, &vm, &error.to_string(), None);
            }
            (Err(_), _) => {}
        }
        begun.map(|()| Vm::Primary(vm.clone()).status())
    }

    /// Protects a VM, and its group, to another host, as its operator wished.
    pub(crate) fn protect_again(
        self: &Arc<Self>,
        vm: &Arc<PrimaryVm>,
        to: &str,
    ) -> Result<(), HostError> {
        if vm.repairer().group().is_some() {
            return self.protect_group_again(vm, to);
        }
        let _protecting = lock(&vm.protecting);
        let mut request = ProtectRequest { to: to.to_owned(), ..self.still_wanted(vm)?.request };
        if request.mode == Mode::Lockstep && vm.repairer().distrusts_lockstep() {
            (request.mode, request.disk_reads) = (Mode::Checkpoint, DiskReads::default());
            vm.events.note(format!(
                "the backup diverged twice in a row: protected with checkpoints, until `understudy \
                 protect {name} --mode lockstep`",
                name = vm.name()
            ));
        }
        self.begin_alone(vm, request)
    }

    /// Wish for how a VM whose protection was lost is to be protected by now.
    pub(crate) fn still_wanted(&self, vm: &PrimaryVm) -> Result<Wish, HostError> {
        vm.repairer().wish().filter(|_| !self.is_powering_off()).ok_or_else(|| {
            HostError::new(ErrorKind::Conflict, "nobody wants it protected any more".to_owned())
        })
    }

    /// Begins the protection of a VM by itself.
    fn begin_alone(
        self: &Arc<Self>,
        vm: &Arc<PrimaryVm>,
        request: ProtectRequest,
    ) -> Result<(), HostError> {
        self.check_protectable(vm)?;
        if request.mode == Mode::Lockstep {
            self.check_mode(&vm.machine(), request.mode)?;
            self.ask_to_follow(vm, &request.to)?;
        }
        if request.hold_console {
            check_held_console(vm.machine().definition(), request.output)?;
        }
        self.make_fit(vm, request.mode)?;
        let plan = self.plan_protection(vm, &request)?;
        let membership = Membership::of_one(vm.name(), plan.generation);
        let (bounds, output) = (&self.config.detection, request.output);
        let group = primary::Group::new(membership, &plan.peer, bounds, output);
        // Before protection can be lost again.
        let former = vm.repairer().wish();
        vm.repairer().set_wish(Some(Wish::alone(request)));
        self.begin_protection(vm, plan, (group, 0))
            .inspect_err(|_| vm.repairer().take_back(former))?;
        self.note_wish(vm);
        Ok(())
    }

    /// Refuses to protect what is protected, or cannot be.
    pub(crate) fn check_protectable(&self, vm: &PrimaryVm) -> Result<(), HostError> {
        let name = vm.name();
        check_goes_on(vm)?;
        self.check_not_ending(vm)?;
        if let Some(session) = vm.active_session() {
            let message = format!(
                "{name} is protected to {} already: run `understudy unprotect {name}` first",
                session.peer
            );
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        if self.snapshots.is_taking(name) || self.snapshots.filling(name).is_some() {
            let message = format!(
                "{name} is being snapshotted, or its memory is still being loaded from a \
                 snapshot: try again when that has ended (`understudy status {name}`)"
            );
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        if !self.snapshots.await_restored(name) {
            let message = format!(
                "{name} is being restored with its group, and does not stay before all of that runs: try \
                 again when it does"
            );
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        match &self.kernel_problem {
            Some(problem) => Err(HostError::new(ErrorKind::Invalid, problem.clone())),
            None => Ok(()),
        }
    }

    /// Refuses to protect what is about to end: a backup would not hear of its power button, or take over what was stopped.
    pub(crate) fn check_not_ending(&self, vm: &PrimaryVm) -> Result<(), HostError> {
        let name = vm.name();
        let message = match vm.end_asked() {
            None => return Ok(()),
            Some(EndAsked::ByOperator) => format!(
                "{name} is being stopped: if it still runs when `understudy vm stop {name}` has ended, try again"
            ),
            Some(EndAsked::ByDaemon) => {
                format!("{name} is being stopped: host {} is shutting down", self.config.name)
            }
        };
        Err(HostError::new(ErrorKind::Conflict, message))
    }

    /// Begins the protection of the member of a group at this place.
    pub(crate) fn begin_protection(
        self: &Arc<Self>,
        vm: &Arc<PrimaryVm>,
        plan: primary::Plan,
        group: (Arc<primary::Group>, usize),
    ) -> Result<(), HostError> {
        let (name, peer) = (vm.name().to_owned(), plan.peer.clone());
        let host = Arc::downgrade(self);
        let owner = Arc::downgrade(vm);
        let id = plan.session.clone();
        let over = move |phase| {
            if let (Some(host), Some(vm)) = (host.upgrade(), owner.upgrade()) {
                host.protection_over(&vm, &id, phase);
            }
        };
        let protect = || primary::protect(vm.machine(), plan, group, over);
        vm.events.record(EventKind::Synchronising { peer: peer.clone() });
        let session = within(&containment::of_vm(self, vm.name()), protect)
            .map_err(|error| refused(&format!("cannot protect {name} to {peer}"), &error))?;
        vm.begin(session);
        Ok(())
    }

    /// Ends protection on both hosts, of a group as a whole; the VM runs on here. For a VM whose
    /// protection is lost: takes note that this is how it shall be.
    pub fn unprotect(&self, name: &VmName) -> Result<VmStatus, HostError> {
        let vm = self.going_primary(name)?;
        let _protecting = lock(&vm.protecting);
        let is_wanted = vm.is_degraded() || vm.repairer().wish().is_some();
        if vm.active_session().is_none() && !is_wanted {
            let message = format!("{name} is not protected");
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        let fellows = self.wanted_fellows(&vm);
        // Of all, and before protection ends: an end that takes longer than it is waited for is what was asked for.
        for vm in fellows.iter().chain([&vm]) {
            self.want(vm, None);
            vm.repairer().ended();
        }
        self.end_protection(&vm)?;
        for vm in fellows.iter().chain([&vm]) {
            vm.accept_unprotected();
            vm.events.record(EventKind::Unprotected);
        }
        Ok(Vm::Primary(vm.clone()).status())
    }

    /// Hands the VM, and its group, to the backup (planned fail-over) without losing anything.
    /// Returns when the backup runs it.
    pub fn failover(&self, name: &VmName) -> Result<(), HostError> {
        let vm = self.going_primary(name)?;
        let session = vm.active_session().ok_or_else(|| {
            let message = format!("{name} is not protected: there is no backup to hand it to");
            HostError::new(ErrorKind::Conflict, message)
        })?;
        let too_early = match session.phase() {
            PrimaryPhase::Protected => None,
            phase @ PrimaryPhase::HandingOver => Some(not_handed_over(name, &phase)),
            _ => Some(format!("{name} is still being synchronised: wait until it is protected")),
        };
        if let Some(message) = too_early {
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        if let Some(obstacle) = session.group().obstacle() {
            let message = format!(
                "{name} is not handed over: host {} could not take it over now: {obstacle}",
                session.peer
            );
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        session.request_hand_over();
        let ended = session.wait_for_phase(HAND_OVER_TIMEOUT, |phase| {
            matches!(phase, PrimaryPhase::Halted(_) | PrimaryPhase::Alone(_))
        });
        match ended {
            Ok(PrimaryPhase::Halted(_)) if vm.handed_over_to().is_some() => {
                self.await_handed_over(&vm)
            }
            Ok(phase) | Err(phase) => {
                Err(HostError::new(ErrorKind::Unreachable, not_handed_over(name, &phase)))
            }
        }
    }

    /// Compares a VM in lockstep with its backup, all of memory and disks, while both run. A
    /// backup that differs is given up. Returns when that is known.
    pub fn verify_lockstep(&self, name: &VmName) -> Result<ComparisonReport, HostError> {
        let conflict = |message: String| HostError::new(ErrorKind::Conflict, message);
        let vm = self.going_primary(name)?;
        let session = vm.active_session();
        let session =
            session.filter(|session| session.mode() == Mode::Lockstep).ok_or_else(|| {
                conflict(format!(
                    "{name} has no backup in lockstep: there is nothing to compare it with \
                 (`understudy protect {name} --to HOST --mode lockstep`)"
                ))
            })?;
        if session.phase() != PrimaryPhase::Protected {
            let words = "is not protected at present: wait until it is (`understudy status";
            return Err(conflict(format!("{name} {words} {name}`)")));
        }
        let recording = session.recording();
        let recording = recording.ok_or_else(|| conflict(format!("{name} has no log")))?;
        match recording.comparer().verify() {
            Ok(report) => {
                vm.events.note(report.words());
                Ok(report)
            }
            Err(Refusal::Busy) => Err(conflict(format!("{name} is being compared already"))),
            Err(Refusal::Failed(reason)) => {
                let message = format!("{name} and its backup could not be compared: {reason}");
                Err(HostError::new(ErrorKind::Unreachable, message))
            }
        }
    }

    pub(crate) fn plan_protection(
        self: &Arc<Self>,
        vm: &Arc<PrimaryVm>,
        request: &ProtectRequest,
    ) -> Result<primary::Plan, HostError> {
        let invalid = |message: String| Err(HostError::new(ErrorKind::Invalid, message));
        let machine = vm.machine();
        let definition = machine.definition();
        let Some(arbiter) = self.arbiter.clone() else {
            return invalid(
                "this host's configuration has no [arbiter]: without one, nobody may decide who \
                 owns a VM after a failure"
                    .to_owned(),
            );
        };
        check_blockers(&machine)?;
        let (peer, addresses) = self.known_host(&request.to)?;
        if request.output == Output::Unheld && !self.config.allow_unheld_output {
            return invalid(
                "output that is not held is not protected: this host does that for measurements \
                 only, and only if its configuration says allow_unheld_output = true under \
                 [experiments]"
                    .to_owned(),
            );
        }
        let policy = request.policy.or(definition.policy).unwrap_or_default();
        policy.validate().map_err(|error| HostError::new(ErrorKind::Invalid, error))?;
        request.encoding.validate().map_err(|error| HostError::new(ErrorKind::Invalid, error))?;
        let generation = match vm.generation() {
            // Started without an arbiter's record.
            Generation(0) => {
                let generation = self.take_ownership(&definition.name, Generation(0))?;
                self.note_generation_of(&machine, generation)?;
                generation
            }
            generation => generation,
        };
        let directory = self.vm_directory(&definition.name)?;
        Ok(primary::Plan {
            identity: self.identity.clone(),
            peer,
            addresses,
            cluster: self.cluster_offer(&definition.name),
            generation,
            mode: request.mode,
            disk_reads: request.disk_reads,
            hold_console: request.hold_console,
            policy,
            encoding: request.encoding,
            detection: self.config.detection,
            arbiter,
            ask_winner: hand_back::asking(self),
            tell_sick: repair::hearing_of_sick(self, vm),
            qemu: self.release_of(&machine),
            session: SessionName::fresh(&self.config.name, &definition.name).map_err(internal)?,
            sessions: resync::track(&machine, &self.records, &directory)
                .map_err(|error| failed("cannot note the changes of the disks", &error))?,
            records: self.records.clone(),
            wish: request.clone(),
            meters: self.meters.clone(),
            events: vm.events.clone(),
        })
    }

    /// The QEMU that runs the machine, which the installed one may have replaced since.
    pub(crate) fn release_of(&self, machine: &Machine) -> Release {
        let version = machine.monitor().version();
        let installed = self.capabilities.release();
        let layout = installed.layout.filter(|_| version == installed.version);
        Release { version, layout }
    }
}

/// An error that the peer, or the way to it, caused.
pub(crate) fn refused(what: &str, error: &anyhow::Error) -> HostError {
    let kind = if error.chain().any(|cause| cause.is::<understudy_link::link::Refused>()) {
        ErrorKind::Refused
    } else {
        ErrorKind::Unreachable
    };
    HostError::new(kind, format!("{what}: {error:#}"))
}

/// Refuses to hold what there is not, or beside output that is not held.
pub(crate) fn check_held_console(
    definition: &VmDefinition,
    output: Output,
) -> Result<(), HostError> {
    let name = &definition.name;
    let message = if output == Output::Unheld {
        format!("{name}: the console is held with all other output or not at all: leave one out")
    } else if !definition.console {
        format!("{name} has no console to hold: leave it out, or define the VM with one")
    } else {
        return Ok(());
    };
    Err(HostError::new(ErrorKind::Invalid, message))
}

/// Refuses a VM whose state QEMU itself says cannot be saved.
pub(crate) fn check_blockers(machine: &Machine) -> Result<(), HostError> {
    let asked = machine.monitor().blockers();
    let blockers = asked.map_err(|error| HostError::new(ErrorKind::Internal, error.to_string()))?;
    if blockers.is_empty() {
        return Ok(());
    }
    let message = format!(
        "{}: QEMU says that its state cannot be carried to another host: {}; remove from the \
         definition what this is about, and start the VM again",
        machine.definition().name,
        blockers.join("; ")
    );
    Err(HostError::new(ErrorKind::Invalid, message))
}

/// Refuses what only lockstep can do.
fn check_disk_reads(request: &ProtectRequest) -> Result<(), HostError> {
    if request.mode == Mode::Checkpoint && request.disk_reads == DiskReads::Log {
        let message = "disk reads travel with lockstep's log only (`disk_reads` \"log\"): a backup \
                       that gets checkpoints reads no disk; ask for lockstep, or leave it out";
        return Err(HostError::new(ErrorKind::Invalid, message.to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One whose last epoch moved slowly was called failed, and then came true.
    #[test]
    fn a_fail_over_that_is_under_way_is_not_called_failed() {
        let vm: VmName = "db".parse().unwrap();
        let words = |phase| not_handed_over(&vm, &phase);
        for phase in [PrimaryPhase::Protected, PrimaryPhase::HandingOver] {
            let words = words(phase);
            assert!(words.starts_with("db is still being handed over"), "{words}");
        }
        let alone = words(PrimaryPhase::Alone(Some("it is full".to_owned())));
        assert!(alone.starts_with("db was not handed over, and goes on here"), "{alone}");
        let contests = words(PrimaryPhase::Contesting("it is silent".to_owned()));
        assert_eq!(contests, "db was not handed over: it is silent; the arbiter decides");
    }

    #[test]
    fn a_console_is_held_where_there_is_one_and_with_all_other_output() {
        let definition = |console: bool| -> VmDefinition {
            toml::from_str(&format!(
                "name = \"db\"\nmemory = \"64M\"\nvcpus = 1\nconsole = {console}\n\
                 [[disk]]\npath = \"db.img\"\nformat = \"raw\""
            ))
            .unwrap()
        };
        assert!(check_held_console(&definition(true), Output::Held).is_ok());
        let error = check_held_console(&definition(false), Output::Held).unwrap_err();
        assert!(error.to_string().contains("db has no console"), "{error}");
        assert!(check_held_console(&definition(true), Output::Unheld).is_err());
    }
}
