//! A VM that was won by a host which cannot run it goes back to the one that keeps its guest.

use crate::host::{HostId, Role, SessionId};
use crate::mutant::DriverMutant;
use crate::world::{Event, World};
use understudy_protocol::validity::ImageRole;
use understudy_protocol::{BackupPhase, Generation, PrimaryPhase, Verdict};
use understudy_session::backup::{Effect, Event as BackupEvent};
use understudy_session::hand_back::{Answer, Present, Recorded, WinnersWord, answer};

impl World {
    /// A host that keeps its guest asks the winner what became of the VM.
    pub(crate) fn ask_winner(&mut self, host: HostId, id: SessionId) -> WinnersWord {
        let silence = WinnersWord::default();
        let Some(session) = self.hosts[host.0].session(id) else { return silence };
        let Some(owner) = session.core.winner().cloned() else { return silence };
        let from = session.core.generation();
        let mut all = (0..self.hosts.len()).map(HostId);
        let winner = all.find(|host| Some(host.name()) == owner.host);
        let Some(winner) = winner.filter(|winner| self.reaches(host, *winner)) else {
            return silence;
        };
        let asked = &self.hosts[winner.0];
        let (present, standby) = match &asked.role {
            Role::Primary(running) if !asked.is_frozen() => {
                (Present::Runs(running.generation), None)
            }
            Role::Backup(standby) if standby.primary == host => {
                (Present::StandsBy, Some(standby.id))
            }
            Role::Primary(_) | Role::Backup(_) => (Present::Busy, None),
            Role::Idle | Role::Fenced => (Present::Nothing, None),
        };
        let record = asked.image.record_of(winner);
        let recorded = record.map(|record| {
            vec![Recorded { ran: record.ran_at(), backed_asker: asked.backs == Some(host) }]
        });
        match answer(from, present, || recorded) {
            Answer::Say(word) => return word,
            Answer::Hurry => {
                if let Some(id) = standby {
                    self.backup_event(winner, id, BackupEvent::Awaited);
                    self.check_hurried(winner, id);
                }
            }
            Answer::Return(won) => self.return_grant(winner, host, won),
        }
        silence
    }

    /// Notes that a copy was handed back, before it lets anything out.
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
                self.ask_arbiter(host, id, (from, Some(primary)), WinnersWord::default());
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
                self.ask_arbiter(host, id, (from, Some(primary)), WinnersWord::default());
            }
        }
    }

    /// The winner knows of no grant, and returns it.
    fn return_grant(&mut self, winner: HostId, to: HostId, won: Generation) {
        if !self.arbiter.reachable(winner) {
            return;
        }
        if let Verdict::Granted(_) = self.arbiter.hand_back(winner, to, won) {
            self.note(winner, || format!("returns generation {won} to {to}"));
            self.coverage.grants_returned += 1;
        }
    }
}
