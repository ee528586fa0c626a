//! A schedule that breaks an invariant, without all that is not needed for it.

use crate::mutant::Mutant;
use crate::schedule::Schedule;
use crate::sweep::{Story, play, play_cluster, play_group};
use crate::{groups, snapshots};
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

/// A schedule from which something can be left out.
trait Shrinkable: Clone {
    /// Its faults, for people.
    fn faults(&self) -> Vec<String>;

    /// The schedules that lack one thing.
    fn simpler(&self) -> Vec<Self>;

    fn play(&self, chance: u64, mutant: Option<Mutant>, trace: bool) -> Story;
}

impl Shrinkable for Schedule {
    fn faults(&self) -> Vec<String> {
        self.faults.iter().map(ToString::to_string).collect()
    }

    fn simpler(&self) -> Vec<Schedule> {
        simpler(self)
    }

    fn play(&self, chance: u64, mutant: Option<Mutant>, trace: bool) -> Story {
        play(self.clone(), chance, mutant, trace)
    }
}

impl Shrinkable for groups::Schedule {
    fn faults(&self) -> Vec<String> {
        self.words()
    }

    fn simpler(&self) -> Vec<groups::Schedule> {
        groups::Schedule::simpler(self)
    }

    fn play(&self, chance: u64, mutant: Option<Mutant>, trace: bool) -> Story {
        play_group(self.clone(), chance, mutant, trace)
    }
}

impl Shrinkable for snapshots::Schedule {
    fn faults(&self) -> Vec<String> {
        self.faults.iter().map(ToString::to_string).collect()
    }

    fn simpler(&self) -> Vec<snapshots::Schedule> {
        snapshots::Schedule::simpler(self)
    }

    fn play(&self, chance: u64, mutant: Option<Mutant>, trace: bool) -> Story {
        play_cluster(self.clone(), chance, mutant, trace)
    }
}

/// Leaves out of a seed's schedule whatever can be left out, one thing after the other, as long as an
/// invariant is broken; none if none was. Of a seed's schedules that is the first that breaks one.
pub fn shrink(seed: u64, mutant: Option<Mutant>) -> Option<Shrunk> {
    let of_one_vm = shrink_schedule(&Schedule::new(seed), seed, mutant);
    let of_group = || shrink_schedule(&groups::Schedule::new(seed), seed, mutant);
    of_one_vm
        .or_else(of_group)
        .or_else(|| shrink_schedule(&snapshots::Schedule::new(seed), seed, mutant))
}

fn shrink_schedule<S: Shrinkable>(whole: &S, seed: u64, mutant: Option<Mutant>) -> Option<Shrunk> {
    let breaks = |schedule: &S, chance| schedule.play(chance, mutant, false).violation.is_some();
    if !breaks(whole, seed) {
        return None;
    }
    let (mut left, mut chance) = (whole.clone(), seed);
    while let Some(next) = left.simpler().into_iter().find_map(|schedule| {
        let chances = [chance].into_iter().chain(0..CHANCES);
        let found = chances.into_iter().find(|chance| breaks(&schedule, *chance));
        found.map(|chance| (schedule, chance))
    }) {
        (left, chance) = next;
    }
    Some(Shrunk {
        faults_before: whole.faults().len(),
        faults: left.faults(),
        story: left.play(chance, mutant, true),
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
