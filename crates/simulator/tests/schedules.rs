//! 10 000 schedules of failures, and planted bugs among them.

use understudy_simulator::{Mutant, replay, simulate};

/// Unoptimised builds do a part.
const SEEDS: u64 = if cfg!(debug_assertions) { 3_000 } else { 10_000 };

#[test]
fn no_schedule_breaks_an_invariant_and_every_planted_bug_is_found() {
    let report = simulate(0..SEEDS, || {});
    assert_eq!(report.failures, [], "replay with `understudy-lab simulate --seed N`");
    assert_eq!(report.schedules, SEEDS);
    for found in &report.mutants.each {
        assert!(found.by.is_some(), "{:?} was not found", found.mutant);
    }
    assert!(report.is_good());
    // The schedules reach what they are meant to test.
    for (what, count) in report.coverage.counts() {
        assert!(count > 0, "no schedule reached {what}: {:#?}", report.coverage);
    }
}

#[test]
fn each_planted_bug_breaks_the_invariant_that_it_should() {
    let cases = [
        (Mutant::AckBeforeStaged, "output commit"),
        (Mutant::ReleaseEarly, "output commit"),
        (Mutant::SkipArbiter, "two live copies"),
        (Mutant::ApplyPartialEpoch, "is not at the boundary"),
        (Mutant::LoseBarrier, "output commit"),
        (Mutant::HeartbeatsSuffice, "and nothing moves"),
        (Mutant::KeepTheGrant, "although nothing fails"),
        (Mutant::OpenBeforeRecord, "image is the valid one"),
        (Mutant::ContestWhenSick, "sick"),
        (Mutant::ContestUnfit, "could not start it"),
    ];
    assert_eq!(cases.len(), Mutant::ALL.len());
    for (mutant, broken) in cases {
        let violation = |seed| replay(seed, Some(mutant)).violation;
        let found = (0..SEEDS).filter_map(violation).find(|it| it.contains(broken));
        assert!(found.is_some(), "{mutant:?}");
    }
}

#[test]
fn a_seed_tells_the_same_story_again() {
    for seed in 0..20 {
        let (first, second) = (replay(seed, None), replay(seed, None));
        assert_eq!(first.trace, second.trace);
        assert!(first.trace.len() > 20, "seed {seed}: {} lines", first.trace.len());
    }
    let mut stories = (0..50).map(|seed| replay(seed, Some(Mutant::LoseBarrier)));
    let story = stories.find(|story| story.violation.is_some()).unwrap();
    assert!(story.trace.last().unwrap().contains("VIOLATION: output commit"));
}
