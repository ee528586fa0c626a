//! A guest moved from one QEMU to another on the same memory, disks and ports.

use crate::Machine;
use anyhow::ensure;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};
use tracing::info;
use understudy_memory::RamBlock;
use understudy_protocol::{PAGE_SIZE, PageIndex};
use understudy_qemu::TickRate;
use understudy_qemu::counting::count_instructions;
use understudy_qemu::lockstep::LogErrand;

/// QEMU takes a frame in microseconds; one whose card is full takes no more anyhow.
const INBOUND_PATIENCE: Duration = Duration::from_millis(20);

/// Moves the stopped guest; since when it stands still. On success the former QEMU has ended,
/// else it goes on. `while_stopped` is called when it has written all that it will.
pub fn hand_over(
    former: &Machine,
    next: &Machine,
    while_stopped: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<Instant> {
    check_blocks(former, next)?;
    for port in former.ports() {
        if !port.hold_inbound(INBOUND_PATIENCE) {
            info!(vm = %former.definition().name, "QEMU leaves frames unread; they are lost");
        }
    }
    let began = Instant::now();
    let mut monitor = former.monitor();
    let moved = former.pause(&mut monitor, LogErrand::None).and_then(|mut pause| {
        let mut state = Vec::new();
        let moved = pause.saved(&mut state).and_then(|_| {
            while_stopped()?;
            if let (None, Some(lockstep)) = (former.lockstep(), next.lockstep()) {
                let rate = lockstep.clock.tick_rate().unwrap_or(TickRate(1 << 32));
                count_instructions(&mut state, rate, SystemTime::now())?;
            }
            copy_small_blocks(former.blocks(), next.blocks())?;
            spoil(&mut state);
            next.load(&state)
        });
        if moved.is_err() {
            pause.resume()?;
        }
        moved
    });
    if let Err(error) = moved {
        former.ports().iter().for_each(|port| port.resume_inbound());
        return Err(error.context("it goes on as it was"));
    }
    drop(monitor);
    next.held.store(former.held.load(Ordering::Relaxed), Ordering::Relaxed);
    next.take_place();
    former.retire();
    Ok(began)
}

/// A test makes a state of it that no QEMU loads.
fn spoil(_state: &mut [u8]) {
    fail::fail_point!("spoil-state", |_| _state[0] ^= 1);
}

/// An error unless both have the same RAM blocks.
pub fn check_blocks(former: &Machine, next: &Machine) -> anyhow::Result<()> {
    let shape = |machine: &Machine| -> Vec<(String, u64)> {
        machine.blocks().iter().map(|block| (block.name().to_owned(), block.bytes())).collect()
    };
    let (ours, theirs) = (shape(former), shape(next));
    ensure!(ours == theirs, "the QEMUs' RAM blocks differ: {ours:?} and {theirs:?}");
    Ok(())
}

/// All but the main memory, which both have mapped.
pub fn copy_small_blocks(from: &[RamBlock], to: &[RamBlock]) -> anyhow::Result<()> {
    for (from, to) in from.iter().zip(to).skip(1) {
        let mut content = vec![0; usize::try_from(from.pages())? * PAGE_SIZE];
        from.read(PageIndex(0), &mut content)?;
        to.write(PageIndex(0), &content)?;
    }
    Ok(())
}
