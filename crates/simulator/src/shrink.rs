//! A schedule that breaks an invariant, without all that is not needed for it.

use crate::mutant::Mutant;
use crate::schedule::{Planned, Schedule};
use crate::sweep::{Story, play};
use serde::Serialize;

/// Number of tries with something left out: what chance decides comes out differently then.
const CHANCES: u64 = 8;

/// The remains of a schedule, and what happens in it.
#[derive(Debug, Serialize)]
pub struct Shrunk {
    /// Faults of the whole schedule.
    pub faults_before: usize,
    /// Faults that are left.
    pub faults: Vec<String>,
    /// Story that happens with them.
    pub story: Story,
}

/// Leaves out of a seed's schedule whatever can be left out, one thing after the other, as long as an
/// invariant is broken; none if none was.
pub fn shrink(seed: u64, mutant: Option<Mutant>) -> Option<Shrunk> {
    let whole = Schedule::new(seed);
    let breaks = |schedule: &Schedule, chance| {
        play(schedule.clone(), chance, mutant, false).violation.is_some()
    };
    if !breaks(&whole, seed) {
        return None;
    }
    let (mut left, mut chance) = (whole.clone(), seed);
    while let Some(next) = simpler(&left).into_iter().find_map(|schedule| {
        let chances = [chance].into_iter().chain(0..CHANCES);
        let found = chances.into_iter().find(|chance| breaks(&schedule, *chance));
        found.map(|chance| (schedule, chance))
    }) {
        (left, chance) = next;
    }
    Some(Shrunk {
        faults_before: whole.faults.len(),
        faults: left.faults.iter().map(Planned::to_string).collect(),
        story: play(left, chance, mutant, true),
    })
}

/// The schedules that lack one thing.
fn simpler(schedule: &Schedule) -> Vec<Schedule> {
    let mut all: Vec<Schedule> = (0..schedule.faults.len())
        .map(|place| {
            let mut less = schedule.clone();
            less.faults.remove(place);
            less
        })
        .collect();
    let changes: [fn(&mut Schedule); 11] = [
        |less| less.lost_answers = 0,
        |less| less.without_arbiter = None,
        |less| less.never_returns = None,
        |less| less.lockstep = false,
        |less| less.turns.clear(),
        |less| less.clocks = [0; 3],
        |less| less.clocks_stop = false,
        |less| less.slow = None,
        |less| less.paths = 1,
        |less| less.shortage = None,
        |less| less.torn_records = 0,
    ];
    let changed = changes.map(|change| {
        let mut less = schedule.clone();
        change(&mut less);
        less
    });
    all.extend(changed.into_iter().filter(|less| less != schedule));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutant::CoreMutant;

    #[test]
    fn nothing_is_left_of_a_schedule_that_breaks_nothing() {
        assert!(shrink(0, None).is_none());
    }

    #[test]
    fn what_is_left_breaks_an_invariant_and_nothing_more_can_be_left_out() {
        let bug = Some(Mutant::Core(CoreMutant::TakeOverWithNothing));
        let breaks = |schedule, chance| play(schedule, chance, bug, false).violation.is_some();
        let seed = (0..10_000)
            .find(|&seed| {
                let schedule = Schedule::new(seed);
                schedule.faults.len() >= 4 && breaks(schedule, seed)
            })
            .unwrap();
        let shrunk = shrink(seed, bug).unwrap();
        assert!(shrunk.faults.len() < shrunk.faults_before, "{:?}", shrunk.faults);
        let story = &shrunk.story;
        assert!(story.trace.last().unwrap().contains("VIOLATION"), "{story:?}");
        let told = |fault: &String| story.trace.iter().any(|line| line.contains(fault.as_str()));
        let kinds = shrunk.faults.iter().map(|fault| fault.split(", ").next().unwrap().to_owned());
        assert!(kinds.collect::<Vec<_>>().iter().all(told), "{:?}: {story:?}", shrunk.faults);
    }
}
