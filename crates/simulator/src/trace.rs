//! The story of what happened, for people.

use crate::host::HostId;
use understudy_protocol::Time;

/// The number of lines of undisturbed checkpoints in a row: more than that are left out, but for
/// the first and the last of them.
const ROUTINE_LINES: usize = 12;
const ROUTINE_FIRST: usize = 3;
const ROUTINE_LAST: usize = 6;

/// The story of a schedule; empty unless asked for.
#[derive(Debug, Default)]
pub struct Trace {
    wanted: bool,
    lines: Vec<String>,
    /// Lines of routine since anything else happened.
    routine: Vec<String>,
}

impl Trace {
    /// Records, or not.
    pub fn new(wanted: bool) -> Trace {
        Trace { wanted, ..Trace::default() }
    }

    /// Adds a line about `host`, or about the world; words are made only when wanted.
    pub fn note(&mut self, now: Time, host: Option<HostId>, words: impl FnOnce() -> String) {
        if self.wanted {
            self.shorten_routine();
            self.lines.push(line(now, host, &words()));
        }
    }

    /// Adds a line that matters only when something else happens near it.
    pub fn routine(&mut self, now: Time, host: HostId, words: impl FnOnce() -> String) {
        if self.wanted {
            self.routine.push(line(now, Some(host), &words()));
        }
    }

    fn shorten_routine(&mut self) {
        let mut routine = std::mem::take(&mut self.routine);
        if routine.len() > ROUTINE_LINES {
            let left_out = ROUTINE_FIRST..routine.len() - ROUTINE_LAST;
            let dots = format!("{:>11}        ({} lines of checkpoints)", "...", left_out.len());
            routine.splice(left_out, [dots]);
        }
        self.lines.append(&mut routine);
    }

    /// The lines.
    pub fn into_lines(mut self) -> Vec<String> {
        self.shorten_routine();
        self.lines
    }
}

fn line(now: Time, host: Option<HostId>, words: &str) -> String {
    let who = host.map_or("-".to_owned(), |host| host.to_string());
    format!("{:>11.3} ms  {who}  {words}", now.0.as_secs_f64() * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_routine_is_shortened_and_short_routine_is_not() {
        for (count, lines) in [(12, 14), (13, 12), (500, 12)] {
            let mut trace = Trace::new(true);
            trace.note(Time::default(), None, || "begins".to_owned());
            for _ in 0..count {
                trace.routine(Time::default(), HostId(0), || "closes an epoch".to_owned());
            }
            trace.note(Time::default(), None, || "ends".to_owned());
            assert_eq!(trace.into_lines().len(), lines, "of {count}");
        }
    }
}
