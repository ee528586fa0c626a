//! Plan of what is measured when.

use super::store::{Outcome, Sample};
use super::variant::{Subject, Variant};
use std::time::Duration;

/// One measurement to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The round, from 1.
    pub round: u32,
    /// Subject that is measured.
    pub subject: Subject,
    /// Way in which the guest is kept.
    pub variant: Variant,
}

/// Steps, round by round: each workload in every variant, one after the other, so that what else
/// the machine does falls on all of them. Each workload and round begins with another
/// variant. Figures with a laboratory of their own come once, after the first round.
pub fn plan(subjects: &[Subject], variants: &[Variant], runs: u32) -> Vec<Step> {
    let own = |&subject: &Subject| {
        subject.own_variant().map(|variant| Step { round: 1, subject, variant })
    };
    let mut steps = Vec::new();
    for round in 1..=runs {
        let workloads = subjects.iter().filter(|subject| subject.own_variant().is_none());
        for (n, &subject) in workloads.enumerate() {
            let step = |variant| Step { round, subject, variant };
            steps.extend(rotated(variants, n + round as usize - 1).map(step));
        }
        if round == 1 {
            steps.extend(subjects.iter().filter_map(own));
        }
    }
    steps
}

/// All of `variants` in their order, beginning with that one.
pub fn rotated<V: Copy>(variants: &[V], first: usize) -> impl Iterator<Item = V> {
    (0..variants.len()).map(move |n| variants[(first + n) % variants.len()])
}

/// Steps of `left` that fit into `budget`, with what was spent before. Everything is measured once
/// whatever it takes; after that a workload's round is begun only if it can be ended, so that
/// all variants have it.
pub fn affordable(left: Vec<Step>, samples: &[Sample], budget: Duration) -> Vec<Step> {
    let mut spent: f64 = samples.iter().map(|sample| sample.took_seconds).sum();
    let mut affordable = Vec::new();
    for block in left.chunk_by(|one, next| (one.round, one.subject) == (next.round, next.subject)) {
        let of =
            |sample: &Sample| (sample.round, sample.subject) == (block[0].round, block[0].subject);
        let begun = block[0].round == 1 || samples.iter().any(of);
        spent += seconds_left(block, samples).unwrap_or(0.0);
        if !begun && spent > budget.as_secs_f64() {
            break;
        }
        affordable.extend(block);
    }
    affordable
}

/// The steps that have no result yet, in order: neither a figure nor a last error.
pub fn left(plan: &[Step], samples: &[Sample]) -> Vec<Step> {
    let done = |step: &&Step| !samples.iter().any(|sample| is_result(sample, step));
    plan.iter().filter(done).copied().collect()
}

fn is_result(sample: &Sample, step: &Step) -> bool {
    let of = Step { round: sample.round, subject: sample.subject, variant: sample.variant };
    of == *step && !matches!(sample.outcome, Outcome::Failed { last: false, .. })
}

/// The seconds that `left` will take, by what steps took until now: of the same subject and
/// variant, else of the same subject, else of any. None before the first.
pub fn seconds_left(left: &[Step], samples: &[Sample]) -> Option<f64> {
    let mean = |of: &dyn Fn(&Sample) -> bool| {
        let (count, sum) = samples
            .iter()
            .filter(|sample| of(sample))
            .fold((0.0, 0.0), |(count, sum), sample| (count + 1.0, sum + sample.took_seconds));
        (count > 0.0).then(|| sum / count)
    };
    let one = |step: &Step| {
        mean(&|sample| (sample.subject, sample.variant) == (step.subject, step.variant))
            .or_else(|| mean(&|sample| sample.subject == step.subject))
            .or_else(|| mean(&|_| true))
    };
    left.iter().map(one).sum()
}

#[cfg(test)]
mod tests {
    use super::super::store::tests::{sample, seconds};
    use super::*;

    const SUBJECTS: [Subject; 3] = [Subject::Cpu, Subject::Web, Subject::Pause];
    const VARIANTS: [Variant; 3] = [Variant::Unprotected, Variant::Adaptive, Variant::Plain];

    #[test]
    fn every_workload_meets_every_variant_in_every_round() {
        let steps = plan(&SUBJECTS, &VARIANTS, 3);
        assert_eq!(steps.len(), 2 * 3 * 3 + 1);
        for round in 1..=3 {
            for subject in [Subject::Cpu, Subject::Web] {
                for variant in VARIANTS {
                    let step = Step { round, subject, variant };
                    assert_eq!(steps.iter().filter(|&&other| other == step).count(), 1);
                }
            }
        }
        let pause = Step { round: 1, subject: Subject::Pause, variant: Variant::Adaptive };
        assert_eq!(steps[2 * 3], pause);
    }

    #[test]
    fn after_the_first_round_only_what_can_be_ended_is_begun() {
        let steps = plan(&SUBJECTS[..1], &VARIANTS, 3);
        let done = |count: usize| -> Vec<Sample> {
            let sample = |step: &Step| seconds(step.subject, step.variant, step.round, 1.0);
            steps[..count].iter().map(sample).collect()
        };
        let affordable = |count, seconds| {
            let samples = done(count);
            let left = left(&steps, &samples);
            affordable(left, &samples, Duration::from_secs(seconds)).len()
        };
        // Each takes 10 s: see `sample`.
        assert_eq!(affordable(1, 1), 2, "the first round is whole");
        assert_eq!(affordable(3, 59), 0);
        assert_eq!(affordable(3, 60), 3);
        assert_eq!(affordable(4, 1), 2, "what was begun is ended");
        assert_eq!(affordable(3, 90), 6);
    }

    #[test]
    fn the_order_of_the_variants_rotates() {
        let steps = plan(&SUBJECTS[..1], &VARIANTS, 3);
        let firsts: Vec<Variant> = steps.chunks(3).map(|round| round[0].variant).collect();
        assert_eq!(firsts, VARIANTS);
    }

    #[test]
    fn what_is_done_is_not_done_again_and_what_failed_once_is() {
        let steps = plan(&SUBJECTS[..1], &VARIANTS, 1);
        let failed = |last| Outcome::Failed { error: "e".into(), last };
        let samples = [
            seconds(Subject::Cpu, Variant::Unprotected, 1, 1.0),
            sample(Subject::Cpu, Variant::Adaptive, 1, failed(false)),
            sample(Subject::Cpu, Variant::Plain, 1, failed(true)),
        ];
        let adaptive = Step { round: 1, subject: Subject::Cpu, variant: Variant::Adaptive };
        assert_eq!(left(&steps, &samples), [adaptive]);
    }

    #[test]
    fn the_time_left_is_by_what_is_nearest() {
        let steps = plan(&SUBJECTS[..2], &VARIANTS[..2], 1);
        assert_eq!(seconds_left(&steps, &[]), None);
        assert_eq!(seconds_left(&[], &[]), Some(0.0));
        let samples = [seconds(Subject::Cpu, Variant::Adaptive, 1, 1.0)];
        assert_eq!(seconds_left(&steps, &samples), Some(40.0));
    }
}
