//! The sweep over many seeds, on all processors, and what came out.

use crate::coverage::Coverage;
use crate::mutant::Mutant;
use crate::schedule::{Fault, Planned, Schedule};
use crate::shrink::{Shrunk, shrink};
use crate::world::World;
use crate::{groups, snapshots};
use serde::Serialize;
use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;
use understudy_protocol::mutant::{Field, plant};

/// The result of a range of seeds.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Schedules that were run.
    pub schedules: u64,
    /// Number of them that broke an invariant.
    pub violations: usize,
    /// The planted bugs.
    pub mutants: Mutants,
    /// The seeds that broke an invariant, and which.
    pub failures: Vec<Failure>,
    /// Part of the first one's schedule that is needed to break one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shrunk: Option<Shrunk>,
    /// Coverage of the schedules.
    pub coverage: Coverage,
}

/// A seed that broke an invariant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// Invariant that was broken.
    pub violation: String,
}

/// The results of the planted bugs.
#[derive(Debug, Default, Serialize)]
pub struct Mutants {
    /// Number that were planted.
    pub planted: usize,
    /// Number of them that were found.
    pub found: usize,
    /// Result of each.
    pub each: Vec<Found>,
}

/// The result of a planted bug.
#[derive(Debug, Serialize)]
pub struct Found {
    /// The bug.
    pub mutant: Mutant,
    /// A seed that found it; none if no seed did.
    pub by: Option<Failure>,
}

/// The story of a schedule.
#[derive(Debug, Serialize)]
pub struct Story {
    /// The seed; none of what is left of a seed's schedule.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Invariant that was broken, if any was.
    pub violation: Option<String>,
    /// Events, a line each.
    pub trace: Vec<String>,
    /// Coverage of the schedule.
    pub coverage: Coverage,
}

impl Report {
    /// Whether nothing was broken, and every planted bug was found.
    pub fn is_good(&self) -> bool {
        self.violations == 0 && self.mutants.found == self.mutants.planted
    }
}

/// Schedules in which a planted bug must show, however few were asked for.
const ENOUGH: u64 = 10_000;

/// Runs every seed of the range, then plants each bug and runs seeds of that range, or enough of them from
/// the same start, until one finds it. `progress` is called after each schedule.
pub fn simulate(seeds: Range<u64>, progress: impl Fn() + Sync) -> Report {
    let mut report = sweep(seeds.clone(), |seed| Some(play_all(seed, None, false)), &progress);
    report.shrunk = report.failures.first().and_then(|first| shrink(first.seed, None));
    report.mutants.planted = Mutant::all().len();
    let seeds = seeds.start..seeds.end.max(seeds.start.saturating_add(ENOUGH));
    report.mutants.each = search(&seeds);
    let found = report.mutants.each.iter().filter(|found| found.by.is_some());
    report.mutants.found = found.count();
    report
}

/// Runs one seed and tells its story.
pub fn replay(seed: u64, mutant: Option<Mutant>) -> Story {
    Story { seed: Some(seed), ..play_all(seed, mutant, true) }
}

/// Runs the seeds with hosts that suspect their peers after another time-out.
pub fn simulate_with_timeout(seeds: Range<u64>, timeout: Duration) -> Report {
    let schedule = |seed| Schedule { timeout, ..Schedule::new(seed) };
    sweep(seeds, |seed| Some(play(schedule(seed), seed, None, false)), &|| {})
}

/// Runs those of the seeds whose schedules let an operator force the VM onto another host, with clocks that
/// are so many millionths too fast.
pub fn force_with_clocks(seeds: Range<u64>, clocks: [i64; 3]) -> Report {
    let forces = |planned: &Planned| matches!(planned.fault, Fault::Force(..));
    let schedule = |seed| {
        let schedule = Schedule { clocks, ..Schedule::new(seed) };
        schedule.faults.iter().any(forces).then_some(schedule)
    };
    sweep(seeds, |seed| Some(play(schedule(seed)?, seed, None, false)), &|| {})
}

fn sweep(
    seeds: Range<u64>,
    story: impl Fn(u64) -> Option<Story> + Sync,
    progress: &(impl Fn() + Sync),
) -> Report {
    let next = AtomicU64::new(seeds.start);
    let parts = on_all_processors(|| {
        let mut part = Report::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return part;
            }
            let Some(story) = story(seed) else { continue };
            part.schedules += 1;
            part.coverage.add(&story.coverage);
            part.failures.extend(story.violation.map(|violation| Failure { seed, violation }));
            progress();
        }
    });
    let mut report = Report::default();
    for part in parts {
        report.schedules += part.schedules;
        report.coverage.add(&part.coverage);
        report.failures.extend(part.failures);
    }
    report.failures.sort_by_key(|failure| failure.seed);
    report.violations = report.failures.len();
    report
}

/// A seed that finds each planted bug.
fn search(seeds: &Range<u64>) -> Vec<Found> {
    let (mutants, next) = (Mutant::all(), AtomicUsize::new(0));
    let parts = on_all_processors(|| {
        let mut found = Vec::new();
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(&mutant) = mutants.get(place) else { return found };
            let fails = |seed| {
                let bug = Some(mutant);
                let story = match mutant.field() {
                    Field::Vm => play(Schedule::new(seed), seed, bug, false),
                    Field::Group => play_group(groups::Schedule::new(seed), seed, bug, false),
                    Field::Cluster => {
                        play_cluster(snapshots::Schedule::new(seed), seed, bug, false)
                    }
                };
                let violation = story.violation?;
                Some(Failure { seed, violation })
            };
            let known = mutant.shown_by().filter(|seed| seeds.contains(seed));
            let by = known.into_iter().chain(seeds.clone()).find_map(fails);
            found.push((place, Found { mutant, by }));
        }
    });
    let mut all: Vec<_> = parts.into_iter().flatten().collect();
    all.sort_by_key(|(place, _)| *place);
    all.into_iter().map(|(_, found)| found).collect()
}

fn on_all_processors<T: Send>(work: impl Fn() -> T + Sync) -> Vec<T> {
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(&work)).collect();
        workers.into_iter().map(|worker| worker.join().expect("a worker catches panics")).collect()
    })
}

/// Plays the schedules of a seed, until an invariant is broken: that of a protected VM, of a group of several, of a
/// cluster.
fn play_all(seed: u64, mutant: Option<Mutant>, trace: bool) -> Story {
    let mut story = play(Schedule::new(seed), seed, mutant, trace);
    let group = || play_group(groups::Schedule::new(seed), seed, mutant, trace);
    let cluster = || play_cluster(snapshots::Schedule::new(seed), seed, mutant, trace);
    let others: [&dyn Fn() -> Story; 2] = [&group, &cluster];
    for other in others {
        if story.violation.is_none() {
            let next = other();
            story.violation = next.violation;
            story.trace.extend(next.trace);
            story.coverage.add(&next.coverage);
        }
    }
    story
}

/// Plays a schedule of a protected VM. A panic of the core is a finding like any other.
pub(crate) fn play(schedule: Schedule, chance: u64, mutant: Option<Mutant>, trace: bool) -> Story {
    let _planted = plant(mutant.and_then(Mutant::core));
    let mut world = World::new(schedule, chance, mutant, trace);
    let ended = catch_unwind(AssertUnwindSafe(|| world.run()));
    if let Err(panic) = ended {
        world.violation(words_of(&*panic));
    }
    Story {
        seed: None,
        violation: world.violation,
        trace: world.trace.into_lines(),
        coverage: world.coverage,
    }
}

/// The same of a group of several VMs.
pub(crate) fn play_group(
    schedule: groups::Schedule,
    chance: u64,
    mutant: Option<Mutant>,
    trace: bool,
) -> Story {
    let _planted = plant(mutant.and_then(Mutant::core));
    let mut world = groups::World::new(schedule, chance, trace);
    let ended = catch_unwind(AssertUnwindSafe(|| world.run()));
    if let Err(panic) = ended {
        world.violation(words_of(&*panic));
    }
    Story {
        seed: None,
        violation: world.violation,
        trace: world.trace.into_lines(),
        coverage: world.coverage,
    }
}

/// The same of a cluster that is snapshotted and restored.
pub(crate) fn play_cluster(
    schedule: snapshots::Schedule,
    chance: u64,
    mutant: Option<Mutant>,
    trace: bool,
) -> Story {
    let _planted = plant(mutant.and_then(Mutant::core));
    let mut world = snapshots::World::new(schedule, chance, trace);
    let ended = catch_unwind(AssertUnwindSafe(|| world.run()));
    if let Err(panic) = ended {
        world.violation(words_of(&*panic));
    }
    Story {
        seed: None,
        violation: world.violation,
        trace: world.trace.into_lines(),
        coverage: world.coverage,
    }
}

fn words_of(panic: &(dyn Any + Send)) -> String {
    let words = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no words");
    format!("panic: {words}")
}
