//! The best length of the epochs of a busy guest: found, not set.
//!
//! Who waits for a guest's output asks again once it is there, so what a guest gets done is how
//! much it says and hears. Short epochs let answers out early, long ones let the guest run; which
//! counts for more depends on the guest, its clients and both hosts. So two lengths are tried in
//! turn, the one that is in use and a longer or a shorter one, and the better is used from then
//! on. Of lengths between which nothing is to be seen, that one is taken which the guest's pages
//! speak for: those who wait for nothing in particular do not make a guest's epochs short.
//!
//! Pure: it hears of epochs that have ended, and says how long the next one should be.

use std::time::Duration;

/// Factor between a length and the next one that is tried.
const STEP: f64 = 2.0;

/// The length with nothing known.
const FIRST: Duration = Duration::from_millis(10);

/// The bounds: a pause takes nearly as long as the one, and people notice the other.
const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_millis(50);

/// A length is kept for so long, and so many epochs, at least, so that what one lets out comes
/// back as requests to one of its own.
const TURN: Duration = Duration::from_millis(20);
const TURN_EPOCHS: u32 = 2;

/// The turns of one round. What grows or shrinks meanwhile falls on both.
const ROUND: [Side; 4] = [Side::Used, Side::Tried, Side::Tried, Side::Used];

/// A trial ends after so many rounds at the latest, and after so few if the difference is clear.
const MOST_ROUNDS: usize = 12;
const FEWEST_ROUNDS: usize = 3;

/// A difference is clear beyond so many of its standard errors, …
const CLEAR: f64 = 2.0;
/// … and worth a change.
const WORTH: f64 = 0.02;

/// An epoch that has ended.
#[derive(Clone, Copy, Debug)]
pub struct EndedEpoch {
    /// Time from its first instruction to that of the next one, the pause included.
    pub lasted: Duration,
    /// Bytes that the guest sent and was given in it.
    pub carried: u64,
    /// Length that an epoch should have by what the pages of this one cost.
    pub by_pages: Duration,
}

/// Finds the length. See the module.
#[derive(Clone, Debug)]
pub struct EpochLength {
    used: Duration,
    trial: Trial,
}

impl Default for EpochLength {
    fn default() -> EpochLength {
        EpochLength { used: FIRST, trial: Trial::new(Direction::Shorter) }
    }
}

impl EpochLength {
    /// The least time that a guest under full load gets before its output ends the epoch that
    /// runs.
    pub fn now(&self) -> Duration {
        match self.trial.side() {
            Side::Used => self.used,
            Side::Tried => self.tried(),
        }
    }

    /// Learns from an epoch.
    pub fn ended(&mut self, epoch: EndedEpoch) {
        let Some(verdict) = self.trial.ended(epoch) else { return };
        let tried = self.tried();
        let nearer = tried.abs_diff(epoch.by_pages) < self.used.abs_diff(epoch.by_pages);
        let adopt = verdict == Verdict::Better || verdict == Verdict::Same && nearer;
        let direction = self.trial.direction;
        if adopt {
            self.used = tried;
        }
        // What did well is gone on with; at a bound there is but one way.
        let onwards = if adopt { direction } else { direction.opposite() };
        let possible = onwards.from(self.used) != self.used;
        self.trial = Trial::new(if possible { onwards } else { onwards.opposite() });
    }

    fn tried(&self) -> Duration {
        self.trial.direction.from(self.used)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Shorter,
    Longer,
}

impl Direction {
    fn opposite(self) -> Direction {
        match self {
            Direction::Shorter => Direction::Longer,
            Direction::Longer => Direction::Shorter,
        }
    }

    /// The next length this way.
    fn from(self, length: Duration) -> Duration {
        let next = match self {
            Direction::Shorter => length.div_f64(STEP),
            Direction::Longer => length.mul_f64(STEP),
        };
        next.clamp(SHORTEST, LONGEST)
    }
}

/// The side of a trial to which an epoch's length belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Used,
    Tried,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Better,
    Same,
    Worse,
}

/// Another length beside the one that is used, in turns.
#[derive(Clone, Debug)]
struct Trial {
    direction: Direction,
    /// Turn of the round.
    turn: usize,
    /// The turn's epochs.
    running: Tally,
    used: Tally,
    tried: Tally,
    /// The gain of each round, by which the tried length carried more: the logarithm of the ratio.
    gains: Vec<f64>,
}

/// The bytes that were carried, and in which time.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    epochs: u32,
    time: Duration,
    bytes: u64,
}

impl Tally {
    fn add(&mut self, other: Tally) {
        self.epochs += other.epochs;
        self.time += other.time;
        self.bytes += other.bytes;
    }

    /// A second; never nothing, so that ratios can be taken.
    fn rate(&self) -> f64 {
        (self.bytes + 1) as f64 / self.time.as_secs_f64().max(1e-9)
    }
}

impl Trial {
    fn new(direction: Direction) -> Trial {
        let (running, used, tried) = Default::default();
        Trial { direction, turn: 0, running, used, tried, gains: Vec::new() }
    }

    fn side(&self) -> Side {
        ROUND[self.turn]
    }

    /// Counts an epoch; says which length is better once that is known.
    fn ended(&mut self, epoch: EndedEpoch) -> Option<Verdict> {
        self.running.add(Tally { epochs: 1, time: epoch.lasted, bytes: epoch.carried });
        if self.running.epochs < TURN_EPOCHS || self.running.time < TURN {
            return None;
        }
        let turn = std::mem::take(&mut self.running);
        match self.side() {
            Side::Used => self.used.add(turn),
            Side::Tried => self.tried.add(turn),
        }
        self.turn = (self.turn + 1) % ROUND.len();
        if self.turn > 0 {
            return None;
        }
        let (used, tried) = (std::mem::take(&mut self.used), std::mem::take(&mut self.tried));
        self.gains.push((tried.rate() / used.rate()).ln());
        self.verdict()
    }

    fn verdict(&self) -> Option<Verdict> {
        let rounds = self.gains.len();
        if rounds < FEWEST_ROUNDS {
            return None;
        }
        let mean = self.gains.iter().sum::<f64>() / rounds as f64;
        let spread: f64 = self.gains.iter().map(|gain| (gain - mean).powi(2)).sum();
        let error = (spread / (rounds - 1) as f64 / rounds as f64).sqrt();
        if mean.abs() > (CLEAR * error).max(WORTH) {
            return Some(if mean > 0.0 { Verdict::Better } else { Verdict::Worse });
        }
        (rounds == MOST_ROUNDS).then_some(Verdict::Same)
    }
}

#[cfg(test)]
#[path = "epoch_length_tests.rs"]
mod tests;
