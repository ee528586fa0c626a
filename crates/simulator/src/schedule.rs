//! A seed becomes a schedule: how the world is, and what goes wrong when.

use crate::lasting::Lasting;
use crate::outbox::Shortage;
use crate::paths::Flaw;
use crate::random::Random;
use std::fmt;
use std::time::Duration;
use understudy_protocol::{Policy, Time};

/// Faults strike before this time.
const TROUBLE: u64 = 4_000;

/// Delays of a message on a sound network, in microseconds.
const QUICK: (u64, u64) = (50, 1_500);

/// A time longer than any schedule.
pub(crate) const FOR_GOOD: Duration = Duration::from_secs(3_600);

/// Of two clocks that go wrong by so many millionths, one too fast and one too slow, the one is faster by
/// a tenth: what a lease allows for (`Renewal::patience`), without what it has to spare.
pub const TENTH_APART: i64 = 47_619;

/// What a seed decides in advance; the rest is decided as it happens.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// Number of hosts.
    pub hosts: usize,
    /// Policy of when the primary checkpoints.
    pub policy: Policy,
    /// Whether its backup gets a log instead, behind the first checkpoint.
    pub lockstep: bool,
    /// Times at which the operator wants the other of both.
    pub turns: Vec<Time>,
    /// The shortest silence that counts as failure.
    pub timeout: Duration,
    /// Delay of a message, in microseconds.
    pub latency: (u64, u64),
    /// Number, of a hundred answers of the arbiter, that are lost, late or doubled.
    pub lost_answers: u64,
    /// Faults that strike.
    pub faults: Vec<Planned>,
    /// A host that does not reach the arbiter even when all else is well.
    pub without_arbiter: Option<usize>,
    /// A host that loses its power for good.
    pub never_returns: Option<usize>,
    /// How many paths there are between two hosts.
    pub paths: usize,
    /// By how much each host's clock is faster than the world's, in millionths.
    pub clocks: [i64; 3],
    /// A sole owner that stands still while an operator forces the VM elsewhere has a clock that does, too.
    pub clocks_stop: bool,
    /// A host whose processors are slow, and how many times everything takes longer there.
    pub slow: Option<(usize, u32)>,
    /// Number, of a hundred records that are written, as which are written their host fails.
    pub torn_records: u64,
    /// Room for what is on its way, if that is short.
    pub shortage: Option<Shortage>,
    /// From here on nothing goes wrong any more, and what did is repaired, unless it failed for good.
    pub calm_from: Time,
}

/// A fault and its time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Planned {
    /// Time at which it strikes.
    pub when: When,
    /// Fault that strikes.
    pub fault: Fault,
}

/// The time at which a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum When {
    /// The fault strikes at this time.
    At(Time),
    /// The fault strikes when this has happened so many times: the moments that matter are short.
    Upon(Moment, u32),
}

/// Moments at which a failure is most interesting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Moment {
    /// An epoch was closed.
    Captured,
    /// An epoch's end was sent.
    EndSent,
    /// An epoch was acknowledged.
    Acknowledged,
    /// An epoch is being applied.
    Applying,
    /// The primary asks the arbiter.
    PrimaryContests,
    /// The backup asks the arbiter.
    BackupContests,
    /// The backup has won.
    Granted,
    /// The backup has written its activation record.
    Activated,
    /// The backup runs the VM.
    Live,
    /// The primary hands the VM over.
    HandingOver,
    /// The backup is to forget the VM.
    StandingDown,
    /// The backup is asked for a turn.
    TurnAsked,
    /// The primary hears that the backup is ready for it.
    TurnReady,
    /// The guest moves into a QEMU that records.
    TurnMoves,
    /// The epoch that is the turn was closed.
    TurnCaptured,
    /// All of it was sent.
    TurnSent,
    /// It is committed.
    TurnCommitted,
    /// The backup executes the last of its log.
    TurnApplying,
    /// The backup has turned.
    TurnApplied,
}

/// Target of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The host that runs the VM.
    Primary,
    /// The host that keeps an understudy.
    Backup,
    /// A host by number.
    Host(usize),
}

/// A fault: what goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A host loses its power for so long.
    PowerLoss(Target, Duration),
    /// All hosts lose their power for so long.
    AllPowerLoss(Duration),
    /// A daemon dies; its kernel closes its connections.
    DaemonDeath(Target, Duration),
    /// A QEMU dies.
    QemuDeath(Target),
    /// The QEMU that the backup has prepared for a turn dies.
    OtherDeath,
    /// The primary's QEMU is taken for one that hangs; it goes on.
    QemuHang,
    /// The guest of a protected primary does nothing any more, and cannot be saved, for so long.
    SickGuest(Duration),
    /// No message gets through between primary and backup.
    Partition(Duration),
    /// No message gets through one way: from the primary, or to it.
    OneWay(bool, Duration),
    /// A host is cut off from the others and from the arbiter.
    Isolation(Target, Duration),
    /// A host does not reach the arbiter.
    ArbiterCut(Target, Duration),
    /// The arbiter is down.
    ArbiterDown(Duration),
    /// One of the session's connections breaks (true: the data connection).
    Break(bool),
    /// A host stands still.
    Stall(Target, Duration),
    /// The backup's disk answers nothing.
    HungDisk(Duration),
    /// The disk of the backup's records, which is another one, answers nothing.
    HungRecord(Duration),
    /// The backup's disk fails what is written to it next, so many times.
    FailingDisk(u32),
    /// The backup's QEMU does not follow its log.
    Divergence,
    /// The session's data does not get through, its heartbeats do: on the way, or (true) read by
    /// nobody at the backup.
    DataStall(bool, Duration),
    /// One of several paths fails, the one that carries the data (true) or another.
    Path(Flaw, bool, Duration),
    /// Every message is late.
    Delay(Duration, Duration),
    /// Data comes slowly, a message each such time.
    SlowData(Duration, Duration),
    /// The next message to arrive is damaged.
    Damage,
    /// The operator hands the VM over.
    Failover,
    /// The operator ends protection.
    Unprotect,
    /// The operator ends protection; then the sole owner stands still, or is isolated, for so long,
    /// and the operator forces the VM onto another host.
    Force(bool, Duration),
    /// A part fails for good.
    Lasts(Lasting),
}

impl Fault {
    /// Whether a protected VM must come through this fault alone.
    pub fn is_survivable(self) -> bool {
        !matches!(self, Fault::AllPowerLoss(_) | Fault::Unprotect | Fault::Force(..))
    }
}

impl Schedule {
    /// Time between two heartbeats of its sessions.
    pub(crate) fn heartbeat_interval(&self) -> Duration {
        understudy_protocol::heartbeat_interval(self.timeout, Some(self.timeout))
    }

    /// The schedule of a seed.
    pub fn new(seed: u64) -> Schedule {
        let random = &mut Random::new(seed, 1);
        let hosts = if random.percent(30) { 3 } else { 2 };
        let policy = match random.percent(40) {
            true => Policy::Interval { hz: 10 + random.below(90) as u32 },
            false => Policy::default(),
        };
        let latency = if random.percent(80) { QUICK } else { (500, 40_000) };
        let lost_answers = if random.percent(60) { 0 } else { random.below(40) };
        let without_arbiter = random.percent(15).then(|| random.index(hosts));
        let count = [1, 1, 2, 2, 3, 3, 4, 5, 7, 10][random.index(10)];
        let mut faults: Vec<_> = (0..count).map(|_| Planned::any(random, hosts)).collect();
        let never_returns = random.percent(10).then(|| random.index(hosts));
        if let Some(host) = never_returns {
            let when = When::At(Time(random.millis(200, TROUBLE - 500)));
            let fault = Fault::PowerLoss(Target::Host(host), FOR_GOOD);
            let last = faults.len() - 1;
            faults[last] = Planned { when, fault };
        }
        // By numbers of its own, as all about leases: other schedules are what they were. Those of one
        // fault show what a VM must survive.
        let forced = &mut Random::new(seed, 2);
        if faults.len() > 1 && forced.percent(20) {
            let when = When::At(Time(forced.millis(300, TROUBLE - 500)));
            let fault = Fault::Force(forced.percent(50), forced.millis(300, 3_500));
            faults.push(Planned { when, fault });
        }
        // By numbers of its own, too.
        let failing = &mut Random::new(seed, 4);
        if faults.len() > 1 && failing.percent(25) {
            let when = match failing.percent(50) {
                true => Planned::upon(failing),
                false => When::At(Time(failing.millis(100, TROUBLE - 500))),
            };
            faults.push(Planned { when, fault: Fault::FailingDisk(1 + failing.below(2) as u32) });
        }
        // Long enough for a winner to give the VM back meanwhile.
        let recording = &mut Random::new(seed, 7);
        if faults.len() > 1 && recording.percent(15) {
            let when = match recording.percent(50) {
                true => When::Upon(Moment::BackupContests, 1),
                false => When::At(Time(recording.millis(100, TROUBLE - 500))),
            };
            let fault = Fault::HungRecord(recording.millis(4_000, 9_000));
            faults.push(Planned { when, fault });
            // The copy dies while its record is written.
            if recording.percent(40) {
                let when = When::Upon(Moment::Granted, 1);
                faults.push(Planned { when, fault: Fault::QemuDeath(Target::Backup) });
            }
        }
        // Again: the schedules of checkpoints are what they were.
        let following = &mut Random::new(seed, 5);
        let lockstep = following.percent(20);
        if lockstep && following.percent(25) {
            let fault = Fault::Divergence;
            let when = When::At(Time(following.millis(100, TROUBLE - 500)));
            match &mut faults[..] {
                [only] if never_returns.is_none() => *only = Planned { when, fault },
                _ => faults.push(Planned { when, fault }),
            }
        }
        // And again.
        let lasting = &mut Random::new(seed, 6);
        let alone = without_arbiter.is_none() && never_returns.is_none();
        if alone && lasting.percent(20) {
            let planned = Planned::lasting(lasting);
            match &mut faults[..] {
                [only] => *only = planned,
                _ => faults.push(planned),
            }
        }
        let slow = &mut Random::new(seed, 8);
        if faults.len() > 1 && slow.percent(15) {
            let when = When::At(Time(slow.millis(100, TROUBLE - 500)));
            let fault = Fault::SlowData(slow.millis(8, 20), slow.millis(500, 1_500));
            faults.push(Planned { when, fault });
        }
        let ways = &mut Random::new(seed, 12);
        let paths = if ways.percent(20) { 2 } else { 1 };
        if paths > 1 && ways.percent(70) {
            let planned = Planned::of_path(ways);
            match &mut faults[..] {
                [only] if never_returns.is_none() => *only = planned,
                _ => faults.push(planned),
            }
        }
        let turning = &mut Random::new(seed, 18);
        let turns = if turning.percent(25) { turns(turning) } else { Vec::new() };
        if !turns.is_empty() {
            for planned in &mut faults {
                let stays = planned.fault == Fault::Unprotect || never_returns.is_some();
                if !stays && turning.percent(50) {
                    planned.when = Planned::in_turn(turning);
                }
            }
            // Its commit is late.
            if faults.len() > 1 && turning.percent(25) {
                let when = match turning.percent(50) {
                    true => When::Upon(Moment::TurnReady, 1 + turning.below(3) as u32),
                    false => When::Upon(Moment::TurnCaptured, 1 + turning.below(3) as u32),
                };
                let fault = Fault::DataStall(turning.percent(50), turning.millis(420, 980));
                faults.push(Planned { when, fault });
            }
            if turning.percent(15) {
                let planned = Planned { when: Planned::in_turn(turning), fault: Fault::OtherDeath };
                match &mut faults[..] {
                    [only] if never_returns.is_none() => *only = planned,
                    _ => faults.push(planned),
                }
                // Its primary dies with it.
                if faults.len() > 1 && turning.percent(50) {
                    let number = 1 + turning.below(2) as u32;
                    for (moment, fault) in [
                        (Moment::TurnReady, Fault::OtherDeath),
                        (Moment::TurnCaptured, Fault::QemuDeath(Target::Primary)),
                    ] {
                        faults.push(Planned { when: When::Upon(moment, number), fault });
                    }
                }
            }
        }
        let shortage = (!lockstep).then(|| Shortage::any(&mut Random::new(seed, 14))).flatten();
        // A message at a time on a slow wire is too little for a log.
        let latency = match shortage {
            Some(_) if !turns.is_empty() => QUICK,
            _ => latency,
        };
        let timing = &mut Random::new(seed, 9);
        let clocks = [(); 3].map(|()| [-TENTH_APART, TENTH_APART][timing.index(2)]);
        let clocks = if faults.len() > 1 && timing.percent(80) { clocks } else { [0; 3] };
        let clocks_stop = timing.percent(40);
        let slow = (faults.len() > 1 && timing.percent(15))
            .then(|| (timing.index(hosts), 3 + timing.below(6) as u32));
        let torn = &mut Random::new(seed, 15);
        let torn_records = if faults.len() > 1 && torn.percent(15) { 20 } else { 0 };
        Schedule {
            hosts,
            policy,
            lockstep,
            turns,
            timeout: Duration::from_millis(100),
            latency,
            lost_answers,
            faults,
            without_arbiter,
            never_returns,
            paths,
            clocks,
            clocks_stop,
            slow,
            torn_records,
            shortage,
            calm_from: Time(Duration::from_millis(TROUBLE)),
        }
    }
}

/// Times of turns, some soon after each other.
fn turns(random: &mut Random) -> Vec<Time> {
    let mut at = random.millis(200, 1_200);
    let mut turns = Vec::new();
    while at < Duration::from_millis(TROUBLE - 100) && turns.len() < 8 {
        turns.push(Time(at));
        at += if random.percent(40) { random.millis(5, 300) } else { random.millis(300, 1_500) };
    }
    turns
}

impl Shortage {
    fn any(random: &mut Random) -> Option<Shortage> {
        random.percent(25).then(|| Shortage {
            queue: 1 + random.below(8),
            wire: 1 + random.index(5),
            epoch: 2 + random.below(16),
            writes: [25, 60, 95][random.index(3)],
            backup: 1 + random.index(3),
        })
    }
}

impl fmt::Display for Planned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.when {
            When::At(time) => write!(f, "{:?}, after {:?}", self.fault, time.0),
            When::Upon(moment, times) => {
                write!(f, "{:?}, at {moment:?} number {times}", self.fault)
            }
        }
    }
}

impl Planned {
    fn any(random: &mut Random, hosts: usize) -> Planned {
        let when = match random.percent(40) {
            true => Planned::upon(random),
            false => When::At(Time(random.millis(20, TROUBLE - 500))),
        };
        Planned { when, fault: Fault::any(random, hosts) }
    }

    fn lasting(random: &mut Random) -> Planned {
        let when = match random.percent(50) {
            true => Planned::upon(random),
            false => When::At(Time(random.millis(100, TROUBLE - 500))),
        };
        let what = match random.below(4) {
            0 => Lasting::FailedDisk,
            1 => Lasting::HungDisk,
            2 => Lasting::OneWay(random.percent(50)),
            _ => Lasting::Hole,
        };
        Planned { when, fault: Fault::Lasts(what) }
    }

    fn of_path(random: &mut Random) -> Planned {
        let when = When::At(Time(random.millis(200, TROUBLE - 500)));
        let flaw = match random.below(5) {
            0 => Flaw::Cut,
            1 => Flaw::Reset,
            2 => Flaw::OneWay(random.percent(50)),
            _ => Flaw::Hole,
        };
        let span = random.millis(50, 8_000);
        Planned { when, fault: Fault::Path(flaw, random.percent(80), span) }
    }

    fn in_turn(random: &mut Random) -> When {
        use Moment::*;
        let moments = [
            TurnAsked,
            TurnReady,
            TurnMoves,
            TurnCaptured,
            TurnSent,
            TurnCommitted,
            TurnApplying,
            TurnApplied,
        ];
        When::Upon(moments[random.index(moments.len())], 1 + random.below(3) as u32)
    }

    fn upon(random: &mut Random) -> When {
        use Moment::*;
        let often = [Captured, EndSent, Acknowledged, Applying];
        let rare =
            [PrimaryContests, BackupContests, Granted, Activated, Live, HandingOver, StandingDown];
        match random.percent(50) {
            true => When::Upon(often[random.index(often.len())], 1 + random.below(40) as u32),
            false => When::Upon(rare[random.index(rare.len())], 1 + random.below(2) as u32),
        }
    }
}

impl Fault {
    fn any(random: &mut Random, hosts: usize) -> Fault {
        let target = match random.below(10) {
            0..=4 => Target::Primary,
            5..=8 => Target::Backup,
            _ => Target::Host(random.index(hosts)),
        };
        // Short enough to be borne, or long enough to be suspected.
        let span = match random.percent(40) {
            true => random.millis(5, 150),
            false => random.millis(150, 2_500),
        };
        match random.below(121) {
            0..12 => Fault::PowerLoss(target, span),
            12..16 => Fault::AllPowerLoss(span),
            16..24 => Fault::DaemonDeath(target, span),
            24..30 => Fault::QemuDeath(target),
            30..38 => Fault::Partition(span),
            38..44 => Fault::OneWay(random.percent(50), span),
            44..50 => Fault::Isolation(target, span),
            50..57 => Fault::ArbiterCut(target, span),
            57..62 => Fault::ArbiterDown(span),
            62..70 => Fault::Break(random.percent(50)),
            70..78 => Fault::Stall(target, span),
            78..82 => Fault::Delay(random.millis(1, 300), span),
            82..86 => Fault::Damage,
            86..92 => Fault::Failover,
            92..94 => Fault::QemuHang,
            94..100 => Fault::Unprotect,
            100..107 => Fault::DataStall(random.percent(50), span * 2),
            107..113 => Fault::HungDisk(span * 4),
            _ => Fault::SickGuest(span * 4),
        }
    }
}
