//! Pages that each policy has loaded when the guest touches them (HotRestore, Tables 1 to 3 and
//! Figure 6). For each load:
//!
//! 1. A snapshot is taken while the load runs, as it is taken by default: the first accesses of
//!    the next 7 s are traced.
//! 2. Another one follows; all accesses of the next 7 s are noted, a page that is touched again
//!    every tenth of a second at most. First access, recency and CLOCK are computed from that one
//!    run. The guest gets less far in it, which is why there is the former.
//! 3. Each is restored with all its memory, and the first accesses of 7 s are noted: what a
//!    policy should have foretold.
//! 4. The former is restored at the default's way with other shares of the working set: how often
//!    does the guest wait for a page in 7 s?
//!
//! The loads are measured one after the other, and that so many times.
//!
//! | module    | is |
//! |-----------|----|
//! | `load`    | what the guest does |
//! | `testbed` | the guest, and what is measured of one load |
//! | `score`   | policies over what was noted |
//! | `report`  | the section's report and text |

mod load;
mod report;
mod score;
mod testbed;

pub use load::Load;
#[cfg(test)]
pub use report::tests;
pub use report::{Report, table};

use super::progress::Progress;
use super::runs;
use crate::cli::BenchRestoreArgs;
use anyhow::Result;
use clap::ValueEnum;
use testbed::Testbed;

/// Shares of the working set that are loaded before the start.
const SHARES: [f64; 4] = [0.5, 0.7, 1.0, 2.0];
const QUICK_SHARES: [f64; 2] = [0.5, 1.0];
/// Number of times that each load is measured.
const RUNS: u32 = 3;
/// Loads that are measured with `--quick`.
const QUICK_LOADS: [Load; 2] = [Load::Compile, Load::Pi];

/// Measures each load.
pub fn measure(args: &BenchRestoreArgs) -> Result<Report> {
    let loads = match (&args.workloads[..], args.quick) {
        ([], true) => &QUICK_LOADS,
        ([], false) => Load::value_variants(),
        (some, _) => some,
    };
    let shares: &[f64] = if args.quick { &QUICK_SHARES } else { &SHARES };
    let testbed = Testbed::start(args)?;
    let rounds = runs(args, RUNS) as usize;
    let progress = Progress::new("queue", rounds * loads.len());
    let mut report = Report::new(args.memory_mib);
    for load in std::iter::repeat_n(loads, rounds).flatten() {
        let name = load.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned());
        progress.begin(&name);
        match testbed.measure(*load, shares) {
            Ok(figures) => {
                progress.end(&name, &figures.words());
                report.rounds.entry(*load).or_default().push(figures);
            }
            Err(error) => {
                let words = format!("{name}: {error:#}");
                progress.end(&name, &words);
                eprintln!("{}", testbed.diagnostics());
                report.queue_failures.push(words);
                break;
            }
        }
    }
    testbed.end()?;
    report.conclude();
    Ok(report)
}
