//! Turns, on the standby: orders, the QEMU that is started for one, and the epoch that is one.

use crate::host::{HostId, Role, SessionId};
use crate::lockstep::Following;
use crate::schedule::Moment;
use crate::world::{Event, World};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;
use understudy_protocol::wire::{Kind, Message};
use understudy_protocol::{Epoch, Time};
use understudy_session::backup::{Event as BackupEvent, Orders};

/// Time between two looks at whether the turn before is carried out, and for how long.
const GLANCE: Duration = Duration::from_millis(10);

const APPLY_PATIENCE: Duration = Duration::from_millis(400);

/// A QEMU that is started beside another one has ended by then, where nobody needs it and nothing has failed.
const LEFT_OVER: Duration = Duration::from_millis(1_500);

/// A QEMU beside the one that a standby has.
#[derive(Clone, Debug)]
pub(crate) struct Other {
    to_log: bool,
    /// The QEMU beside which it was started, by number.
    beside: u32,
    dead: Rc<Cell<bool>>,
    since: Time,
}

/// A standby's turns.
#[derive(Debug, Default)]
pub(crate) struct Beside {
    pub(crate) orders: Orders<Other>,
    /// Number of the QEMU that it has.
    machine: u32,
}

/// An order on its way, or being carried out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Preparation {
    number: u64,
    to_log: bool,
    by: Time,
    beside: Option<u32>,
}

impl World {
    /// An order of the primary.
    pub(crate) fn take_order(&mut self, host: HostId, id: SessionId, message: &Message) {
        let now = self.now;
        let (prepares, to_log) = (message.payload[0] == 1, message.payload[1] == 1);
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let orders = &mut standby.beside.orders;
        let number = match orders.take() {
            Ok((number, _)) => number,
            Err(why) => return self.violation(format!("{host} hears: {why}")),
        };
        if !prepares {
            self.coverage.turns_called_off += 1;
            return self.note(host, || "hears that it is not to turn".to_owned());
        }
        if !orders.begin_to_prepare() {
            return self.answer_order(host, id, "it is still preparing for the order before");
        }
        let by = now + APPLY_PATIENCE;
        let preparation = Preparation { number, to_log, by, beside: None };
        self.after(Duration::ZERO, Event::Prepares(host, id, preparation));
    }

    /// A thread prepares for a turn.
    pub(crate) fn prepares(&mut self, host: HostId, id: SessionId, mut order: Preparation) {
        let now = self.now;
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let follows = standby.log.span.is_some();
        let beside = &mut standby.beside;
        if order.beside.is_none() {
            if !beside.orders.may_prepare() {
                if now < order.by {
                    return self.after(GLANCE, Event::Prepares(host, id, order));
                }
                return self.prepared(host, id, Err("the turn before is not carried out yet"));
            }
            if follows == order.to_log {
                return self.prepared(host, id, Err("the session is in that mode already"));
            }
            order.beside = Some(beside.machine);
            let launch = match self.turn_random.percent(12) {
                true => self.turn_random.millis(300, 6_000),
                false => self.turn_random.millis(2, 150),
            };
            return self.after_work(host, launch, Event::Prepares(host, id, order));
        }
        if self.turn_random.percent(8) {
            return self.prepared(host, id, Err("its QEMU does not start"));
        }
        let beside_which = order.beside.unwrap_or_default();
        let other =
            Other { to_log: order.to_log, beside: beside_which, dead: Rc::default(), since: now };
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let offered = standby.beside.orders.offer(order.number, other);
        self.prepared(host, id, offered.map_err(|_| "it was called off"));
    }

    fn prepared(&mut self, host: HostId, id: SessionId, answer: Result<(), &str>) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        standby.beside.orders.end_to_prepare();
        self.note(host, || format!("is prepared for a turn: {answer:?}"));
        self.answer_order(host, id, answer.err().unwrap_or_default());
    }

    fn answer_order(&mut self, host: HostId, id: SessionId, words: &str) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let data = standby.data;
        let answer = Message::new(Kind::TurnAnswer, Epoch(0), words.as_bytes().to_vec());
        self.send(host, data, answer);
    }

    /// An epoch that is a turn begins to come. Whether it may.
    pub(crate) fn expect_turn(&mut self, host: HostId, id: SessionId, message: &Message) -> bool {
        let Some(standby) = self.hosts[host.0].standby(id) else { return false };
        let to_log = match message.header.kind {
            Kind::LogBegins => true,
            Kind::LogEnds => false,
            _ => return true,
        };
        let other = match standby.beside.orders.expect(|other| other.to_log == to_log) {
            Ok(other) => other.clone(),
            Err(why) => {
                self.violation(format!("{host} is to turn, and has not prepared for it: {why}"));
                return false;
            }
        };
        if other.dead.get() {
            // What still comes is read, and of no use.
            standby.deaf = true;
            let why = "the QEMU for the turn ended".to_owned();
            self.backup_event(host, id, BackupEvent::CannotTurn(why));
            return false;
        }
        match &mut standby.log.span {
            None if to_log => standby.log = Following::behind(message.header.epoch),
            Some(span) if !to_log => {
                if let Err(why) = span.expect_end(message.header.epoch) {
                    self.violation(format!("{host} is to turn: {why}"));
                }
            }
            _ => self.violation(format!("{host} is to turn to what it does already")),
        }
        true
    }

    /// An epoch is committed: what it needs if it is a turn.
    pub(crate) fn commit_turn(&mut self, host: HostId, id: SessionId, epoch: Epoch) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let part = standby.parts.iter().find(|part| part.epoch == epoch);
        let turns = |piece: &&Message| matches!(piece.header.kind, Kind::LogBegins | Kind::LogEnds);
        let Some(piece) = part.and_then(|part| part.pieces.iter().find(turns)) else { return };
        let piece = piece.clone();
        if piece.header.kind == Kind::LogEnds {
            standby.log.end_with(&piece.payload);
        }
        let other = standby.beside.orders.commit();
        standby.others.push_back((epoch, other));
        self.note(host, || format!("is to turn with epoch {epoch}"));
        self.moment(Moment::TurnCommitted);
    }

    /// Executes what is left of a log that has ended, step by step; how that ended, if it has. What the guest has then
    /// is the primary's.
    pub(crate) fn leave_log(
        &mut self,
        host: HostId,
        id: SessionId,
        epoch: Epoch,
    ) -> Option<Result<(), String>> {
        self.moment(Moment::TurnApplying);
        match self.complete(host, id)? {
            Ok(()) => {
                let standby = self.hosts[host.0].standby(id)?;
                standby.log.leave(epoch);
                let (of, state) = (standby.id, standby.device_state);
                self.check_copy(host, epoch, false);
                let primarys = self.oracle.boundary(of, epoch).map(|boundary| boundary.state);
                if primarys.is_some_and(|primarys| state != Some(primarys)) {
                    self.violation(format!(
                        "{host} has executed its log to {state:?}, its primary was at {primarys:?}"
                    ));
                }
                Some(self.change_over(host, id, epoch))
            }
            failed => Some(failed),
        }
    }

    /// The other QEMU takes the place of the one that there is.
    pub(crate) fn change_over(
        &mut self,
        host: HostId,
        id: SessionId,
        epoch: Epoch,
    ) -> Result<(), String> {
        let Some(standby) = self.hosts[host.0].standby(id) else { return Ok(()) };
        let front = standby.others.pop_front();
        let other = front.filter(|(of, _)| *of == epoch).and_then(|(_, other)| other);
        let Some(other) = other else {
            self.violation(format!("{host} is to turn, and the turn is not possible"));
            return Err("the turn is not possible".to_owned());
        };
        if other.dead.get() {
            self.excuse("the QEMU for a turn ended");
            return Err("the QEMU for the turn ended".to_owned());
        }
        let machine = &mut standby.beside.machine;
        let is_beside = other.beside == *machine;
        *machine += 1;
        if !is_beside {
            self.violation(format!("{host} turns to a QEMU that was started beside another one"));
        }
        Ok(())
    }

    pub(crate) fn turn_applied(&mut self, host: HostId, id: SessionId) {
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        standby.beside.orders.carried_out();
        self.coverage.turns_applied += 1;
        self.note(host, || "has turned, too".to_owned());
        self.moment(Moment::TurnApplied);
    }

    /// The QEMU that a standby has prepared dies.
    pub(crate) fn other_dies(&mut self, host: HostId) {
        let Role::Backup(standby) = &mut self.hosts[host.0].role else { return };
        let committed = standby.others.iter().filter_map(|(_, other)| other.as_ref());
        for other in standby.beside.orders.other().into_iter().chain(committed) {
            self.coverage.others_died += u64::from(!other.dead.replace(true));
        }
    }

    /// Checks that no QEMU waits beside another for a turn that nobody wants.
    pub(crate) fn check_other(&mut self, host: HostId, id: SessionId) {
        let now = self.now;
        let Some(standby) = self.hosts[host.0].standby(id) else { return };
        let (primary, other) = (standby.primary, standby.beside.orders.other().cloned());
        let Some(other) = other.filter(|_| self.coverage.faults == 0) else { return };
        let Some(session) = self.hosts[primary.0].session(id) else { return };
        let since = other.since.max(session.turns.ended);
        if !session.turns.is_asked() && now - since > LEFT_OVER {
            self.violation(format!("{host} keeps a QEMU for a turn that nobody wants"));
        }
    }
}
