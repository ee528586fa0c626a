//! What fails among a cluster's hosts, and comes back.

use super::restore::Restoring;
use super::schedule::{Fault, Lasting, Who};
use super::world::{Event, Host, Job, VmId, World};
use crate::host::HostId;
use std::time::Duration;
use understudy_snapshot::{Cohort, Incarnation, Member};

/// Time after which connections over a way that carries nothing end.
const UNHEARD: (u64, u64) = (4_000, 12_000);

/// Pause before an arbiter that did not answer is asked again.
const ASKED_AGAIN: Duration = Duration::from_secs(1);

/// Longer than any schedule.
const FOR_GOOD: Duration = Duration::from_secs(1_000_000);

impl World {
    fn who(&self, who: Who) -> HostId {
        let last = self.ops.last().map_or(HostId(0), |op| op.host);
        match who {
            Who::Host(host) => host,
            Who::Coordinator => last,
        }
    }

    pub(crate) fn strike(&mut self, fault: Fault) {
        if self.is_calm {
            return;
        }
        self.coverage.cluster_faults += 1;
        self.note(None, || fault.to_string());
        match fault {
            Fault::Power(who, time) => {
                let host = self.who(who);
                self.host_down(host, true, time);
            }
            Fault::Daemon(who, time) => {
                let host = self.who(who);
                self.host_down(host, false, time);
            }
            Fault::Qemu(member) => {
                let member = Member(member as u16);
                if let Some(vm) = self.running(member) {
                    self.end_vm(vm);
                }
            }
            Fault::Stall(who, time) => {
                let host = self.who(who);
                self.hosts[host.0].stalled_until = self.now + time;
            }
            Fault::Cut(who, to, both, time) => {
                let from = self.who(who);
                self.cut_way(from, to, time);
                if both {
                    self.cut_way(to, from, time);
                }
            }
            Fault::Break(who, other) => {
                let one = self.who(who);
                self.break_connections(one, other);
            }
            Fault::Arbiter(None, time) => {
                self.arbiter.down += 1;
                self.after(time, Event::ArbiterBack(None));
            }
            Fault::Arbiter(Some(who), time) => {
                let host = self.who(who);
                self.arbiter.cut_off.push(host);
                self.after(time, Event::ArbiterBack(Some(host)));
            }
            Fault::Store(time) => {
                self.store.away += 1;
                self.after(time, Event::StoreBack);
            }
            Fault::StoreFull => self.store.full += 1,
            Fault::Slow(time) => {
                self.slow += 1;
                self.after(time, Event::QuickAgain);
            }
        }
    }

    /// A part fails that calm does not mend.
    pub(crate) fn lasts(&mut self, what: Lasting) {
        if std::mem::replace(&mut self.has_lasted, true) {
            return;
        }
        self.note(None, || format!("for good: {what:?}"));
        self.coverage.cluster_faults_that_stay += 1;
        match what {
            Lasting::Store => self.store.away = self.store.away.max(1),
            Lasting::OneWay(from, to) => self.cut_way(from, to, FOR_GOOD),
            Lasting::Host(host) => self.host_down(host, true, FOR_GOOD),
            Lasting::Arbiter => self.arbiter.down += 1,
        }
    }

    /// A host's daemon dies, or all of the host. VMs go with it, but for those that outlive a daemon.
    fn host_down(&mut self, host: HostId, power: bool, time: Duration) {
        if !self.hosts[host.0].up {
            return;
        }
        self.drop_connections(host);
        let former = &self.hosts[host.0];
        let life = former.life + 1;
        self.hosts[host.0] = Host { life, ..Host::default() };
        for op in self.ops.iter_mut().filter(|op| op.host == host && !op.over) {
            op.over = true;
            self.coverage.coordinators_died += 1;
        }
        let here: Vec<VmId> = self.vms_here(host).collect();
        for vm in here {
            let stays = self.vms[vm.0].entrusted && !power;
            match stays {
                true => (self.vms[vm.0].frozen, self.vms[vm.0].seated) = (true, false),
                false => self.end_vm(vm),
            }
        }
        self.after(time, Event::PowerOn(host, life));
    }

    fn vms_here(&self, host: HostId) -> impl Iterator<Item = VmId> + '_ {
        self.vms.iter().filter(move |vm| vm.alive && vm.host == host).map(|vm| vm.id)
    }

    pub(crate) fn power_on(&mut self, host: HostId, life: u32) {
        let is_it = self.hosts[host.0].life == life && !self.hosts[host.0].up;
        if !is_it {
            return;
        }
        self.note(Some(host), || "is there again".to_owned());
        self.hosts[host.0].up = true;
        let here: Vec<VmId> = self.vms_here(host).collect();
        for vm in here {
            self.soon(50, 500, Event::Adopts(host, life, vm));
        }
    }

    fn cut_way(&mut self, from: HostId, to: HostId, time: Duration) {
        if from == to {
            return;
        }
        self.cut_count += 1;
        let cut = self.cut_count;
        self.cuts.push((from, to, cut));
        self.after(time, Event::Heal(from, to, cut));
        self.soon(UNHEARD.0, UNHEARD.1, Event::ConnectionsEnd(from, to, cut));
    }

    pub(crate) fn heal(&mut self, from: HostId, to: HostId, cut: u32) {
        self.cuts.retain(|it| it.2 != cut);
        if !self.is_cut(from, to) {
            self.flow(from, to);
        }
    }

    pub(crate) fn connections_end(&mut self, from: HostId, to: HostId, cut: u32) {
        if self.cuts.iter().any(|it| it.2 == cut) {
            self.break_connections(from, to);
        }
    }

    pub(crate) fn arbiter_back(&mut self, host: Option<HostId>) {
        match host {
            None => self.arbiter.down = self.arbiter.down.saturating_sub(1),
            Some(host) => {
                let place = self.arbiter.cut_off.iter().position(|it| *it == host);
                if let Some(at) = place {
                    self.arbiter.cut_off.swap_remove(at);
                }
            }
        }
    }

    /// Nothing fails any more, but for what stays.
    pub(crate) fn calm(&mut self) {
        self.note(None, || "calm".to_owned());
        self.is_calm = true;
        self.schedule.lost_answers = 0;
        self.triggers.clear();
        let stays = self.schedule.lasting;
        let cuts = self.cuts.clone();
        for (from, to, cut) in cuts {
            if stays != Some(Lasting::OneWay(from, to)) {
                self.heal(from, to, cut);
            }
        }
        self.arbiter.cut_off.clear();
        self.arbiter.down = u32::from(stays == Some(Lasting::Arbiter));
        (self.store.full, self.store.away) = (0, u32::from(stays == Some(Lasting::Store)));
        self.slow = 0;
        for host in (0..self.hosts.len()).map(HostId) {
            if stays != Some(Lasting::Host(host)) {
                self.power_on(host, self.hosts[host.0].life);
            }
        }
    }

    /// A daemon finds a VM of the one before it, which stands still: it goes on if it is still its own.
    pub(crate) fn adopts(&mut self, host: HostId, life: u32, id: VmId) {
        let vm = &self.vms[id.0];
        if self.hosts[host.0].life != life || !vm.alive {
            return;
        }
        let (member, generation, op) = (vm.member, vm.generation, vm.restored_by);
        let record = self.consult(host, |arbiter| arbiter.vms[member.index()]);
        let incarnation = self.consult(host, |arbiter| arbiter.incarnation.generation);
        let (Some(record), Some(incarnation)) = (record, incarnation) else {
            return self.after(ASKED_AGAIN, Event::Adopts(host, life, id));
        };
        if (record.host, record.generation) != (Some(host), generation.0) {
            return self.end_vm(id);
        }
        let (vms, number) = (self.running(member), self.hosts[host.0].number);
        if vms.is_some() {
            self.violation(format!("{member:?} goes on beside another copy of it"));
        }
        let mut vm = self.new_vm(host, member, generation);
        let joined = self.join(&mut vm, Incarnation(incarnation as u32), number);
        let adopted = &mut self.vms[id.0];
        (adopted.frozen, adopted.seated) = (false, joined.is_ok());
        (adopted.cut, adopted.gate, adopted.incarnation) = (vm.cut, vm.gate, vm.incarnation);
        let held = std::mem::take(&mut adopted.held);
        self.truth.lost.extend(held.into_keys());
        self.coverage.restored_outlived_daemon += 1;
        self.note(Some(host), || format!("{member:?} goes on, with a new daemon"));
        self.soon(1, 60, Event::GuestStep(id));
        self.tell_all(host);
        if let Some(op) = op {
            let resumed = Restoring::new(op, Cohort::resumed(self.now));
            self.hosts[host.0].restorings.insert(member, resumed);
            let job = Job { host, life, member, id: op.0 as u64 };
            self.soon(50, 2_000, Event::Completes(job));
        }
    }
}
