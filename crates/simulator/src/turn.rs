//! Turns of a protected VM from checkpoints to lockstep, and back: what the daemon's threads do around the product's own
//! decisions ([`Turning`], [`Way`]; of the standby [`Beside`]).

mod standby;

pub(crate) use standby::{Beside, Other, Preparation};

use crate::capture::{Cut, STOP_LOOK};
use crate::guest::PAGES;
use crate::host::{Host, HostId, Role, SessionId};
use crate::lockstep::PIPELINE;
use crate::schedule::{Fault, Moment};
use crate::world::{Event, World};
use std::time::Duration;
use understudy_protocol::wire::{Kind, Message};
use understudy_protocol::{Epoch, PrimaryPhase, Time};
use understudy_session::primary::{Look, NoTurn, Turning, Way};

/// Each part of a turn may take so long: less than in the product, as all here.
const PATIENCE: Duration = Duration::from_millis(400);

/// A turn has ended by then, whatever came of it, if its host was awake: its parts, and what a slow host does between them.
const BOUND: Duration = Duration::from_millis(3_000);

/// What is there for a turn, on the primary.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prepared {
    to_log: bool,
    /// The guest must be moved into another QEMU, which records.
    moves: bool,
}

/// A primary's turns.
#[derive(Debug)]
pub(crate) struct Turns {
    pub(crate) way: Way,
    pub(crate) turning: Turning<Prepared>,
    /// The turn that somebody waits for, and since when.
    asked: Option<(bool, Time)>,
    /// Its own QEMU is being started.
    preparing: bool,
    /// Time at which one ended last.
    ended: Time,
}

impl Turns {
    pub(crate) fn new(lockstep: bool, now: Time) -> Turns {
        let turning = Turning::default().with_patience(PATIENCE);
        Turns { way: Way::at_first(lockstep), turning, asked: None, preparing: false, ended: now }
    }

    /// Whether a turn is waited for.
    pub(crate) fn is_asked(&self) -> bool {
        self.asked.is_some()
    }
}

impl World {
    /// The operator wants the other mode.
    pub(crate) fn ask_turn(&mut self) {
        for host in (0..self.hosts.len()).map(HostId) {
            let (told, now) = (self.clock_of_cores(host), self.now);
            let Some(session) = self.hosts[host.0].running().and_then(|vm| vm.session.as_mut())
            else {
                continue;
            };
            let turns = &mut session.turns;
            // One asks at a time.
            let may_ask = *session.core.phase() == PrimaryPhase::Protected && !turns.is_asked();
            if !may_ask {
                continue;
            }
            let (to_log, id, data) = (!turns.way.is_log(), session.id, session.data);
            if let Err(why) = turns.turning.ask(told, &session.core) {
                self.coverage.turns_refused_at_once += 1;
                self.note(host, || format!("does not turn: {why:?}"));
                continue;
            }
            turns.asked = Some((to_log, now));
            self.note(host, || format!("is to turn, to lockstep: {to_log}"));
            self.send(host, data, order(true, to_log));
            self.moment(Moment::TurnAsked);
            self.look_at_turn(host, id);
        }
    }

    /// The backup answers an order.
    pub(crate) fn turn_answered(&mut self, host: HostId, id: SessionId, message: &Message) {
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let words = String::from_utf8_lossy(&message.payload).into_owned();
        session.turns.turning.answered(if words.is_empty() { Ok(()) } else { Err(words) });
        self.look_at_turn(host, id);
    }

    /// Whoever waits for a turn looks.
    pub(crate) fn look_at_turn(&mut self, host: HostId, id: SessionId) {
        let told = self.clock_of_cores(host);
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let turns = &mut session.turns;
        if !turns.is_asked() || turns.preparing {
            return;
        }
        match turns.turning.look(told, &session.core) {
            Look::Wait => {}
            Look::Ready => {
                turns.preparing = true;
                self.note(host, || "hears that its backup is ready to turn".to_owned());
                self.moment(Moment::TurnReady);
                let soon = self.turn_random.millis(1, 120);
                self.after_work(host, soon, Event::TurnPrepared(host, id));
            }
            Look::Committed => self.turn_ends(host, id, None),
            Look::Ended { why, .. } => self.turn_ends(host, id, Some(why)),
        }
    }

    fn turn_ends(&mut self, host: HostId, id: SessionId, why: Option<NoTurn>) {
        let now = self.now;
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let Some((to_log, _)) = session.turns.asked.take() else { return };
        session.turns.ended = now;
        let data = session.data;
        let is_over = session.core.phase().is_over();
        let Some(why) = why else {
            self.coverage.turns_to_lockstep += u64::from(to_log);
            self.coverage.turns_to_checkpoints += u64::from(!to_log);
            return self.note(host, || "has turned".to_owned());
        };
        session.turns.turning.give_up();
        match &why {
            NoTurn::Refused(_) => self.coverage.turns_refused += 1,
            NoTurn::Unanswered => self.coverage.turns_unanswered += 1,
            NoTurn::NotCaptured => self.coverage.turns_not_captured += 1,
            NoTurn::Failed(_) => self.coverage.turns_failed += 1,
            NoTurn::Uncommitted(_) => self.coverage.turns_uncommitted += 1,
            NoTurn::Early(_) | NoTurn::Over => {}
        }
        self.note(host, || format!("does not turn: {why:?}"));
        if why.is_called_off() && !is_over {
            self.send(host, data, order(false, to_log));
        }
        if self.now < self.schedule.calm_from && self.turn_random.percent(60) {
            let soon = self.turn_random.millis(1, 80);
            self.after(soon, Event::AskTurn);
        }
    }

    /// This host has started what it needs, or cannot.
    pub(crate) fn turn_prepared(&mut self, host: HostId, id: SessionId) {
        let told = self.clock_of_cores(host);
        let fails = self.turn_random.percent(8);
        let Some(running) = self.hosts[host.0].running() else { return };
        let moves = !running.records;
        let Some(session) = running.session.as_mut().filter(|session| session.id == id) else {
            return;
        };
        session.turns.preparing = false;
        let Some((to_log, _)) = session.turns.asked else { return };
        if fails {
            let why = NoTurn::Failed("cannot start another QEMU here".to_owned());
            return self.turn_ends(host, id, Some(why));
        }
        session.turns.turning.prepared(told, Prepared { to_log, moves });
        self.look_at_turn(host, id);
        self.consider_checkpoint(host, id);
    }

    /// The epoch that runs is to end with the turn that is due. Whether that has begun.
    pub(crate) fn begin_turn(&mut self, host: HostId, id: SessionId) -> bool {
        let Some(running) = self.hosts[host.0].running() else { return false };
        let Some(session) = running.session.as_mut().filter(|session| session.id == id) else {
            return false;
        };
        let turns = &mut session.turns;
        if !turns.turning.may_begin(&session.core, &turns.way) {
            return false;
        }
        let is_log = turns.way.is_log();
        session.busy = true;
        if is_log {
            // So that there is room for what stopping logs.
            self.cut_batch(host, id, false);
        }
        let Some(session) = self.hosts[host.0].session(id) else { return true };
        let Some(prepared) = session.turns.turning.begin() else {
            session.busy = false;
            return true;
        };
        if prepared.to_log == is_log {
            self.violation(format!("{host} is to turn to what it does already"));
        } else if is_log {
            // What was written before is in the log.
            session.dirty = [false; PAGES];
            let scan = self.turn_random.micros(50, 3_000);
            self.after_work(host, scan, Event::TurnCut(host, id));
        } else if prepared.moves {
            self.stop_guest(host);
            self.moment(Moment::TurnMoves);
            let move_takes = self.turn_random.micros(500, 8_000);
            self.after_work(host, move_takes, Event::TurnMoved(host, id));
        } else {
            self.turn_cut(host, id);
        }
        true
    }

    /// The guest has another QEMU, which records, or goes on in its own.
    pub(crate) fn turn_moved(&mut self, host: HostId, id: SessionId) {
        let Some(session) = self.hosts[host.0].session(id) else { return };
        if session.outbox.holds_guest() {
            // It stops behind its writes.
            return self.after(STOP_LOOK, Event::TurnMoved(host, id));
        }
        let fails = self.turn_random.percent(5);
        let lost = self.hosts[host.0].has_lost();
        let Some(running) = self.hosts[host.0].running() else { return };
        running.records |= !fails;
        let Some(session) = running.session.as_mut().filter(|session| session.id == id) else {
            return;
        };
        if fails {
            session.busy = false;
            session.turns.turning.failed("the next QEMU does not load the guest".to_owned());
        }
        if !lost {
            self.resume_guest(host);
        }
        if fails {
            self.look_at_turn(host, id);
            return self.consider_checkpoint(host, id);
        }
        self.coverage.guests_moved += 1;
        let soon = self.turn_random.micros(50, 3_000);
        self.after_work(host, soon, Event::TurnCut(host, id));
    }

    /// The checkpoint that is the turn.
    pub(crate) fn turn_cut(&mut self, host: HostId, id: SessionId) {
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let turns = &mut session.turns;
        let cut = if turns.way.is_log() { Cut::LogEnds } else { Cut::LogBegins };
        if cut == Cut::LogBegins {
            turns.way.begin_log(&mut session.core, PIPELINE);
        }
        self.pause(host, id, cut);
    }

    /// A checkpoint that is a turn is on its way.
    pub(crate) fn turn_captured(&mut self, host: HostId, id: SessionId) {
        let told = self.clock_of_cores(host);
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let epoch = session.turns.way.since();
        session.turns.turning.captured(told, epoch);
        self.note(host, || format!("turns with epoch {epoch}"));
        self.moment(Moment::TurnSent);
        self.look_at_turn(host, id);
    }

    /// Checks that a turn ends, whatever comes of it.
    pub(crate) fn check_turn(&mut self, host: HostId, id: SessionId) {
        let (now, awake) = (self.now, self.hosts[host.0].stalled_until);
        let Some(session) = self.hosts[host.0].session(id) else { return };
        let Some((_, since)) = session.turns.asked else { return };
        let age = now - since.max(awake);
        if age > BOUND {
            self.violation(format!("{host} has been turning for {age:?}"));
        }
    }

    /// Whether a turn is under way, on either host: what strikes then is counted.
    pub(crate) fn count_in_turn(&mut self, fault: Fault) {
        let turns = |host: &mut Host| {
            let session = host.running().and_then(|vm| vm.session.as_ref());
            session.is_some_and(|session| session.turns.is_asked())
        };
        let applies = |host: &Host| match &host.role {
            Role::Backup(standby) => !standby.beside.orders.may_prepare(),
            _ => false,
        };
        let in_turn = self.hosts.iter_mut().any(turns) || self.hosts.iter().any(applies);
        if !in_turn {
            return;
        }
        let seen = &mut self.coverage;
        let counter = match fault {
            Fault::PowerLoss(..) | Fault::AllPowerLoss(_) => &mut seen.powerless_in_turn,
            Fault::DaemonDeath(..) => &mut seen.daemons_died_in_turn,
            Fault::QemuDeath(_) | Fault::OtherDeath | Fault::QemuHang | Fault::SickGuest(_) => {
                &mut seen.qemus_failed_in_turn
            }
            Fault::Partition(_) | Fault::OneWay(..) | Fault::Isolation(..) => &mut seen.cut_in_turn,
            Fault::ArbiterCut(..) | Fault::ArbiterDown(_) => &mut seen.arbiter_away_in_turn,
            Fault::Break(_) | Fault::Damage => &mut seen.connections_broken_in_turn,
            Fault::Stall(..) => &mut seen.stalled_in_turn,
            Fault::HungDisk(_) | Fault::HungRecord(_) | Fault::FailingDisk(_) => {
                &mut seen.disks_failed_in_turn
            }
            Fault::Divergence => &mut seen.diverged_in_turn,
            Fault::DataStall(..) | Fault::SlowData(..) | Fault::Delay(..) => {
                &mut seen.data_late_in_turn
            }
            Fault::Path(..) => &mut seen.paths_failed_in_turn,
            Fault::Failover => &mut seen.handed_over_in_turn,
            Fault::Unprotect | Fault::Force(..) => &mut seen.unprotected_in_turn,
            Fault::Lasts(_) => &mut seen.lost_for_good_in_turn,
        };
        *counter += 1;
    }
}

/// An order to the backup.
fn order(prepares: bool, to_log: bool) -> Message {
    Message::new(Kind::Turn, Epoch(0), vec![u8::from(prepares), u8::from(to_log)])
}
