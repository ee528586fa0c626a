//! One restore of the managed guest, or of the plain one.

use super::super::pair::{Pair, fill};
use super::super::stage::{drop_caches, ms};
use super::plan::Step;
use anyhow::{Context, Result};
use std::thread;
use std::time::Instant;
use understudy_protocol::PAGE_SIZE;
use understudy_report::cluster::{RestoreRequest, SnapshotRequest};
use understudy_snapshot::Mode;

/// Figures that a step measured. Times are in milliseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Time from the command until the guest ran.
    pub restore_ms: f64,
    /// Time until nothing was left to load.
    pub whole_ms: f64,
    /// Time until the guest answered a request.
    pub answer_ms: f64,
    /// Pages that the start waited for.
    pub pages_before_start: Option<u64>,
    /// All pages that have content.
    pub pages: u64,
    /// Time for which taking the snapshot stopped the guest.
    pub pause_ms: f64,
    /// Time that taking it took.
    pub snapshot_ms: f64,
}

impl Measured {
    /// Words for the progress.
    pub fn words(&self) -> String {
        format!(
            "ran after {:.0} ms, answered after {:.0} ms, whole after {:.0} ms",
            self.restore_ms, self.answer_ms, self.whole_ms
        )
    }
}

/// Saves a guest and has it back.
pub fn measure(pair: &mut Pair, step: Step) -> Result<Measured> {
    match step.way.mode() {
        Some(mode) => restore(pair, mode),
        None => incoming(pair),
    }
}

fn restore(pair: &Pair, mode: Mode) -> Result<Measured> {
    let stage = pair.settled();
    // The mode that needs it has the trace that it needs.
    let recency = mode == Mode::WorkingSet;
    let taken = stage.snapshot(SnapshotRequest { recency, ..Default::default() })?;
    stage.end_guest()?;
    let request = RestoreRequest { mode, wait: true, ..Default::default() };
    drop_caches();
    let began = Instant::now();
    let (report, answered) = thread::scope(|scope| {
        let answer = scope.spawn(|| stage.await_answer().map(|()| ms(began.elapsed())));
        (stage.restore_at_once(request), answer.join())
    });
    let report = report?;
    let answer_ms = answered.map_err(|_| anyhow::anyhow!("a thread panicked"))??;
    let member = report.members.first().context("nothing was restored")?;
    Ok(Measured {
        restore_ms: member.started_ms,
        whole_ms: member.restored_ms.unwrap_or(member.started_ms),
        answer_ms,
        pages_before_start: Some(member.pages_before_start),
        pages: taken.pages,
        pause_ms: taken.pause_ms,
        snapshot_ms: taken.took_ms,
    })
}

fn incoming(pair: &mut Pair) -> Result<Measured> {
    let plain = pair.migrate()?;
    Ok(Measured {
        restore_ms: plain.loaded_ms,
        whole_ms: plain.loaded_ms,
        answer_ms: plain.answer_ms,
        pages_before_start: None,
        pages: plain.bytes / PAGE_SIZE as u64,
        pause_ms: plain.saved_ms,
        snapshot_ms: plain.saved_ms,
    })
}

/// A twelfth of the memory is read again and again.
pub fn load(memory_mib: u32) -> Vec<String> {
    let mut lines = fill(memory_mib);
    lines.push("while :; do md5sum /tmp/hot > /tmp/sum; done".to_owned());
    lines
}
