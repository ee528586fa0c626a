//! Plan of what is measured, and when.

use crate::bench::suite::plan::rotated;
use clap::ValueEnum;
use serde::Serialize;
use std::fmt;
use understudy_snapshot::Mode;

/// A way to have a guest back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// All memory before the start.
    Eager,
    /// Nothing before the start.
    Lazy,
    /// What statistical sampling says, most recently used pages first.
    WorkingSet,
    /// The queue of first accesses, without the restore line.
    HotNoLine,
    /// The queue of first accesses, and the restore line: the product's default.
    Hot,
    /// Plain QEMU: `migrate file:`, and `-incoming` from there.
    Incoming,
}

impl Way {
    /// The product's mode; none if it is not the product's way.
    pub fn mode(self) -> Option<Mode> {
        Some(match self {
            Way::Eager => Mode::Eager,
            Way::Lazy => Mode::Lazy,
            Way::WorkingSet => Mode::WorkingSet,
            Way::HotNoLine => Mode::HotNoLine,
            Way::Hot => Mode::Hot,
            Way::Incoming => return None,
        })
    }
}

/// One measurement to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Number of the round, from 1.
    pub round: u32,
    /// Way in which the guest comes back.
    pub way: Way,
}

/// Steps, round by round: each way, each time in another order. Nothing asked for is everything.
pub fn plan(only: &[Way], runs: u32) -> Vec<Step> {
    let wanted = |way: &&Way| only.is_empty() || only.contains(way);
    let ways: Vec<Way> = Way::value_variants().iter().filter(wanted).copied().collect();
    let round = |round: u32| {
        let steps = rotated(&ways, round as usize - 1).map(move |way| Step { round, way });
        steps.collect::<Vec<_>>()
    };
    (1..=runs).flat_map(round).collect()
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.pad(value.as_ref().map_or("", |value| value.get_name()))
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "round {}, {}", self.round, self.way)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_has_all_that_was_asked_for_in_another_order() {
        let steps = plan(&[], 2);
        let of = |round| {
            let chosen = steps.iter().filter(move |step| step.round == round);
            chosen.map(|step| step.way).collect::<Vec<_>>()
        };
        let (first, mut second) = (of(1), of(2));
        assert_eq!(first, Way::value_variants());
        assert_ne!(first, second);
        second.sort();
        assert_eq!(first, second);
        assert_eq!(plan(&[Way::Hot], 1), [Step { round: 1, way: Way::Hot }]);
    }
}
