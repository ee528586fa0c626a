//! `understudy-lab bench`: what protection costs for each kind of workload, beside an
//! unprotected guest, plain QEMU and QEMU's COLO.
//!
//! | module       | is |
//! |--------------|----|
//! | [`variant`]  | what is measured, and how the guest is kept meanwhile |
//! | `plan`       | what is measured when |
//! | `runner`     | one step after the other, failures included |
//! | `testbed`    | the laboratory: a managed guest, a plain one, and whose turn it is |
//! | `protection` | from one variant to the next; what the daemon counts |
//! | `figures`    | the figures with a laboratory of their own |
//! | `store`      | the results file, from which a run goes on |
//! | `identity`   | which results belong together |
//! | `statistics` | medians, spread, ratios |
//! | `papers`     | what others have published, and what is aimed at |
//! | `report`     | all of it, as JSON; `table` for a terminal, `html` and `charts` as a page |
//! | [`readme`]   | the tables of README.md and docs/performance.md, made of one report |

mod charts;
mod figures;
mod html;
pub(super) mod identity;
mod papers;
pub(super) mod plan;
mod progress;
pub(super) mod protection;
pub(super) mod readme;
mod report;
mod runner;
pub(super) mod statistics;
pub(super) mod store;
pub(super) mod table;
pub(super) mod testbed;
mod variant;

pub use variant::{Subject, Variant};

use crate::cli::SuiteArgs;
use crate::parts::{guest_files, scene_options};
use anyhow::{Context, Result};
use figures::Repetitions;
use progress::Progress;
use report::Report;
use std::fs;
use std::path::Path;
use std::time::Duration;
use store::{Beginning, Store};
use testbed::Bench;
use understudy_client::{Exit, Failure, FailureKind, output};
use understudy_lab::{BenchGuest, GUEST_ADDRESS};
use understudy_report::ErrorKind;

const RUNS: u32 = 3;
const QUICK_RUNS: u32 = 1;
const REPORT_JSON: &str = "report.json";
const REPORT_HTML: &str = "report.html";

/// Measures what is missing, and prints the report.
pub fn run(args: &SuiteArgs, json: bool) -> Result<Exit, Failure> {
    // Whether anything can be measured at all: told once, not for each measurement.
    match subjects(args).iter().any(|subject| subject.own_variant().is_none()) {
        true => bench_guest(args.guest.as_deref())?,
        false => scene_options(args.guest.as_deref()).map(drop)?,
    }
    let report = measure(args)
        .map_err(|error| Failure::internal(format!("the benchmarks failed: {error:#}")))?;
    output::show(json, &report, table::table)?;
    eprintln!("report: {}", args.output.join(REPORT_HTML).display());
    Ok(if complete(&report) { Exit::Ok } else { Exit::Error })
}

/// Refuses where there is no bench guest, with the way to build it.
pub(super) fn bench_guest(guest: Option<&Path>) -> Result<(), Failure> {
    scene_options(guest)?;
    let files = guest.map_or_else(guest_files, Path::to_owned);
    BenchGuest::files(&files, GUEST_ADDRESS)
        .map(drop)
        .map_err(|error| Failure::new(FailureKind::Host(ErrorKind::NotFound), format!("{error:#}")))
}

fn measure(args: &SuiteArgs) -> Result<Report> {
    let steps = plan::plan(&subjects(args), &variants(args), runs(args));
    let guest = args.guest.clone().unwrap_or_else(guest_files);
    let identity = identity::run(scale(args), args.pinned, &testbed::files(&guest))?;
    let mut bench = Bench::new(args, repetitions(args));
    let (mut store, begun) = Store::open(&args.output, &identity, args.fresh)?;
    announce(&begun, &store, args);
    let progress = Progress::new(steps.len());
    let report = |store: &Store| write(&args.output, &Report::of(store.run(), store.samples()));
    let budget = Duration::from_secs(60 * args.minutes);
    runner::run(&mut store, (&steps, budget), &progress, |step| bench.measure(step), report)?;
    bench.end()?;
    Ok(Report::of(store.run(), store.samples()))
}

fn subjects(args: &SuiteArgs) -> Vec<Subject> {
    chosen(Subject::all(), &args.only)
}

fn variants(args: &SuiteArgs) -> Vec<Variant> {
    let all =
        if args.quick && args.variants.is_empty() { &Variant::QUICK[..] } else { Variant::all() };
    chosen(all, &args.variants)
}

/// Choice of `all`, in that order; all if nothing was asked for.
fn chosen<T: Copy + PartialEq>(all: &[T], asked: &[T]) -> Vec<T> {
    all.iter().copied().filter(|one| asked.is_empty() || asked.contains(one)).collect()
}

fn runs(args: &SuiteArgs) -> u32 {
    args.runs.unwrap_or(if args.quick { QUICK_RUNS } else { RUNS })
}

fn repetitions(args: &SuiteArgs) -> Repetitions {
    if args.quick { Repetitions::Few } else { Repetitions::All }
}

fn scale(args: &SuiteArgs) -> &'static str {
    if args.quick { "quick" } else { "full" }
}

fn announce(begun: &Beginning, store: &Store, args: &SuiteArgs) {
    let file = args.output.join(store::SAMPLES);
    match begun {
        Beginning::New => {}
        Beginning::Resumed => eprintln!(
            "{} has {} measurements of this build and machine: going on from there",
            file.display(),
            store.samples().len()
        ),
        Beginning::SetAside { why, kept } => {
            eprintln!("beginning anew ({why}); earlier results are in {}", kept.display());
        }
    }
}

/// Both forms of the report; each is whole at any time.
fn write(folder: &Path, report: &Report) -> Result<()> {
    let json = serde_json::to_string_pretty(report)?;
    for (name, text) in [(REPORT_JSON, json), (REPORT_HTML, html::page(report)?)] {
        let (path, part) = (folder.join(name), folder.join(format!("{name}.part")));
        let written = fs::write(&part, text).and_then(|()| fs::rename(&part, &path));
        written.with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Whether everything of ours has a figure. Whether COLO runs is QEMU's affair.
fn complete(report: &Report) -> bool {
    let mut cells = report.workloads.values().flatten();
    cells.all(|(&variant, cell)| variant == Variant::Colo || cell.error.is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_asked_for_is_chosen_in_the_order_of_the_report() {
        let chosen = chosen(Variant::all(), &[Variant::Plain, Variant::Adaptive]);
        assert_eq!(chosen, [Variant::Adaptive, Variant::Plain]);
        assert_eq!(super::chosen(Subject::all(), &[]), Subject::all());
    }

    #[test]
    fn both_reports_are_written_and_a_failure_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let mut report = report::tests::report();
        write(folder.path(), &report).unwrap();
        let json = fs::read_to_string(folder.path().join(REPORT_JSON)).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["workloads"]["cpu"]["adaptive"]["ratio"], 0.5);
        let page = fs::read_to_string(folder.path().join(REPORT_HTML)).unwrap();
        assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
        assert!(!complete(&report));
        for cells in report.workloads.values_mut() {
            cells.remove(&Variant::Plain);
        }
        assert!(complete(&report));
    }
}
