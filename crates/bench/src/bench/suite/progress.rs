//! Progress of the suite: a bar on a terminal, plain lines elsewhere.

use super::plan::Step;
use super::store::{Outcome, Sample};
use super::table::number;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{self, IsTerminal};
use std::time::Duration;

const TEMPLATE: &str = "[{bar:30}] {pos}/{len}  {msg}";
const TICK: Duration = Duration::from_secs(1);

/// Progress on stderr.
pub struct Progress {
    /// None where no bar can be drawn.
    bar: Option<ProgressBar>,
    steps: usize,
}

impl Progress {
    /// Progress of so many steps.
    pub fn new(steps: usize) -> Progress {
        let style = ProgressStyle::with_template(TEMPLATE).expect("the template is well-formed");
        let bar = io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(steps as u64).with_style(style.progress_chars("=> "));
            bar.enable_steady_tick(TICK);
            bar
        });
        Progress { bar, steps }
    }

    /// A step begins when so many are done and so many seconds are left.
    pub fn begin(&self, step: &Step, done: usize, seconds_left: Option<f64>) {
        if let Some(bar) = &self.bar {
            bar.set_position(done as u64);
            bar.set_message(format!("{}{}", name(step), left(seconds_left)));
        }
    }

    /// A step has ended: well, or not.
    pub fn end(&self, step: &Step, done: usize, sample: &Sample, seconds_left: Option<f64>) {
        let what = match &sample.outcome {
            Outcome::Measured(measured) => {
                format!("{} {}", number(measured.value), measured.unit)
            }
            Outcome::Failed { error, .. } => format!("failed: {error}"),
        };
        let line =
            format!("{done} of {}: {}: {what}{}", self.steps, name(step), left(seconds_left));
        match &self.bar {
            None => eprintln!("{line}"),
            // What failed is to be seen at once; the rest is in the report.
            Some(bar) if matches!(sample.outcome, Outcome::Failed { .. }) => bar.println(line),
            Some(_) => {}
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn name(step: &Step) -> String {
    format!("round {}, {}, {}", step.round, step.subject, step.variant)
}

fn left(seconds: Option<f64>) -> String {
    match seconds {
        Some(seconds) if seconds >= 90.0 => format!("; {:.0} minutes left", seconds / 60.0),
        Some(seconds) if seconds > 0.0 => format!("; {seconds:.0} s left"),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_is_in_words() {
        let words = [None, Some(0.0), Some(30.0), Some(600.0)].map(left);
        assert_eq!(words, ["", "", "; 30 s left", "; 10 minutes left"]);
    }
}
