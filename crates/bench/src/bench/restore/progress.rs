//! Progress of a section: a bar on a terminal, plain lines elsewhere.

use indicatif::{ProgressBar, ProgressStyle};
use std::cell::Cell;
use std::io::{self, IsTerminal};
use std::time::Duration;

const TEMPLATE: &str = "[{bar:30}] {pos}/{len}  {msg}";
const TICK: Duration = Duration::from_secs(1);

/// Progress on stderr.
pub struct Progress {
    /// None where no bar can be drawn.
    bar: Option<ProgressBar>,
    section: &'static str,
    steps: usize,
    done: Cell<usize>,
}

impl Progress {
    /// Progress of a section with so many steps.
    pub fn new(section: &'static str, steps: usize) -> Progress {
        let style = ProgressStyle::with_template(TEMPLATE).expect("the template is well-formed");
        let bar = io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(steps as u64).with_style(style.progress_chars("=> "));
            bar.enable_steady_tick(TICK);
            bar
        });
        Progress { bar, section, steps, done: Cell::new(0) }
    }

    /// A step begins.
    pub fn begin(&self, step: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{}: {step}", self.section));
        }
    }

    /// A step has ended so.
    pub fn end(&self, step: &str, words: &str) {
        self.done.set(self.done.get() + 1);
        let line =
            format!("{}, {} of {}: {step}: {words}", self.section, self.done.get(), self.steps);
        match &self.bar {
            Some(bar) => {
                bar.println(line);
                bar.set_position(self.done.get() as u64);
            }
            None => eprintln!("{line}"),
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
