//! The truth about a cluster, and what must hold against it.

use super::schedule::Lasting;
use super::world::{Frame, Guest, Job, Op, OpId, OpKind, VmId, World};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use understudy_protocol::Time;
use understudy_snapshot::{
    CohortPhase, Crossing, Incarnation, Member, Report, SnapshotNumber, TakerPhase,
};

/// Time for which a frame may wait for its receiver's snapshot: that is a pause away, or a host that
/// stands still.
const HELD: Duration = Duration::from_secs(45);

/// The same where nobody has prepared any.
const PASSED: Duration = Duration::from_secs(1);

/// Time for which any command may last: a store that never says whether a manifest is there ends it last.
const LASTS: Duration = Duration::from_secs(1_000);

/// A member's state as it was captured, and what was in flight to it.
#[derive(Debug)]
pub(crate) struct Captured {
    pub(crate) vm: VmId,
    member: Member,
    incarnation: Incarnation,
    guest: Guest,
    log: Vec<(Member, Frame)>,
}

/// What has really happened.
#[derive(Debug, Default)]
pub(crate) struct Truth {
    /// Frames that a network has lost.
    pub(crate) lost: BTreeSet<Frame>,
    pub(crate) parts: Vec<Captured>,
    /// Whether members stay, of each restore of which it was decided.
    pub(crate) decisions: BTreeMap<Incarnation, bool>,
}

/// Snapshots.
impl World {
    /// The state of a VM that stands still; its place in the truth.
    pub(crate) fn capture(&mut self, vm: VmId) -> usize {
        let (own, guest) = (&self.vms[vm.0], self.vms[vm.0].guest.clone());
        let (member, incarnation) = (own.member, own.incarnation);
        self.truth.parts.push(Captured { vm, member, incarnation, guest, log: Vec::new() });
        self.truth.parts.len() - 1
    }

    /// The frames in flight to it are known.
    pub(crate) fn note_log(&mut self, part: usize, log: Vec<(Member, Frame)>) -> Vec<Crossing> {
        self.coverage.frames_in_flight += log.len() as u64;
        let to = self.truth.parts[part].member;
        let crossing = |(from, frame): &(Member, Frame)| {
            let data = u32::from(frame.serial % 3 == 0);
            let acknowledgements = u32::from(frame.serial % 3 == 1);
            Crossing { from: *from, to, data, acknowledgements, others: 1 }
        };
        let crossings = log.iter().map(crossing).collect();
        self.truth.parts[part].log = log;
        crossings
    }

    pub(crate) fn crossings_of(&self, number: SnapshotNumber) -> Vec<Crossing> {
        let parts = self.store.manifests[&number].iter().map(|part| &self.truth.parts[*part]);
        let of = |part: &Captured| {
            let to = part.member;
            let crossing = |(from, frame): &(Member, Frame)| {
                let data = u32::from(frame.serial % 3 == 0);
                let acknowledgements = u32::from(frame.serial % 3 == 1);
                Crossing { from: *from, to, data, acknowledgements, others: 1 }
            };
            part.log.iter().map(crossing).collect::<Vec<_>>()
        };
        parts.flat_map(of).collect()
    }

    pub(crate) fn log_of(&self, number: SnapshotNumber, member: Member) -> Vec<(Member, Frame)> {
        let parts = self.store.manifests[&number].iter().map(|part| &self.truth.parts[*part]);
        let own = parts.into_iter().find(|part| part.member == member);
        own.map(|part| part.log.clone()).unwrap_or_default()
    }

    /// A manifest is written: it has all members, and they fit together.
    pub(crate) fn check_published(&mut self, number: SnapshotNumber, parts: &[usize]) {
        self.coverage.snapshots_complete += 1;
        let found = self.unfit(parts);
        if self.store.swept.contains(&number) {
            self.violation(format!("snapshot {number} exists, and its chunks were removed"));
        }
        if let Some(why) = found {
            self.violation(format!("snapshot {number} is no consistent cut: {why}"));
        }
    }

    fn unfit(&self, parts: &[usize]) -> Option<String> {
        let parts: Vec<&Captured> = parts.iter().map(|part| &self.truth.parts[*part]).collect();
        let members: Vec<Member> = parts.iter().map(|part| part.member).collect();
        if members != self.members().collect::<Vec<_>>() {
            return Some(format!("it has {members:?}"));
        }
        if parts.iter().any(|part| part.incarnation != parts[0].incarnation) {
            return Some("its members are of several lives".into());
        }
        let pairs = parts.iter().flat_map(|from| parts.iter().map(move |to| (from, to)));
        pairs.into_iter().find_map(|(from, to)| self.unfit_pair(from, to))
    }

    fn unfit_pair(&self, from: &Captured, to: &Captured) -> Option<String> {
        let sent = from.guest.sent.get(&to.vm).copied().unwrap_or(0);
        let read = to.guest.read.get(&from.vm).copied().unwrap_or(0);
        let (a, b) = (from.member.0, to.member.0);
        if read > sent {
            return Some(format!("{b} has received {read} of {a}, which has sent {sent}"));
        }
        let later = to
            .guest
            .read
            .keys()
            .any(|life| *life > from.vm && self.vms[life.0].member == from.member);
        if later {
            return Some(format!("{b} has received what {a} sends in a later life"));
        }
        let is_lost = |serial: &u64| {
            let incarnation = from.incarnation;
            let frame = Frame { incarnation, from: from.vm, to: to.vm, serial: *serial };
            self.truth.lost.contains(&frame)
        };
        let expected: Vec<u64> = (read + 1..=sent).filter(|serial| !is_lost(serial)).collect();
        let own = to.log.iter().map(|(_, frame)| frame);
        let own = own.filter(|frame| (frame.from, frame.to) == (from.vm, to.vm));
        let logged: Vec<u64> = own.map(|frame| frame.serial).collect();
        (logged != expected).then(|| {
            format!("in flight from {a} to {b} were {expected:?}, and in the log are {logged:?}")
        })
    }

    /// A member hears that a snapshot exists.
    pub(crate) fn check_committed(&mut self, member: Member, number: SnapshotNumber) {
        if !self.store.manifests.contains_key(&number) {
            self.violation(format!("{member:?} counts on snapshot {number}, which is not there"));
        }
    }

    /// The command has returned.
    pub(crate) fn check_taken(&mut self, op: OpId, number: SnapshotNumber, failed: bool) {
        let OpKind::Take(take) = &self.ops[op.0].kind else { return };
        let unknown = matches!(take.taker.phase(), TakerPhase::Failed(failure)
            if failure.why.contains("has not said for"));
        let there = self.store.manifests.contains_key(&number);
        match failed {
            true => self.coverage.snapshots_given_up += 1,
            false => self.operator.snapshots += u32::from(self.is_calm),
        }
        self.coverage.snapshots_unknown += u64::from(unknown);
        if there == failed && !unknown {
            let (says, is) = if failed { ("given up", "is there") } else { ("there", "is not") };
            self.violation(format!("snapshot {number} is said to be {says}, and {is}"));
        }
    }

    /// No frame waits but for a snapshot that its receiver is about to take.
    pub(crate) fn check_held(&mut self, vm: VmId) {
        let (own, now) = (&self.vms[vm.0], self.now);
        let taking = self.hosts[own.host.0].takings.get(&own.member);
        let thread = taking.and_then(|taking| taking.thread.as_ref());
        let thread = thread.filter(|thread| !thread.stopped && thread.vm == vm);
        let is_in_vain = |(since, number): &(Time, SnapshotNumber)| {
            let is_taken = thread.is_some_and(|thread| thread.number >= *number);
            now - *since > if is_taken { HELD } else { PASSED }
        };
        let old = own.held.iter().find(|(_, waits)| is_in_vain(waits));
        if let Some((frame, _)) = old {
            let (serial, member) = (frame.serial, self.vms[vm.0].member);
            self.violation(format!("frame {serial} waits for ever for a snapshot of {member:?}"));
        }
    }
}

/// Looks at a cohort in each of which it had no order, half a second each: it waits for 5 s.
const UNHEARD: u32 = 14;

/// Restores.
impl World {
    /// No member waits for ever for a coordinator that is silent.
    pub(crate) fn check_unheard(&mut self, job: &Job, looks: u32, waits: &str) {
        if looks > UNHEARD {
            let words = format!("{:?} {waits}, and has had no order for 7 s", job.member);
            self.violation(words);
        }
    }

    /// A member is about to run.
    pub(crate) fn check_started(&mut self, op: OpId, member: Member) {
        let Some(restore) = self.restore_of(op) else { return };
        let ring = &restore.order.rings()[restore.order.ring(member)];
        let earlier = ring.after.iter().flat_map(|&ring| &restore.order.rings()[ring].members);
        let missing = earlier.into_iter().find(|earlier| !restore.ran[earlier.index()]).copied();
        let (whole, again) = (restore.whole, restore.ran[member.index()]);
        if let Some(earlier) = missing {
            self.violation(format!("{member:?} starts, and {earlier:?} before it has not"));
        }
        if !whole {
            self.violation(format!("{member:?} starts, and the snapshot may not be whole"));
        }
        if again {
            self.violation(format!("{member:?} is started twice by one restore"));
        }
    }

    /// Notes what the arbiter has decided, if it has.
    pub(crate) fn note_decision(&mut self, incarnation: Incarnation) {
        let record = self.arbiter.decision;
        if record.generation == u64::from(incarnation.0) {
            let stay = record.host.is_some();
            let known = self.truth.decisions.insert(incarnation, stay);
            let first = known.is_none();
            self.coverage.restores_settled += u64::from(first && stay);
            self.coverage.restores_given_up_by_a_member += u64::from(first && !stay);
        }
    }

    fn decision_of(&self, op: OpId) -> Option<bool> {
        let incarnation = self.restore_of(op)?.incarnation;
        self.truth.decisions.get(&incarnation).copied()
    }

    /// A member is told that all stay.
    pub(crate) fn check_stays(&mut self, op: OpId, member: Member) {
        let all = self.restore_of(op).is_some_and(|restore| restore.ran.iter().all(|ran| *ran));
        if self.decision_of(op) != Some(true) || !all {
            self.violation(format!("{member:?} is to stay, and not all were to"));
        }
    }

    /// A member that runs is stopped for its restore's sake.
    pub(crate) fn check_stopped(&mut self, op: OpId, vm: VmId) {
        if self.decision_of(op) == Some(true) {
            let member = self.vms[vm.0].member;
            self.violation(format!("{member:?} is stopped, and all were to stay"));
        }
    }

    /// A host says that its member has ended.
    pub(crate) fn check_ended(&mut self, op: OpId, job: &Job, report: &Report) {
        let ended = matches!(report, Report::Failed { .. } | Report::Aborted);
        let vm = self.vm_on(job.host, job.member);
        let runs = vm.is_some_and(|vm| self.vms[vm.0].restored_by == Some(op));
        if ended && runs {
            self.violation(format!("{:?} is said to have ended, and runs", job.member));
        }
    }

    /// The command has returned.
    pub(crate) fn check_restored(&mut self, op: OpId, failed: bool) {
        let of_it = |vm: &&super::world::Vm| vm.alive && vm.restored_by == Some(op);
        let running = self.vms.iter().filter(of_it).count();
        let decided = self.decision_of(op);
        match failed {
            true => {
                self.coverage.restores_failed += 1;
                // A host that was not heard may still be about to stop its own.
                self.coverage.restores_failed_beside_a_member += u64::from(running > 0);
                if decided == Some(true) {
                    self.violation("a restore is said to have failed, and its members stay".into());
                }
            }
            false => {
                self.coverage.restores_done += 1;
                self.operator.restores += u32::from(self.is_calm && self.operator.snapshots > 0);
                if decided != Some(true) {
                    self.violation("a restore is said to be done, and nobody decided so".into());
                }
            }
        }
    }
}

/// The end.
impl World {
    /// Whether nothing is under way any more.
    pub(crate) fn is_quiet(&self) -> bool {
        self.unquiet().is_none()
    }

    /// Whether a command waits for an arbiter that is away for good.
    pub(crate) fn waits_for_arbiter(&self, op: &Op) -> bool {
        let away = self.schedule.lasting == Some(Lasting::Arbiter) && self.has_lasted;
        away && matches!(op.kind, OpKind::Restore(_))
    }

    fn unquiet(&self) -> Option<String> {
        let decides = self.schedule.lasting != Some(Lasting::Arbiter);
        for (op, one) in self.ops.iter().enumerate().filter(|(_, one)| !one.over) {
            if !self.waits_for_arbiter(one) {
                return Some(format!("command {op} has not returned"));
            }
        }
        for host in &self.hosts {
            for (member, taking) in &host.takings {
                if taking.armed.is_some() || taking.cohort.deadline().is_some() {
                    let phase = taking.cohort.phase();
                    return Some(format!("{member:?} is in a snapshot: {phase:?}"));
                }
            }
            for (member, restoring) in host.restorings.iter().filter(|_| decides) {
                let phase = restoring.cohort.phase();
                if !restoring.cohort.is_over() && *phase != CohortPhase::Idle {
                    return Some(format!("{member:?} is in a restore: {phase:?}"));
                }
            }
        }
        None
    }

    pub(crate) fn unfinished(&self) -> String {
        self.unquiet().unwrap_or_else(|| {
            let (snapshots, restores) = (self.operator.snapshots, self.operator.restores);
            format!("{snapshots} snapshots and {restores} restores have gone well since")
        })
    }

    /// Nothing is under way any more: of each restore all stay, or none.
    pub(crate) fn check_quiet(&mut self) {
        let runs = |vm: &&super::world::Vm| vm.alive && !vm.frozen;
        let restored =
            self.vms.iter().filter(runs).filter_map(|vm| Some((vm.member, vm.restored_by?)));
        let undecided = restored.into_iter().find(|(_, op)| self.decision_of(*op) != Some(true));
        let decides = self.schedule.lasting != Some(Lasting::Arbiter);
        if let Some((member, _)) = undecided.filter(|_| decides) {
            self.violation(format!("{member:?} runs on, of a restore that came to nothing"));
        }
    }

    /// No command lasts for ever.
    pub(crate) fn check_age(&mut self, op: OpId) {
        let waits = self.waits_for_arbiter(&self.ops[op.0]);
        if self.age(op) > LASTS && !self.ops[op.0].over && !waits {
            self.violation(format!("command {} has lasted for {:?}", op.0, self.age(op)));
        }
    }
}
