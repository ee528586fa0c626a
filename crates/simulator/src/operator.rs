//! The work of operators: hand over, end protection, want it again, recover.

use crate::host::{HostId, Role};
use crate::world::{Event, World};
use std::time::Duration;
use understudy_protocol::repair::{RepairEvent, RepairPhase};
use understudy_protocol::{PrimaryPhase, Verdict};
use understudy_session::primary::Event as PrimaryEvent;

/// Time after which an operator asks again for what was refused.
const ASKED_AGAIN: Duration = Duration::from_millis(300);

impl World {
    /// The operator wants the VM to move.
    pub(crate) fn ask_hand_over(&mut self) {
        for host in (0..self.hosts.len()).map(HostId) {
            let Some(running) = self.hosts[host.0].running() else { continue };
            let Some(session) = &running.session else { continue };
            let id = session.id;
            if *session.core.phase() == PrimaryPhase::Protected {
                self.primary_event(host, id, PrimaryEvent::HandOver);
            }
        }
    }

    /// The operator ends protection, for a while.
    pub(crate) fn unprotect(&mut self) {
        for host in (0..self.hosts.len()).map(HostId) {
            let Some(running) = self.hosts[host.0].running() else { continue };
            running.wanted = false;
            let id = running.session.as_ref().map(|session| session.id);
            self.cancel_offer(host);
            self.repair_event(host, RepairEvent::Ended);
            if let Some(id) = id {
                self.primary_event(host, id, PrimaryEvent::Unprotect);
            }
        }
        let later = self.random.millis(100, 1_200);
        self.after(later, Event::WantedAgain);
    }

    /// The operator wants protection.
    pub(crate) fn want_protection(&mut self) {
        let mut refused = false;
        for host in (0..self.hosts.len()).map(HostId) {
            let Some(running) = self.hosts[host.0].running() else { continue };
            running.wanted = true;
            let ends = running.session.as_ref().is_some_and(|session| {
                use PrimaryPhase::*;
                matches!(
                    session.core.phase(),
                    HandingOver | StandingDown | Contesting(_) | Frozen(_)
                )
            });
            let alone = running.session.is_none() && running.dialling.is_none();
            if alone && *running.repair.phase() == RepairPhase::Idle {
                self.repair_event(host, RepairEvent::Lost("the operator wants it".to_owned()));
            }
            refused |= ends;
        }
        if refused {
            // It is refused until then. Asked once: two hosts that end would have twice as many ask each time.
            self.after(ASKED_AGAIN, Event::WantedAgain);
        }
    }

    /// Has the operator, if the VM is nowhere, bring it up from the image that is
    /// valid for certain, by the records of the hosts that answer.
    pub(crate) fn recover_if_lost(&mut self) {
        let gone = |role: &Role| matches!(role, Role::Idle | Role::Fenced);
        if !self.hosts.iter().all(|host| gone(&host.role)) {
            return;
        }
        if self.must_survive {
            return self.violation("one failure lost a VM that was protected".to_owned());
        }
        let Some(host) = self.valid_image(|host| !self.hosts[host.0].up) else { return };
        if !self.arbiter.reachable(host) || self.has_lost_its_disk(host) {
            return;
        }
        // As the daemon does: should nothing come of it, its images are the newest all the same.
        let newest = self.arbiter.generation;
        self.note_claim(host, newest);
        if !self.hosts[host.0].up {
            return;
        }
        let Verdict::Granted(generation) = self.arbiter.acquire(host, newest) else { return };
        self.note(host, || format!("recovers the VM at generation {generation}"));
        self.coverage.recoveries += 1;
        let lineage = self.hosts[host.0].image.lineage;
        self.coverage.recoveries_from_mirror += u64::from(lineage.0 > 0);
        self.oracle.forget_shown();
        let origin = self.oracle.tip(lineage);
        self.boot(host, generation, Some(origin));
    }
}
