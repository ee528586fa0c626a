//! The guests of a group, and one restore of them.

use super::super::members::{Members, Shape, address, name};
use super::super::stage::LIMIT;
use super::report::{Restored, Snapshot, neighbours};
use crate::cli::BenchRestoreArgs;
use anyhow::{Context, Result, bail, ensure};
use std::net::SocketAddr;
use understudy_lab::scene::GuestKind;
use understudy_lab::wait_for;
use understudy_report::cluster::{Backoff, RestoreRequest, SnapshotRequest};
use understudy_snapshot::{Mode, SnapshotNumber};

/// Memory of each guest, small enough for many of them to fit.
const MEMORY_MIB: u32 = 96;
const HOSTS: [&str; 4] = ["a", "b", "c", "d"];
const PORT: u16 = 7100;
/// Pause between two payments of a way: all guests share this machine's processors.
const PACE_MS: u32 = 50;
/// Payments of each that prove that its connections live.
const PAID: u64 = 20;
/// First accesses are noted for so long.
const TRACE_MS: u64 = 5_000;

/// The guests, which pay.
pub struct Testbed {
    members: Members,
    number: Option<SnapshotNumber>,
}

impl Testbed {
    /// Boots them, and has them pay.
    pub fn start(args: &BenchRestoreArgs, count: usize) -> Result<Testbed> {
        let kind = GuestKind::Linux;
        let shape = Shape { kind, members: count, memory_mib: MEMORY_MIB, hosts: &HOSTS };
        let members = Members::boot(args, &shape)?;
        for member in 0..count {
            let peers = neighbours(count).filter(|(one, _)| *one == member);
            let peers: Vec<String> = peers
                .map(|(_, peer)| SocketAddr::from((address(peer), PORT)).to_string())
                .collect();
            let (own, peers) = (name(member), peers.join(" "));
            members.run(
                member,
                &format!("BANK_PACE_MS={PACE_MS} exec guest-tools bank {own} {PORT} {peers}"),
            )?;
        }
        let testbed = Testbed { members, number: None };
        testbed.await_payments()?;
        Ok(testbed)
    }

    /// Takes the snapshot that is restored from then on.
    pub fn snapshot(&mut self) -> Result<Snapshot> {
        self.all("silence")?;
        let request = SnapshotRequest {
            recency: true,
            trace_ms: Some(TRACE_MS.try_into()?),
            ..Default::default()
        };
        let (report, took_ms) = self.members.snapshot(request)?;
        self.number = Some(report.number);
        Ok(Snapshot { vms: self.members.count(), memory_mib: MEMORY_MIB, took_ms })
    }

    /// Ends all and has them back.
    pub fn restore(&self, mode: Mode) -> Result<Restored> {
        self.members.end_guests()?;
        let number = Some(self.number.context("there is no snapshot")?);
        let request = RestoreRequest { number, mode, wait: true, ..Default::default() };
        let (report, _) = self.members.restore(request)?;
        self.await_payments()?;
        let silence = self.all("silence")?.into_iter().map(|answer| {
            let micros = answer.strip_prefix("ok ").and_then(|text| text.parse::<f64>().ok());
            let micros = micros.with_context(|| format!("a bank says {answer:?}"))?;
            Ok(micros / 1e3)
        });
        let silence_ms = silence.collect::<Result<Vec<f64>>>()?;
        let started_ms: Vec<f64> = report.members.iter().map(|member| member.started_ms).collect();
        let differences = neighbours(started_ms.len())
            .map(|(one, other)| (started_ms[one] - started_ms[other]).abs());
        Ok(Restored {
            backoff_ms: Backoff::of(differences.collect()),
            line_backoff_ms: report.backoff_ms,
            silence_ms: Backoff::of(silence_ms),
            pages_before_start: report.members.iter().map(|one| one.pages_before_start).collect(),
            restored_ms: report.members.iter().filter_map(|one| one.restored_ms).collect(),
            started_ms,
        })
    }

    /// Ends of the logs.
    pub fn diagnostics(&self) -> String {
        self.members.diagnostics()
    }

    /// Ends all, and proves that nothing is left.
    pub fn end(self) -> Result<()> {
        self.members.end()
    }

    fn all(&self, request: &str) -> Result<Vec<String>> {
        (0..self.members.count()).map(|member| self.members.ask(member, PORT, request)).collect()
    }

    /// Each pays on the connections that it always had.
    fn await_payments(&self) -> Result<()> {
        for member in 0..self.members.count() {
            let answers = || Ok(self.moves(member).ok());
            let goal = wait_for("a bank to answer", LIMIT, answers)? + PAID;
            wait_for(&format!("{} to pay", name(member)), LIMIT, || {
                Ok((self.moves(member)? >= goal).then_some(()))
            })?;
        }
        Ok(())
    }

    fn moves(&self, member: usize) -> Result<u64> {
        let text = self.members.ask(member, PORT, "report")?;
        let words: Vec<&str> = text.split(' ').collect();
        let [_, _, moves, broken] = words[..] else { bail!("bank {member} says {text:?}") };
        ensure!(broken == "-", "bank {member}: {broken}");
        Ok(moves.parse()?)
    }
}
