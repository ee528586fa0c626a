//! Who orders snapshots and restores, stops and starts VMs, and does not always wait for the end.

use super::world::{Event, Op, OpId, OpKind, Vm, World};
use crate::host::HostId;
use std::time::Duration;
use understudy_protocol::{Generation, Verdict};
use understudy_snapshot::{Incarnation, Member, SnapshotNumber, TakerEvent};

/// The operator, and how far it has come.
#[derive(Debug, Default)]
pub(crate) struct Operator {
    /// Snapshots and restores that went well since nothing fails any more.
    pub(crate) snapshots: u32,
    pub(crate) restores: u32,
    /// Snapshots that were ordered since then.
    tried: u32,
    done: bool,
}

impl Operator {
    pub(crate) fn is_done(&self) -> bool {
        self.done
    }
}

impl World {
    /// Looks, and orders something.
    pub(crate) fn operate(&mut self) {
        let (low, high) = if self.is_calm { (500, 700) } else { (100, 1_500) };
        self.soon(low, high, Event::Operator);
        if self.ops.iter().any(|op| !op.over && !self.waits_for_arbiter(op)) {
            if self.schedule.impatient && !self.is_calm && self.random.percent(25) {
                self.interfere();
            }
            return;
        }
        if self.is_calm && self.wants_no_more() {
            if self.is_quiet() {
                self.check_quiet();
                self.operator.done = true;
            }
            return;
        }
        self.operator.tried += u32::from(self.is_calm);
        let all_run = self.members().all(|member| self.running(member).is_some());
        // Of two restores at once the later one's life counts for whoever starts by itself, although the
        // earlier one came about: its members have no network beside that one.
        let here: Vec<&Vm> = self.vms.iter().filter(|vm| vm.alive && !vm.frozen).collect();
        if here.iter().any(|vm| !vm.seated || vm.incarnation != here[0].incarnation) {
            self.coverage.members_without_network += 1;
            return self.stop_all();
        }
        let may_restore = !self.store.manifests.is_empty();
        let wants_restore = match self.is_calm {
            true => self.operator.snapshots > 0,
            false => self.random.percent(40),
        };
        match (all_run, may_restore && wants_restore) {
            (true, false) => self.order_snapshot(),
            (_, true) => {
                self.stop_all();
                self.order_restore();
            }
            (false, false) => self.boot_missing(),
        }
    }

    /// Whether all that was wanted once nothing fails any more was done, or tried.
    fn wants_no_more(&self) -> bool {
        match self.schedule.lasting {
            None => self.operator.snapshots > 0 && self.operator.restores > 0,
            Some(_) => self.operator.tried > 2,
        }
    }

    /// Does something else before what was ordered has ended.
    fn interfere(&mut self) {
        self.coverage.operators_impatient += 1;
        match self.random.below(5) {
            0 => self.boot_missing(),
            1 => {
                let member = Member(self.random.index(self.schedule.places.len()) as u16);
                self.stop(member);
            }
            2 => {
                let last = OpId(self.ops.len() - 1);
                self.taker(last, TakerEvent::Cancel);
            }
            3 => self.order_restore(),
            _ => self.order_snapshot(),
        }
    }

    fn any_host(&mut self) -> HostId {
        HostId(self.random.index(self.hosts.len()))
    }

    fn order_snapshot(&mut self) {
        let own = self.any_host();
        let places: Option<Vec<HostId>> = self
            .members()
            .map(|member| self.running(member).map(|vm| self.vms[vm.0].host))
            .collect();
        let answers = |host: &HostId| *host == own || self.reach(own, *host);
        let Some(hosts) = places.filter(|hosts| hosts.iter().all(answers)) else { return };
        if !self.hosts[own.0].up || self.is_stalled(own) || self.store.away > 0 {
            return;
        }
        if self.consult(own, |_| ()).is_none() {
            return;
        }
        let others = self.ops.iter().any(|op| !op.over && matches!(op.kind, OpKind::Take(_)));
        self.coverage.snapshots_at_once += u64::from(others);
        let known = (0..self.hosts.len()).map(HostId).filter(|host| self.hosts[host.0].up);
        let heard = known.filter(|host| *host == own || self.reach(own, *host));
        let after = heard.map(|host| self.hosts[host.0].number).max().unwrap_or_default();
        let there = [self.store.manifests.keys().last(), self.store.marks.last()];
        let number = there.into_iter().flatten().copied().fold(after, SnapshotNumber::max).next();
        self.store.marks.insert(number);
        self.store.swept.remove(&number);
        let op = self.new_op(own, hosts);
        self.begin_take(op, number);
    }

    fn new_op(&mut self, host: HostId, hosts: Vec<HostId>) -> OpId {
        let life = self.hosts[host.0].life;
        let op = OpId(self.ops.len());
        let kind = OpKind::New;
        self.ops.push(Op { host, life, hosts, since: self.now, over: false, kind });
        op
    }

    fn order_restore(&mut self) {
        let own = self.any_host();
        if !self.hosts[own.0].up || self.is_stalled(own) || self.store.away > 0 {
            return;
        }
        let numbers: Vec<SnapshotNumber> = self.store.manifests.keys().copied().collect();
        let Some(&last) = numbers.last() else { return };
        let number = match self.random.percent(70) {
            true => last,
            false => numbers[self.random.index(numbers.len())],
        };
        if !self.run_nowhere(own) {
            self.coverage.restores_not_begun += 1;
            return;
        }
        let Some(hosts) = self.place(own, number) else { return };
        let won = self.consult(own, |arbiter| {
            let from = Generation(arbiter.incarnation.generation);
            arbiter.incarnation.swap(from, Some(own))
        });
        let Some(Verdict::Granted(won)) = won else { return };
        let op = self.new_op(own, hosts);
        self.begin_restore(op, number, Incarnation(won.0 as u32));
    }

    /// Whether no member runs, by all that answer, and whoever owns one does.
    fn run_nowhere(&self, own: HostId) -> bool {
        let answers = |host: HostId| host == own || self.reach(own, host);
        self.members().all(|member| {
            let owner = self.arbiter.vms[member.index()].host;
            let there = (0..self.hosts.len()).map(HostId).filter(|host| answers(*host));
            let runs = there.into_iter().any(|host| self.has_or_claims(host, member));
            !runs && owner.is_none_or(answers)
        })
    }

    /// Hosts to which the members go: where each ran, or any that answer.
    fn place(&mut self, own: HostId, number: SnapshotNumber) -> Option<Vec<HostId>> {
        let answer: Vec<HostId> = (0..self.hosts.len())
            .map(HostId)
            .filter(|host| (*host == own && self.hosts[own.0].up) || self.reach(own, *host))
            .collect();
        let moved = self.random.percent(30);
        let parts = self.store.manifests[&number].clone();
        let mut hosts = Vec::new();
        for part in parts {
            let former = self.vms[self.truth.parts[part].vm.0].host;
            let other = *answer.get(self.random.index(answer.len().max(1)))?;
            hosts.push(if answer.contains(&former) && !moved { former } else { other });
        }
        Some(hosts)
    }

    fn stop_all(&mut self) {
        self.members().for_each(|member| self.stop(member));
    }

    fn stop(&mut self, member: Member) {
        let Some(vm) = self.running(member) else { return };
        let (host, generation) = (self.vms[vm.0].host, self.vms[vm.0].generation);
        if !self.hosts[host.0].up || self.is_stalled(host) {
            return;
        }
        self.note(Some(host), || format!("{member:?} is stopped"));
        self.end_vm(vm);
        self.release(host, member, generation);
    }

    fn boot_missing(&mut self) {
        for member in self.members() {
            if self.running(member).is_none() {
                let host = self.any_host();
                self.boot(host, member);
            }
        }
    }

    /// A VM is started by itself, on its disks.
    pub(crate) fn boot(&mut self, host: HostId, member: Member) {
        if !self.hosts[host.0].up || self.is_stalled(host) {
            return;
        }
        let restoring = self.hosts[host.0].restorings.get(&member);
        if restoring.is_some_and(|restoring| !restoring.cohort.is_over()) {
            return;
        }
        let owner = self.arbiter.vms[member.index()].host;
        let answers = |other: HostId| other == host || self.reach(host, other);
        let runs = (0..self.hosts.len()).any(|other| self.has_or_claims(HostId(other), member));
        if runs || !owner.is_none_or(answers) {
            return;
        }
        let won = self.consult(host, |arbiter| {
            let record = &mut arbiter.vms[member.index()];
            let won = record.swap(Generation(record.generation), Some(host));
            (won, Incarnation(arbiter.incarnation.generation as u32))
        });
        let Some((Verdict::Granted(generation), incarnation)) = won else { return };
        let mut vm = self.new_vm(host, member, generation);
        let number = self.hosts[host.0].number;
        if self.join(&mut vm, incarnation, number).is_err() {
            return self.release(host, member, generation);
        }
        self.note(Some(host), || format!("{member:?} is started by itself"));
        self.start_vm(vm);
        self.tell_all(host);
    }

    /// Time since a command was given.
    pub(crate) fn age(&self, op: OpId) -> Duration {
        self.now - self.ops[op.0].since
    }
}
