//! `understudy bench restore`: snapshots of a VM and their restore, as HotSnap's and
//! HotRestore's authors measured them.
//!
//! | module    | is |
//! |-----------|----|
//! | `plan`    | what is measured, and when |
//! | `testbed` | the laboratory: a managed guest and a plain one with the same load |
//! | `report`  | medians and ratios, the aims; `table` for a terminal |

mod plan;
mod report;
mod table;
mod testbed;

pub use plan::Way;

use crate::cli::BenchRestoreArgs;
use crate::demo::scene_options;
use crate::failure::{Exit, Failure};
use crate::output;
use anyhow::Result;
use plan::Step;
use report::Report;
use testbed::{Taken, Testbed};

const RUNS: u32 = 5;
const QUICK_RUNS: u32 = 1;

/// One measurement, and what came of it.
struct Sample {
    step: Step,
    outcome: Result<Taken, String>,
}

/// Measures and prints.
pub fn run(args: &BenchRestoreArgs, json: bool) -> Result<Exit, Failure> {
    // Whether anything can be measured at all.
    scene_options(args.guest.as_deref())?;
    let report = measure(args)
        .map_err(|error| Failure::internal(format!("the benchmark failed: {error:#}")))?;
    output::show(json, &report, table::table)?;
    Ok(if report.is_complete() { Exit::Ok } else { Exit::Error })
}

fn measure(args: &BenchRestoreArgs) -> Result<Report> {
    let runs = args.runs.unwrap_or(if args.quick { QUICK_RUNS } else { RUNS });
    let steps = plan::plan(&args.only, runs);
    let mut testbed = Testbed::start(args)?;
    let mut samples = Vec::new();
    for (done, &step) in steps.iter().enumerate() {
        let outcome = testbed.measure(step).map_err(|error| format!("{error:#}"));
        let words = outcome.as_ref().map_or_else(String::clone, Taken::words);
        eprintln!("{} of {}: {step}: {words}", done + 1, steps.len());
        let failed = outcome.is_err();
        samples.push(Sample { step, outcome });
        if failed {
            eprintln!("{}", testbed.diagnostics());
            break;
        }
    }
    let report = Report::of(&testbed.setting(), &samples);
    testbed.end()?;
    Ok(report)
}
