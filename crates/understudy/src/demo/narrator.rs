//! The story as it is told on stderr: a line for each thing that happens, and
//! on a terminal one more below them that changes while something goes on.

use indicatif::{ProgressBar, ProgressStyle};
use std::cell::Cell;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

/// How often the changing line is printed where it cannot change in place.
const LINE_INTERVAL: Duration = Duration::from_secs(2);

/// Tells what happens, and when.
pub struct Narrator {
    begun: Instant,
    /// Hidden where stderr is no terminal.
    live: ProgressBar,
    last_line: Cell<Option<Instant>>,
}

impl Narrator {
    /// Time counts from now.
    pub fn new() -> Narrator {
        let style = ProgressStyle::with_template("         {msg}").expect("a well-formed template");
        let live = if io::stderr().is_terminal() {
            ProgressBar::new_spinner().with_style(style)
        } else {
            ProgressBar::hidden()
        };
        Narrator { begun: Instant::now(), live, last_line: Cell::new(None) }
    }

    /// Something happened.
    pub fn say(&self, what: impl AsRef<str>) {
        self.settle();
        self.print(what.as_ref());
    }

    /// Something goes on: how far it has come.
    pub fn update(&self, state: String) {
        if !self.live.is_hidden() {
            self.live.set_message(state);
            self.live.tick();
        } else if self.last_line.get().is_none_or(|last| last.elapsed() >= LINE_INTERVAL) {
            self.print(&state);
            self.last_line.set(Some(Instant::now()));
        }
    }

    /// Takes the changing line away.
    pub fn settle(&self) {
        self.live.set_message("");
        self.live.suspend(|| ());
        self.last_line.set(Some(Instant::now()));
    }

    fn print(&self, text: &str) {
        eprintln!("{:6.1} s  {text}", self.begun.elapsed().as_secs_f64());
    }
}

impl Drop for Narrator {
    fn drop(&mut self) {
        self.live.finish_and_clear();
    }
}
