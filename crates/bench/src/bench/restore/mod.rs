//! `understudy-lab bench restore`: snapshots of VMs and their restore, as HotSnap's and
//! HotRestore's authors measured them. Each section has a laboratory of its own.
//!
//! | module    | is |
//! |-----------|----|
//! | `modes`   | one VM: how fast each way has it back |
//! | `queue`   | how well first accesses, recency and CLOCK foretell what is touched |
//! | `group`   | 8 to 16 VMs that talk to each other: latency and back-off |
//! | `queries` | the first answers of a service after its restore |
//! | `distcc`  | a distributed compile in three VMs, which goes on after the restore |
//! | `cost`    | what taking a snapshot costs the guest, beside QEMU's own ways |
//! | `stage`, `members` | a VM, or a group of them, to be snapshotted and restored |
//! | `pair`    | a VM, and one of plain QEMU with the same load |
//! | `report`  | all sections' results, JSON and the text; `aim`: what is aimed at |

mod aim;
mod cost;
mod distcc;
mod group;
mod members;
mod modes;
mod pair;
mod progress;
mod queries;
mod queue;
mod report;
mod stage;

pub use members::MOST as MOST_VMS;
pub use modes::Way;
pub use queue::Load;

use crate::cli::BenchRestoreArgs;
use crate::parts::scene_options;
use clap::ValueEnum;
use report::Report;
use std::fmt;
use understudy_client::{Exit, Failure, output};
use understudy_snapshot::Mode;

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Section {
    /// One VM: how fast each way has it back, beside `-incoming`.
    Modes,
    /// Which pages each policy has loaded when the guest touches them.
    Queue,
    /// Groups of VMs: latency of each, and back-off.
    Group,
    /// The first answers of a service after its restore.
    Queries,
    /// Three VMs, of which one compiles on the others: whether its build goes on, and when it ends.
    Distcc,
    /// Pause, duration and slow-down of a snapshot, beside savevm and `migrate file:`.
    Cost,
}

/// Measures and prints.
pub fn run(args: &BenchRestoreArgs, json: bool) -> Result<Exit, Failure> {
    // Whether anything can be measured at all.
    scene_options(args.guest.as_deref())?;
    let mut report = Report::new(args);
    let wanted = |section: &&Section| args.only.is_empty() || args.only.contains(section);
    for section in Section::value_variants().iter().filter(wanted) {
        if let Err(error) = measure(args, *section, &mut report) {
            eprintln!("{section}: {error:#}");
            report.failures.push(format!("{section}: {error:#}"));
        }
    }
    report.finish();
    output::show(json, &report, report::table)?;
    Ok(if report.is_complete() { Exit::Ok } else { Exit::Error })
}

fn measure(args: &BenchRestoreArgs, section: Section, report: &mut Report) -> anyhow::Result<()> {
    match section {
        Section::Modes => report.modes = Some(modes::measure(args)?),
        Section::Queue => report.queue = Some(queue::measure(args)?),
        Section::Group => report.group = Some(group::measure(args)?),
        Section::Queries => report.queries = Some(queries::measure(args)?),
        Section::Distcc => report.distcc = Some(distcc::measure(args)?),
        Section::Cost => report.cost = Some(cost::measure(args)?),
    }
    Ok(())
}

/// Number of times that a section's measurements are made.
fn runs(args: &BenchRestoreArgs, usual: u32) -> u32 {
    args.runs.unwrap_or(if args.quick { 1 } else { usual })
}

/// The product's mode, as it is written on the command line.
fn name(mode: Mode) -> String {
    let name = serde_json::to_value(mode).ok();
    name.and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.pad(value.as_ref().map_or("", |value| value.get_name()))
    }
}
