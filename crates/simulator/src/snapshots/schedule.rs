//! A seed becomes a schedule of faults among a cluster's hosts.

use crate::host::HostId;
use crate::random::Random;
use std::fmt;
use std::time::Duration;
use understudy_protocol::Time;
use understudy_snapshot::Member;

/// Faults strike before this time, in milliseconds.
const TROUBLE: u64 = 25_000;

/// The stream of a seed's numbers that its schedule is made of.
const STREAM: u64 = 200;

/// What a seed decides in advance.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Schedule {
    pub(crate) hosts: usize,
    /// The host of each member, at first.
    pub(crate) places: Vec<HostId>,
    pub(crate) faults: Vec<Planned>,
    /// Answers of arbiter and store, of a hundred, that are lost once the deed is done.
    pub(crate) lost_answers: u64,
    /// The operator does something else before what was ordered has ended.
    pub(crate) impatient: bool,
    /// A member that sends nothing.
    pub(crate) mute: Option<Member>,
    /// A fault that stays.
    pub(crate) lasting: Option<Lasting>,
}

/// A fault, and when it strikes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Planned {
    pub(crate) when: When,
    pub(crate) fault: Fault,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum When {
    At(Time),
    /// The first time after the given one that this happens, and so much later.
    In(Moment, Time, Duration),
}

/// A moment of a snapshot or of a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    Prepared,
    Paused,
    Saved,
    Publishing,
    Loaded,
    Claimed,
    Started,
    Deciding,
    Decided,
}

/// A host by what it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    Host(HostId),
    /// The one that coordinates what was ordered last.
    Coordinator,
}

/// What fails.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    /// Power, for so long.
    Power(Who, Duration),
    /// The daemon; it is started again.
    Daemon(Who, Duration),
    /// The QEMU of a member.
    Qemu(usize),
    /// A host stands still.
    Stall(Who, Duration),
    /// The way from one host to another, and back if so said.
    Cut(Who, HostId, bool, Duration),
    /// All connections between both break, with a tail of what is under way.
    Break(Who, HostId),
    /// The arbiter, for one host or for all.
    Arbiter(Option<Who>, Duration),
    /// The store answers nothing.
    Store(Duration),
    /// The store takes nothing more of one write.
    StoreFull,
    /// All messages are slow.
    Slow(Duration),
}

/// A part that fails for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lasting {
    /// The store answers nothing any more.
    Store,
    /// No message gets from one host to the other.
    OneWay(HostId, HostId),
    /// A host without power.
    Host(HostId),
    /// The arbiter is away.
    Arbiter,
}

impl Schedule {
    pub(crate) fn new(seed: u64) -> Schedule {
        let random = &mut Random::new(seed, STREAM);
        let hosts = 2 + random.index(2);
        let members = 2 + random.index(3);
        let places = (0..members).map(|_| HostId(random.index(hosts))).collect();
        let count = if random.percent(10) { 0 } else { 1 + random.index(5) };
        let faults = (0..count).map(|_| planned(random, hosts, members)).collect();
        let lost_answers = if random.percent(30) { 5 + random.below(30) } else { 0 };
        let impatient = random.percent(40);
        let mute = random.percent(15).then(|| Member(random.index(members) as u16));
        let lasting = random.percent(8).then(|| lasting(random, hosts));
        Schedule { hosts, places, faults, lost_answers, impatient, mute, lasting }
    }

    /// Time after which nothing fails any more, but for what stays.
    pub(crate) fn calm() -> Time {
        Time(Duration::from_millis(TROUBLE))
    }

    /// The schedules that lack one thing.
    pub(crate) fn simpler(&self) -> Vec<Schedule> {
        let without = |place| {
            let mut less = self.clone();
            less.faults.remove(place);
            less
        };
        let mut all: Vec<Schedule> = (0..self.faults.len()).map(without).collect();
        all.push(Schedule { lost_answers: 0, ..self.clone() });
        all.push(Schedule { impatient: false, ..self.clone() });
        all.push(Schedule { mute: None, ..self.clone() });
        all.push(Schedule { lasting: None, ..self.clone() });
        all.retain(|less| less != self);
        all
    }
}

fn planned(random: &mut Random, hosts: usize, members: usize) -> Planned {
    use Moment::*;
    let at = Time(random.millis(200, TROUBLE));
    let moments =
        [Prepared, Paused, Saved, Publishing, Loaded, Claimed, Started, Deciding, Decided];
    let when = match random.percent(60) {
        true => When::In(moments[random.index(moments.len())], at, random.micros(0, 40_000)),
        false => When::At(at),
    };
    let host = |random: &mut Random| HostId(random.index(hosts));
    let who = |random: &mut Random| match random.percent(35) {
        true => Who::Coordinator,
        false => Who::Host(host(random)),
    };
    let fault = match random.below(20) {
        0 | 1 => Fault::Power(who(random), random.millis(500, 15_000)),
        2..=4 => Fault::Daemon(who(random), random.millis(300, 4_000)),
        5 | 6 => Fault::Qemu(random.index(members)),
        7 | 8 => Fault::Stall(who(random), random.millis(300, 9_000)),
        9..=11 => {
            Fault::Cut(who(random), host(random), random.percent(60), random.millis(200, 14_000))
        }
        12..=14 => Fault::Break(who(random), host(random)),
        15 | 16 => {
            let of = random.percent(60).then(|| who(random));
            Fault::Arbiter(of, random.millis(300, 9_000))
        }
        17 => Fault::Store(random.millis(300, 9_000)),
        18 => Fault::StoreFull,
        _ => Fault::Slow(random.millis(500, 6_000)),
    };
    Planned { when, fault }
}

fn lasting(random: &mut Random, hosts: usize) -> Lasting {
    let one = random.index(hosts);
    let other = (one + 1 + random.index(hosts - 1)) % hosts;
    match random.below(4) {
        0 => Lasting::Store,
        1 => Lasting::OneWay(HostId(one), HostId(other)),
        2 => Lasting::Host(HostId(one)),
        _ => Lasting::Arbiter,
    }
}

impl fmt::Display for Planned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.when {
            When::At(at) => write!(f, "{}, at {:.3} s", self.fault, at.0.as_secs_f64()),
            When::In(moment, from, later) => write!(
                f,
                "{}, {:.3} ms after {moment:?}, from {:.3} s on",
                self.fault,
                later.as_secs_f64() * 1e3,
                from.0.as_secs_f64()
            ),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cluster: {self:?}")
    }
}
