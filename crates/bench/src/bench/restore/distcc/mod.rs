//! A group in which one VM compiles a C project through distcc on the others (HotRestore's
//! distributed compile): it is snapshotted in a build, restored, and that build must go on and end,
//! over the connections that it had, with the library that all builds make.
//!
//! | module    | is |
//! |-----------|----|
//! | `testbed` | the guests, and one restore of them |
//! | `report`  | the section's report and text |

mod report;
mod testbed;

#[cfg(test)]
pub use report::tests;
pub use report::{Report, table};

use super::progress::Progress;
use super::{name, runs};
use crate::cli::BenchRestoreArgs;
use anyhow::Result;
use testbed::Testbed;
use understudy_snapshot::Mode;

const RUNS: u32 = 3;
const MODES: [Mode; 3] = [Mode::Eager, Mode::WorkingSet, Mode::Hot];
const QUICK_MODES: [Mode; 1] = [Mode::Hot];

/// Measures restores of builders.
pub fn measure(args: &BenchRestoreArgs) -> Result<Report> {
    let modes: &[Mode] = if args.quick { &QUICK_MODES } else { &MODES };
    let runs = runs(args, RUNS);
    let progress = Progress::new("distcc", 1 + modes.len() * runs as usize);
    let step = "three guests boot, build, and are snapshotted";
    progress.begin(step);
    let mut testbed = Testbed::start(args)?;
    let build_ms = testbed.prepare().inspect_err(|_| eprintln!("{}", testbed.diagnostics()))?;
    progress.end(step, &format!("a build takes {build_ms:.0} ms"));
    let mut report = Report::new(build_ms);
    for run in 0..runs {
        for &mode in modes {
            let step = format!("run {}, {}", run + 1, name(mode));
            progress.begin(&step);
            let restored =
                testbed.restore(mode).inspect_err(|_| eprintln!("{}", testbed.diagnostics()))?;
            progress.end(&step, &restored.words());
            report.restores.entry(name(mode)).or_default().push(restored);
        }
    }
    testbed.end()?;
    report.conclude();
    Ok(report)
}
