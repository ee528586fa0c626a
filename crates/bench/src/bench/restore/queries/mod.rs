//! The first answers of a service after its restore (HotRestore, Figure 9): a small search service
//! in two guests, asked by ten clients at once, each query after the answer to the one before.
//!
//! Clients ask until the snapshot is taken and traced. Once all run after a restore ten new ones
//! connect, and what each waits for that, and for its first, its second, … answer is noted.
//!
//! | module    | is |
//! |-----------|----|
//! | `clients` | who asks |
//! | `report`  | the section's report and text |

mod clients;
mod report;

#[cfg(test)]
pub use report::tests;
pub use report::{Report, table};

use super::members::{Members, Shape, address};
use super::progress::Progress;
use super::{name, runs};
use crate::cli::BenchRestoreArgs;
use anyhow::Result;
use clients::Clients;
use report::{QUERIES, Restored};
use std::net::SocketAddr;
use understudy_lab::scene::GuestKind;
use understudy_lab::wait_for;
use understudy_report::cluster::{RestoreRequest, SnapshotRequest};
use understudy_snapshot::{Mode, SnapshotNumber};

const RUNS: u32 = 3;
const HOSTS: [&str; 2] = ["a", "b"];
const MEMORY_MIB: u32 = 256;
/// Documents of each guest.
const DOCUMENTS_MIB: u32 = 96;
const PORT: u16 = 7200;
/// Number of answers that tell what is normal.
const NORMAL: usize = 400;
const MODES: [Mode; 5] = [Mode::Eager, Mode::Lazy, Mode::WorkingSet, Mode::HotNoLine, Mode::Hot];
const QUICK_MODES: [Mode; 2] = [Mode::WorkingSet, Mode::Hot];

/// Measures the first answers.
pub fn measure(args: &BenchRestoreArgs) -> Result<Report> {
    let modes: &[Mode] = if args.quick { &QUICK_MODES } else { &MODES };
    let runs = runs(args, RUNS);
    let progress = Progress::new("queries", 1 + modes.len() * runs as usize);
    let step = "two guests boot and are asked";
    progress.begin(step);
    let shape = Shape {
        kind: GuestKind::Linux,
        members: HOSTS.len(),
        memory_mib: MEMORY_MIB,
        hosts: &HOSTS,
    };
    let members = Members::boot(args, &shape)?;
    let prepared = prepare(&members).inspect_err(|_| eprintln!("{}", members.diagnostics()))?;
    let (normal_ms, number) = prepared;
    progress.end(step, &format!("a query takes {normal_ms:.1} ms"));
    let mut report = Report::new(normal_ms);
    for run in 0..runs {
        for &mode in modes {
            let step = format!("run {}, {}", run + 1, name(mode));
            progress.begin(&step);
            let restored = restore(&members, number, mode)
                .inspect_err(|_| eprintln!("{}", members.diagnostics()))?;
            progress.end(&step, &restored.words());
            report.query_restores.entry(name(mode)).or_default().push(restored);
        }
    }
    members.end()?;
    report.conclude();
    Ok(report)
}

/// Starts the service, and takes a snapshot while it is asked. Returns how long a query takes.
fn prepare(members: &Members) -> Result<(f64, SnapshotNumber)> {
    for member in 0..members.count() {
        let peer = SocketAddr::from((address(1 - member), PORT));
        let line = format!("exec guest-tools search {PORT} {DOCUMENTS_MIB} {peer}");
        members.run(member, &line)?;
    }
    for member in 0..members.count() {
        wait_for("the service to answer", super::stage::LIMIT, || {
            let answer = members.ask(member, PORT, "find 1");
            Ok(answer.ok().filter(|answer| answer.starts_with("found ")))
        })?;
    }
    let clients = Clients::start(members, PORT, 0, None);
    let normal = wait_for("the service to be asked", super::stage::LIMIT, || {
        clients.check()?;
        Ok(clients.last(NORMAL))
    })?;
    let (snapshot, _) =
        members.snapshot(SnapshotRequest { recency: true, ..Default::default() })?;
    clients.stop()?;
    Ok((normal, snapshot.number))
}

fn restore(members: &Members, number: SnapshotNumber, mode: Mode) -> Result<Restored> {
    members.end_guests()?;
    let request = RestoreRequest { number: Some(number), mode, ..Default::default() };
    let (report, began) = members.restore(request)?;
    let served = Clients::start(members, PORT, 1 << 32, Some(QUERIES)).finish()?;
    let last = report.members.iter().map(|member| member.started_ms).fold(0.0, f64::max);
    Ok(Restored::of(began, last, &served))
}
