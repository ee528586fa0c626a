//! `understudy-lab simulate`.

use crate::cli::SimulateArgs;
use indicatif::{ProgressBar, ProgressStyle};
use std::fmt::Write;
use std::io::{self, IsTerminal};
use understudy_client::{Exit, Failure, output};
use understudy_simulator::{Report, Story, replay, simulate};

const TEMPLATE: &str = "[{bar:40}] {pos} of {len} schedules, {eta} left";

/// Broken seeds that the text names; JSON has them all.
const NAMED: usize = 10;

/// Runs the schedules, or tells the story of one.
pub fn run(args: &SimulateArgs, json: bool) -> Result<Exit, Failure> {
    if let Some(seed) = args.seed {
        let story = replay(seed, None);
        output::show(json, &story, tell)?;
        return Ok(exit(story.violation.is_none()));
    }
    let bar = io::stderr().is_terminal().then(|| progress_bar(args.seeds));
    let report = simulate(args.from..args.from + args.seeds, || {
        if let Some(bar) = &bar {
            bar.inc(1);
        }
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    output::show(json, &report, summary)?;
    Ok(exit(report.is_good()))
}

fn exit(good: bool) -> Exit {
    if good { Exit::Ok } else { Exit::Error }
}

fn progress_bar(schedules: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(TEMPLATE).expect("the template is well-formed");
    ProgressBar::new(schedules).with_style(style.progress_chars("=> "))
}

fn tell(story: &Story) -> String {
    let mut text = story.trace.join("\n");
    let end = story.violation.as_deref().unwrap_or("no invariant was broken");
    let seed = story.seed.map_or_else(String::new, |seed| format!("seed {seed}: "));
    let _ = write!(text, "\n\n{seed}{end}\n");
    text
}

fn summary(report: &Report) -> String {
    let mut text = format!(
        "{} schedules, {} broke an invariant; {} bugs planted, {} found\n",
        report.schedules, report.violations, report.mutants.planted, report.mutants.found
    );
    for failure in report.failures.iter().take(NAMED) {
        let _ = writeln!(text, "  seed {}: {}", failure.seed, failure.violation);
    }
    if let (Some(first), Some(shrunk)) = (report.failures.first(), &report.shrunk) {
        let (left, all) = (shrunk.faults.len(), shrunk.faults_before);
        let _ = writeln!(
            text,
            "seed {} with {left} of its {all} faults (all of it: understudy-lab simulate --seed {}):",
            first.seed, first.seed
        );
        text += &shrunk.faults.iter().map(|fault| format!("  {fault}\n")).collect::<String>();
        text += &tell(&shrunk.story);
    }
    for missed in report.mutants.each.iter().filter(|found| found.by.is_none()) {
        let _ = writeln!(text, "  not found: {}", missed.mutant);
    }
    text.push_str("reached:\n");
    for (what, count) in report.coverage.counts() {
        let _ = writeln!(text, "  {count:>10} {}", what.replace('_', " "));
    }
    text
}
