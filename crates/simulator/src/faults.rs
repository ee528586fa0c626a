//! Faults strike, end, and are made good.

use crate::host::{HostId, Role};
use crate::schedule::{Fault, Moment, Planned, Target, When};
use crate::world::{Event, World};
use std::time::Duration;
use understudy_protocol::{BackupPhase, PrimaryPhase};
use understudy_session::primary::Event as PrimaryEvent;

impl World {
    /// Strikes with the faults that wait for what happens now.
    pub(crate) fn moment(&mut self, moment: Moment) {
        let mut due = Vec::new();
        for planned in &mut self.triggers {
            if let When::Upon(awaited, times) = &mut planned.when {
                if *awaited == moment {
                    *times -= 1;
                    if *times == 0 {
                        due.push(planned.fault);
                    }
                }
            }
        }
        let waits = |planned: &Planned| !matches!(planned.when, When::Upon(_, 0));
        self.triggers.retain(waits);
        for fault in due {
            let soon = self.random.micros(0, 400);
            self.after(soon, Event::Strike(fault));
        }
    }

    pub(crate) fn strike(&mut self, fault: Fault) {
        if self.now >= self.schedule.calm_from {
            return;
        }
        self.note_world(|| format!("FAULT {fault:?}"));
        self.coverage.faults += 1;
        self.count_in_turn(fault);
        self.excuse(format!("{fault:?}"));
        self.must_survive = self.schedule.faults.len() == 1
            && fault.is_survivable()
            && self.hosts.iter().any(|host| self.is_well_protected(&host.role));
        match fault {
            Fault::PowerLoss(target, span) => self.on(target, |w, host| w.power_off(host, span)),
            Fault::AllPowerLoss(span) => {
                for host in (0..self.hosts.len()).map(HostId) {
                    let span = span + self.random.millis(0, 300);
                    self.power_off(host, span);
                }
            }
            Fault::DaemonDeath(target, span) => {
                self.on(target, |w, host| w.daemon_dies(host, span, true));
            }
            Fault::QemuDeath(target) => self.on(target, World::qemu_dies),
            Fault::OtherDeath => self.on(Target::Backup, World::other_dies),
            Fault::QemuHang => self.on(Target::Primary, World::qemu_hangs),
            Fault::SickGuest(span) => {
                self.on(Target::Primary, |w, host| w.guest_falls_sick(host, span));
            }
            Fault::Partition(span) => {
                self.cut_for(true, span);
                self.cut_for(false, span);
            }
            Fault::OneWay(outward, span) => self.cut_for(outward, span),
            Fault::Isolation(target, span) => self.on(target, |w, host| w.isolate(host, span)),
            Fault::ArbiterCut(target, span) => self.on(target, |w, host| {
                w.arbiter.cut_off.insert(host);
                w.after(span, Event::ArbiterBack(Some(host)));
            }),
            Fault::ArbiterDown(span) => {
                self.arbiter.down = true;
                self.after(span, Event::ArbiterBack(None));
            }
            Fault::Path(flaw, in_use, span) => self.path_fails(flaw, in_use, span),
            Fault::Break(true) if self.schedule.paths > 1 => self.data_breaks(),
            Fault::Break(data) => {
                let connections = self.session_connections();
                if let Some(id) = connections.get(usize::from(!data)) {
                    self.break_connection(*id);
                }
            }
            Fault::Stall(target, span) => self.on(target, |w, host| {
                let stalled = &mut w.hosts[host.0];
                // One that stands still already does so for no shorter.
                let begun = stalled.stalled_until.max(w.now);
                if begun == w.now {
                    stalled.stalled_from = w.now;
                }
                let until = begun.max(w.now + span);
                stalled.slept += until - begun;
                stalled.stalled_until = until;
                w.coverage.stalls += 1;
            }),
            Fault::HungDisk(span) => self.on(Target::Backup, |w, host| {
                let hangs_until = w.hosts[host.0].disk_hangs_until;
                if hangs_until <= w.now {
                    w.hosts[host.0].disk_hangs_from = w.now;
                }
                w.hosts[host.0].disk_hangs_until = hangs_until.max(w.now + span);
                w.coverage.hung_disks += 1;
            }),
            Fault::HungRecord(span) => self.on(Target::Backup, |w, host| {
                w.hosts[host.0].record_hangs_until = w.now + span;
                w.coverage.hung_records += 1;
            }),
            Fault::FailingDisk(times) => self.on(Target::Backup, |w, host| {
                w.hosts[host.0].disk_fails = times.max(w.hosts[host.0].disk_fails);
            }),
            Fault::Divergence => self.on(Target::Backup, World::diverge),
            Fault::DataStall(unread, span) => {
                if let Some(id) = self.session_connections().first() {
                    self.stall_data(*id, unread);
                    self.after(span, Event::DataFlows(*id));
                }
            }
            Fault::Delay(delay, span) => {
                self.network.extra_delay += delay;
                self.after(span, Event::DelayEnds(delay));
            }
            Fault::SlowData(spacing, span) => {
                self.network.spacing = spacing;
                self.after(span, Event::DataQuickens);
            }
            Fault::Damage => self.network.damage = true,
            Fault::Failover => self.ask_hand_over(),
            Fault::Unprotect => self.unprotect(),
            Fault::Lasts(what) => self.lasts(what),
            Fault::Force(stalls, span) => {
                self.unprotect();
                let soon = self.lease_random.millis(50, 300);
                self.after(soon, Event::Force(stalls, span));
            }
        }
        self.check_image();
        self.check_records();
    }

    /// Where there are several paths, a session's data outlives its connection.
    fn data_breaks(&mut self) {
        if let Some((host, id, _)) = self.session_of_now() {
            self.leave_path(host, id);
        }
    }

    /// Whether this is a primary whose backup follows it, so that either may fail.
    fn is_well_protected(&self, role: &Role) -> bool {
        let Role::Primary(running) = role else { return false };
        let Some(session) = &running.session else { return false };
        let standing = match &self.hosts[session.peer.0].role {
            Role::Backup(standby) => *standby.core.phase() == BackupPhase::Standing,
            _ => false,
        };
        standing && *session.core.phase() == PrimaryPhase::Protected
    }

    pub(crate) fn primary_host(&self) -> Option<HostId> {
        let is_primary = |host: &HostId| matches!(self.hosts[host.0].role, Role::Primary(_));
        let mut all = (0..self.hosts.len()).map(HostId).filter(is_primary);
        all.clone().find(|host| !self.hosts[host.0].is_frozen()).or_else(|| all.next())
    }

    fn backup_host(&self) -> Option<HostId> {
        let is_backup = |host: &HostId| matches!(self.hosts[host.0].role, Role::Backup(_));
        (0..self.hosts.len()).map(HostId).find(is_backup)
    }

    /// Does `what` to the target, if there is one and it has power.
    fn on(&mut self, target: Target, what: impl FnOnce(&mut World, HostId)) {
        let host = match target {
            Target::Primary => self.primary_host(),
            Target::Backup => self.backup_host(),
            Target::Host(number) => Some(HostId(number)),
        };
        if let Some(host) = host.filter(|host| self.hosts[host.0].up) {
            self.note(host, || "is struck".to_owned());
            what(self, host);
        }
    }

    pub(crate) fn power_off(&mut self, id: HostId, span: Duration) {
        if !self.hosts[id.0].up {
            return;
        }
        self.daemon_dies(id, span, false);
        self.hosts[id.0].image.lose_power(&mut self.random);
        self.coverage.power_losses += 1;
        if self.hosts.iter().all(|host| !host.up) {
            self.coverage.all_powerless += 1;
        }
    }

    pub(crate) fn daemon_dies(&mut self, id: HostId, span: Duration, told: bool) {
        if let Role::Backup(standby) = &self.hosts[id.0].role {
            self.perhaps_recorded(id, standby.id);
        }
        self.drop_connections(id, told);
        let host = &mut self.hosts[id.0];
        host.role = Role::Idle;
        host.former.clear();
        host.up = false;
        host.life += 1;
        let event = Event::PowerOn(id, host.life);
        self.after(span, event);
    }

    pub(crate) fn power_on(&mut self, id: HostId, life: u32) {
        let host = &mut self.hosts[id.0];
        if !host.up && host.life == life {
            host.up = true;
            host.stalled_until = self.now;
            self.note(id, || "is back, empty-handed".to_owned());
        }
    }

    fn qemu_dies(&mut self, host: HostId) {
        let (mut session, mut standby) = (None, None);
        match &self.hosts[host.0].role {
            Role::Primary(running) => session = Some(running.session.as_ref().map(|s| s.id)),
            Role::Backup(backup) => standby = Some(backup.id),
            Role::Idle | Role::Fenced => {}
        }
        if let Some(session) = session {
            self.coverage.guest_deaths += 1;
            match session {
                Some(id) => self.primary_event(
                    host,
                    id,
                    PrimaryEvent::GuestDied("its QEMU died".to_owned()),
                ),
                None => self.hosts[host.0].role = Role::Fenced,
            }
        }
        if let Some(id) = standby {
            self.standby_breaks(host, id);
        }
    }

    fn qemu_hangs(&mut self, host: HostId) {
        let Role::Primary(running) = &self.hosts[host.0].role else { return };
        let Some(session) = &running.session else { return };
        let (id, reason) = (session.id, "its QEMU does not answer".to_owned());
        self.primary_event(host, id, PrimaryEvent::GuestSick(reason));
    }

    /// Makes a guest sick: its primary says so once a checkpoint is due that it cannot take.
    fn guest_falls_sick(&mut self, host: HostId, span: Duration) {
        if !self.is_well_protected(&self.hosts[host.0].role) {
            return;
        }
        let until = self.now + span;
        let Some(running) = self.hosts[host.0].running() else { return };
        running.sick_until = until;
        let Some(session) = &mut running.session else { return };
        session.hung = true;
        let (id, reason) = (session.id, "no checkpoint can be taken".to_owned());
        self.coverage.sick_guests += 1;
        self.after(span, Event::Recovers(host));
        self.primary_event(host, id, PrimaryEvent::CannotCapture(reason));
    }

    fn cut_for(&mut self, outward: bool, span: Duration) {
        let (Some(primary), Some(backup)) = (self.primary_host(), self.backup_host()) else {
            return;
        };
        let (from, to) = if outward { (primary, backup) } else { (backup, primary) };
        self.cut(from, to);
        self.after(span, Event::Heal(from, to));
    }

    fn isolate(&mut self, host: HostId, span: Duration) {
        self.arbiter.cut_off.insert(host);
        self.after(span, Event::ArbiterBack(Some(host)));
        for other in (0..self.hosts.len()).map(HostId).filter(|other| *other != host) {
            for (from, to) in [(host, other), (other, host)] {
                self.cut(from, to);
                self.after(span, Event::Heal(from, to));
            }
        }
    }

    pub(crate) fn arbiter_back(&mut self, host: Option<HostId>) {
        match host {
            Some(host) if self.schedule.without_arbiter == Some(host.0) => {}
            Some(host) => {
                self.arbiter.cut_off.remove(&host);
            }
            None => self.arbiter.down = false,
        }
    }

    /// Begins the calm: nothing fails any more but what stays, and the operator wants protection. A
    /// host that is asleep wakes up, and a disk that hangs answers, in its own time.
    pub(crate) fn calm(&mut self) {
        self.note_world(|| "CALM: nothing fails from here on".to_owned());
        self.triggers.clear();
        self.arbiter.down = false;
        self.arbiter.cut_off = self.schedule.without_arbiter.map(HostId).into_iter().collect();
        self.schedule.lost_answers = 0;
        self.network.extra_delay = Duration::ZERO;
        self.network.spacing = Duration::ZERO;
        self.network.damage = false;
        self.heal_all();
        self.let_data_flow(None);
        for id in (0..self.hosts.len()).map(HostId) {
            let life = self.hosts[id.0].life;
            if self.schedule.never_returns != Some(id.0) {
                self.power_on(id, life);
            }
            self.guest_recovers(id);
            self.hosts[id.0].disk_fails = 0;
        }
        self.persist();
        self.want_protection();
    }
}
