//! What taking a snapshot costs the guest, beside QEMU's own ways to save one and have it back
//! (HotSnap, Figures 4 and 5). The guest reads and hashes a twelfth of its memory over and over,
//! and says how many MiB it has read; a client outside asks it all the time.
//!
//! | module    | is |
//! |-----------|----|
//! | `testbed` | a managed guest and a plain one with the same load |
//! | `report`  | the section's report and text |

mod report;
mod testbed;

#[cfg(test)]
pub use report::tests;
pub use report::{Report, table};

use super::progress::Progress;
use super::runs;
use crate::cli::BenchRestoreArgs;
use anyhow::Result;
use testbed::Testbed;

const RUNS: u32 = 3;

/// Measures.
pub fn measure(args: &BenchRestoreArgs) -> Result<Report> {
    let runs = runs(args, RUNS);
    let mut testbed = Testbed::start(args)?;
    let progress = Progress::new("cost", 2 * runs as usize + 1);
    let mut report = Report::new(args.memory_mib);
    for run in 1..=runs {
        let step = format!("round {run}, snapshot");
        progress.begin(&step);
        let cost = testbed.snapshot().inspect_err(|_| eprintln!("{}", testbed.diagnostics()))?;
        progress.end(&step, &cost.words());
        report.snapshots.push(cost);
        let step = format!("round {run}, migrate file:");
        progress.begin(&step);
        let plain = testbed.migrate()?;
        progress.end(&step, &plain.words());
        report.migrations.push(plain);
    }
    progress.begin("savevm");
    let inside = testbed.inside()?;
    progress.end("savevm", &inside.words());
    report.inside = Some(inside);
    testbed.end()?;
    report.conclude();
    Ok(report)
}
