//! What is measured when.

use super::store::{Outcome, Sample};
use super::variant::{Subject, Variant};

/// One measurement to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The round, from 1.
    pub round: u32,
    /// What is measured.
    pub subject: Subject,
    /// How the guest is kept.
    pub variant: Variant,
}

/// Round by round, each workload in every variant, one after the other, so that what else
/// the machine does falls on all of them. Each workload and round begins with another
/// variant. Figures with a laboratory of their own come last, once.
pub fn plan(subjects: &[Subject], variants: &[Variant], runs: u32) -> Vec<Step> {
    let mut steps = Vec::new();
    for round in 1..=runs {
        let workloads = subjects.iter().filter(|subject| subject.own_variant().is_none());
        for (n, &subject) in workloads.enumerate() {
            let step = |variant| Step { round, subject, variant };
            steps.extend(rotated(variants, n + round as usize - 1).map(step));
        }
    }
    let own = |&subject: &Subject| {
        subject.own_variant().map(|variant| Step { round: 1, subject, variant })
    };
    steps.extend(subjects.iter().filter_map(own));
    steps
}

/// All of `variants` in their order, beginning with that one.
pub fn rotated<V: Copy>(variants: &[V], first: usize) -> impl Iterator<Item = V> {
    (0..variants.len()).map(move |n| variants[(first + n) % variants.len()])
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
        assert_eq!(steps.last(), Some(&pause));
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
