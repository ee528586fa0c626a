//! A restore, as the daemon drives it: the coordinator, and each member on the host that will run it.

use super::schedule::Moment;
use super::wires::Payload;
use super::world::{Event, Job, OpId, OpKind, VmId, World};
use crate::host::HostId;
use std::time::Duration;
use understudy_protocol::{Generation, GroupName, Verdict};
use understudy_snapshot::{
    Cohort, CohortAction, CohortEvent, CohortPhase, Decision, Former, Incarnation, Line, Member,
    Order, Report, RestoreAction, RestoreEvent, RestorePhase, Restorer, SnapshotNumber, StartOrder,
};

const TICK: Duration = Duration::from_millis(500);
pub(super) const AGAIN: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(3);
/// Time between two looks of a coordinator at the clock: no deadline of it comes sooner.
pub(super) const LOOK: Duration = Duration::from_millis(100);

/// A member that is being restored, or was.
#[derive(Debug)]
pub(crate) struct Restoring {
    pub(crate) op: OpId,
    pub(crate) cohort: Cohort,
    pub(super) stop: bool,
    /// A QEMU is loaded, and not started.
    pub(super) prepared: bool,
    /// Threads that load or start it.
    pub(super) workers: u32,
    /// It is being won from the arbiter, and started.
    pub(super) claims: bool,
    /// Looks since the last order, or question to the arbiter.
    pub(super) unheard: u32,
}

impl Restoring {
    pub(crate) fn new(op: OpId, cohort: Cohort) -> Restoring {
        Restoring {
            op,
            cohort,
            stop: false,
            prepared: false,
            workers: 0,
            claims: false,
            unheard: 0,
        }
    }
}

/// The coordinator of a restore.
#[derive(Debug)]
pub(crate) struct RestoreOp {
    pub(crate) restorer: Restorer,
    pub(crate) number: SnapshotNumber,
    pub(crate) incarnation: Incarnation,
    newest: Vec<Generation>,
    pub(crate) order: StartOrder,
    /// It is known that all of the snapshot is there.
    pub(crate) whole: bool,
    /// Members that have run by it.
    pub(crate) ran: Vec<bool>,
}

/// The coordinator.
impl World {
    pub(crate) fn begin_restore(
        &mut self,
        op: OpId,
        number: SnapshotNumber,
        incarnation: Incarnation,
    ) {
        let members = self.schedule.places.len();
        let newest = self.arbiter.vms.iter().map(|record| Generation(record.generation));
        let newest: Vec<Generation> = newest.collect();
        let crossings = self.crossings_of(number);
        let (order, patience) = match self.random.percent(75) {
            true => (StartOrder::new(members, &crossings), PATIENCE),
            false => (StartOrder::none(members), Duration::ZERO),
        };
        let (mut actions, line) = (Vec::new(), Line { order: order.clone(), patience });
        let restorer = Restorer::new(line, vec![100; members], self.now, &mut actions);
        let ran = vec![false; members];
        let op_of = RestoreOp { restorer, number, incarnation, newest, order, whole: false, ran };
        self.ops[op.0].kind = OpKind::Restore(op_of);
        let host = self.ops[op.0].host;
        self.note(Some(host), || format!("restores snapshot {number}, life {}", incarnation.0));
        self.open_exchange(op);
        self.perform_restore(op, actions);
        self.soon(10, 2_500, Event::Checked(op));
        self.after(LOOK, Event::OpTick(op));
    }

    pub(crate) fn op_tick(&mut self, op: OpId) {
        match &self.ops[op.0].kind {
            OpKind::Take(_) => self.taker(op, understudy_snapshot::TakerEvent::Tick),
            OpKind::Restore(_) => self.restorer(op, RestoreEvent::Tick),
            OpKind::New => {}
        }
        self.check_age(op);
        if !self.ops[op.0].over {
            self.after(LOOK, Event::OpTick(op));
        }
    }

    pub(crate) fn restore_of(&self, op: OpId) -> Option<&RestoreOp> {
        match &self.ops[op.0].kind {
            OpKind::Restore(restore) => Some(restore),
            OpKind::Take(_) | OpKind::New => None,
        }
    }

    fn restorer(&mut self, op: OpId, event: RestoreEvent) {
        let now = self.now;
        let one = &mut self.ops[op.0];
        if one.over || self.hosts[one.host.0].life != one.life {
            return;
        }
        let OpKind::Restore(restore) = &mut one.kind else { return };
        let mut actions = Vec::new();
        let before = restore.restorer.phase().clone();
        restore.restorer.handle(now, event, &mut actions);
        let (after, host) = (restore.restorer.phase().clone(), one.host);
        if before != after {
            self.note(Some(host), || format!("restore: {after:?}"));
            match after {
                RestorePhase::Deciding => self.moment(Moment::Deciding),
                RestorePhase::Running => self.moment(Moment::Decided),
                _ => {}
            }
        }
        self.perform_restore(op, actions);
        self.end_restore(op);
    }

    fn end_restore(&mut self, op: OpId) {
        let Some(restore) = self.restore_of(op) else { return };
        // Whoever does not wait until all is loaded returns once all run.
        let waits = op.0 % 3 == 0 && self.schedule.lasting.is_none();
        let returns = matches!(restore.restorer.phase(), RestorePhase::Running) && !waits;
        let goes_on = restore.restorer.deadline().is_some() && !returns;
        if self.ops[op.0].over || goes_on {
            return;
        }
        let failed = matches!(restore.restorer.phase(), RestorePhase::Failed(_));
        self.ops[op.0].over = true;
        self.check_restored(op, failed);
    }

    pub(crate) fn restore_report(&mut self, op: OpId, member: Member, report: Report) {
        self.restorer(op, RestoreEvent::Report(member, report));
    }

    fn perform_restore(&mut self, op: OpId, actions: Vec<RestoreAction>) {
        for action in actions {
            match action {
                RestoreAction::Send(member, order) => {
                    let host = self.ops[op.0].hosts[member.index()];
                    self.say(op, host, Payload::Restore(op, member, order));
                }
                RestoreAction::Decide => self.soon(1, 50, Event::DecideAsked(op)),
            }
        }
    }

    /// The store has said whether all of the snapshot is there.
    pub(crate) fn checked(&mut self, op: OpId) {
        let refused = self.store.away > 0 || self.random.percent(4);
        if let OpKind::Restore(restore) = &mut self.ops[op.0].kind {
            restore.whole = !refused;
        }
        self.coverage.restores_refused += u64::from(refused);
        let word = match refused {
            true => RestoreEvent::Refused("a chunk is missing".into()),
            false => RestoreEvent::Whole,
        };
        self.restorer(op, word);
    }

    pub(crate) fn decide_asked(&mut self, op: OpId) {
        let one = &self.ops[op.0];
        let (host, life) = (one.host, one.life);
        let Some(restore) = self.restore_of(op) else { return };
        let incarnation = restore.incarnation;
        let before = Decision::before(incarnation);
        if self.hosts[host.0].life != life {
            return;
        }
        let verdict = self.consult(host, |arbiter| arbiter.decision.swap(before, Some(host)));
        self.note_decision(incarnation);
        let verdict = verdict.unwrap_or(Verdict::Unreachable("no answer".into()));
        self.soon(1, 300, Event::DecideAnswered(op, verdict));
    }

    pub(crate) fn decide_answered(&mut self, op: OpId, verdict: Verdict) {
        match Decision::of_claim(verdict) {
            Ok(decision) => self.restorer(op, RestoreEvent::Decided(decision)),
            Err(_) if !self.ops[op.0].over => self.after(AGAIN, Event::DecideAsked(op)),
            Err(_) => {}
        }
    }
}

/// A member on its host.
impl World {
    pub(crate) fn restore_order(&mut self, host: HostId, op: OpId, member: Member, order: Order) {
        let Some(number) = self.restore_of(op).map(|restore| restore.number) else { return };
        let known = &mut self.hosts[host.0];
        known.number = known.number.max(number);
        let failed = |why: &str| Payload::Restored(op, member, Report::Failed { why: why.into() });
        let is_known = known.restorings.get(&member).is_some_and(|known| known.op == op);
        if !is_known && !order.begins() {
            // Of one that is being taken back it is not known what becomes of it.
            let orphan = self.vm_on(host, member).is_some_and(|vm| self.vms[vm.0].frozen);
            if !orphan {
                self.answer(op, host, failed("its host knows nothing of the restore"));
            }
            return;
        }
        if !is_known {
            if let Err(why) = self.give_way(host, op, member) {
                return self.answer(op, host, failed(why));
            }
            let cohort = Cohort::new(self.now);
            let begun = Restoring::new(op, cohort);
            self.hosts[host.0].restorings.insert(member, begun);
        }
        let known = self.hosts[host.0].restorings.get_mut(&member);
        known.into_iter().for_each(|known| known.unheard = 0);
        self.cohort_of(host, member, CohortEvent::Order(order));
    }

    fn give_way(&mut self, host: HostId, op: OpId, member: Member) -> Result<(), &'static str> {
        let Some(former) = self.hosts[host.0].restorings.get(&member) else { return Ok(()) };
        let group: GroupName = "shop".parse().expect("a name");
        let incarnation = |op| self.restore_of(op).map_or(Incarnation(0), |one| one.incarnation);
        let vm = self.vm_on(host, member);
        let has_vm = vm.is_some_and(|vm| self.vms[vm.0].restored_by == Some(former.op));
        let asked = Former {
            group: &group,
            incarnation: incarnation(former.op),
            phase: former.cohort.phase(),
            has_vm,
        };
        asked.check_replaceable(&group, incarnation(op))?;
        let failed = CohortEvent::Failed("another restore of the VM has begun".into());
        self.cohort_of(host, member, failed);
        Ok(())
    }

    fn cohort_of(&mut self, host: HostId, member: Member, event: CohortEvent) {
        let now = self.now;
        let life = self.hosts[host.0].life;
        let Some(restoring) = self.hosts[host.0].restorings.get_mut(&member) else { return };
        let (op, mut actions) = (restoring.op, Vec::new());
        let before = restoring.cohort.phase().clone();
        restoring.cohort.handle(now, event, &mut actions);
        let after = restoring.cohort.phase().clone();
        if before != after && !matches!(after, CohortPhase::Loading(_)) {
            self.note(Some(host), || format!("{member:?}: {after:?}"));
            match after {
                CohortPhase::Loaded => self.moment(Moment::Loaded),
                CohortPhase::Running => self.moment(Moment::Started),
                _ => {}
            }
        }
        let job = Job { host, life, member, id: op.0 as u64 };
        for action in actions {
            self.obey(job, op, action);
        }
    }

    fn obey(&mut self, job: Job, op: OpId, action: CohortAction) {
        let Some(restoring) = self.restoring(&job) else { return };
        match action {
            CohortAction::Load { .. } => {
                restoring.workers += 1;
                self.after(TICK, Event::RestoreTick(job));
                self.soon(50, 3_000, Event::Loads(job));
            }
            CohortAction::Start if std::mem::take(&mut restoring.prepared) => {
                restoring.workers += 1;
                restoring.claims = true;
                let newest = self.restore_of(op).map(|one| one.newest[job.member.index()]);
                self.soon(1, 40, Event::Claims(job, newest.unwrap_or_default()));
            }
            CohortAction::Start => {}
            CohortAction::Settle => {
                self.check_stays(op, job.member);
                self.soon(1, 50, Event::Entrusts(job));
            }
            CohortAction::Conclude => self.check_stays(op, job.member),
            CohortAction::Ask => self.soon(1, 50, Event::Asks(job)),
            CohortAction::Discard => {
                (restoring.stop, restoring.prepared) = (true, false);
                self.soon(20, 400, Event::Discards(job));
            }
            CohortAction::Report(report) => {
                self.check_ended(op, &job, &report);
                self.answer(op, job.host, Payload::Restored(op, job.member, report));
            }
        }
    }

    /// The restore of a job, if its daemon lives and no other has taken its place.
    pub(super) fn restoring(&mut self, job: &Job) -> Option<&mut Restoring> {
        if !self.is_of(job) {
            return None;
        }
        let restoring = self.hosts[job.host.0].restorings.get_mut(&job.member);
        restoring.filter(|restoring| restoring.op.0 as u64 == job.id)
    }

    pub(super) fn restoring_event(&mut self, job: &Job, event: CohortEvent) {
        if self.restoring(job).is_some() {
            self.cohort_of(job.host, job.member, event);
        }
    }

    pub(crate) fn restore_tick(&mut self, job: Job) {
        let Some(restoring) = self.restoring(&job) else { return };
        if !restoring.cohort.is_over() {
            restoring.unheard += 1;
            let runs =
                matches!(restoring.cohort.phase(), CohortPhase::Running | CohortPhase::Restored);
            let unheard = if runs { restoring.unheard } else { 0 };
            self.check_unheard(&job, unheard, "is in a restore");
            self.after(TICK, Event::RestoreTick(job));
            self.restoring_event(&job, CohortEvent::Progress(7));
            self.restoring_event(&job, CohortEvent::Tick);
        }
    }

    /// Whether a host has the VM, or is about to start it.
    pub(crate) fn has_or_claims(&self, host: HostId, member: Member) -> bool {
        let restoring = self.hosts[host.0].restorings.get(&member);
        self.vm_on(host, member).is_some() || restoring.is_some_and(|restoring| restoring.claims)
    }

    /// Whether the VM runs, or may run, somewhere: whoever owns it says so, or does not answer.
    fn owner_is_busy(&self, host: HostId, member: Member) -> bool {
        let here = self.vm_on(host, member).is_some();
        let owner = self.arbiter.vms[member.index()].host.filter(|owner| *owner != host);
        here || owner
            .is_some_and(|owner| !self.reach(host, owner) || self.has_or_claims(owner, member))
    }

    pub(crate) fn loads(&mut self, job: Job) {
        let busy = self.owner_is_busy(job.host, job.member);
        let away = self.store.away > 0;
        let Some(restoring) = self.restoring(&job) else { return };
        restoring.workers -= 1;
        if restoring.stop {
            return;
        }
        if busy || away {
            let why = if busy { "it may run on its owner" } else { "the store does not answer" };
            return self.restoring_event(&job, CohortEvent::Failed(why.into()));
        }
        restoring.prepared = true;
        self.restoring_event(&job, CohortEvent::Loaded);
    }

    /// Wins the VM from the arbiter.
    pub(crate) fn claims(&mut self, job: Job, newest: Generation) {
        if self.restoring(&job).is_none() {
            return;
        }
        let (at, host) = (job.member.index(), job.host);
        let verdict = self.consult(host, |arbiter| arbiter.vms[at].swap(newest, Some(host)));
        let verdict = verdict.unwrap_or(Verdict::Unreachable("no answer".into()));
        self.moment(Moment::Claimed);
        self.soon(1, 60, Event::Starts(job, verdict));
    }

    pub(crate) fn starts(&mut self, job: Job, verdict: Verdict) {
        let Some(restoring) = self.restoring(&job) else {
            return;
        };
        restoring.workers -= 1;
        restoring.claims = false;
        let op = restoring.op;
        let started = match verdict {
            Verdict::Granted(generation) => self.start_restored(&job, op, generation),
            other => Err(format!("{other:?}")),
        };
        let stopped = self.restoring(&job).is_some_and(|restoring| restoring.stop);
        match started {
            Err(why) => self.restoring_event(&job, CohortEvent::Failed(why)),
            // Given up meanwhile: whoever gave up may have come before the VM was there.
            Ok(vm) if stopped => self.stop_restored(vm, op),
            Ok(_) => {
                self.soon(1, 3_000, Event::Completes(job));
                self.restoring_event(&job, CohortEvent::Started);
            }
        }
    }

    fn start_restored(
        &mut self,
        job: &Job,
        op: OpId,
        generation: Generation,
    ) -> Result<VmId, String> {
        let Some(restore) = self.restore_of(op) else { return Err("no restore".into()) };
        let (number, incarnation) = (restore.number, restore.incarnation);
        if self.vm_on(job.host, job.member).is_some() {
            self.release(job.host, job.member, generation);
            return Err("it runs on this host".into());
        }
        let mut vm = self.new_vm(job.host, job.member, generation);
        vm.restored_by = Some(op);
        if let Err(why) = self.join(&mut vm, incarnation, number) {
            self.release(job.host, job.member, generation);
            return Err(why);
        }
        // What was in flight comes first.
        vm.socket.extend(self.log_of(number, job.member));
        self.check_started(op, job.member);
        let (id, host, member) = (self.start_vm(vm), job.host, job.member);
        self.note(Some(host), || format!("{member:?} runs, of snapshot {number}"));
        self.tell_all(host);
        if let OpKind::Restore(restore) = &mut self.ops[op.0].kind {
            restore.ran[member.index()] = true;
        }
        Ok(id)
    }

    /// Ends a VM that a restore has started.
    pub(super) fn stop_restored(&mut self, vm: VmId, op: OpId) {
        let (host, member) = (self.vms[vm.0].host, self.vms[vm.0].member);
        self.note(Some(host), || format!("{member:?} is stopped: its restore is given up"));
        self.coverage.restored_stopped_again += 1;
        self.check_stopped(op, vm);
        let generation = self.vms[vm.0].generation;
        self.end_vm(vm);
        self.release(host, member, generation);
    }

    /// Gives a VM up at the arbiter, if that answers.
    pub(crate) fn release(&mut self, host: HostId, member: Member, generation: Generation) {
        let at = member.index();
        drop(self.consult(host, |arbiter| arbiter.vms[at].swap(generation, None)));
    }
}
