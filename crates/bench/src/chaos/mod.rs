//! `understudy-lab chaos`: seeded failures, one after the other, of real hosts with a
//! real guest under load on disk, memory and network.
//!
//! Run *i* is drawn from seed S + *i*. A guest and its clients live through
//! [`RUNS_OF_A_GUEST`] runs, each on the connection that it had at first: the
//! host that failed becomes the backup of the other one for the next run.
//!
//! | module     | is |
//! |------------|----|
//! | [`fault`]  | what goes wrong, drawn from a seed |
//! | [`stage`]  | the guest, its clients, and who watches them |
//! | [`run`]    | one failure and what became of everything |
//! | [`report`] | what all runs have shown together |

mod fault;
mod report;
mod run;
pub mod stage;

use crate::cli::ChaosArgs;
use crate::parts::scene_options;
use anyhow::Result;
use fault::Fault;
use indicatif::{ProgressBar, ProgressStyle};
use report::{FailedRun, OutageReport, Report};
use run::Run;
use stage::Stage;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use understudy_client::{Exit, Failure, output};
use understudy_lab::{RecordReport, SceneOptions};

/// Runs that a guest lives through before the next one is booted.
const RUNS_OF_A_GUEST: usize = 20;
const GUEST_MEMORY_MIB: u32 = 192;
const TEMPLATE: &str = "{msg}\n[{bar:40}] {pos} of {len} runs, {eta} left";

/// Plays all runs; exits with 0 only if every promise was kept in each, and there was none in
/// which a backup gave a healthy host up.
pub fn run(args: &ChaosArgs, json: bool) -> Result<Exit, Failure> {
    let mut options = scene_options(args.guest.as_deref())?;
    options.memory_mib = GUEST_MEMORY_MIB;
    let mut chaos = Chaos::new(options, args);
    let seeds: Vec<u64> = (0..args.runs).map(|run| args.seed.wrapping_add(run)).collect();
    for seeds in seeds.chunks(RUNS_OF_A_GUEST) {
        chaos.live(seeds);
    }
    let report = chaos.finish();
    output::show(json, &report, |report| format!("\n{}", report.summary()))?;
    Ok(if report.is_good() { Exit::Ok } else { Exit::Error })
}

struct Chaos {
    options: SceneOptions,
    report: Report,
    outages: Vec<f64>,
    progress: Option<ProgressBar>,
}

impl Chaos {
    fn new(options: SceneOptions, args: &ChaosArgs) -> Chaos {
        let bar = || {
            let style =
                ProgressStyle::with_template(TEMPLATE).expect("the template is well-formed");
            ProgressBar::new(args.runs).with_style(style.progress_chars("=> "))
        };
        let progress = io::stderr().is_terminal().then(bar);
        Chaos { options, report: Report::default(), outages: Vec::new(), progress }
    }

    /// Has guests live through the runs of these seeds: one guest, and another
    /// one after each run that went wrong.
    fn live(&mut self, seeds: &[u64]) {
        let mut left = seeds;
        while let Some(&next) = left.first() {
            let mut stage = match Stage::under_load(self.options.clone()) {
                Ok(stage) => stage,
                Err(error) => {
                    self.fail(None, next, format!("the guest cannot be started: {error:#}"));
                    left = &left[1..];
                    continue;
                }
            };
            let mut runs = Vec::new();
            let mut broken = false;
            while let (false, [seed, rest @ ..]) = (broken, left) {
                left = rest;
                match run::play(&mut stage, *seed) {
                    Ok(run) => {
                        broken = !self.count(&stage, &run);
                        runs.push(run);
                    }
                    Err(error) => {
                        broken = true;
                        self.fail(Some(&stage), *seed, format!("{error:#}"));
                    }
                }
                self.advance();
            }
            match stage.clear(!broken) {
                Ok(said) => self.outages.extend(outages(&runs, &said.records)),
                Err(error) => self.fail(None, next, format!("{error:#}")),
            }
        }
    }

    /// Counts a run; returns whether the guest may go on.
    fn count(&mut self, stage: &Stage, run: &Run) -> bool {
        let missed = !run.false_alarm && run.fault.calls_for_takeover() && !run.moved;
        let report = &mut self.report;
        report.runs += 1;
        report.called_for += u64::from(run.fault.calls_for_takeover());
        report.takeovers += u64::from(run.moved);
        report.missed += u64::from(missed);
        report.lost += run.lost;
        report.inconsistent_fs += u64::from(run.file_system.is_some());
        report.double_live += u64::from(run.double_live);
        report.false_alarms += u64::from(run.false_alarm);
        let mut problems = Vec::new();
        if missed {
            problems.push("the backup did not take over".to_owned());
        }
        if run.lost > 0 {
            problems.push(format!(
                "{} records are not on the survivor's disk as acknowledged",
                run.lost
            ));
        }
        problems.extend(
            run.file_system.iter().map(|words| format!("the file system is damaged: {words}")),
        );
        if run.double_live {
            problems.push("both copies answered".to_owned());
        }
        if run.false_alarm {
            problems.push("protection was lost before it: a false alarm".to_owned());
        }
        let outcome = match (problems.is_empty(), run.moved) {
            (false, _) => problems.join("; "),
            (true, true) => "taken over".to_owned(),
            (true, false) => "stays".to_owned(),
        };
        self.tell(&format!("seed {}: {}: {outcome}", run.seed, run.fault));
        if !problems.is_empty() {
            self.keep(stage, run.seed, outcome);
        }
        problems.is_empty()
    }

    /// Counts a run that has no result.
    fn fail(&mut self, stage: Option<&Stage>, seed: u64, problem: String) {
        self.report.runs += 1;
        self.report.broken += 1;
        self.tell(&format!("seed {seed}: {}: {problem}", Fault::draw(seed)));
        match stage {
            Some(stage) => self.keep(stage, seed, problem),
            None => self.report.failures.push(failed(seed, problem, PathBuf::new())),
        }
    }

    /// Keeps the logs of a run that went wrong.
    fn keep(&mut self, stage: &Stage, seed: u64, problem: String) {
        let logs =
            std::env::temp_dir().join(format!("understudy-chaos-{}-{seed}", std::process::id()));
        if let Err(error) = stage.keep_logs(&logs) {
            self.tell(&format!("the logs cannot be kept: {error:#}"));
        }
        self.report.failures.push(failed(seed, problem, logs));
    }

    fn advance(&self) {
        if let Some(bar) = &self.progress {
            bar.set_position(self.report.runs);
        }
    }

    fn tell(&self, text: &str) {
        match &self.progress {
            Some(bar) => bar.set_message(text.to_owned()),
            None => eprintln!("{text}"),
        }
    }

    fn finish(mut self) -> Report {
        if let Some(bar) = self.progress {
            bar.finish_and_clear();
        }
        self.report.outage_ms = OutageReport::of(self.outages);
        self.report
    }
}

fn failed(seed: u64, problem: String, logs: PathBuf) -> FailedRun {
    FailedRun { seed, fault: Fault::draw(seed).to_string(), problem, logs }
}

/// The outages of those runs whose failure called for a take-over: others are
/// as long as the fault's own absence.
fn outages(runs: &[Run], records: &RecordReport) -> Vec<f64> {
    let taken_over = runs.iter().filter(|run| run.moved && run.fault.calls_for_takeover());
    let outage = |run: &Run| records.outage_until(run.window.start, run.window.end);
    taken_over.filter_map(outage).map(|outage| outage.as_secs_f64() * 1e3).collect()
}
