//! The world: a virtual clock, the events to come, and everything they happen to.

use crate::arbiter::{Arbiter, Question};
use crate::capture::{Capture, Cut};
use crate::coverage::Coverage;
use crate::guest::State;
use crate::host::{CopyId, Host, HostId, SessionId};
use crate::lasting::Lost;
use crate::lease::{Forcing, Tending};
use crate::mutant::{DriverMutant, Mutant};
use crate::network::{ConnectionId, Network};
use crate::oracle::Oracle;
use crate::queue::Queue;
use crate::random::Random;
use crate::schedule::{Fault, Moment, Planned, Schedule, When};
use crate::trace::Trace;
use crate::turn::Preparation;
use std::collections::BTreeSet;
use std::time::Duration;
use understudy_protocol::wire::Message;
use understudy_protocol::{Generation, LeaseAnswer, PathIndex, PrimaryPhase, Time, Verdict};
use understudy_session::backup::Event as BackupEvent;
use understudy_session::primary::Event as PrimaryEvent;

/// A beat that comes later than this tells of an own stall, not of the peer's.
pub const OWN_STALL: Duration = Duration::from_millis(50);

/// Time between two looks at what waits for a disk that hangs.
const HANG_LOOK: Duration = Duration::from_millis(200);

/// The operator looks at the hosts this often.
const OPERATOR_LOOKS: Duration = Duration::from_millis(300);

/// An event that will happen.
#[derive(Debug)]
pub(crate) enum Event {
    GuestStep(HostId, CopyId, u32),
    SyncPiece(HostId, SessionId, usize),
    CheckpointDue(HostId, SessionId),
    PauseEnds(HostId, SessionId, Cut),
    Captured(HostId, SessionId, Box<Capture>),
    PrimaryBeat(HostId, SessionId),
    BackupBeat(HostId, SessionId),
    Prove(HostId, SessionId),
    Errand(HostId, SessionId),
    Feed(HostId, SessionId),
    Pump(HostId, SessionId),
    RepairDue(HostId, CopyId),
    RepairLook(HostId, CopyId),
    LossHeard(HostId, CopyId, SessionId),
    Surveyed(HostId, CopyId),
    OfferExpires(HostId, SessionId),
    Arrival(ConnectionId, usize),
    Read(HostId, u32, ConnectionId, Message),
    Question(Question),
    Answer(Question, Verdict),
    Strike(Fault),
    PowerOn(HostId, u32),
    Heal(HostId, HostId),
    WakesUp(HostId, Duration),
    DialPath(HostId, SessionId, PathIndex),
    MoveData(HostId, SessionId),
    PathHeals(HostId, HostId, PathIndex),
    DataFlows(ConnectionId),
    FormerAsks(HostId, SessionId),
    Recovers(HostId),
    ArbiterBack(Option<HostId>),
    DelayEnds(Duration),
    DataQuickens,
    WantedAgain,
    AskTurn,
    TurnPrepared(HostId, SessionId),
    TurnMoved(HostId, SessionId),
    TurnCut(HostId, SessionId),
    Prepares(HostId, SessionId, Preparation),
    Calm,
    OperatorLooks,
    LeaseLook(HostId, CopyId),
    LeaseWritten(Tending),
    LeaseRead(Tending),
    LeaseAnswered(Tending, LeaseAnswer),
    Force(bool, Duration),
    ForceLooks(Forcing),
    ForceTakes(Forcing),
}

/// The world: all that there is.
pub(crate) struct World {
    pub(crate) now: Time,
    pub(crate) schedule: Schedule,
    pub(crate) random: Random,
    /// Chance of what is left to it about leases.
    pub(crate) lease_random: Random,
    /// And about records that were being written when something failed.
    pub(crate) record_random: Random,
    /// And about paths.
    pub(crate) path_random: Random,
    /// And about turns.
    pub(crate) turn_random: Random,
    /// And about when news of lost protection comes.
    pub(crate) repair_random: Random,
    pub(crate) hosts: Vec<Host>,
    pub(crate) network: Network,
    pub(crate) arbiter: Arbiter,
    pub(crate) oracle: Oracle,
    pub(crate) coverage: Coverage,
    pub(crate) mutant: Option<Mutant>,
    pub(crate) tickets: u64,
    pub(crate) triggers: Vec<Planned>,
    pub(crate) sessions: u32,
    /// One failure struck a VM that was protected, and nothing else will.
    pub(crate) must_survive: bool,
    pub(crate) trace: Trace,
    pub(crate) violation: Option<String>,
    /// The generation at which a host was given the VM by force, and did not start it.
    pub(crate) forced_in_vain: Option<Generation>,
    /// Parts that have failed for good.
    pub(crate) lost: Lost,
    /// Session of which one path has failed, another works, and nothing else fails.
    pub(crate) spare_path: Option<SessionId>,
    /// Whether somebody could go on with the VM.
    pub(crate) carried: bool,
    /// Part of the present event that may take it from a host.
    pub(crate) excuse: Option<String>,
    answered: BTreeSet<u64>,
    pub(crate) copies: u32,
    events: Queue<Event>,
    /// A planned fail-over: the session, and the state at which the guest stands.
    pub(crate) handed_over: Option<(SessionId, State)>,
    handing_over: bool,
    protections: u64,
    /// Commits when calm came.
    pub(crate) commits_before: Option<u64>,
    /// Time at which output last left the VM.
    pub(crate) last_output: Time,
    /// Time at which the copy that is live went live.
    pub(crate) live_since: Time,
}

impl World {
    /// The world of a schedule: host a runs the VM, and protection begins. `chance` decides what the
    /// schedule leaves open.
    pub(crate) fn new(
        schedule: Schedule,
        chance: u64,
        mutant: Option<Mutant>,
        trace: bool,
    ) -> World {
        let (first, generation) = (HostId(0), Generation(1));
        let told = schedule.clone();
        let mut world = World {
            now: Time::default(),
            random: Random::new(chance, 0),
            lease_random: Random::new(chance, 3),
            record_random: Random::new(chance, 11),
            repair_random: Random::new(chance, 17),
            path_random: Random::new(chance, 13),
            turn_random: Random::new(chance, 19),
            hosts: (0..schedule.hosts).map(|_| Host::new()).collect(),
            network: Network::new(),
            arbiter: Arbiter::new(first, generation),
            oracle: Oracle::new(),
            coverage: Coverage::default(),
            mutant,
            tickets: 0,
            triggers: Vec::new(),
            sessions: 0,
            must_survive: false,
            trace: Trace::new(trace),
            violation: None,
            forced_in_vain: None,
            lost: Lost::default(),
            spare_path: None,
            carried: true,
            excuse: None,
            answered: BTreeSet::new(),
            copies: 0,
            events: Queue::new(),
            handed_over: None,
            handing_over: false,
            protections: 0,
            commits_before: None,
            last_output: Time::default(),
            live_since: Time::default(),
            schedule,
        };
        world.note_world(|| format!("{told:?}"));
        world.boot(first, generation, None);
        for planned in world.schedule.faults.clone() {
            match planned.when {
                When::At(time) => world.at(time, Event::Strike(planned.fault)),
                When::Upon(..) => world.triggers.push(planned),
            }
        }
        world.arbiter.cut_off.extend(world.schedule.without_arbiter.map(HostId));
        for time in world.schedule.turns.clone() {
            world.at(time, Event::AskTurn);
        }
        world.at(world.schedule.calm_from, Event::Calm);
        world.after(OPERATOR_LOOKS, Event::OperatorLooks);
        world
    }

    /// Runs until the schedule has ended or an invariant is broken.
    pub(crate) fn run(&mut self) {
        while self.violation.is_none() {
            let Some((time, event)) = self.events.next() else { return };
            self.now = time;
            if let Some(until) = self.stalled(&event) {
                let awake = until + self.random.micros(1, 5_000);
                self.at(awake, event);
                continue;
            }
            self.happen(event);
            self.check_live();
            self.check_loss();
            if self.has_settled() {
                return;
            }
            if self.now > self.schedule.calm_from + self.patience() {
                return self.check_what_never_settled();
            }
        }
    }

    /// The time by this host's clock, which counts for leases: nothing else is compared with another host's.
    pub(crate) fn clock(&self, host: HostId) -> Time {
        Time(self.by_clock(host, self.now.0).saturating_sub(self.hosts[host.0].clock_stood))
    }

    /// The time that the state machines of this host are told: all of it passes, whatever the host does.
    pub(crate) fn clock_of_cores(&self, host: HostId) -> Time {
        let slept = match self.has(DriverMutant::SleepUncounted) {
            true => self.hosts[host.0].slept,
            false => Duration::ZERO,
        };
        Time(self.now.0.saturating_sub(slept))
    }

    /// So much time, by this host's clock.
    pub(crate) fn by_clock(&self, host: HostId, time: Duration) -> Duration {
        let faster = i128::from(self.schedule.clocks[host.0]);
        let nanos = time.as_nanos() as i128;
        Duration::from_nanos((nanos + nanos * faster / 1_000_000) as u64)
    }

    /// What takes so long elsewhere, on this host.
    pub(crate) fn paced(&mut self, host: HostId, time: Duration) -> Duration {
        let slow = self.schedule.slow.filter(|(slow, _)| *slow == host.0);
        self.coverage.slowed += u64::from(slow.is_some());
        time * slow.map_or(1, |(_, times)| times)
    }

    /// Lets the event happen on this host once it has done what takes so long elsewhere.
    pub(crate) fn after_work(&mut self, host: HostId, time: Duration, event: Event) {
        let delay = self.paced(host, time);
        self.after(delay, event);
    }

    pub(crate) fn at(&mut self, time: Time, event: Event) {
        self.events.put(time, event);
    }

    pub(crate) fn after(&mut self, delay: Duration, event: Event) {
        self.at(self.now + delay, event);
    }

    pub(crate) fn note(&mut self, host: HostId, words: impl FnOnce() -> String) {
        self.trace.note(self.now, Some(host), words);
    }

    /// Notes what matters only when something else happens near it.
    pub(crate) fn note_routine(&mut self, host: HostId, words: impl FnOnce() -> String) {
        self.trace.routine(self.now, host, words);
    }

    pub(crate) fn note_world(&mut self, words: impl FnOnce() -> String) {
        self.trace.note(self.now, None, words);
    }

    /// Whether the drivers have this bug.
    pub(crate) fn has(&self, mutant: DriverMutant) -> bool {
        self.mutant == Some(Mutant::Driver(mutant))
    }

    /// An invariant is broken; the first time counts.
    pub(crate) fn violation(&mut self, what: String) {
        if self.violation.is_none() {
            self.note_world(|| format!("VIOLATION: {what}"));
            self.violation = Some(what);
        }
    }

    /// The time until which the host that the event happens to stands still, if it does.
    fn stalled(&self, event: &Event) -> Option<Time> {
        use Event::*;
        let host = match event {
            GuestStep(host, ..) | SyncPiece(host, ..) | CheckpointDue(host, ..) => host,
            PauseEnds(host, ..) | Captured(host, ..) => host,
            Errand(host, ..) | Feed(host, ..) | Pump(host, _) => host,
            PrimaryBeat(host, _) | BackupBeat(host, _) | RepairDue(host, _) => host,
            RepairLook(host, _) | LossHeard(host, ..) => host,
            TurnPrepared(host, _) | TurnMoved(host, _) | TurnCut(host, _) => host,
            Prepares(host, ..) => host,
            Prove(host, _) | DialPath(host, ..) | MoveData(host, _) => host,
            OfferExpires(host, _) | Surveyed(host, _) | Read(host, ..) => host,
            LeaseLook(host, _) => host,
            LeaseAnswered(tending, _) => &tending.host(),
            Answer(question, _) => &question.host,
            Arrival(id, end) => &self.arrival_host(*id, *end),
            _ => return None,
        };
        let hangs = matches!(event, Errand(..) | Feed(..)).then(|| {
            // Looked at again: calm may have come.
            self.hosts[host.0].errand_hangs_until().min(self.now + HANG_LOOK)
        });
        let until = self.hosts[host.0].stalled_until.max(hangs.unwrap_or_default());
        (until > self.now).then_some(until)
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::GuestStep(host, copy, runs) => self.guest_step(host, copy, runs),
            Event::SyncPiece(host, id, piece) => self.sync_piece(host, id, piece),
            Event::CheckpointDue(host, id) => self.checkpoint_due(host, id),
            Event::PauseEnds(host, id, cut) => self.pause_ends(host, id, cut),
            Event::Captured(host, id, capture) => self.send_capture(host, id, *capture),
            Event::PrimaryBeat(host, id) => self.primary_beat(host, id),
            Event::BackupBeat(host, id) => self.backup_beat(host, id),
            Event::Prove(host, id) => self.prove(host, id),
            Event::Errand(host, id) => self.do_errand(host, id),
            Event::Feed(host, id) => self.feed(host, id),
            Event::Pump(host, id) => self.pump(host, id),
            Event::RepairDue(host, copy) => self.repair_due(host, copy),
            Event::RepairLook(host, copy) => self.repair_look(host, copy),
            Event::LossHeard(host, copy, id) => self.loss_heard(host, copy, id),
            Event::Surveyed(host, copy) => self.surveyed(host, copy),
            Event::OfferExpires(host, id) => self.offer_expires(host, id),
            Event::Arrival(id, end) => self.arrival(id, end),
            Event::Read(host, life, id, message) => self.read(host, life, id, message),
            Event::Question(question) => self.question_arrives(question),
            Event::Answer(question, verdict) => self.answer_arrives(question, verdict),
            Event::Strike(fault) => self.strike(fault),
            Event::PowerOn(host, life) => self.power_on(host, life),
            Event::Heal(from, to) => self.heal(from, to),
            Event::DialPath(host, id, path) => self.dial_path(host, id, path),
            Event::MoveData(host, id) => self.move_data(host, id),
            Event::PathHeals(from, to, path) => self.path_heals(from, to, path),
            Event::WakesUp(host, still) => self.wakes_up(host, still),
            Event::Recovers(host) => self.guest_recovers(host),
            Event::FormerAsks(host, id) => self.former_asks(host, id),
            Event::DataFlows(id) => self.let_data_flow(Some(id)),
            Event::ArbiterBack(host) => self.arbiter_back(host),
            Event::DelayEnds(delay) => {
                self.network.extra_delay = self.network.extra_delay.saturating_sub(delay);
            }
            Event::DataQuickens => self.network.spacing = Duration::ZERO,
            Event::WantedAgain => self.want_protection(),
            Event::AskTurn => self.ask_turn(),
            Event::TurnPrepared(host, id) => self.turn_prepared(host, id),
            Event::TurnMoved(host, id) => self.turn_moved(host, id),
            Event::TurnCut(host, id) => self.turn_cut(host, id),
            Event::Prepares(host, id, order) => self.prepares(host, id, order),
            Event::Calm => {
                self.calm();
                self.commits_before = Some(self.coverage.commits);
            }
            Event::LeaseLook(host, copy) => self.look_at_lease(host, copy),
            Event::LeaseWritten(tending) => self.lease_written(tending),
            Event::LeaseRead(tending) => self.lease_read(tending),
            Event::LeaseAnswered(tending, answer) => self.lease_answered(tending, answer),
            Event::Force(stalls, span) => self.force_elsewhere(stalls, span),
            Event::ForceLooks(forcing) => self.force_looks(forcing),
            Event::ForceTakes(forcing) => self.force_takes(forcing),
            Event::OperatorLooks => {
                self.recover_if_lost();
                self.after(OPERATOR_LOOKS, Event::OperatorLooks);
            }
        }
    }

    fn answer_arrives(&mut self, question: Question, verdict: Verdict) {
        let unreachable = matches!(verdict, Verdict::Unreachable(_));
        // The asker's patience ends only if it has heard nothing.
        if !self.answered.insert(question.ticket) && unreachable {
            return;
        }
        let (host, id) = (question.host, question.session);
        self.note_hand_back(host, id, &verdict);
        self.note(host, || format!("hears of the arbiter: {verdict:?}"));
        if self.hosts[host.0].session(id).is_some() {
            self.coverage.unreachable_to_primary += u64::from(unreachable);
            self.primary_event(host, id, PrimaryEvent::Verdict(verdict, question.word));
        } else if self.hosts[host.0].standby(id).is_some() {
            self.coverage.unreachable_to_backup += u64::from(unreachable);
            self.backup_event(host, id, BackupEvent::Verdict(verdict));
        } else {
            self.former_hears(host, id, verdict);
        }
    }

    /// Counts what a primary's change of phase tells.
    pub(crate) fn primary_turned(&mut self, before: &PrimaryPhase, after: &PrimaryPhase) {
        use PrimaryPhase::*;
        match (before, after) {
            (Syncing, Protected) => {
                self.coverage.reprotections += u64::from(self.protections > 0);
                self.protections += 1;
            }
            (_, HandingOver) => {
                self.coverage.hand_overs += 1;
                self.handing_over = true;
                self.moment(Moment::HandingOver);
            }
            (StandingDown, Contesting(reason)) => {
                self.coverage.stand_downs_contested += 1;
                // The end of protection is itself one of those that strike.
                if self.coverage.faults <= 1 && self.coverage.records_torn == 0 {
                    self.violation(format!("a backup that forgets the VM is lost: {reason}"));
                }
            }
            (StandingDown, Alone(_)) => self.coverage.stood_down += 1,
            (Contesting(_), Alone(_)) => {
                self.coverage.primaries_alone += 1;
                let undone = std::mem::take(&mut self.handing_over);
                self.coverage.hand_overs_undone += u64::from(undone);
            }
            (_, Halted(_)) => {
                self.coverage.primaries_halted += 1;
                self.handing_over = false;
            }
            _ => {}
        }
    }
}
