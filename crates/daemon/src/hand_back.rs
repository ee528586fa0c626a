//! A VM goes back to the host that keeps its guest, where the one that has won it runs nothing.
//!
//! A primary that lost the VM at the arbiter keeps its guest, and asks the winner what became of
//! it. That one runs it, or did; or it is about to; or it has nothing of it, since its daemon or its
//! standby ended before, or since it never heard of the grant: then it returns the grant.

use crate::host::Host;
use crate::vm::Vm;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tracing::{info, warn};
use understudy_link::link::Link;
use understudy_protocol::wire::Kind;
use understudy_protocol::{Generation, HostName, Verdict, VmName};
use understudy_replication::hand_back::{AskWinner, SaidByWinner};
use understudy_replication::handshake::Purpose;
use understudy_replication::membership::{Member, Membership};
use understudy_session::backup::Event;
use understudy_session::hand_back::{Answer, Present, Recorded, WinnersWord, answer};

/// Time for the winner to answer; nobody asks the arbiter meanwhile.
const PATIENCE: Duration = Duration::from_secs(2);

/// Asks in the name of this host.
pub(crate) fn asking(host: &Arc<Host>) -> AskWinner {
    let host: Weak<Host> = Arc::downgrade(host);
    Box::new(move |winner, membership, from| host.upgrade()?.ask_winner(winner, membership, from))
}

impl Host {
    fn ask_winner(
        &self,
        winner: &HostName,
        membership: &Membership,
        from: Generation,
    ) -> Option<WinnersWord> {
        let addresses = self.known_hosts().remove(winner)?;
        let purpose = Purpose::Kept { membership: membership.clone(), from };
        let ask = || -> anyhow::Result<WinnersWord> {
            let (vm, to) = (&membership.leader().vm, (winner, &*addresses));
            let (.., said): (_, _, SaidByWinner) =
                self.identity.ask(vm, to, |_| purpose.clone(), PATIENCE)?;
            Ok(said.into())
        };
        ask().ok()
    }

    /// Answers a host that keeps its guests.
    pub(crate) fn answer_kept(
        &self,
        link: &Link,
        asker: &HostName,
        membership: &Membership,
        from: Generation,
    ) -> anyhow::Result<()> {
        let word = self.winners_word(asker, membership, from);
        link.send_json(Kind::Welcome, &SaidByWinner::from(word))
    }

    fn winners_word(
        &self,
        asker: &HostName,
        membership: &Membership,
        from: Generation,
    ) -> WinnersWord {
        // Held while it is answered: whatever is started begins with it, and may claim what is returned here.
        let starting = self.adding.try_lock();
        // A keeper that has the leader no more knows of its own VMs alone.
        let leader = &membership.leader().vm;
        let knows_some = self.keeps.as_ref().is_some_and(|kept| !kept.has(leader));
        let present = self.present(asker, membership);
        let present = present.beside_start(starting.is_none() || knows_some);
        let records = || {
            let recorded = |member: &Member| {
                let record = self.record(&member.vm).ok()??;
                let backed_asker = record.peer.as_ref() == Some(asker);
                Some(Recorded { ran: record.image.ran_at(), backed_asker })
            };
            membership.members.iter().map(recorded).collect()
        };
        match answer(from, present, records) {
            Answer::Say(word) => return word,
            Answer::Hurry => self.hurry_standby(&membership.leader().vm),
            Answer::Return(won) => self.return_grant(asker, membership, won),
        }
        WinnersWord::default()
    }

    /// State of a group on this host. One member that runs is enough: the asker can have all of them back, or none, and
    /// the leader may have died here since, or moved on.
    fn present(&self, asker: &HostName, membership: &Membership) -> Present {
        let leader = self.vms.get(&membership.leader().vm);
        let runs = |member: &Member| match self.vms.get(&member.vm) {
            Some(Vm::Primary(vm)) if vm.kept().is_none() && vm.machine().is_alive() => {
                Some(membership.leaders_of(member, vm.generation()))
            }
            _ => None,
        };
        match (leader, membership.members.iter().find_map(runs)) {
            (Some(Vm::Backup(session)), _) if session.primary == *asker => Present::StandsBy,
            (_, Some(generation)) => Present::Runs(generation),
            _ if membership.members.iter().all(|member| self.has_nothing_of(&member.vm)) => {
                Present::Nothing
            }
            _ => Present::Busy,
        }
    }

    fn hurry_standby(&self, leader: &VmName) {
        let present = self.vms.get(leader);
        if let Some(Vm::Backup(session)) = present {
            session.event(Event::Awaited);
        }
    }

    fn has_nothing_of(&self, vm: &VmName) -> bool {
        let present = self.vms.get(vm);
        let is_elsewhere =
            self.orphans.why(vm).is_some() || self.keeper_of(vm).is_some() || self.arrivals.has(vm);
        matches!(present, Some(Vm::Fenced(_)) | None) && !is_elsewhere
    }

    /// Returns what this host was granted and has nothing of, if it was.
    fn return_grant(&self, to: &HostName, membership: &Membership, won: Generation) {
        let Some(arbiter) = &self.arbiter else { return };
        let vm = &membership.leader().vm;
        match membership.hand_back(arbiter, won, to) {
            Verdict::Granted(generation) => {
                info!(%vm, "returned to host {to} at generation {generation}: nothing of it is here");
            }
            Verdict::Unreachable(reason) => warn!(%vm, "not returned to host {to}: {reason}"),
            Verdict::Taken(_) | Verdict::Returned(_) => {}
        }
    }
}
