//! Runs from the plan to the results file: one step after the other, failures included.

use super::plan::{self, Step};
use super::progress::Progress;
use super::store::{Measured, Outcome, Sample, Store};
use crate::bench::machine::load_average;
use anyhow::Result;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Measures what has no result yet, and keeps each as soon as it is there. What fails is
/// tried once more. `report` sees the results after each step. What does not fit into `budget`
/// is left out, from the last round on.
pub fn run(
    store: &mut Store,
    (steps, budget): (&[Step], Duration),
    progress: &Progress,
    mut measure: impl FnMut(&Step) -> Result<Measured>,
    mut report: impl FnMut(&Store) -> Result<()>,
) -> Result<()> {
    loop {
        let left = left(steps, store, budget);
        let Some(step) = left.first() else { return report(store) };
        let done = steps.len() - left.len();
        progress.begin(step, done, plan::seconds_left(&left, store.samples()));
        let again = has_failed(store, step);
        let begun = Instant::now();
        let outcome = match measure(step) {
            Ok(measured) => Outcome::Measured(measured),
            Err(error) => Outcome::Failed { error: format!("{error:#}"), last: again },
        };
        store.add(sample(step, begun, outcome))?;
        let left = self::left(steps, store, budget);
        let newest = store.samples().last().expect("one was added");
        let seconds = plan::seconds_left(&left, store.samples());
        progress.end(step, steps.len() - left.len(), newest, seconds);
        report(store)?;
    }
}

fn left(steps: &[Step], store: &Store, budget: Duration) -> Vec<Step> {
    plan::affordable(plan::left(steps, store.samples()), store.samples(), budget)
}

fn has_failed(store: &Store, step: &Step) -> bool {
    let failed = |sample: &&Sample| matches!(sample.outcome, Outcome::Failed { .. });
    let mut failures = store.samples().iter().filter(failed);
    failures.any(|sample| {
        (sample.round, sample.subject, sample.variant) == (step.round, step.subject, step.variant)
    })
}

fn sample(step: &Step, begun: Instant, outcome: Outcome) -> Sample {
    let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let Step { round, subject, variant } = *step;
    let (took_seconds, load_average) = (begun.elapsed().as_secs_f64(), load_average());
    Sample { subject, variant, round, at, took_seconds, load_average, outcome }
}

#[cfg(test)]
mod tests {
    use super::super::report::Report;
    use super::super::store::tests::{run as identity, seconds};
    use super::super::variant::{Subject, Variant};
    use super::*;
    use anyhow::anyhow;
    use std::path::Path;

    const VARIANTS: [Variant; 3] = [Variant::Unprotected, Variant::Adaptive, Variant::Plain];

    fn figure(step: &Step) -> Measured {
        match seconds(step.subject, step.variant, step.round, 1.0).outcome {
            Outcome::Measured(measured) => measured,
            Outcome::Failed { .. } => unreachable!(),
        }
    }

    /// Plays the steps with `measure`; returns those that were tried, and the results.
    fn play(
        folder: &Path,
        mut measure: impl FnMut(&Step) -> Result<Measured>,
    ) -> (Vec<Step>, Report) {
        let (mut store, _) = Store::open(folder, &identity(), false).unwrap();
        let steps = plan::plan(&[Subject::Cpu], &VARIANTS, 2);
        let mut tried = Vec::new();
        let measure = |step: &Step| {
            tried.push(*step);
            measure(step)
        };
        let plan = (&steps[..], Duration::from_secs(3600));
        run(&mut store, plan, &Progress::new(steps.len()), measure, |_| Ok(())).unwrap();
        (tried, Report::of(store.run(), store.samples()))
    }

    #[test]
    fn what_fails_is_tried_once_more_and_the_suite_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let mut failures = 0;
        let (tried, report) = play(folder.path(), |step| match step.variant {
            Variant::Adaptive if step.round == 1 && failures == 0 => {
                failures += 1;
                Err(anyhow!("once"))
            }
            Variant::Adaptive if step.round == 2 => Err(anyhow!("always")),
            _ => Ok(figure(step)),
        });
        assert_eq!(tried.len(), 6 + 2);
        let cell = |variant| report.cell(Subject::Cpu, variant).unwrap();
        assert_eq!((cell(Variant::Unprotected).runs, cell(Variant::Unprotected).failed), (2, 0));
        let adaptive = cell(Variant::Adaptive);
        assert_eq!((adaptive.runs, adaptive.failed), (1, 3));
        assert_eq!(adaptive.error.as_deref(), Some("always"));
        assert_eq!((cell(Variant::Plain).runs, cell(Variant::Plain).failed), (2, 0));
    }

    #[test]
    fn a_second_call_measures_only_what_is_missing() {
        let folder = tempfile::tempdir().unwrap();
        play(folder.path(), |step| Ok(figure(step)));
        // The last line is torn: the program was killed while it wrote.
        let path = folder.path().join(super::super::store::SAMPLES);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 9]).unwrap();
        let (tried, report) = play(folder.path(), |step| Ok(figure(step)));
        let last = *plan::plan(&[Subject::Cpu], &VARIANTS, 2).last().unwrap();
        assert_eq!(tried, [last]);
        assert_eq!(report.cell(Subject::Cpu, last.variant).unwrap().runs, 2);
    }
}
