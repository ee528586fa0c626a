//! A VM that was won by a host which cannot run it goes back to the one that keeps its guest.

use crate::host::{HostId, Role, SessionId};
use crate::mutant::DriverMutant;
use crate::world::{Event, World};
use understudy_protocol::validity::ImageRole;
use understudy_protocol::{BackupPhase, Generation, PrimaryEvent, PrimaryPhase, Verdict};
use understudy_session::backup::{Effect, Event as BackupEvent};

impl World {
    /// Now and then a host that keeps its guest asks the winner what became of the VM, then the
    /// arbiter: what the winner said counts only if it has not handed the VM back since.
    pub(crate) fn ask_winner(&mut self, host: HostId, id: SessionId) {
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let Some(owner) = session.core.winner().cloned() else { return };
        let from = session.core.generation();
        let all = (0..self.hosts.len()).map(HostId);
        let winner = all.into_iter().find(|host| Some(host.name()) == owner.host);
        let Some(winner) = winner.filter(|_| self.random.percent(20)) else { return };
        let runs = self.runs_at(host, winner, owner.generation);
        self.return_grant(winner, host, owner.generation);
        if let Role::Backup(standby) = &self.hosts[winner.0].role
            && self.reaches(host, winner)
        {
            let id = standby.id;
            self.backup_event(winner, id, BackupEvent::Awaited);
        }
        if self.arbiter.reachable(host) {
            let verdict = self.arbiter.acquire(host, from);
            self.note_hand_back(host, id, &verdict);
            self.primary_event(host, id, PrimaryEvent::Verdict(verdict));
        } else if self.hosts[winner.0].running().is_none() {
            return;
        }
        if let Some(generation) = runs {
            self.primary_event(host, id, PrimaryEvent::LiveElsewhere(generation));
        }
    }

    /// The generation at which the winner runs the VM, or did and does nothing with it now.
    fn runs_at(&self, host: HostId, winner: HostId, won: Generation) -> Option<Generation> {
        if !self.reaches(host, winner) {
            return None;
        }
        let asked = &self.hosts[winner.0];
        match &asked.role {
            Role::Primary(running) if !asked.is_frozen() => Some(running.generation),
            Role::Primary(_) | Role::Backup(_) => None,
            Role::Idle | Role::Fenced => asked.image.record_of(winner)?.ran_at(),
        }
        .filter(|generation| *generation >= won)
    }

    /// Before a copy that was handed back lets anything out, that is on record.
    pub(crate) fn note_hand_back(&mut self, host: HostId, id: SessionId, verdict: &Verdict) {
        let &Verdict::Returned(generation) = verdict else { return };
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let kept =
            matches!(session.core.phase(), PrimaryPhase::Contesting(_) | PrimaryPhase::Frozen(_));
        if kept {
            self.coverage.handed_back += 1;
            if !self.has(DriverMutant::OpenBeforeRecord) {
                self.set_record(host, ImageRole::Active, generation);
            }
        }
    }

    /// A verdict comes to a standby that is no more.
    pub(crate) fn former_hears(&mut self, host: HostId, id: SessionId, verdict: Verdict) {
        let now = self.now;
        let former = self.hosts[host.0].former.iter_mut().find(|former| former.id == id);
        let Some(former) = former else { return };
        let (primary, mut effects) = (former.primary, Vec::new());
        let given_up = *former.core.phase() == BackupPhase::Discarded;
        let late = given_up && matches!(verdict, Verdict::Granted(_));
        former.core.handle(now, BackupEvent::Verdict(verdict), &mut effects);
        let retry = former.core.deadline();
        if late && effects.is_empty() {
            self.violation(format!("{host} had given the VM up, is given it, and keeps it"));
        }
        for effect in effects {
            if let Effect::HandBack(from) = effect {
                self.coverage.late_grants_returned += 1;
                self.ask_arbiter(host, id, from, Some(primary));
            }
        }
        if let Some(at) = retry {
            self.at(at, Event::FormerAsks(host, id));
        }
    }

    pub(crate) fn former_asks(&mut self, host: HostId, id: SessionId) {
        let now = self.now;
        let former = self.hosts[host.0].former.iter_mut().find(|former| former.id == id);
        let Some(former) = former else { return };
        let (primary, mut effects) = (former.primary, Vec::new());
        former.core.handle(now, BackupEvent::Tick, &mut effects);
        for effect in effects {
            if let Effect::HandBack(from) = effect {
                self.ask_arbiter(host, id, from, Some(primary));
            }
        }
    }

    /// The winner, which is asked, has nothing of the VM and has run nothing: it knows of no grant,
    /// and returns it.
    fn return_grant(&mut self, winner: HostId, to: HostId, won: Generation) {
        let asked = &self.hosts[winner.0];
        let idle = matches!(asked.role, Role::Idle | Role::Fenced);
        let record = asked.image.record_of(winner);
        let ran = record.and_then(|record| record.ran_at()).is_some_and(|ran| ran >= won);
        let owns = (self.arbiter.owner, self.arbiter.generation) == (winner, won);
        if idle && !ran && owns && self.reaches(to, winner) && self.arbiter.reachable(winner) {
            self.note(winner, || format!("returns generation {won} to {to}"));
            self.coverage.grants_returned += 1;
            self.arbiter.hand_back(winner, to, won);
        }
    }
}
