//! How a member's restore ends: all of it is loaded, the arbiter has decided, or it comes to nothing.

use super::restore::{AGAIN, LOOK};
use super::world::{Event, Job, World};
use understudy_snapshot::{CohortEvent, Decision};

impl World {
    pub(crate) fn completes(&mut self, job: Job) {
        if self.store.away > 0 && self.is_of(&job) {
            return self.after(AGAIN, Event::Completes(job));
        }
        let Some(restoring) = self.restoring(&job) else { return };
        if !restoring.stop {
            self.restoring_event(&job, CohortEvent::Complete);
        }
    }

    pub(crate) fn entrusts(&mut self, job: Job) {
        let Some(op) = self.restoring(&job).map(|restoring| restoring.op) else { return };
        let vm = self.vm_on(job.host, job.member);
        if let Some(vm) = vm.filter(|vm| self.vms[vm.0].restored_by == Some(op)) {
            self.vms[vm.0].entrusted = true;
        }
    }

    /// The coordinator is silent: does the VM stay?
    pub(crate) fn asks(&mut self, job: Job) {
        let Some(restoring) = self.restoring(&job) else { return };
        restoring.unheard = 0;
        let op = restoring.op;
        let Some(incarnation) = self.restore_of(op).map(|one| one.incarnation) else { return };
        self.coverage.members_asked += 1;
        let before = Decision::before(incarnation);
        let record = self.consult(job.host, |arbiter| {
            arbiter.decision.swap(before, None);
            arbiter.decision.ownership()
        });
        self.note_decision(incarnation);
        // Asked again without an answer.
        let Some(record) = record else { return };
        let decision = Decision::of_record(Some(&record), incarnation);
        self.soon(1, 200, Event::Answered(job, decision));
    }

    pub(crate) fn answered(&mut self, job: Job, decision: Decision) {
        match decision {
            Decision::Settled => self.coverage.members_settled_by_arbiter += 1,
            Decision::GivenUp => self.coverage.members_given_up_by_arbiter += 1,
        }
        self.restoring_event(&job, CohortEvent::Decided(decision));
    }

    pub(crate) fn discards(&mut self, job: Job) {
        let vm = self.vm_on(job.host, job.member);
        let Some(restoring) = self.restoring(&job) else { return };
        let (op, waits) = (restoring.op, restoring.workers > 0);
        if let Some(vm) = vm.filter(|vm| self.vms[vm.0].restored_by == Some(op)) {
            self.stop_restored(vm, op);
        }
        match waits {
            true => self.after(LOOK, Event::Discards(job)),
            false => self.restoring_event(&job, CohortEvent::Discarded),
        }
    }
}
