//! What must hold of a group: all members or none, one live copy, and nothing let out too soon.

use super::primary::Known;
use super::schedule::{Fault, Side};
use super::world::World;
use understudy_protocol::{BackupPhase, Epoch, PrimaryPhase};
use understudy_session::backup::{Ending, Errand};

/// What has really happened.
#[derive(Debug)]
pub(crate) struct Truth {
    /// What each member knew as it came to stand still.
    captured: Vec<Option<Known>>,
    /// The epoch that the last checkpoint closed.
    pub(crate) closed: Option<Epoch>,
    /// The last epoch of which each member's part has come to the backup.
    pub(crate) staged: Vec<Epoch>,
    /// The last epoch of which something of each member has left, on the backup's word.
    released: Vec<Epoch>,
    faults: Vec<Fault>,
    /// Whether the primary's host lost its power before the backup had a part of every member: nobody was protected.
    unprotected: bool,
}

impl Truth {
    pub(crate) fn new(members: usize) -> Truth {
        Truth {
            captured: vec![None; members],
            closed: None,
            staged: vec![Epoch(0); members],
            released: vec![Epoch(0); members],
            faults: Vec::new(),
            unprotected: false,
        }
    }

    pub(crate) fn strikes(&mut self, fault: Fault) {
        let is_first_copy = self.staged.contains(&Epoch(0));
        self.unprotected |= fault == Fault::Power(Side::A) && is_first_copy;
        self.faults.push(fault);
    }

    pub(crate) fn captures(&mut self, member: usize, known: Known) {
        self.captured[member] = Some(known);
    }
}

impl World {
    fn is_alone(&self) -> bool {
        self.a.as_ref().is_some_and(|a| matches!(a.lead.phase(), PrimaryPhase::Alone(_)))
    }

    /// An epoch is closed: no frame between members crosses the cut backwards.
    pub(crate) fn check_cut(&mut self, epoch: Epoch) {
        let members = self.schedule.members;
        let captured = std::mem::replace(&mut self.truth.captured, vec![None; members]);
        let Some(known) = captured.into_iter().collect::<Option<Vec<Known>>>() else {
            return self.violation(format!("epoch {epoch} is closed, and not all stand still"));
        };
        for (from, sender) in known.iter().enumerate() {
            for (to, receiver) in known.iter().enumerate() {
                if receiver.read[from] > sender.sent[to] {
                    self.violation(format!(
                        "in epoch {epoch} member {to} has read what member {from} has not sent"
                    ));
                }
            }
        }
    }

    /// A member's frame leaves the primary.
    pub(crate) fn leaves(&mut self, member: usize, of: Epoch) {
        if self.is_alone() {
            return self.leaves_alone();
        }
        self.truth.released[member] = self.truth.released[member].max(of);
        let missing = self.truth.staged.iter().position(|staged| *staged < of);
        if let Some(other) = missing {
            self.violation(format!(
                "output commit: a frame of member {member} of epoch {of} leaves, of which member \
                 {other}'s part is not on the backup"
            ));
        }
    }

    /// A frame leaves the primary on nobody's word.
    pub(crate) fn leaves_alone(&mut self) {
        let heard = self.b.as_ref().is_some_and(|b| b.open.contains(&true));
        if heard || self.owner != Side::A {
            self.violation("two live copies: the primary lets output out at once".into());
        }
    }

    /// The primary is to let all out.
    pub(crate) fn check_alone(&mut self) {
        let runs = self.b.as_ref().is_some_and(|b| b.started.contains(&true));
        if runs || self.owner != Side::A {
            self.violation("two live copies: the primary goes on alone".into());
        }
    }

    /// The backup says that it has an epoch.
    pub(crate) fn check_acknowledged(&mut self, epoch: Epoch) {
        let missing = self.truth.staged.iter().position(|staged| *staged < epoch);
        if let Some(member) = missing {
            self.violation(format!(
                "epoch {epoch} is acknowledged, and member {member}'s part of it is not there"
            ));
        }
    }

    /// A member's errand begins on the backup: before this, all must have come as far.
    pub(crate) fn check_begun(&mut self, member: usize, errand: &Errand) {
        let Some(b) = &self.b else { return };
        let is_whole = |member| b.standby.applied(member) == b.standby.committed();
        let all = match errand {
            Errand::Activate(_) => b.settled.iter().all(|settled| *settled),
            Errand::Start => {
                let records = b.recorded.iter().all(|recorded| *recorded);
                records && (0..self.schedule.members).all(is_whole)
            }
            _ => true,
        };
        if !all {
            self.violation(format!("member {member} is to {errand:?}, and not all are as far"));
        }
    }

    /// A member's guest is heard from now on.
    pub(crate) fn check_opened(&mut self, member: usize) {
        let Some(b) = &self.b else { return };
        let starts = b.busy.iter().any(|busy| matches!(busy, Some(Errand::Start)));
        let committed = b.standby.committed();
        let lost = self.truth.released.iter().any(|released| *released > committed);
        if starts {
            self.violation(format!("member {member} is heard, and another is only being started"));
        }
        if lost {
            self.violation(format!("output commit: the group goes on from epoch {committed}"));
        }
        if self.owner != Side::B || self.is_alone() {
            self.violation(format!("two live copies: member {member} is heard on the backup"));
        }
    }

    /// The arbiter is asked to give the group back.
    pub(crate) fn check_handed_back(&mut self) {
        if self.b.as_ref().is_some_and(|b| b.started.contains(&true)) {
            self.violation("the group is handed back, and a member of it runs".into());
        }
    }

    /// All has come to its end.
    pub(crate) fn check_end(&mut self) {
        if let Some(phase) = self.a.as_ref().map(|a| a.lead.phase().clone()) {
            let waits = match phase {
                PrimaryPhase::Contesting(_) => true,
                PrimaryPhase::HandingOver | PrimaryPhase::StandingDown => true,
                // Whoever has won it may be dead.
                PrimaryPhase::Frozen(_) => self.b.is_some(),
                _ => false,
            };
            if waits {
                return self
                    .violation(format!("nothing fails any more, and the group is {phase:?}"));
            }
        }
        self.check_endings();
        if self.truth.faults.len() == 1 && !self.truth.unprotected && !self.goes_on() {
            let fault = self.truth.faults[0];
            self.violation(format!("one failure, {fault:?}, and the group does not go on"));
        }
    }

    fn check_endings(&mut self) {
        let Some(b) = &self.b else { return };
        let phase = b.standby.phase().clone();
        let waits = matches!(phase, BackupPhase::Contesting(_) | BackupPhase::HandingBack(_));
        let ended = b.endings.iter().filter(|ending| ending.is_some()).count();
        let live = |ending: &&Option<Ending>| {
            matches!(ending, Some(Ending::Live(..) | Ending::Failed(..)))
        };
        let live = b.endings.iter().filter(live).count();
        let is_over = b.standby.is_over();
        if waits || (is_over && ended < self.schedule.members) {
            let words =
                format!("nothing fails any more, and the backup is {phase:?}, {ended} ended");
            return self.violation(words);
        }
        if live > 0 && live < self.schedule.members {
            self.violation(format!("{live} members have gone over, and the others have not"));
        }
    }

    /// Whether all members run on one of both hosts, but for one whose QEMU has died there.
    fn goes_on(&self) -> bool {
        let on_a = self.a.as_ref().is_some_and(|a| {
            let died = self.truth.faults.iter().filter(|f| matches!(f, Fault::Qemu(Side::A, _)));
            let run = self.guests.iter().filter(|guest| guest.alive).count();
            let phase = a.lead.phase();
            let goes_on = matches!(
                phase,
                PrimaryPhase::Alone(_) | PrimaryPhase::Protected | PrimaryPhase::Syncing
            );
            goes_on && run + died.count() == self.schedule.members
        });
        let live = |ending: &Option<Ending>| matches!(ending, Some(Ending::Live(..)));
        on_a || self.b.as_ref().is_some_and(|b| b.endings.iter().all(live))
    }
}
