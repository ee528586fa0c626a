//! The group's primary: guests that run, and a rendezvous at each checkpoint.

use super::schedule::Side;
use super::world::{Event, Said, World};
use std::collections::VecDeque;
use std::time::Duration;
use understudy_protocol::{
    Arrival, Epoch, Gate, Generation, HostName, Primary, PrimaryAction, PrimaryPhase, Rendezvous,
    Time,
};
use understudy_session::backup::{Event as BackupEvent, Word};
use understudy_session::hand_back::{Answer, Present, Recorded, WinnersWord, answer};
use understudy_session::primary::{Effect, Event as PrimaryEvent, Lead};

/// The shortest silence that counts as failure.
pub(super) const TIMEOUT: Duration = Duration::from_millis(100);

/// The primary's side.
#[derive(Debug)]
pub(crate) struct Leading {
    pub(crate) lead: Lead,
    rendezvous: Rendezvous,
    /// A checkpoint is being taken; the last one of a planned fail-over, if so.
    taking: Option<bool>,
}

impl Leading {
    pub(crate) fn new(members: usize, now: Time) -> Leading {
        let peer: HostName = "b".parse().expect("a name");
        let core = Primary::new(Generation(1), TIMEOUT, now);
        let lead = Lead::new(core, members, peer, now);
        Leading { lead, rendezvous: Rendezvous::new(members), taking: None }
    }
}

/// What a guest knows of the others: what it has sent to each, and read of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) sent: Vec<u64>,
    pub(crate) read: Vec<u64>,
}

/// A guest on the primary.
#[derive(Debug)]
pub(crate) struct Guest {
    pub(crate) alive: bool,
    paused: bool,
    frozen: bool,
    /// The gate at which it waits.
    gate: Option<Gate>,
    pub(crate) known: Known,
    /// What the others have sent, and it has not read.
    inbox: Vec<VecDeque<u64>>,
    /// What waits for the end of its epoch.
    held: VecDeque<Epoch>,
}

impl Guest {
    pub(crate) fn new(members: usize) -> Guest {
        Guest {
            alive: true,
            paused: false,
            frozen: false,
            gate: None,
            known: Known { sent: vec![0; members], read: vec![0; members] },
            inbox: vec![VecDeque::new(); members],
            held: VecDeque::new(),
        }
    }

    pub(crate) fn end(&mut self) {
        self.alive = false;
        self.held.clear();
    }

    fn runs(&self) -> bool {
        self.alive && !self.paused && !self.frozen
    }
}

impl World {
    pub(crate) fn lead(&mut self, event: PrimaryEvent) {
        let now = self.now;
        let Some(a) = &mut self.a else { return };
        let mut effects = Vec::new();
        let before = a.lead.phase().clone();
        a.lead.handle(now, event, &mut effects);
        let after = a.lead.phase().clone();
        if before != after {
            self.note(Some(Side::A), || format!("{after:?}"));
        }
        for effect in effects {
            if let Effect::Act(action) = effect {
                self.act(action);
            }
        }
    }

    fn act(&mut self, action: PrimaryAction) {
        match action {
            PrimaryAction::Release(epoch) => self.release(Some(epoch)),
            PrimaryAction::OpenOutput => {
                self.check_alone();
                self.coverage.groups_alone += 1;
                for guest in &mut self.guests {
                    (guest.frozen, guest.paused) = (false, false);
                }
                self.release(None);
            }
            PrimaryAction::Contest(from) => self.ask(Side::A, from),
            PrimaryAction::YieldToBackup => {
                let planned = self.a.as_ref().is_some_and(|a| a.lead.is_handed_over());
                self.send(Side::A, 0, Said::TakeOver { planned });
            }
            PrimaryAction::StandDown => {
                (0..self.schedule.members).for_each(|way| self.send(Side::A, way, Said::StandDown));
            }
            PrimaryAction::ClosePeer => self.hang_up(Side::A),
            PrimaryAction::Freeze => {
                self.coverage.groups_frozen += 1;
                self.guests.iter_mut().for_each(|guest| guest.frozen = true);
            }
            PrimaryAction::Halt(_) => {
                self.guests.iter_mut().for_each(Guest::end);
            }
            PrimaryAction::Permit(_) => {}
        }
    }

    /// All connections end.
    pub(crate) fn hang_up(&mut self, side: Side) {
        (0..=self.schedule.members).for_each(|way| self.close(side, way));
    }

    /// Lets out what waits for epochs up to this one, or all.
    fn release(&mut self, epoch: Option<Epoch>) {
        for member in 0..self.schedule.members {
            while let Some(of) = self.guests[member].held.front().copied() {
                if epoch.is_some_and(|epoch| of > epoch) {
                    break;
                }
                self.guests[member].held.pop_front();
                self.leaves(member, of);
            }
        }
    }

    /// Whether the primary's heart beats for its backup.
    pub(crate) fn beats(&self, side: Side) -> bool {
        match (side, &self.a, &self.b) {
            (Side::A, Some(a), _) => !a.lead.phase().is_over(),
            (Side::B, _, Some(b)) => !b.standby.may_hang_up(0),
            _ => false,
        }
    }

    pub(crate) fn lead_hears(&mut self, way: usize, said: Said) {
        let event = match said {
            Said::Heartbeat => PrimaryEvent::Heard,
            Said::Acknowledge(epoch) => PrimaryEvent::Acknowledged(epoch),
            Said::Settled => PrimaryEvent::Whole(way),
            Said::MayTakeOver(obstacle) => PrimaryEvent::MayTakeOver(obstacle),
            Said::Word(Word::StoodDown) => PrimaryEvent::StoodDown(way),
            Said::Word(Word::Live(generation)) => PrimaryEvent::LiveElsewhere(generation),
            Said::Word(Word::Refuse(reason) | Word::Diverged(reason)) => {
                PrimaryEvent::PeerGone(reason)
            }
            Said::End if way == self.heartbeats() => {
                PrimaryEvent::LostAside("the heartbeats ended".into())
            }
            Said::End => PrimaryEvent::PeerGone("a connection ended".into()),
            Said::Part(_) | Said::TakeOver { .. } | Said::StandDown => return,
        };
        self.lead(event);
    }

    /// A member's QEMU dies.
    pub(crate) fn qemu_dies(&mut self, member: usize) {
        if self.a.is_none() || !std::mem::replace(&mut self.guests[member].alive, false) {
            return;
        }
        self.guests[member].end();
        if let Some(a) = &mut self.a {
            a.rendezvous.break_up();
        }
        self.coverage.group_qemus_died += 1;
        self.lead(PrimaryEvent::QemuDied("its QEMU died".into()));
    }

    pub(crate) fn checkpoint_due(&mut self) {
        self.soon(8, 40, Event::CheckpointDue);
        let Some(a) = &mut self.a else { return };
        let stand_still = self.guests.iter().any(|guest| guest.paused);
        let may = a.lead.may_capture() && a.taking.is_none() && !a.rendezvous.is_broken();
        if !may || stand_still {
            return;
        }
        let last = a.lead.is_handed_over() && *a.lead.phase() == PrimaryPhase::Protected;
        a.taking = Some(last);
        (0..self.schedule.members).for_each(|member| self.soon(0, 5, Event::Pauses(member)));
    }

    /// A member stands still, and waits until all do.
    pub(crate) fn pauses(&mut self, member: usize) {
        let Some(a) = &mut self.a else { return };
        if !self.guests[member].alive || a.lead.phase().is_over() {
            return;
        }
        self.guests[member].paused = true;
        let known = self.guests[member].known.clone();
        self.truth.captures(member, known);
        match a.rendezvous.arrive() {
            Arrival::Wait(gate) => {
                self.guests[member].gate = Some(gate);
                self.after(Duration::from_micros(300), Event::Waits(member));
            }
            Arrival::Last => {
                let epoch = self.place_barrier();
                if let Some(a) = &mut self.a {
                    a.rendezvous.open();
                }
                self.truth.closed = epoch;
                self.soon(0, 4, Event::Resumes(member, epoch));
            }
        }
    }

    /// Closes the epoch of every member, all of whom stand still.
    fn place_barrier(&mut self) -> Option<Epoch> {
        let a = self.a.as_mut()?;
        let last = a.taking.take().unwrap_or(false);
        if a.lead.phase().is_over() {
            return None;
        }
        let epoch = a.lead.running();
        self.check_cut(epoch);
        self.lead(match last {
            true => PrimaryEvent::CapturedLast,
            false => PrimaryEvent::Captured,
        });
        self.coverage.group_epochs += 1;
        Some(epoch)
    }

    pub(crate) fn waits(&mut self, member: usize) {
        let (Some(a), Some(gate)) = (&mut self.a, self.guests[member].gate) else { return };
        if a.rendezvous.is_open(gate) {
            let epoch = self.truth.closed;
            return self.soon(0, 4, Event::Resumes(member, epoch));
        }
        if a.rendezvous.is_broken() || a.lead.phase().is_over() {
            a.taking = None;
            return self.soon(0, 4, Event::Resumes(member, None));
        }
        self.after(Duration::from_micros(300), Event::Waits(member));
    }

    /// A member goes on, unless it has been handed over, and what it was goes to the backup.
    pub(crate) fn resumes(&mut self, member: usize, epoch: Option<Epoch>) {
        self.guests[member].gate = None;
        let Some(a) = &self.a else { return };
        let stays = a.lead.has_captured_last() && !matches!(a.lead.phase(), PrimaryPhase::Alone(_));
        self.guests[member].paused = stays;
        if let Some(epoch) = epoch {
            self.send(Side::A, member, Said::Part(epoch));
        }
    }

    pub(crate) fn guest_step(&mut self, member: usize) {
        let (low, high) = if self.is_calm { (40, 200) } else { (1, 12) };
        self.soon(low, high, Event::GuestStep(member));
        if self.a.is_none() || !self.guests[member].runs() {
            return;
        }
        let other = self.random.index(self.schedule.members);
        if other != member {
            let guest = &mut self.guests[member];
            guest.known.sent[other] += 1;
            let serial = guest.known.sent[other];
            self.guests[other].inbox[member].push_back(serial);
        }
        let from = self.random.index(self.schedule.members);
        if let Some(serial) = self.guests[member].inbox[from].pop_front() {
            self.guests[member].known.read[from] = serial;
        }
        if self.random.percent(50) {
            self.guest_speaks(member);
        }
    }

    /// A guest sends something to the outside.
    fn guest_speaks(&mut self, member: usize) {
        let Some(a) = &self.a else { return };
        match a.lead.holds_output() {
            true => {
                let epoch = a.lead.running();
                self.guests[member].held.push_back(epoch);
            }
            false => self.leaves_alone(),
        }
    }

    /// What the host that has won the group says, as the one that lost asks.
    pub(crate) fn winners_word(&mut self, from: Generation) -> WinnersWord {
        let both = self.ways_are_there();
        let Some(b) = self.b.as_ref().filter(|_| both) else { return WinnersWord::default() };
        let present = match () {
            () if b.is_live() => Present::Runs(b.standby.generation()),
            () if b.is_gone() => Present::Nothing,
            () => Present::StandsBy,
        };
        let recorded = Recorded { ran: None, backed_asker: true };
        match answer(from, present, || Some(vec![recorded; self.schedule.members])) {
            Answer::Say(word) => word,
            Answer::Hurry => {
                self.stand_by(BackupEvent::Awaited);
                WinnersWord::default()
            }
            Answer::Return(generation) => {
                self.after(Duration::from_millis(5), Event::HandsBack(generation));
                WinnersWord::default()
            }
        }
    }
}
