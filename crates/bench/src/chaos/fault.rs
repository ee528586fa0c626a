//! Fault of a run: one failure, drawn from the run's seed.

use anyhow::Result;
use std::fmt;
use std::time::{Duration, Instant};
use understudy_lab::scene::VM;
use understudy_lab::{Part, Scene};

/// A stall or a cut of this length is a failure to every detector: silence
/// longer than their ceiling of 2 s, and time to act on it.
const CERTAIN: Duration = Duration::from_millis(3500);

/// One failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Host that it hits.
    pub side: Side,
    /// Kind of what happens to it.
    pub kind: Kind,
    /// Time at which it happens: so long after protection is complete, or after its beginning.
    pub delay: Duration,
    /// Whether the delay counts from the beginning of the synchronisation.
    pub while_syncing: bool,
}

/// The host that is hit, by what it is to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Runs the guest.
    Primary,
    /// Stands by.
    Backup,
}

/// Kind of what happens to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// SIGKILL, for good.
    Kill(What),
    /// SIGSTOP, and SIGCONT so much later.
    Stall(What, Duration),
    /// The network drops everything, for so long.
    Cut(Duration),
    /// The cable is pulled, for so long: the host sees that its link is down.
    Unplug(Duration),
}

/// Part of a host that is hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Every process.
    Everything,
    /// The daemon alone.
    Daemon,
    /// The guest's QEMU alone.
    Qemu,
}

impl Fault {
    /// The failure of a seed: always the same one.
    pub fn draw(seed: u64) -> Fault {
        let mut dice = Dice(seed);
        let side = if dice.below(10) < 7 { Side::Primary } else { Side::Backup };
        let kind = match dice.below(10) {
            0..4 => Kind::Kill(dice.what()),
            4..7 => Kind::Stall(dice.what(), dice.absence()),
            7..9 => Kind::Cut(dice.absence()),
            _ => Kind::Unplug(dice.absence()),
        };
        // Before the first synchronisation has ended there is no second copy:
        // nobody promises that the guest outlives its only one.
        let while_syncing = side == Side::Backup && dice.below(4) == 0;
        let delay = Duration::from_micros(dice.below(1_500_000));
        Fault { side, kind, delay, while_syncing }
    }

    /// Time until what was hit comes back; none for a death.
    pub fn absence(&self) -> Option<Duration> {
        match self.kind {
            Kind::Kill(_) => None,
            Kind::Stall(_, absence) | Kind::Cut(absence) | Kind::Unplug(absence) => Some(absence),
        }
    }

    /// Whether the backup must take over. Otherwise the guest must live on, on
    /// either host: after a short absence both are right.
    pub fn calls_for_takeover(&self) -> bool {
        self.side == Side::Primary
            && match self.kind {
                Kind::Kill(_) => true,
                // Of a QEMU, too: it is given a second (`detection.qemu_timeout_ms`).
                Kind::Stall(_, absence) | Kind::Cut(absence) | Kind::Unplug(absence) => {
                    absence >= CERTAIN
                }
            }
    }

    /// Does it to a host; returns the instant just before.
    pub fn strike(&self, scene: &mut Scene, host: &str, qemu: u32) -> Result<Instant> {
        let part = |what| match what {
            What::Everything => Part::Everything,
            What::Daemon => Part::Daemon,
            What::Qemu => Part::Process(qemu),
        };
        let instant = Instant::now();
        match self.kind {
            Kind::Kill(what) => scene.host_mut(host)?.kill(part(what)),
            Kind::Stall(what, _) => scene.host(host)?.stall(part(what)),
            Kind::Cut(_) => scene.lab().cut(host).map(|()| instant),
            Kind::Unplug(_) => scene.lab().unplug(host).map(|()| instant),
        }
    }

    /// Undoes it, as far as it can be undone.
    pub fn undo(&self, scene: &Scene, host: &str) -> Result<()> {
        match self.kind {
            Kind::Kill(_) => Ok(()),
            Kind::Stall(..) => scene.host(host)?.resume(),
            Kind::Cut(_) | Kind::Unplug(_) => scene.lab().heal(host),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = match self.side {
            Side::Primary => "the primary",
            Side::Backup => "the backup",
        };
        let part = |what| match what {
            What::Everything => side.to_owned(),
            What::Daemon => format!("{side}'s daemon"),
            What::Qemu => format!("{side}'s {VM} QEMU"),
        };
        let seconds = Duration::as_secs_f64;
        match self.kind {
            Kind::Kill(what) => write!(f, "{} is killed", part(what)),
            Kind::Stall(what, absence) => {
                write!(f, "{} stalls for {:.2} s", part(what), seconds(&absence))
            }
            Kind::Cut(absence) => write!(f, "{side} is cut off for {:.2} s", seconds(&absence)),
            Kind::Unplug(absence) => {
                write!(f, "{side} is unplugged for {:.2} s", seconds(&absence))
            }
        }?;
        let since = if self.while_syncing { "into the synchronisation" } else { "into protection" };
        write!(f, " {:.3} s {since}", seconds(&self.delay))
    }
}

/// SplitMix64: a few numbers from a seed, the same ones every time.
struct Dice(u64);

impl Dice {
    /// A number below `limit`.
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (value ^ (value >> 31)) % limit
    }

    fn what(&mut self) -> What {
        match self.below(5) {
            0..3 => What::Everything,
            3 => What::Daemon,
            _ => What::Qemu,
        }
    }

    /// Time for which something is away: blinks, the time-outs' own range, and long.
    fn absence(&mut self) -> Duration {
        let milliseconds = match self.below(10) {
            0..3 => self.below(100),
            3..6 => 100 + self.below(900),
            6 => 1000 + self.below(2500),
            7..9 => 3500 + self.below(1500),
            _ => 10_000,
        };
        Duration::from_millis(milliseconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_seed_is_always_the_same_fault() {
        for seed in 0..100 {
            assert_eq!(Fault::draw(seed), Fault::draw(seed));
        }
    }

    #[test]
    fn every_kind_of_fault_is_drawn() {
        let faults: Vec<Fault> = (0..400).map(Fault::draw).collect();
        let kind = |fault: &Fault| {
            let absence = fault.absence().map(|absence| absence >= CERTAIN);
            let name = match fault.kind {
                Kind::Kill(what) => format!("kill {what:?}"),
                Kind::Stall(what, _) => format!("stall {what:?}"),
                Kind::Cut(_) => "cut".to_owned(),
                Kind::Unplug(_) => "unplug".to_owned(),
            };
            format!("{:?} {name} {absence:?}", fault.side)
        };
        let kinds: BTreeSet<String> = faults.iter().map(kind).collect();
        // On both sides: three kills, three stalls, cut and unplug, short and long.
        assert_eq!(kinds.len(), 2 * (3 + 2 * (3 + 2)), "{kinds:#?}");
        let takeovers = faults.iter().filter(|fault| fault.calls_for_takeover()).count();
        assert!((100..300).contains(&takeovers), "{takeovers} of 400");
        assert!(faults.iter().any(|fault| fault.while_syncing));
    }

    #[test]
    fn only_a_lost_primary_calls_for_a_takeover() {
        let fault = |side, kind| Fault { side, kind, delay: Duration::ZERO, while_syncing: false };
        let calls = |side, kind| fault(side, kind).calls_for_takeover();
        let (short, long) = (Duration::from_millis(10), Duration::from_secs(10));
        assert!(calls(Side::Primary, Kind::Kill(What::Qemu)));
        assert!(calls(Side::Primary, Kind::Cut(long)));
        assert!(calls(Side::Primary, Kind::Stall(What::Daemon, long)));
        assert!(calls(Side::Primary, Kind::Stall(What::Qemu, long)));
        assert!(!calls(Side::Primary, Kind::Unplug(short)));
        assert!(!calls(Side::Backup, Kind::Kill(What::Everything)));
    }
}
