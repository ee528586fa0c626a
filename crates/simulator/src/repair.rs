//! The driver of [`Repair`](understudy_protocol::repair::Repair): a host that runs the
//! VM alone asks the others and offers it to them.

use crate::host::{CopyId, Dialling, HostId, Role, SessionId};
use crate::messages::hello;
use crate::world::{Event, World};
use std::time::Duration;
use understudy_protocol::Generation;
use understudy_protocol::PrimaryPhase;
use understudy_protocol::repair::{Candidate, Fitness, RepairAction, RepairEvent, is_history};
use understudy_protocol::wire::{Kind, Message};
use understudy_session::primary::Event as PrimaryEvent;

/// An offer that is not answered by then is withdrawn.
const OFFER_TIMEOUT: Duration = Duration::from_secs(1);
/// Time between two looks at a VM that is to be protected again.
const LOOK: Duration = Duration::from_millis(100);
/// Milliseconds within which the end of a session is heard of.
const HEARD_WITHIN: u64 = 500;

impl World {
    /// Feeds the state machine and does what it says.
    pub(crate) fn repair_event(&mut self, host: HostId, event: RepairEvent) {
        let (now, jitter) = (self.now, self.random.below(1_001) as u32);
        let Some(running) = self.hosts[host.0].running() else { return };
        let copy = running.copy;
        let mut actions = Vec::new();
        running.repair.handle(now, jitter, event, &mut actions);
        let looks = running.repair.awaits_protection() && !running.is_watched;
        running.is_watched |= looks;
        if let Some(deadline) = running.repair.deadline() {
            self.at(deadline, Event::RepairDue(host, copy));
        }
        if looks {
            self.after(LOOK, Event::RepairLook(host, copy));
        }
        for action in actions {
            match action {
                RepairAction::Survey => {
                    let answers = self.random.millis(1, 100);
                    self.after(answers, Event::Surveyed(host, copy));
                }
                RepairAction::Attempt(name) => self.offer(host, &name),
                RepairAction::Replace(reason) => self.replace_backup(host, reason),
            }
        }
    }

    /// Another host would take the VM whose backup could not take over; the arbiter is asked whether it answers.
    fn replace_backup(&mut self, host: HostId, reason: String) {
        let session = self.hosts[host.0].running().and_then(|running| running.session.as_ref());
        let Some(id) = session.map(|session| session.id) else { return };
        if self.arbiter.reachable(host) {
            self.note(host, || format!("gives its backup up: {reason}"));
            self.coverage.backups_replaced += 1;
            self.primary_event(host, id, PrimaryEvent::Replace(reason));
        }
    }

    /// Looks whether the VM is protected, whoever saw to that.
    pub(crate) fn repair_look(&mut self, host: HostId, copy: CopyId) {
        let running = self.hosts[host.0].running().filter(|running| running.copy == copy);
        let Some(running) = running else { return };
        running.is_watched = false;
        if running.repair.awaits_protection() {
            let session = running.session.as_ref().map(|session| session.core.phase());
            let event = match session == Some(&PrimaryPhase::Protected) {
                true => RepairEvent::Protected,
                false => RepairEvent::Tick,
            };
            self.repair_event(host, event);
        }
    }

    /// A session has ended: that is heard of a little later, and now and then twice.
    pub(crate) fn session_lost(&mut self, host: HostId, id: SessionId) {
        let Some(running) = self.hosts[host.0].running() else { return };
        let copy = running.copy;
        for _ in 0..=u32::from(self.repair_random.percent(10)) {
            let late = self.repair_random.millis(0, HEARD_WITHIN);
            self.after(late, Event::LossHeard(host, copy, id));
        }
    }

    pub(crate) fn loss_heard(&mut self, host: HostId, copy: CopyId, id: SessionId) {
        let running = self.hosts[host.0].running().filter(|running| running.copy == copy);
        let Some(running) = running else { return };
        let session = running.session.as_ref().map(|session| session.id);
        let under_way = session.or(running.dialling.map(|dialling| dialling.session));
        if under_way.is_some_and(|under_way| under_way != id) {
            self.coverage.late_losses += 1;
        }
        match is_history(&id, under_way.as_ref()) {
            true => {}
            false => self.protection_lost(host, "protection ended"),
        }
    }

    /// The VM lost its protection, or an attempt to give it one failed.
    pub(crate) fn protection_lost(&mut self, host: HostId, reason: &str) {
        let wanted = self.hosts[host.0].running().is_some_and(|running| running.wanted);
        let event = if wanted { RepairEvent::Lost(reason.to_owned()) } else { RepairEvent::Ended };
        self.repair_event(host, event);
    }

    pub(crate) fn repair_due(&mut self, host: HostId, copy: CopyId) {
        if self.hosts[host.0].running().is_some_and(|running| running.copy == copy) {
            self.repair_event(host, RepairEvent::Tick);
        }
    }

    /// The other hosts have said whether they could take the VM.
    pub(crate) fn surveyed(&mut self, host: HostId, copy: CopyId) {
        if self.hosts[host.0].running().is_none_or(|running| running.copy != copy) {
            return;
        }
        let others = (0..self.hosts.len()).map(HostId).filter(|other| *other != host);
        let mut found = Vec::new();
        for other in others {
            let free = Fitness { free_memory: self.random.below(100), ..Fitness::default() };
            let answer = match self.hosts[other.0].role {
                _ if !self.reaches(host, other) => Err("it does not answer".to_owned()),
                Role::Idle | Role::Fenced => Ok(free),
                Role::Primary(_) | Role::Backup(_) => Err("it has the VM already".to_owned()),
            };
            found.push(Candidate { host: other.name(), answer });
        }
        self.repair_event(host, RepairEvent::Surveyed(found));
    }

    fn offer(&mut self, host: HostId, to: &str) {
        let named = |peer: &HostId| peer.to_string() == to;
        let Some(peer) = (0..self.hosts.len()).map(HostId).find(named) else { return };
        if self.hosts[host.0].is_frozen() {
            return self.protection_lost(host, "it stands still");
        }
        if self.hosts[host.0].running().is_some_and(|running| running.session.is_some()) {
            return self.protection_lost(host, "it is protected already");
        }
        self.sessions += 1;
        let session = SessionId(self.sessions);
        let data = self.dial(host, peer, true);
        let Some(running) = self.hosts[host.0].running() else { return };
        running.dialling = Some(Dialling { peer, session, data, heartbeat: None });
        let generation = running.generation;
        self.note(host, || format!("offers the VM to {peer}"));
        self.send(host, data, hello(session, generation));
        self.after(OFFER_TIMEOUT, Event::OfferExpires(host, session));
    }

    pub(crate) fn offer_expires(&mut self, host: HostId, session: SessionId) {
        let dialling = self.hosts[host.0].running().and_then(|running| running.dialling);
        if dialling.is_some_and(|dialling| dialling.session == session) {
            self.offer_failed(host, "no answer in time");
        }
    }

    /// Ends an offer that was not taken.
    pub(crate) fn offer_failed(&mut self, host: HostId, reason: &str) {
        self.cancel_offer(host);
        self.protection_lost(host, reason);
    }

    pub(crate) fn cancel_offer(&mut self, host: HostId) {
        let Some(running) = self.hosts[host.0].running() else { return };
        let Some(dialling) = running.dialling.take() else { return };
        self.close(host, dialling.data);
        if let Some(heartbeat) = dialling.heartbeat {
            self.close(host, heartbeat);
        }
    }

    /// The backup answers.
    pub(crate) fn answer_to_offer(&mut self, host: HostId, offer: Dialling, message: &Message) {
        match message.header.kind {
            Kind::Ready => {
                let heartbeat = self.dial(host, offer.peer, false);
                if let Some(running) = self.hosts[host.0].running() {
                    running.dialling = Some(Dialling { heartbeat: Some(heartbeat), ..offer });
                }
                self.send(host, heartbeat, hello(offer.session, Generation(0)));
            }
            Kind::Welcome => self.start_session(host),
            _ => self.offer_failed(host, "it refuses"),
        }
    }
}
