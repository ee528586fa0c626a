//! The backup's side: its QEMU gets the log up to the place and no further, executes it, and
//! waits; what it has then is compared.

use super::primary::MOST_UNANSWERED;
use super::{Differing, checksum, read};
use anyhow::ensure;
use std::collections::VecDeque;
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_lockstep::{Comparison, Finding, Findings, Mark, Place};
use understudy_machine::Machine;
use understudy_qemu::lockstep::LogChannel;

/// Time between two looks whether QEMU has come to the place.
const LOOK_INTERVAL: Duration = Duration::from_micros(250);

/// A QEMU that waits at the place, having executed something else, is looked at for so long: it
/// shows its instructions a millisecond late.
const MISPLACED_AFTER: Duration = Duration::from_secs(1);

/// The number of spots that differed that are kept, for a look at a divergence.
const MOST_KEPT: usize = 16;

/// The comparisons that this backup was asked for.
#[derive(Debug, Default)]
pub struct Asked {
    waiting: VecDeque<Comparison>,
    /// Spots that differed last.
    differing: Differing,
}

impl Asked {
    /// The primary asks.
    pub fn push(&mut self, comparison: Comparison) -> anyhow::Result<()> {
        ensure!(
            self.waiting.len() <= 2 * MOST_UNANSWERED,
            "the primary asked for {} comparisons at once",
            self.waiting.len()
        );
        self.waiting.push_back(comparison);
        Ok(())
    }

    /// The next one.
    pub fn pop(&mut self) -> Option<Comparison> {
        self.waiting.pop_front()
    }

    /// No log is followed any more.
    pub fn clear(&mut self) {
        self.waiting.clear();
    }

    /// The spots that differed at the last place where something did.
    pub fn differing(&self) -> &Differing {
        &self.differing
    }

    /// Keeps what differed, if anything did.
    pub fn keep(&mut self, differing: Differing) {
        if !differing.is_empty() {
            self.differing = differing;
        }
    }
}

/// Waits until QEMU has executed the log up to the place. None if `is_over`; false if it waits
/// there after other instructions than the primary's.
pub fn await_place(log: &LogChannel, place: &Place, is_over: impl Fn() -> bool) -> Option<bool> {
    let mut misplaced: Option<Instant> = None;
    loop {
        if is_over() {
            return None;
        }
        let status = log.status();
        let arrived = status.position >= place.position.0 && status.is_blocked;
        if arrived && status.instructions == place.instructions {
            return Some(true);
        }
        if !arrived {
            misplaced = None;
        } else if misplaced.get_or_insert_with(Instant::now).elapsed() > MISPLACED_AFTER {
            warn!(
                "QEMU has executed {} instructions at {} of its log, where the primary had executed \
                 {}",
                status.instructions, place.position, place.instructions
            );
            return Some(false);
        }
        thread::sleep(LOOK_INTERVAL);
    }
}

/// Compares: QEMU stands at the place. Gives what differs, and the first of its content.
pub fn compare(
    machine: &Machine,
    comparison: &Comparison,
    mark: &Mark,
) -> anyhow::Result<(Findings, Differing)> {
    let (mut differences, mut kept) = (Vec::new(), Differing::new());
    let mut content = Vec::new();
    for reading in &comparison.readings {
        content.clear();
        read(machine, reading.spot, &mut content)?;
        if checksum(&content) != reading.checksum {
            let is_certain = comparison.place.is_certain(mark, reading);
            differences.push(Finding { spot: reading.spot, is_certain });
            if kept.len() < MOST_KEPT {
                kept.push((reading.spot, content.clone()));
            }
        }
    }
    let number = comparison.place.number;
    Ok((Findings { number, was_compared: true, differences }, kept))
}
