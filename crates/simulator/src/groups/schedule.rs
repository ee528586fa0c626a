//! A seed becomes a schedule of faults of a group.

use crate::random::Random;
use std::fmt;
use std::time::Duration;
use understudy_protocol::Time;

/// Faults strike before this time, in milliseconds.
const TROUBLE: u64 = 3_000;

/// The stream of a seed's numbers that its schedule is made of.
const STREAM: u64 = 300;

/// What a seed decides in advance.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Schedule {
    pub(crate) members: usize,
    pub(crate) faults: Vec<(Time, Fault)>,
}

/// One of both hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The primary, at first.
    A,
    /// The backup.
    B,
}

impl Side {
    pub(crate) fn other(self) -> Side {
        match self {
            Side::A => Side::B,
            Side::B => Side::A,
        }
    }
}

/// What fails, or is wanted; members by their place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    Power(Side),
    /// A member's QEMU dies.
    Qemu(Side, usize),
    /// A member's disk takes nothing any more on the backup.
    Disk(usize),
    /// A member's disk answers nothing on the backup, for so long.
    DiskHangs(usize, Duration),
    /// A member's guest cannot be started on the backup.
    CannotStart(usize),
    /// A member's connection breaks.
    Break(usize),
    /// What goes to that side waits for so long.
    Cut(Side, Duration),
    /// Neither side hears the other.
    Partition(Duration),
    Stall(Side, Duration),
    Arbiter(Duration),
    /// A member's data goes slowly for so long.
    SlowMember(usize, Duration),
    HandOver,
    Unprotect,
}

impl Schedule {
    pub(crate) fn new(seed: u64) -> Schedule {
        let random = &mut Random::new(seed, STREAM);
        let members = 2 + random.index(2);
        let count = [1, 1, 1, 2, 2, 3, 4][random.index(7)];
        let fault = |_| (Time(random.millis(20, TROUBLE)), fault(random, members));
        let mut faults: Vec<(Time, Fault)> = (0..count).map(fault).collect();
        faults.sort_by_key(|(at, _)| *at);
        // Some close together.
        if count > 1 && random.percent(60) {
            faults[1].0 = faults[0].0 + random.micros(0, 150_000);
        }
        Schedule { members, faults }
    }

    pub(crate) fn calm() -> Time {
        Time(Duration::from_millis(TROUBLE + 4_000))
    }

    /// The schedules that lack one thing.
    pub(crate) fn simpler(&self) -> Vec<Schedule> {
        let without = |place| {
            let mut less = self.clone();
            less.faults.remove(place);
            less
        };
        (0..self.faults.len()).map(without).collect()
    }

    /// The faults, for people.
    pub(crate) fn words(&self) -> Vec<String> {
        let words =
            |(at, fault): &(Time, Fault)| format!("{fault}, at {:.3} s", at.0.as_secs_f64());
        self.faults.iter().map(words).collect()
    }
}

fn fault(random: &mut Random, members: usize) -> Fault {
    let member = random.index(members);
    let side = if random.percent(50) { Side::A } else { Side::B };
    match random.below(22) {
        0..=2 => Fault::Power(side),
        3..=5 => Fault::Qemu(side, member),
        6 | 7 => Fault::Disk(member),
        8 | 9 => Fault::DiskHangs(member, random.millis(100, 6_000)),
        10 | 11 => Fault::CannotStart(member),
        12 | 13 => Fault::Break(member),
        14 => Fault::Cut(side, random.millis(50, 2_000)),
        15 => Fault::Partition(random.millis(50, 2_000)),
        16 => Fault::Stall(side, random.millis(50, 1_500)),
        17 => Fault::Arbiter(random.millis(100, 3_000)),
        18 | 19 => Fault::SlowMember(member, random.millis(100, 1_500)),
        20 => Fault::HandOver,
        _ => Fault::Unprotect,
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "group: {self:?}")
    }
}
