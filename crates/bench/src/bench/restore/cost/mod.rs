//! Costs of a snapshot for the guest, beside QEMU's own ways to save one and have it back
//! (HotSnap, Figures 4 and 5). The guest reads and hashes a twelfth of its memory over and over,
//! and says how many MiB it has read; a client outside asks it all the time.
//!
//! | module    | is |
//! |-----------|----|
//! | `take`    | one snapshot of the managed guest |
//! | `report`  | the section's report and text |

mod report;
mod take;

#[cfg(test)]
pub use report::tests;
pub use report::{Report, table};

use super::pair::Pair;
use super::progress::Progress;
use super::runs;
use crate::cli::BenchRestoreArgs;
use anyhow::Result;

const RUNS: u32 = 3;

/// Measures what a snapshot costs.
pub fn measure(args: &BenchRestoreArgs) -> Result<Report> {
    let runs = runs(args, RUNS);
    let mut pair = Pair::start(args, &take::load(args.memory_mib))?;
    let progress = Progress::new("cost", 2 * runs as usize + 1);
    let mut report = Report::new(args.memory_mib);
    for run in 1..=runs {
        let step = format!("round {run}, snapshot");
        progress.begin(&step);
        let cost = take::snapshot(&pair).inspect_err(|_| eprintln!("{}", pair.diagnostics()))?;
        progress.end(&step, &cost.words());
        report.snapshots.push(cost);
        let step = format!("round {run}, migrate file:");
        progress.begin(&step);
        let plain = pair.migrate()?;
        progress.end(&step, &plain.words());
        report.migrations.push(plain);
    }
    progress.begin("savevm");
    let inside = pair.save_inside()?;
    progress.end("savevm", &inside.words());
    report.inside = Some(inside);
    pair.end()?;
    report.conclude();
    Ok(report)
}
