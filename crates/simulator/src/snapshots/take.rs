//! The taking of a snapshot, as the daemon drives it: the coordinator, and each member on its host.

use super::schedule::{Lasting, Moment};
use super::wires::Payload;
use super::world::{Event, Job, OpId, OpKind, VmId, World};
use crate::host::HostId;
use std::time::Duration;
use understudy_protocol::Time;
use understudy_snapshot::{
    About, Blob, CutEvent, Member, Part, SnapshotNumber, TakeAction, TakeCohort, TakeCohortPhase,
    TakeEvent, TakeOrder, TakeReport, Taker, TakerAction, TakerEvent, TakerPhase,
};

/// As the daemon has them.
const TICK: Duration = Duration::from_millis(500);
const LOOK: Duration = Duration::from_millis(100);
const CONNECTED: Duration = Duration::from_secs(4);
const ARRIVED: Duration = Duration::from_secs(30);
const ASK_AGAIN: Duration = Duration::from_secs(1);
const TRIED_FOR: Duration = Duration::from_secs(600);

/// A store that fails for good does so when a manifest is to be written, from here on.
const LASTS_FROM: Time = Time(Duration::from_secs(4));

/// A member, for one snapshot after the other.
#[derive(Debug)]
pub(crate) struct Taking {
    pub(crate) cohort: TakeCohort,
    /// Command that is answered.
    op: OpId,
    pub(crate) thread: Option<Thread>,
    /// VM on which write protection is armed.
    pub(crate) armed: Option<VmId>,
    /// Looks since the last order.
    unheard: u32,
    /// Progress, for whoever looks whether there is any.
    looks: u64,
}

/// The thread that takes a snapshot.
#[derive(Debug)]
pub(crate) struct Thread {
    pub(crate) number: SnapshotNumber,
    pub(crate) vm: VmId,
    prepared: bool,
    told: bool,
    pub(crate) stopped: bool,
    is_log_complete: bool,
    /// State that it has captured, by its place in the truth.
    part: Option<usize>,
}

/// The coordinator of a snapshot.
#[derive(Debug)]
pub(crate) struct TakeOp {
    pub(crate) taker: Taker,
    pub(crate) number: SnapshotNumber,
    /// The mark of what is being written is its own.
    pub(crate) writing: bool,
    pub(crate) parts: Vec<usize>,
}

/// A step of whoever writes a manifest.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PublishStep {
    /// It is written; it is tried again until then.
    Write(Time),
    /// The store is asked whether it is there; true if an error before may pass.
    Ask(Time, bool),
}

/// The coordinator.
impl World {
    pub(crate) fn begin_take(&mut self, op: OpId, number: SnapshotNumber) {
        let members = self.schedule.places.len();
        let mut actions = Vec::new();
        let taker = Taker::new(number, members, self.now, &mut actions);
        self.ops[op.0].kind =
            OpKind::Take(TakeOp { taker, number, writing: true, parts: Vec::new() });
        let host = self.ops[op.0].host;
        self.note(Some(host), || format!("snapshot {number} begins"));
        self.open_exchange(op);
        self.perform_take(op, actions);
        self.after(LOOK, Event::OpTick(op));
    }

    pub(crate) fn taker(&mut self, op: OpId, event: TakerEvent) {
        let now = self.now;
        let one = &mut self.ops[op.0];
        if one.over || self.hosts[one.host.0].life != one.life {
            return;
        }
        let OpKind::Take(take) = &mut one.kind else { return };
        let mut actions = Vec::new();
        let before = take.taker.phase().clone();
        take.taker.handle(now, event, &mut actions);
        let (after, number, host) = (take.taker.phase().clone(), take.number, one.host);
        if before != after {
            self.note(Some(host), || format!("snapshot {number}: {after:?}"));
        }
        self.perform_take(op, actions);
        self.end_take(op);
    }

    fn end_take(&mut self, op: OpId) {
        let OpKind::Take(take) = &self.ops[op.0].kind else { return };
        if self.ops[op.0].over || take.taker.deadline().is_some() {
            return;
        }
        let (number, failed) = (take.number, matches!(take.taker.phase(), TakerPhase::Failed(_)));
        self.ops[op.0].over = true;
        self.check_taken(op, number, failed);
    }

    pub(crate) fn take_report(&mut self, op: OpId, member: Member, report: About<TakeReport>) {
        self.taker(op, TakerEvent::Report(member, report));
    }

    fn perform_take(&mut self, op: OpId, actions: Vec<TakerAction>) {
        for action in actions {
            match action {
                TakerAction::Send(member, order) => {
                    let host = self.ops[op.0].hosts[member.index()];
                    self.say(op, host, Payload::Take(op, member, order));
                }
                TakerAction::Publish(parts) => {
                    let OpKind::Take(take) = &mut self.ops[op.0].kind else { continue };
                    take.parts = parts.iter().map(|part| part.manifest.bytes as usize).collect();
                    take.writing = false;
                    self.moment(Moment::Publishing);
                    if self.schedule.lasting == Some(Lasting::Store) && self.now > LASTS_FROM {
                        self.lasts(Lasting::Store);
                    }
                    let until = self.now + TRIED_FOR;
                    // It looks for every chunk before.
                    let most = if self.random.percent(15) { 9_000 } else { 200 };
                    self.soon(1, most, Event::Publish(op, PublishStep::Write(until)));
                }
                TakerAction::Discard => {
                    let OpKind::Take(take) = &mut self.ops[op.0].kind else { continue };
                    // Whoever publishes has the mark by then.
                    if std::mem::take(&mut take.writing) {
                        let number = take.number;
                        self.sweep(number);
                    }
                }
            }
        }
    }

    pub(crate) fn publish(&mut self, op: OpId, step: PublishStep) {
        let one = &self.ops[op.0];
        if self.hosts[one.host.0].life != one.life {
            return;
        }
        let OpKind::Take(take) = &one.kind else { return };
        let (number, parts) = (take.number, take.parts.clone());
        match step {
            PublishStep::Write(until) if self.store.away > 0 => {
                self.after(ASK_AGAIN, Event::Publish(op, PublishStep::Ask(until, true)));
            }
            PublishStep::Write(until) if self.store.full > 0 => {
                self.store.full -= 1;
                self.soon(1, 50, Event::Publish(op, PublishStep::Ask(until, false)));
            }
            PublishStep::Write(until) => {
                self.check_published(number, &parts);
                self.store.manifests.insert(number, parts);
                self.store.marks.remove(&number);
                match self.random.percent(self.schedule.lost_answers) {
                    true => {
                        self.coverage.manifests_unheard += 1;
                        self.after(ASK_AGAIN, Event::Publish(op, PublishStep::Ask(until, true)));
                    }
                    false => self.taker(op, TakerEvent::Published),
                }
            }
            PublishStep::Ask(..) if self.store.away > 0 => {
                self.after(ASK_AGAIN, Event::Publish(op, step));
            }
            PublishStep::Ask(..) if self.store.manifests.contains_key(&number) => {
                self.taker(op, TakerEvent::Published);
            }
            PublishStep::Ask(until, true) if self.now <= until => {
                self.after(ASK_AGAIN, Event::Publish(op, PublishStep::Write(until)));
            }
            PublishStep::Ask(..) => {
                self.sweep(number);
                self.taker(op, TakerEvent::NotPublished("the store is full".into()));
            }
        }
    }
}

/// A member on its host.
impl World {
    /// What was stored of a snapshot is removed.
    fn sweep(&mut self, number: SnapshotNumber) {
        self.store.swept.insert(number);
        self.store.marks.remove(&number);
    }

    pub(crate) fn take_order(
        &mut self,
        host: HostId,
        op: OpId,
        member: Member,
        order: About<TakeOrder>,
    ) {
        let now = self.now;
        let known = &mut self.hosts[host.0];
        known.number = known.number.max(order.number);
        let taking = known.takings.entry(member).or_insert_with(|| Taking {
            cohort: TakeCohort::new(SnapshotNumber(0), now),
            op,
            thread: None,
            armed: None,
            unheard: 0,
            looks: 0,
        });
        (taking.op, taking.unheard) = (op, 0);
        self.cohort(host, member, TakeEvent::Order(order));
    }

    fn cohort(&mut self, host: HostId, member: Member, event: TakeEvent) {
        let now = self.now;
        let Some(taking) = self.hosts[host.0].takings.get_mut(&member) else { return };
        let mut actions = Vec::new();
        let before = taking.cohort.phase().clone();
        taking.cohort.handle(now, event, &mut actions);
        let after = taking.cohort.phase().clone();
        if before != after {
            self.note(Some(host), || format!("{member:?}: {after:?}"));
            self.coverage.cohorts_without_coordinator += u64::from(
                matches!(&after, TakeCohortPhase::Failed(why) if why.contains("coordinator was silent")),
            );
            match after {
                TakeCohortPhase::Prepared => self.moment(Moment::Prepared),
                TakeCohortPhase::Taking { taken: true } => self.moment(Moment::Paused),
                TakeCohortPhase::Saved(_) => self.moment(Moment::Saved),
                _ => {}
            }
        }
        for action in actions {
            match action {
                TakeAction::Prepare(number) => self.prepare(host, member, number),
                TakeAction::Take(number) => self.take_now(host, member, number),
                TakeAction::Commit(number) => {
                    self.check_committed(member, number);
                    self.end_taking(host, member, number);
                }
                TakeAction::Discard(number) => self.end_taking(host, member, number),
                TakeAction::Report(report) => {
                    let op = self.hosts[host.0].takings[&member].op;
                    self.answer(op, host, Payload::Taken(op, member, report));
                }
            }
        }
    }

    fn prepare(&mut self, host: HostId, member: Member, number: SnapshotNumber) {
        let job = Job { host, life: self.hosts[host.0].life, member, id: number.0 };
        self.after(TICK, Event::TakeTick(job));
        let vm = self.vm_on(host, member).filter(|vm| !self.vms[vm.0].frozen);
        let taking = self.hosts[host.0].takings.get_mut(&member).expect("it was told to");
        taking.thread = None;
        let Some(vm) = vm else {
            return self.after(LOOK, Event::TakeMissed(job));
        };
        taking.armed = Some(vm);
        taking.thread = Some(Thread {
            number,
            vm,
            prepared: false,
            told: false,
            stopped: false,
            is_log_complete: false,
            part: None,
        });
        self.vms[vm.0].gate.prepare(number);
        let until = self.now + CONNECTED;
        self.soon(10, 300, Event::TakePrepares(job, until));
    }

    /// The thread of a job, unless it has been told to stop.
    fn thread(&mut self, job: &Job) -> Option<&mut Thread> {
        if !self.is_of(job) {
            return None;
        }
        let taking = self.hosts[job.host.0].takings.get_mut(&job.member)?;
        taking.looks += 1;
        taking.thread.as_mut().filter(|thread| thread.number.0 == job.id && !thread.stopped)
    }

    fn fail(&mut self, job: &Job, why: &str) {
        let failed = TakeEvent::Failed(SnapshotNumber(job.id), why.to_owned());
        self.cohort(job.host, job.member, failed);
    }

    /// Whether the frames of members on a host reach all others.
    fn is_connected(&self, host: HostId) -> bool {
        self.members().all(|member| {
            let there = self.running(member).map(|vm| self.vms[vm.0].host);
            there.is_some_and(|there| there == host || self.carries(host, there))
        })
    }

    pub(crate) fn take_prepares(&mut self, job: Job, until: Time) {
        if self.store.away > 0 && self.is_of(&job) {
            // Nothing is looked at meanwhile.
            return self.after(ASK_AGAIN, Event::TakePrepares(job, until));
        }
        let Some(vm) = self.thread(&job).map(|thread| thread.vm) else { return };
        if !self.vms[vm.0].alive {
            return self.fail(&job, "it does not run any more");
        }
        if !self.vms[vm.0].seated {
            return self.fail(&job, "it has no seat in the cluster");
        }
        if !self.is_connected(job.host) {
            return match self.now > until {
                true => self.fail(&job, "the cluster cannot be snapshotted"),
                false => self.after(LOOK, Event::TakePrepares(job, until)),
            };
        }
        let Some(thread) = self.thread(&job) else { return };
        thread.prepared = true;
        self.cohort(job.host, job.member, TakeEvent::Prepared(SnapshotNumber(job.id)));
        self.pause_if_told(job);
    }

    /// The cut says when to pause the VM.
    pub(crate) fn take_told(&mut self, vm: VmId, number: SnapshotNumber) {
        let (host, member) = (self.vms[vm.0].host, self.vms[vm.0].member);
        let life = self.hosts[host.0].life;
        let Some(taking) = self.hosts[host.0].takings.get_mut(&member) else { return };
        let by_frame = matches!(taking.cohort.phase(), TakeCohortPhase::Prepared);
        let Some(thread) = taking.thread.as_mut() else { return };
        if number != thread.number {
            let words = format!("{member:?} is paused for {number}, and has prepared another");
            return self.violation(words);
        }
        thread.told = true;
        self.coverage.cuts_before_the_coordinator += u64::from(by_frame);
        self.pause_if_told(Job { host, life, member, id: number.0 });
    }

    fn pause_if_told(&mut self, job: Job) {
        if self.thread(&job).is_some_and(|thread| thread.prepared && thread.told) {
            self.soon(1, 40, Event::TakePauses(job));
        }
    }

    fn take_now(&mut self, host: HostId, member: Member, number: SnapshotNumber) {
        let taking = &self.hosts[host.0].takings[&member];
        let Some(vm) = taking.thread.as_ref().map(|thread| thread.vm) else { return };
        self.cut(vm, CutEvent::Take(number));
        if self.vms[vm.0].gate.has_missed(number) {
            self.coverage.snapshots_missed += 1;
            let life = self.hosts[host.0].life;
            let job = Job { host, life, member, id: number.0 };
            self.after(Duration::ZERO, Event::TakeMissed(job));
        }
    }

    pub(crate) fn take_missed(&mut self, job: Job) {
        if self.is_of(&job) {
            self.fail(&job, "the members have seen a later snapshot, or it does not run");
        }
    }

    /// The VM stands still, and goes on.
    pub(crate) fn take_pauses(&mut self, job: Job) {
        let Some(vm) = self.thread(&job).map(|thread| thread.vm) else { return };
        if !self.vms[vm.0].alive {
            return self.fail(&job, "it does not run any more");
        }
        let number = SnapshotNumber(job.id);
        let part = self.capture(vm);
        if let Some(thread) = self.thread(&job) {
            thread.part = Some(part);
        }
        self.vms[vm.0].gate.taken();
        let unread = self.vms[vm.0].socket.iter().copied().collect();
        self.cut(vm, CutEvent::Taken { number, unread });
        self.cohort(job.host, job.member, TakeEvent::Taken(number));
        let until = self.now + ARRIVED;
        self.soon(50, 2_500, Event::TakeSaves(job, until));
    }

    pub(crate) fn log_complete(&mut self, vm: VmId, number: SnapshotNumber) {
        let (host, member) = (self.vms[vm.0].host, self.vms[vm.0].member);
        let taking = self.hosts[host.0].takings.get_mut(&member);
        let thread = taking.and_then(|taking| taking.thread.as_mut());
        if let Some(thread) = thread.filter(|thread| thread.number == number) {
            thread.is_log_complete = true;
        }
    }

    pub(crate) fn take_saves(&mut self, job: Job, until: Time) {
        if self.store.away > 0 && self.is_of(&job) {
            // Nothing is looked at meanwhile.
            return self.after(ASK_AGAIN, Event::TakeSaves(job, until + ASK_AGAIN));
        }
        let Some(thread) = self.thread(&job) else { return };
        let (vm, part, complete) = (thread.vm, thread.part, thread.is_log_complete);
        if self.store.full > 0 {
            self.store.full -= 1;
            return self.fail(&job, "the store is full");
        }
        if !complete {
            return match self.now > until {
                true => self.fail(&job, "frames that were in flight did not come to an end"),
                false => self.after(LOOK, Event::TakeSaves(job, until)),
            };
        }
        let log = self.vms[vm.0].cut.log().map(<[_]>::to_vec);
        let (Some(log), Some(part), true) = (log, part, self.vms[vm.0].seated) else {
            return self.fail(&job, "more frames were in flight than are kept, or it is gone");
        };
        let crossings = self.note_log(part, log);
        let saved = Part { manifest: Blob { bytes: part as u64, chunks: vec![] }, crossings };
        self.cohort(job.host, job.member, TakeEvent::Saved(SnapshotNumber(job.id), saved));
    }

    fn end_taking(&mut self, host: HostId, member: Member, number: SnapshotNumber) {
        let Some(taking) = self.hosts[host.0].takings.get_mut(&member) else { return };
        taking.armed = None;
        let Some(thread) = taking.thread.as_mut().filter(|thread| thread.number == number) else {
            return;
        };
        thread.stopped = true;
        let vm = thread.vm;
        self.vms[vm.0].gate.end(number);
        self.cut(vm, CutEvent::Over(number));
    }

    pub(crate) fn take_tick(&mut self, job: Job) {
        if !self.is_of(&job) {
            return;
        }
        let Some(taking) = self.hosts[job.host.0].takings.get_mut(&job.member) else { return };
        let looks = taking.looks;
        if taking.cohort.deadline().is_none() {
            return;
        }
        let is_last = taking.thread.as_ref().is_some_and(|thread| thread.number.0 == job.id);
        taking.unheard += u32::from(is_last);
        let unheard = taking.unheard;
        self.check_unheard(&job, unheard, "is in a snapshot");
        self.after(TICK, Event::TakeTick(job));
        self.cohort(job.host, job.member, TakeEvent::Tick);
        let working = TakeEvent::Working(SnapshotNumber(job.id), looks);
        self.cohort(job.host, job.member, working);
    }
}
