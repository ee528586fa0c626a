//! `understudy-lab bench lockstep`: what lockstep costs, as VMware FT's authors measured it.
//!
//! | module    | is |
//! |-----------|----|
//! | `plan`    | what is measured, in which variants, and when |
//! | `testbed` | the laboratory: a guest for each variant, of which one runs at a time |
//! | `log`     | what the daemon tells of the log meanwhile |
//! | `reads`   | the workload of `disk_reads` |
//! | `report`  | ratios, the two tables of the paper, the aims; `table` for a terminal |
//!
//! The workloads, the guest and the statistics are the suite's.

mod log;
mod plan;
mod reads;
mod report;
mod table;
mod testbed;

pub use plan::{Subject, Variant};

use super::suite::{bench_guest, identity, testbed::files};
use crate::bench::workloads::Scale;
use crate::cli::BenchLockstepArgs;
use crate::parts::guest_files;
use anyhow::Result;
use plan::Step;
use report::Report;
use testbed::{Bench, Taken};
use understudy_client::{Exit, Failure, output};

const RUNS: u32 = 3;
const QUICK_RUNS: u32 = 1;

/// One measurement, and what came of it.
struct Sample {
    step: Step,
    outcome: Result<Taken, String>,
}

/// Measures and prints.
pub fn run(args: &BenchLockstepArgs, json: bool) -> Result<Exit, Failure> {
    // Whether anything can be measured at all.
    bench_guest(args.guest.as_deref())?;
    let report = measure(args)
        .map_err(|error| Failure::internal(format!("the benchmark failed: {error:#}")))?;
    output::show(json, &report, table::table)?;
    Ok(if report.is_complete() { Exit::Ok } else { Exit::Error })
}

fn measure(args: &BenchLockstepArgs) -> Result<Report> {
    let guest = args.guest.clone().unwrap_or_else(guest_files);
    let (name, scale, runs) = match args.quick {
        true => ("quick", Scale::Quick, QUICK_RUNS),
        false => ("full", Scale::Full, RUNS),
    };
    let run = identity::run(name, false, &files(&guest))?;
    let steps = plan::plan(&args.only, &args.variants, args.runs.unwrap_or(runs));
    let mut bench = Bench::new(args.guest.clone(), scale);
    let mut samples = Vec::new();
    for (done, &step) in steps.iter().enumerate() {
        // What fails is tried once more, in a fresh laboratory.
        let taken = bench.measure(step).or_else(|error| {
            eprintln!("{step}: {error:#}; once more");
            bench.measure(step)
        });
        let outcome = taken.map_err(|error| format!("{error:#}"));
        let words = outcome.as_ref().map_or_else(String::clone, Taken::words);
        eprintln!("{} of {}: {step}: {words}", done + 1, steps.len());
        samples.push(Sample { step, outcome });
    }
    bench.end()?;
    Ok(Report::of(&run, scale, &samples))
}
