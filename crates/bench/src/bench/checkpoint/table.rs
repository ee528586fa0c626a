//! The result of `bench checkpoint` for people.

use super::{Round, Thread};
use crate::bench::suite::statistics::median;
use std::fmt::Write;

/// Threads that ran for less than this for each checkpoint are added up.
const LEAST_US: f64 = 5.0;

/// What is compared of hosts with keepers and hosts without.
type Figure = (&'static str, fn(&Round) -> f64);

const COMPARED: [Figure; 5] = [
    ("pause", |round| round.pause_p50_ms),
    ("commit", |round| round.commit_p50_ms),
    ("primary's processor", |round| ran_us(round, &["primary"])),
    ("backup's processor", |round| ran_us(round, &["backup"])),
    ("all processors", |round| ran_us(round, &PROCESSES)),
];

const PROCESSES: [&str; 4] = ["primary", "qemu", "backup", "daemons"];

/// A paragraph for each round, and how those with keepers compare with the others.
pub fn table(rounds: &[Round]) -> String {
    let mut text = String::new();
    for round in rounds {
        paragraph(&mut text, round);
    }
    compare(&mut text, rounds);
    text
}

/// Microseconds that these processes ran for each checkpoint.
fn ran_us(round: &Round, processes: &[&str]) -> f64 {
    let of_these = |thread: &&Thread| processes.contains(&thread.process);
    round.threads.iter().filter(of_these).map(|thread| thread.ran_us).sum()
}

fn compare(text: &mut String, rounds: &[Round]) {
    let (kept, others): (Vec<&Round>, Vec<&Round>) = rounds.iter().partition(|round| round.keepers);
    for (what, of) in COMPARED {
        let middle =
            |rounds: &[&Round]| median(&rounds.iter().map(|round| of(round)).collect::<Vec<_>>());
        let (Some(kept), Some(others)) = (middle(&kept), middle(&others)) else { return };
        let _ = writeln!(text, "with keepers: {what} {:.3} of that without", kept / others);
    }
}

// Writing to a string cannot fail.
fn paragraph(text: &mut String, round: &Round) {
    let Round { load, checkpoints, seconds, pages, precopied_pages, bytes, .. } = round;
    let kept = if round.keepers { ", keepers" } else { "" };
    let _ = writeln!(
        text,
        "{load}{kept}: {checkpoints} checkpoints, {:.1} a second; for each {precopied_pages:.0} pages before \
         the pause, {pages:.0} in it, {bytes:.0} bytes",
        *checkpoints as f64 / seconds,
    );
    let _ = writeln!(
        text,
        "pause {:.2} ms (p99 {:.2}), commit after it {:.2} ms (p99 {:.2}){}",
        round.pause_p50_ms,
        round.pause_p99_ms,
        round.commit_p50_ms,
        round.commit_p99_ms,
        round.figure.map_or_else(String::new, |figure| format!(", the load's figure {figure:.1}")),
    );
    text.push_str("process  thread           ran µs  waited µs   slept  faults   calls\n");
    for process in PROCESSES {
        let (small, large): (Vec<&Thread>, Vec<&Thread>) = round
            .threads
            .iter()
            .filter(|thread| thread.process == process)
            .partition(|thread| thread.ran_us < LEAST_US);
        large.iter().for_each(|thread| line(text, &thread.name, &[thread]));
        line(text, "others", &small);
        line(text, "all", &[&large[..], &small[..]].concat());
    }
    text.push('\n');
}

fn line(text: &mut String, name: &str, threads: &[&Thread]) {
    let Some(first) = threads.first() else { return };
    let sum = |of: fn(&Thread) -> f64| threads.iter().map(|thread| of(thread)).sum::<f64>();
    let calls: Option<f64> = threads.iter().map(|thread| thread.calls).sum();
    let calls = calls.map_or_else(|| "–".to_owned(), |calls| format!("{calls:.1}"));
    let _ = writeln!(
        text,
        "{:8} {name:15} {:7.0} {:10.0} {:7.1} {:7.1} {calls:>7}",
        first.process,
        sum(|thread| thread.ran_us),
        sum(|thread| thread.waited_us),
        sum(|thread| thread.slept),
        sum(|thread| thread.faults),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(name: &str, ran_us: f64, calls: Option<f64>) -> Thread {
        let name = name.to_owned();
        Thread { process: "primary", name, ran_us, waited_us: 1.0, slept: 2.0, faults: 0.0, calls }
    }

    fn round(keepers: bool, threads: Vec<Thread>) -> Round {
        Round {
            load: "450 pages".to_owned(),
            keepers,
            checkpoints: 1_000,
            seconds: 10.0,
            pages: 50.0,
            precopied_pages: 400.0,
            bytes: 90_000.0,
            pause_p50_ms: 0.3,
            pause_p99_ms: 0.9,
            commit_p50_ms: 0.8,
            commit_p99_ms: 2.0,
            figure: None,
            threads,
        }
    }

    #[test]
    fn hosts_with_keepers_are_compared_with_those_without() {
        let round = |keepers, us| round(keepers, vec![thread("capture-vm", us, None)]);
        let rounds =
            [round(false, 100.0), round(true, 103.0), round(false, 90.0), round(true, 94.0)];
        let text = table(&rounds);
        assert!(text.contains("450 pages, keepers: 1000 checkpoints"), "{text}");
        assert!(text.contains("with keepers: primary's processor 1.037 of that without"), "{text}");
        assert!(!table(&rounds[..1]).contains("of that without"));
    }

    #[test]
    fn small_threads_are_one_line_and_all_are_added_up() {
        let threads = vec![
            thread("beat", 1.0, Some(1.0)),
            thread("capture-vm", 700.0, Some(30.0)),
            thread("hear", 2.0, Some(2.0)),
        ];
        let text = table(&[round(false, threads)]);
        let lines: Vec<Vec<&str>> =
            text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert!(
            text.starts_with("450 pages: 1000 checkpoints, 100.0 a second; for each 400 pages")
        );
        assert_eq!(lines[3], ["primary", "capture-vm", "700", "1", "2.0", "0.0", "30.0"]);
        assert_eq!(lines[4], ["primary", "others", "3", "2", "4.0", "0.0", "3.0"]);
        assert_eq!(lines[5], ["primary", "all", "703", "3", "6.0", "0.0", "33.0"]);
    }
}
