//! One VM: how fast each way has it back.
//!
//! | module    | is |
//! |-----------|----|
//! | `plan`    | what is measured, and when |
//! | `restore` | one restore of the managed guest, or of the plain one |
//! | `report`  | medians and ratios, the aims; `table` for a terminal |

mod plan;
mod report;
mod restore;
mod table;

pub use plan::Way;
pub use report::Report;
#[cfg(test)]
pub use report::tests;
pub use table::table;

use super::pair::Pair;
use super::progress::Progress;
use super::runs;
use crate::cli::BenchRestoreArgs;
use anyhow::Result;
use plan::Step;
use restore::Measured;

const RUNS: u32 = 5;

/// One measurement, and what came of it.
struct Sample {
    step: Step,
    outcome: Result<Measured, String>,
}

/// Measures each way.
pub fn measure(args: &BenchRestoreArgs) -> Result<Report> {
    let steps = plan::plan(&args.ways, runs(args, RUNS));
    let mut pair = Pair::start(args, &restore::load(args.memory_mib))?;
    let progress = Progress::new("modes", steps.len());
    let mut samples = Vec::new();
    for &step in &steps {
        progress.begin(&step.to_string());
        let outcome = restore::measure(&mut pair, step).map_err(|error| format!("{error:#}"));
        let words = outcome.as_ref().map_or_else(String::clone, Measured::words);
        progress.end(&step.to_string(), &words);
        let failed = outcome.is_err();
        samples.push(Sample { step, outcome });
        if failed {
            eprintln!("{}", pair.diagnostics());
            break;
        }
    }
    let report = Report::of(args.memory_mib, &samples);
    pair.end()?;
    Ok(report)
}
