//! A VM as this host knows it, and the report about it.

mod describe;

use crate::lease::Tenure;
use crate::repair::{self, Repairer, Wish};
use describe::{backup_status, describe_session, machine_status};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use understudy_machine::Machine;
use understudy_protocol::HostName;
use understudy_protocol::VmName;
use understudy_protocol::{Generation, Lease, LeaseAction, PrimaryPhase};
use understudy_replication::primary::Stance;
use understudy_replication::{backup, primary};
use understudy_report::events::VmEvents;
use understudy_report::{CheckpointTiming, Protection, Role, TakeoverReport, VmStatus};
use understudy_session::primary::Event;
use understudy_threads::{Mutex, lock};

/// Role of this host for a VM.
#[derive(Clone)]
pub enum Vm {
    /// Runs it.
    Primary(Arc<PrimaryVm>),
    /// Stands by for it.
    Backup(Arc<backup::Session>),
    /// The host lost it; nothing of it is left but the name.
    Fenced(Arc<FencedVm>),
}

/// A VM that runs on this host.
pub struct PrimaryVm {
    name: VmName,
    /// Notable events.
    pub events: VmEvents,
    /// Mail of the thread that restores its protection.
    pub(crate) repairs: repair::Mail,
    /// Lock that is held while protection is set up or ended; those of a group in the order of their names. Not the host's
    /// `adding`: two hosts that protect to each other would wait for each other.
    pub protecting: Mutex<()>,
    /// Whether its guest does what its lease says.
    pub(crate) tenure: Tenure,
    /// Whether another host has a copy of it, or had one.
    pub(crate) has_copies: AtomicBool,
    /// Whether somebody hands it over, since it waits for a disk.
    pub(crate) leaves_disk: AtomicBool,
    /// Whether it is being left to the next keeper, and takes no other orders.
    is_leaving: AtomicBool,
    state: Mutex<PrimaryState>,
}

struct PrimaryState {
    /// Another one after a succession.
    machine: Arc<Machine>,
    /// Report on how it came to this host, if by a take-over.
    takeover: Option<TakeoverReport>,
    /// The restore of a snapshot that it comes from.
    restore: Option<String>,
    generation: Generation,
    lease: Lease,
    /// The last protection session, also after its end.
    session: Option<Arc<primary::Session>>,
    /// Reason why a VM that should be protected is not; none if nobody asked.
    degraded: Option<String>,
    /// Whether it was degraded when the last session began.
    restoring: bool,
    /// How it was to be protected when it ran last, until somebody says what shall be now.
    former_wish: Option<Wish>,
    /// Number of its operator's orders to end it that are under way.
    stops: u32,
    /// Whether the daemon ends it.
    ends_with_daemon: bool,
    /// State of its protection's repair.
    repair: repair::State,
}

/// Who has asked for a VM's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EndAsked {
    /// Its operator: it does not come up with the host.
    ByOperator,
    /// The daemon, which ends: it comes up with the next one.
    ByDaemon,
}

/// A VM that this host lost.
pub struct FencedVm {
    /// The VM's name.
    pub name: VmName,
    /// The last generation at which this host owned it.
    pub generation: Generation,
    /// Reason why it lost it.
    pub reason: String,
    /// Whether another host has it: else the copy has merely ended.
    pub elsewhere: bool,
}

impl PrimaryVm {
    /// A VM that runs here, owned at `generation`, and how its protection is to be restored.
    pub(crate) fn new(
        machine: Arc<Machine>,
        generation: Generation,
        repair: repair::State,
        events: VmEvents,
        lease: Lease,
    ) -> PrimaryVm {
        let name = machine.definition().name.clone();
        let state = PrimaryState {
            machine,
            takeover: None,
            restore: None,
            generation,
            lease,
            session: None,
            degraded: None,
            restoring: false,
            former_wish: None,
            stops: 0,
            ends_with_daemon: false,
            repair,
        };
        PrimaryVm {
            name,
            events,
            repairs: repair::Mail::default(),
            protecting: Mutex::default(),
            tenure: Tenure::default(),
            has_copies: AtomicBool::new(false),
            leaves_disk: AtomicBool::new(false),
            is_leaving: AtomicBool::new(false),
            state: Mutex::new(state),
        }
    }

    /// The VM's name.
    pub fn name(&self) -> &VmName {
        &self.name
    }

    /// Who restores its protection.
    pub(crate) fn repairer(&self) -> Repairer<'_> {
        Repairer(self)
    }

    /// Looks at the state of that, or changes it. Nothing may be waited for.
    pub(crate) fn repair_state<T>(&self, act: impl FnOnce(&mut repair::State) -> T) -> T {
        act(&mut lock(&self.state).repair)
    }

    /// The machine that it runs on now.
    pub fn machine(&self) -> Arc<Machine> {
        lock(&self.state).machine.clone()
    }

    /// Has its lease decide something, and what comes of that carried out on its machine before anything else is
    /// decided. Nothing may be waited for.
    pub(crate) fn tend_lease(
        &self,
        decide: impl FnOnce(&mut Lease) -> Vec<LeaseAction>,
        carry_out: impl FnOnce(&Machine, Vec<LeaseAction>),
    ) {
        let state = &mut *lock(&self.state);
        let actions = decide(&mut state.lease);
        carry_out(&state.machine, actions);
    }

    /// Looks at its lease.
    pub(crate) fn lease<T>(&self, look: impl FnOnce(&Lease) -> T) -> T {
        look(&lock(&self.state).lease)
    }

    /// Reason why the guest stands still, if its lease has run out.
    pub(crate) fn standstill(&self) -> Option<String> {
        self.lease(Lease::standstill)
    }

    /// Begins to leave it to the next keeper; false if it is already.
    pub(crate) fn begin_leaving(&self) -> bool {
        !self.is_leaving.swap(true, Ordering::AcqRel)
    }

    /// Notes that it is not left any more.
    pub(crate) fn stay(&self) {
        self.is_leaving.store(false, Ordering::Release);
    }

    /// Notes who asks for its end now; its operator's wish counts before the daemon's.
    pub(crate) fn ask_for_end(&self, asked: EndAsked) {
        let mut state = lock(&self.state);
        match asked {
            EndAsked::ByOperator => state.stops += 1,
            EndAsked::ByDaemon => state.ends_with_daemon = true,
        }
    }

    /// Notes that its operator, who has asked for its end, was told that it goes on.
    pub(crate) fn goes_on_unasked(&self) {
        lock(&self.state).stops -= 1;
    }

    /// Who has asked for its end; none if it ends by itself.
    pub(crate) fn end_asked(&self) -> Option<EndAsked> {
        let state = lock(&self.state);
        match state.stops {
            0 => state.ends_with_daemon.then_some(EndAsked::ByDaemon),
            1.. => Some(EndAsked::ByOperator),
        }
    }

    /// Whether it is being left to the next keeper.
    pub(crate) fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::Acquire)
    }

    /// Lets the VM go on in this machine.
    pub(crate) fn succeed(&self, next: Arc<Machine>) {
        let former = std::mem::replace(&mut lock(&self.state).machine, next);
        // Not under the lock, which leases need: it may be the last of it.
        drop(former);
    }

    /// Notes that it came to this host by a take-over.
    pub(crate) fn took_over(&self, takeover: TakeoverReport) {
        lock(&self.state).takeover = Some(takeover);
    }

    /// Notes how it was to be protected when it ran last, and is not to any more.
    pub(crate) fn note_former_wish(&self, wish: Option<Wish>) {
        lock(&self.state).former_wish = wish;
    }

    /// Notes that it was started by this restore of a snapshot.
    pub(crate) fn note_restore(&self, restore: &str) {
        lock(&self.state).restore = Some(restore.to_owned());
    }

    /// The restore that started it, if one did.
    pub(crate) fn restored_by(&self) -> Option<String> {
        lock(&self.state).restore.clone()
    }

    /// Reason why this copy only stands still, if another host has won the VM and may not run it
    /// yet.
    pub fn kept(&self) -> Option<String> {
        match self.active_session()?.phase() {
            PrimaryPhase::Frozen(reason) => Some(reason),
            _ => None,
        }
    }

    /// Ends a copy that is kept, for this reason.
    pub(crate) fn drop_kept(&self, reason: &str) {
        if let Some(session) = self.active_session().filter(|_| self.kept().is_some()) {
            session.event(Event::GuestDied(reason.to_owned()));
        }
    }

    /// Whether every output waits for a backup.
    pub fn is_protected(&self) -> bool {
        self.active_session().is_some_and(|session| session.phase() == PrimaryPhase::Protected)
    }

    /// The last session. What waits for its lock is asked without this VM's, which leases need.
    fn session(&self) -> Option<Arc<primary::Session>> {
        lock(&self.state).session.clone()
    }

    /// The session, if protection is under way.
    pub fn active_session(&self) -> Option<Arc<primary::Session>> {
        self.session().filter(|session| !session.is_over())
    }

    /// The session that decides about the VM's output: every one but those that ended with sole
    /// ownership.
    pub(crate) fn bound_session(&self) -> Option<Arc<primary::Session>> {
        self.session().filter(|session| !matches!(session.phase(), PrimaryPhase::Alone(_)))
    }

    /// Stance of that session, as of its last event. Waits for no session.
    pub(crate) fn stance(&self) -> Option<Stance> {
        self.session().map(|session| session.stance()).filter(|stance| !stance.is_alone)
    }

    /// The backup that decides about the VM's output, if one does.
    pub(crate) fn deciding_peer(&self) -> Option<HostName> {
        let session = self.session().filter(|session| session.stance().guards_output);
        session.map(|session| session.peer.clone())
    }

    /// The session's measurements, also after its end.
    pub fn timings(&self) -> Vec<CheckpointTiming> {
        self.session().map_or_else(Vec::new, |session| session.stats.timings())
    }

    /// Protection begins.
    pub fn begin(&self, session: Arc<primary::Session>) {
        self.has_copies.store(true, Ordering::Release);
        let restoring = self.is_degraded();
        let mut state = lock(&self.state);
        let former = state.session.replace(session);
        state.degraded = None;
        state.restoring = restoring;
        state.former_wish = None;
        drop(state);
        drop(former);
    }

    /// Whether the VM should be protected and is not.
    pub fn is_degraded(&self) -> bool {
        matches!(self.status().protection, Protection::Degraded { .. })
    }

    /// The operator wants no protection: its lack is no degradation any more. Protection that is under way stays known.
    pub fn accept_unprotected(&self) {
        let over = self.session().filter(|session| session.is_over());
        let mut state = lock(&self.state);
        if let Some(session) = state
            .session
            .take_if(|session| over.as_ref().is_some_and(|over| Arc::ptr_eq(over, session)))
        {
            state.generation = session.generation();
        }
        state.degraded = None;
    }

    /// Whether the last session ended because the backup did not follow the log.
    pub(crate) fn has_diverged(&self) -> bool {
        self.session().is_some_and(|session| session.has_diverged())
    }

    /// Notes what is wrong with the mirrors of the last session's backup, if anything is.
    pub(crate) fn note_distrust(&self) {
        if let Some(session) = self.session() {
            session.note_distrust();
        }
    }

    /// Whether the last session ended for the sake of another host, which has the VM or is to take it.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.session().is_some_and(|session| session.is_elsewhere())
    }

    /// The host that has it now, if the last session ended with a planned fail-over: it goes on there, or is to, from
    /// where it was here.
    pub fn handed_over_to(&self) -> Option<HostName> {
        let session = self.session().filter(|session| session.has_gone_over());
        session.map(|session| session.peer.clone())
    }

    /// Whether both are protected, or were last, in one group.
    pub fn is_fellow(&self, other: &PrimaryVm) -> bool {
        let group = |vm: &PrimaryVm| vm.session().map(|session| session.group());
        match (group(self), group(other)) {
            (Some(ours), Some(theirs)) => Arc::ptr_eq(&ours, &theirs),
            _ => false,
        }
    }

    /// Protection that was asked for has ended, for this reason.
    pub fn degrade(&self, reason: String) {
        self.accept_unprotected();
        lock(&self.state).degraded = Some(reason);
    }

    /// The generation at which this host owns the VM.
    pub fn generation(&self) -> Generation {
        let state = lock(&self.state);
        state.session.as_ref().map_or(state.generation, |session| session.generation())
    }

    fn status(&self) -> VmStatus {
        let machine = self.machine();
        let mut status = machine_status(&machine, Role::Primary, machine.is_alive());
        status.events = self.events.sentences();
        let session = self.describe(&mut status);
        status.live &= status.lease_over.is_none();
        if let Some(session) = session {
            describe_session(&mut status, &session);
        }
        status.restoring &= matches!(status.protection, Protection::Syncing { .. });
        status.wanted = self.repairer().wish().map(|wish| wish.report());
        if let Protection::Degraded { reason } = &mut status.protection {
            if let Some(repair) = self.repairer().describe() {
                *reason += &format!("; {repair}");
            }
        }
        status
    }

    /// All but the session, which is returned.
    fn describe(&self, status: &mut VmStatus) -> Option<Arc<primary::Session>> {
        let state = lock(&self.state);
        status.generation = state.generation;
        status.lease_over = state.lease.standstill();
        status.takeover = state.takeover;
        let former = state.former_wish.as_ref();
        status.former_backup = former.map(|wish| wish.request.to.clone());
        status.former_command = former.map(|wish| wish.command(&status.name));
        status.restoring = state.restoring;
        status.protection = match &state.degraded {
            Some(reason) => Protection::Degraded { reason: reason.clone() },
            None => Protection::Off,
        };
        state.session.clone()
    }
}

impl FencedVm {
    fn status(&self) -> VmStatus {
        VmStatus {
            generation: self.generation,
            elsewhere: self.elsewhere,
            protection: Protection::Degraded { reason: self.reason.clone() },
            events: vec![self.reason.clone()],
            ..VmStatus::new(&self.name, Role::Fenced)
        }
    }
}

impl Vm {
    /// The report about the VM.
    pub fn status(&self) -> VmStatus {
        match self {
            Vm::Primary(vm) => vm.status(),
            Vm::Backup(session) => backup_status(session),
            Vm::Fenced(vm) => vm.status(),
        }
    }
}
