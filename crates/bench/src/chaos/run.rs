//! One run: a protected guest, one failure, and what became of everything.

use super::fault::{Fault, Side};
use super::stage::{Stage, pause};
use anyhow::{Context, Result};
use std::ops::Range;
use std::time::Instant;
use understudy_lab::scene::VM;

/// Result of a run.
pub struct Run {
    /// The seed that replays it.
    pub seed: u64,
    /// Fault that was done.
    pub fault: Fault,
    /// Span from the failure to the end of the run, in which the client looks for its outage.
    pub window: Range<Instant>,
    /// Whether the guest moved.
    pub moved: bool,
    /// Whether protection had been lost before the failure: it hit a guest
    /// without a second copy, and proves nothing.
    pub false_alarm: bool,
    /// Acknowledged records that the owner's disk has not, or not as they were.
    pub lost: u64,
    /// Complaints of `e2fsck`.
    pub file_system: Option<String>,
    /// Whether both copies sent something after one of them had taken over.
    pub double_live: bool,
}

/// Plays the run of a seed. An error means that the guest, or a connection to
/// it, did not live through it.
pub fn play(stage: &mut Stage, seed: u64) -> Result<Run> {
    let fault = Fault::draw(seed);
    let (primary, backup) = stage.protect(!fault.while_syncing).context("before the failure")?;
    let begun = Instant::now();
    let host = match fault.side {
        Side::Primary => primary,
        Side::Backup => backup,
    };
    let qemu = stage.scene.host(host)?.qemu_pid(VM)?;
    pause(fault.delay, || false);
    let false_alarm = !fault.while_syncing && !stage.has_backup(primary)?;
    if false_alarm {
        // Nothing is done to the only copy.
        let owner = stage.await_service()?;
        return conclude(stage, seed, fault, begun..begun, (primary, owner), true);
    }
    let failed_at = fault.strike(&mut stage.scene, host, qemu)?;
    if let Some(absence) = fault.absence() {
        pause(absence, || false);
        fault.undo(&stage.scene, host)?;
    }
    let owner = stage.await_service().with_context(|| fault.to_string())?;
    conclude(stage, seed, fault, begun..failed_at, (primary, owner), false)
}

fn conclude(
    stage: &mut Stage,
    seed: u64,
    fault: Fault,
    before: Range<Instant>,
    (primary, owner): (&str, &'static str),
    false_alarm: bool,
) -> Result<Run> {
    let moved = owner != primary;
    let window = before.end..Instant::now();
    let disk = stage.check_disk(owner).with_context(|| format!("the disk on host {owner}"))?;
    // Last: it is the whole run that is watched.
    let double_live = stage.answered_from_two(owner, before.start, moved)?;
    let records = &disk.records;
    // Anything that is wrong with the records counts as a lost one.
    let faults = records.lost.len() + records.repeated.len() + records.out_of_order.len();
    let lost = faults + records.damaged.len() + records.unacknowledged.len().saturating_sub(1);
    Ok(Run {
        seed,
        fault,
        window,
        moved,
        false_alarm,
        lost: lost as u64,
        file_system: disk.file_system,
        double_live,
    })
}
