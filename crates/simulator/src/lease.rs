//! The driver of [`Lease`](understudy_protocol::Lease), and of an operator who forces the VM onto
//! another host while its sole owner is silent.

use crate::host::{CopyId, HostId, Role};
use crate::schedule::{Fault, Target};
use crate::world::{Event, World};
use std::time::Duration;
use understudy_protocol::validity::ImageRole;
use understudy_protocol::{
    Generation, LeaseAction, LeaseAnswer, LeaseErrand, LeaseSight, LeaseWatch, Renewal, Stake,
    Time, Verdict,
};
use understudy_session::primary::Event as PrimaryEvent;

/// The length of a lease, shorter than the product's, as the schedules are.
pub const LENGTH: Duration = Duration::from_millis(800);
const LOOK: Duration = Duration::from_millis(20);

/// An errand to the arbiter, on its way.
#[derive(Clone, Debug)]
pub struct Tending {
    host: HostId,
    copy: CopyId,
    generation: Generation,
    errand: LeaseErrand,
    asked: Time,
}

impl Tending {
    /// The host whose errand it is.
    pub fn host(&self) -> HostId {
        self.host
    }
}

/// An operator who wants the VM on this host.
#[derive(Clone, Debug)]
pub struct Forcing {
    host: HostId,
    /// The generation of the former owner.
    generation: Generation,
    watch: LeaseWatch,
    last: Option<Renewal>,
}

impl World {
    /// The lease of a copy is looked at for as long as that runs.
    pub(crate) fn look_at_lease(&mut self, host: HostId, copy: CopyId) {
        let (now, stake) = (self.clock(host), self.stake(host));
        let Some(running) = self.hosts[host.0].running().filter(|it| it.copy == copy) else {
            return;
        };
        let actions = running.lease.tick(now, stake);
        self.lease_acts(host, actions);
        self.after(LOOK, Event::LeaseLook(host, copy));
    }

    fn stake(&self, host: HostId) -> Stake {
        let others = self.hosts.iter().enumerate().filter(|(other, _)| *other != host.0);
        let copied = others.map(|(_, other)| other).any(|other| other.image.record.is_some());
        let Role::Primary(running) = &self.hosts[host.0].role else { return Stake::Nothing };
        let guards = running.session.as_ref().map(|session| session.core.guards_output());
        Stake::of(guards, copied)
    }

    fn lease_acts(&mut self, host: HostId, actions: Vec<LeaseAction>) {
        for action in actions {
            let Some(running) = self.hosts[host.0].running() else { return };
            match action {
                LeaseAction::Limit(until) => running.limit = until,
                LeaseAction::Ask(errand) => self.tend(host, errand),
                LeaseAction::Freeze(_) => {
                    self.note(host, || "its lease has run out".to_owned());
                    self.coverage.leases_run_out += 1;
                    self.stop_guest(host);
                }
                LeaseAction::GoOn => {
                    self.note(host, || "goes on: the VM is still its own".to_owned());
                    self.coverage.leases_renewed_late += 1;
                    self.resume_guest(host);
                }
                LeaseAction::Halt(why) => self.lose(host, &why),
            }
        }
    }

    fn lose(&mut self, host: HostId, why: &str) {
        self.note(host, || format!("loses the VM: {why}"));
        self.coverage.sole_owners_halted += 1;
        if self.forced_in_vain == Some(self.arbiter.generation) {
            self.excuse("it was forced onto another host, which found that its owner lives");
        }
        let Some(running) = self.hosts[host.0].running() else { return };
        let generation = running.generation;
        if let Some(id) = running.session.as_ref().map(|session| session.id) {
            return self.primary_event(host, id, PrimaryEvent::GuestDied(why.to_owned()));
        }
        running.port.shut();
        self.cancel_offer(host);
        self.hosts[host.0].role = Role::Fenced;
        self.set_record(host, ImageRole::Stale, generation);
    }

    fn tend(&mut self, host: HostId, errand: LeaseErrand) {
        let asked = self.clock(host);
        let Some(running) = self.hosts[host.0].running() else { return };
        let (copy, generation) = (running.copy, running.generation);
        let tending = Tending { host, copy, generation, errand, asked };
        // Other VMs' errands come first: one that an arbiter is slow to answer holds them all.
        let longest = if self.lease_random.percent(20) { 400_000 } else { 20_000 };
        let travel = self.lease_random.micros(200, longest);
        self.after(travel, Event::LeaseWritten(tending));
    }

    /// The first half of an errand comes to the arbiter.
    pub(crate) fn lease_written(&mut self, tending: Tending) {
        if !self.arbiter.reachable(tending.host) {
            let later = self.lease_random.millis(50, 200);
            let silent = LeaseAnswer::Unreachable("no answer".to_owned());
            return self.after(later, Event::LeaseAnswered(tending, silent));
        }
        let mark = tending.asked.0.as_micros() as u64;
        let length_ms = LENGTH.as_millis() as u64;
        let renewal = Renewal { host: tending.host.name(), length_ms, mark };
        match tending.errand {
            LeaseErrand::Renew => self.arbiter.renewals.insert(tending.generation, renewal),
            LeaseErrand::Withdraw => self.arbiter.renewals.remove(&tending.generation),
        };
        let travel = self.lease_random.micros(200, 20_000);
        self.after(travel, Event::LeaseRead(tending));
    }

    /// The second half: whose is the VM now?
    pub(crate) fn lease_read(&mut self, tending: Tending) {
        let own = (self.arbiter.owner, self.arbiter.generation);
        let answer = match self.arbiter.reachable(tending.host) {
            false => LeaseAnswer::Unreachable("no answer".to_owned()),
            true if own == (tending.host, tending.generation) => LeaseAnswer::Own,
            true => {
                let (to, why) = (Some(own.0.name()), format!("{} has it", own.0));
                LeaseAnswer::Moved { to, why }
            }
        };
        let travel = self.lease_random.micros(200, 3_000);
        self.after(travel, Event::LeaseAnswered(tending, answer));
    }

    pub(crate) fn lease_answered(&mut self, tending: Tending, answer: LeaseAnswer) {
        let (now, host) = (self.clock(tending.host), tending.host);
        let Some(running) = self.hosts[host.0].running() else { return };
        if running.copy != tending.copy {
            return;
        }
        let session = running.session.as_ref();
        let contests = session.is_some_and(|session| session.core.contests());
        let contest = contests || running.generation != tending.generation;
        let answer = answer.beside_contest(contest);
        let guarding = session.filter(|session| session.core.guards_output());
        let hosts = guarding.map(|session| [host.name(), session.peer.name()]);
        let answer = answer.beside_session(hosts.as_ref().map_or(&[], |hosts| hosts));
        let actions = running.lease.answered(now, tending.asked, answer);
        self.lease_acts(host, actions);
    }

    /// The sole owner falls silent, and an operator wants the VM elsewhere.
    pub(crate) fn force_elsewhere(&mut self, stalls: bool, span: Duration) {
        let Some(owner) = self.primary_host() else { return };
        let target = Target::Host(owner.0);
        match stalls {
            true if self.schedule.clocks_stop => self.pause_host(owner, span),
            true => self.strike(Fault::Stall(target, span)),
            false => self.strike(Fault::Isolation(target, span)),
        }
        self.must_survive = false;
        let generation = self.arbiter.generation;
        let idle = |host: &HostId| self.hosts[host.0].up && self.has_whole_image(*host);
        let host = (0..self.hosts.len()).map(HostId).find(|host| *host != owner && idle(host));
        if let Some(host) = host.filter(|_| self.arbiter.owner == owner) {
            let forcing = Forcing { host, generation, watch: LeaseWatch::default(), last: None };
            self.after(LOOK, Event::ForceLooks(forcing));
        }
    }

    fn note_clocks(&mut self, host: HostId, last: Option<&Renewal>) {
        let clock = |host: usize| self.schedule.clocks[host];
        let is_owner = |owner: &usize| last.is_some_and(|it| it.host == HostId(*owner).name());
        let owner = (0..self.hosts.len()).find(is_owner);
        let apart = owner.is_some_and(|owner| clock(owner) != clock(host.0));
        self.coverage.forced_by_another_clock += u64::from(apart);
    }

    /// The hypervisor below a host is paused: no time passes there.
    fn pause_host(&mut self, host: HostId, span: Duration) {
        self.note(host, || format!("stands still for {span:?}, and its clock with it"));
        self.coverage.clocks_stopped += 1;
        let (now, until) = (self.now, self.now + span);
        let stalled = &mut self.hosts[host.0];
        (stalled.stalled_from, stalled.stalled_until) = (now, until.max(stalled.stalled_until));
        self.at(until, Event::WakesUp(host, span));
    }

    /// Other hosts say how much time has passed for them. In the product that takes a second or two, in
    /// which what the stopped clock allows may leave: that is not closed there, and not looked for here.
    pub(crate) fn wakes_up(&mut self, host: HostId, still: Duration) {
        if self.hosts[host.0].stalled_until < self.now {
            return; // It lost its power meanwhile.
        }
        let still = self.by_clock(host, still);
        self.hosts[host.0].clock_stood += still;
        let now = self.clock(host);
        let Some(running) = self.hosts[host.0].running() else { return };
        let actions = running.lease.stood_still(now);
        self.lease_acts(host, actions);
    }

    fn has_whole_image(&self, host: HostId) -> bool {
        let sound = !self.has_lost_its_disk(host);
        let host = &self.hosts[host.0];
        let whole = host.image.record.is_some_and(|(role, _)| role != ImageRole::Syncing);
        whole && sound && matches!(host.role, Role::Idle | Role::Fenced)
    }

    fn may_force(&self, host: HostId) -> bool {
        let up = self.hosts[host.0].up && self.now >= self.hosts[host.0].stalled_until;
        up && self.has_whole_image(host) && self.arbiter.reachable(host)
    }

    /// Looks as `recover --force` does before anything is held.
    pub(crate) fn force_looks(&mut self, mut forcing: Forcing) {
        if !self.may_force(forcing.host) {
            return;
        }
        let found = self.arbiter.renewals.get(&forcing.generation).cloned();
        let now = self.clock(forcing.host);
        match forcing.watch.look((now, now), found) {
            LeaseSight::Over(last) => forcing.last = Some(last),
            LeaseSight::Wait(_) => return self.after(LOOK, Event::ForceLooks(forcing)),
            LeaseSight::None => return,
            LeaseSight::Alive => {
                self.coverage.forces_refused += 1;
                return;
            }
        }
        let travel = self.lease_random.micros(200, 20_000);
        self.after(travel, Event::ForceTakes(forcing));
    }

    /// The arbiter is asked for the VM, and then whether its former owner did anything meanwhile.
    pub(crate) fn force_takes(&mut self, forcing: Forcing) {
        let host = forcing.host;
        if !self.may_force(host) {
            return;
        }
        let verdict = self.arbiter.acquire(host, forcing.generation);
        let Verdict::Granted(generation) = verdict else { return };
        let unchanged = self.arbiter.renewals.get(&forcing.generation) == forcing.last.as_ref();
        self.note(host, || format!("is given the VM by force: {unchanged}"));
        if !unchanged {
            // Its operator is told to ask again; its owner, which lives, reads that it has lost it.
            self.forced_in_vain = Some(generation);
            return;
        }
        self.coverage.forced += 1;
        self.note_clocks(host, forcing.last.as_ref());
        self.oracle.forget_all_shown();
        let origin = self.oracle.tip(self.hosts[host.0].image.lineage);
        self.boot(host, generation, Some(origin));
        if !self.hosts[host.0].up {
            self.forced_in_vain = Some(generation);
        }
    }
}
