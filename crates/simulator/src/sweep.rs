//! Many seeds, on all processors, and what came out.

use crate::coverage::Coverage;
use crate::mutant::Mutant;
use crate::world::World;
use serde::Serialize;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// What came out of a range of seeds.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Schedules that were run.
    pub schedules: u64,
    /// How many of them broke an invariant.
    pub violations: usize,
    /// The planted bugs.
    pub mutants: Mutants,
    /// The seeds that broke an invariant, and which.
    pub failures: Vec<Failure>,
    /// What the schedules reached.
    pub coverage: Coverage,
}

/// A seed that broke an invariant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// What was broken.
    pub violation: String,
}

/// How the planted bugs fared.
#[derive(Debug, Default, Serialize)]
pub struct Mutants {
    /// How many were planted.
    pub planted: usize,
    /// How many of them were found.
    pub found: usize,
    /// How each was found.
    pub each: Vec<Found>,
}

/// How a planted bug was found.
#[derive(Debug, Serialize)]
pub struct Found {
    /// The bug.
    pub mutant: Mutant,
    /// The first seed that found it; none if no seed did.
    pub by: Option<Failure>,
}

/// One seed's story.
#[derive(Debug, Serialize)]
pub struct Story {
    /// The seed.
    pub seed: u64,
    /// What was broken, if anything.
    pub violation: Option<String>,
    /// What happened, a line each.
    pub trace: Vec<String>,
    /// What was reached.
    pub coverage: Coverage,
}

impl Report {
    /// Whether nothing was broken, and every planted bug was found.
    pub fn is_good(&self) -> bool {
        self.violations == 0 && self.mutants.found == self.mutants.planted
    }
}

/// Runs every seed of the range, then plants each bug and runs seeds of the same
/// range until one finds it. `progress` is called after each schedule.
pub fn simulate(seeds: Range<u64>, progress: impl Fn() + Sync) -> Report {
    let mut report = sweep(seeds.clone(), &progress);
    report.mutants.planted = Mutant::ALL.len();
    for mutant in Mutant::ALL {
        let by = seeds.clone().find_map(|seed| fails(seed, Some(mutant)));
        report.mutants.found += usize::from(by.is_some());
        report.mutants.each.push(Found { mutant, by });
    }
    report
}

/// Runs one seed and tells its story.
pub fn replay(seed: u64, mutant: Option<Mutant>) -> Story {
    run(seed, mutant, true)
}

fn sweep(seeds: Range<u64>, progress: &(impl Fn() + Sync)) -> Report {
    let next = AtomicU64::new(seeds.start);
    let work = || {
        let mut part = Report::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return part;
            }
            let story = run(seed, None, false);
            part.coverage.add(&story.coverage);
            part.failures.extend(story.violation.map(|violation| Failure { seed, violation }));
            progress();
        }
    };
    let workers = thread::available_parallelism().map_or(1, usize::from);
    let parts: Vec<Report> = thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        workers.into_iter().map(|worker| worker.join().expect("a worker catches panics")).collect()
    });
    let mut report = Report { schedules: seeds.end - seeds.start, ..Report::default() };
    for part in parts {
        report.coverage.add(&part.coverage);
        report.failures.extend(part.failures);
    }
    report.failures.sort_by_key(|failure| failure.seed);
    report.violations = report.failures.len();
    report
}

fn fails(seed: u64, mutant: Option<Mutant>) -> Option<Failure> {
    let story = run(seed, mutant, false);
    story.violation.map(|violation| Failure { seed, violation })
}

/// A panic of the core is a finding like any other.
fn run(seed: u64, mutant: Option<Mutant>, trace: bool) -> Story {
    let mut world = World::new(seed, mutant, trace);
    let ended = catch_unwind(AssertUnwindSafe(|| world.run()));
    if let Err(panic) = ended {
        let words = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("no words");
        world.violation(format!("panic: {words}"));
    }
    Story {
        seed,
        violation: world.violation,
        trace: world.trace.into_lines(),
        coverage: world.coverage,
    }
}
