//! Groups of small guests that pay money to each other over TCP and UDP all the time: how long
//! each waits for its restore, and for how long its peers are not there yet (HotRestore,
//! Figures 7 and 8). Each pays the two next in a ring.
//!
//! | figure    | is |
//! |-----------|----|
//! | back-off  | the difference of the starts of two guests that pay each other, by the clock of the daemon that restores |
//! | silence   | the longest that a payment over TCP waited for its answer, by the guest's own clock, which stands still until the guest is restored |
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
use report::Restored;
use testbed::Testbed;
use understudy_snapshot::Mode;

const RUNS: u32 = 3;
/// All modes are measured with the first.
const COUNTS: [usize; 3] = [8, 12, 16];
const QUICK_COUNTS: [usize; 1] = [8];
const ALL: [Mode; 5] = [Mode::Eager, Mode::Lazy, Mode::WorkingSet, Mode::HotNoLine, Mode::Hot];
/// Modes that the papers compare.
const FEW: [Mode; 2] = [Mode::WorkingSet, Mode::Hot];

/// Measures restores of groups.
pub fn measure(args: &BenchRestoreArgs) -> Result<Report> {
    let counts: &[usize] = match (&args.vms[..], args.quick) {
        ([], true) => &QUICK_COUNTS,
        ([], false) => &COUNTS,
        (some, _) => some,
    };
    let mut report = Report::default();
    for (at, &count) in counts.iter().enumerate() {
        let modes: &[Mode] = if at == 0 && !args.quick { &ALL } else { &FEW };
        if let Err(error) = measure_group(args, count, modes, &mut report) {
            report.group_failures.push(format!("{count} VMs: {error:#}"));
            break;
        }
    }
    report.conclude();
    Ok(report)
}

fn measure_group(
    args: &BenchRestoreArgs,
    count: usize,
    modes: &[Mode],
    report: &mut Report,
) -> Result<()> {
    let runs = runs(args, RUNS);
    let progress = Progress::new("group", 1 + modes.len() * runs as usize);
    let step = format!("{count} VMs boot and are snapshotted");
    progress.begin(&step);
    let mut testbed = Testbed::start(args, count)?;
    let snapshot = testbed.snapshot().inspect_err(|_| eprintln!("{}", testbed.diagnostics()))?;
    progress.end(&step, &snapshot.words());
    report.snapshots.insert(count, snapshot);
    for _ in 0..runs {
        for &mode in modes {
            let step = format!("{count} VMs, {}", name(mode));
            progress.begin(&step);
            let restored: Restored =
                testbed.restore(mode).inspect_err(|_| eprintln!("{}", testbed.diagnostics()))?;
            progress.end(&step, &restored.words());
            report.restores.entry(count).or_default().entry(name(mode)).or_default().push(restored);
        }
    }
    testbed.end()
}
