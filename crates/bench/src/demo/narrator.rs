//! The story as it is told on stderr: a line for each thing that happens, and
//! on a terminal one more below them that changes while something goes on.

use std::cell::Cell;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// Time between two prints of the state, where it cannot change in place.
const LINE_INTERVAL: Duration = Duration::from_secs(2);
/// Goes to the beginning of the line and clears it.
const CLEAR: &str = "\r\x1b[K";

/// Tells what happens, and when.
pub struct Narrator {
    begun: Instant,
    terminal: bool,
    /// Whether the changing line is on the screen.
    shown: Cell<bool>,
    last_line: Cell<Instant>,
}

impl Narrator {
    /// Time counts from now.
    pub fn new() -> Narrator {
        let begun = Instant::now();
        let terminal = io::stderr().is_terminal();
        Narrator { begun, terminal, shown: Cell::new(false), last_line: Cell::new(begun) }
    }

    /// Something happened.
    pub fn say(&self, what: impl AsRef<str>) {
        self.settle();
        self.print(what.as_ref());
    }

    /// Something goes on: how far it has come.
    pub fn update(&self, state: &str) {
        if self.terminal {
            eprint!("{CLEAR}          {state}");
            // What cannot be shown is not worth failing for.
            let _ = io::stderr().flush();
            self.shown.set(true);
        } else if self.last_line.get().elapsed() >= LINE_INTERVAL {
            self.print(state);
        }
    }

    /// Takes the changing line away.
    pub fn settle(&self) {
        if self.shown.replace(false) {
            eprint!("{CLEAR}");
        }
    }

    fn print(&self, text: &str) {
        eprintln!("{:6.1} s  {text}", self.begun.elapsed().as_secs_f64());
        self.last_line.set(Instant::now());
    }
}

impl Drop for Narrator {
    fn drop(&mut self) {
        self.settle();
    }
}
