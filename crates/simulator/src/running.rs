//! The VM on the host that runs it: the guest's steps, and how it comes to run.

use crate::guest::{BLOCKS, Claim, Frame, Gate, Guest, PAGES, Port, State};
use crate::host::{CopyId, HostId, Role, Running};
use crate::lease::LENGTH;
use crate::lockstep::Step;
use crate::world::{Event, World};
use std::time::Duration;
use understudy_protocol::repair::Repair;
use understudy_protocol::validity::ImageRole;
use understudy_protocol::{Generation, Lease, Time};

impl World {
    /// The guest runs a little further.
    pub(crate) fn guest_step(&mut self, host: HostId, copy: CopyId, runs: u32) {
        let now = self.now;
        let Some(running) = self.hosts[host.0].running() else { return };
        let sick = running.sick_until > now;
        if running.copy != copy || running.runs != runs || running.paused || sick {
            return;
        }
        let state = self.oracle.next_state(running.guest.state.lineage);
        running.guest.state = state;
        self.check_runs(host);
        let Some(running) = self.hosts[host.0].running() else { return };
        let page = self.random.index(PAGES);
        running.guest.pages[page] = state.number;
        self.page_written(host, page);
        let mut step = Step { state, page, block: None, flushes: false };
        let writes = self.schedule.shortage.map_or(25, |shortage| shortage.writes);
        if self.random.percent(writes) {
            let block = self.random.index(BLOCKS);
            step.block = Some(block);
            self.hosts[host.0].image.blocks[block] = state.number;
            if !self.write_through(host, (copy, runs), step) {
                return;
            }
        }
        self.end_step(host, (copy, runs), step);
    }

    /// The rest of a step, once what it wrote is on its way.
    pub(crate) fn end_step(&mut self, host: HostId, (copy, runs): (CopyId, u32), step: Step) {
        self.guest_talks(host, step);
        let next = self.random.micros(200, 4_000);
        self.after_work(host, next, Event::GuestStep(host, copy, runs));
    }

    /// Lets the guest talk at the end of a step, which is logged before anything of it is sent.
    fn guest_talks(&mut self, host: HostId, step: Step) {
        let now = self.now;
        let flushes = self.random.percent(8);
        self.log_step(host, Step { flushes, ..step });
        let (sends, arrives) = (self.random.percent(40), self.random.percent(70));
        let host_state = &mut self.hosts[host.0];
        if flushes {
            host_state.image.sync();
        }
        let synced = host_state.image.synced;
        let Some(running) = host_state.running() else { return };
        let guest = &mut running.guest;
        if flushes {
            guest.flushed = Claim { state: guest.state, blocks: synced };
        }
        if sends {
            let frame = Frame { state: guest.state, claim: guest.flushed };
            running.port.send(frame);
        }
        let out = if arrives { running.port.drain(now) } else { Vec::new() };
        let session = running.session.as_ref().map(|session| session.id);
        self.let_out(host, out);
        if let Some(id) = session {
            self.consider_checkpoint(host, id);
        }
    }

    /// A guest that did nothing goes on.
    pub(crate) fn guest_recovers(&mut self, host: HostId) {
        let Some(running) = self.hosts[host.0].running() else { return };
        let was_sick = std::mem::take(&mut running.sick_until) > Time::default();
        if was_sick && !running.paused {
            self.resume_guest(host);
        }
    }

    /// Lets the guest stand still.
    pub(crate) fn stop_guest(&mut self, host: HostId) {
        let Some(running) = self.hosts[host.0].running() else { return };
        running.paused = true;
        running.runs += 1;
    }

    /// Lets a guest that stands still run, unless its lease holds it, or its backup has its last state.
    pub(crate) fn resume_guest(&mut self, host: HostId) {
        let Some(running) = self.hosts[host.0].running() else { return };
        let session = running.session.as_ref();
        let is_passed_on = session.is_some_and(|session| session.core.has_captured_last());
        if running.lease.has_run_out() || is_passed_on {
            return;
        }
        running.paused = false;
        running.runs += 1;
        let runs = running.runs;
        if running.session.as_mut().is_some_and(|session| session.outbox.goes_on_as(runs)) {
            // Once its write has room.
            return;
        }
        let event = Event::GuestStep(host, running.copy, running.runs);
        let soon = self.random.micros(50, 500);
        self.after(soon, event);
    }

    pub(crate) fn new_copy(&mut self) -> CopyId {
        self.copies += 1;
        CopyId(self.copies)
    }

    /// The VM boots from this host's image, which is valid from here on. What the guest reads of it
    /// its clients may hear of, so all that a mirror was sent is on stable storage before.
    pub(crate) fn boot(&mut self, host: HostId, generation: Generation, origin: Option<State>) {
        let state = self.oracle.new_lineage(origin);
        let image = &mut self.hosts[host.0].image;
        image.lineage = state.lineage;
        image.sync();
        let flushed = Claim { state, blocks: image.blocks };
        self.set_record(host, ImageRole::Active, generation);
        if !self.hosts[host.0].up {
            self.coverage.starts_in_vain += 1;
            return;
        }
        let guest = Guest { state, pages: [state.number; PAGES], flushed };
        self.run_here(host, guest, generation);
    }

    /// The VM runs here, unprotected.
    pub(crate) fn run_here(&mut self, host: HostId, guest: Guest, generation: Generation) {
        let copy = self.new_copy();
        if !std::mem::replace(&mut self.hosts[host.0].ran, true) {
            let ran = self.hosts.iter().filter(|host| host.ran).count();
            self.coverage.ran_on_three_hosts += u64::from(ran == 3);
        }
        self.hosts[host.0].role = Role::Primary(Box::new(Running {
            copy,
            guest,
            runs: 0,
            paused: true,
            port: Port::new(Gate::Open),
            generation,
            session: None,
            dialling: None,
            lease: Lease::new(LENGTH),
            limit: None,
            repair: Repair::default(),
            is_watched: false,
            records: false,
            wanted: true,
            sick_until: Time::default(),
        }));
        self.resume_guest(host);
        self.after(Duration::ZERO, Event::LeaseLook(host, copy));
        self.protection_lost(host, "nobody backs it up");
    }
}
