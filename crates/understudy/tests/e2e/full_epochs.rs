//! A guest that writes much to its disk and sends nothing: no epoch of it is larger than what its backup has room for.

use crate::stage::{Calm, LIMIT, options, play};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::time::Instant;
use understudy_lab::{Scene, SceneOptions};
use understudy_protocol::Policy;
use understudy_replication::primary::EPOCH_DISK_BYTES;

/// The policy of a guest without output, whose epochs nothing else ends sooner.
pub const LONG_EPOCHS: Policy = Policy::Adaptive { max_epoch_ms: 10_000, pause_budget_percent: 10 };
/// The bytes that the guest writes, in all.
const WRITTEN: u64 = 256 << 20;
const WRITE: &str =
    "for i in 1 2 3 4; do dd if=/dev/zero of=/data/much bs=1M count=64 conv=notrunc,fsync; done";
/// The bytes that it may write until it stands still, and pages of its memory.
const PAUSE: u64 = 48 << 20;

/// The epoch that runs, and what was sent until now.
fn seen(scene: &Scene) -> Result<(u64, u64)> {
    let status = scene.status("a")?;
    let number =
        |field: &str| status[field].as_u64().with_context(|| format!("no {field}: {status}"));
    Ok((number("epoch")?, number("bytes_sent")?))
}

#[test]
fn a_guest_that_writes_without_a_word_has_epochs_that_fit() {
    let options = SceneOptions { policy: Some(LONG_EPOCHS), ..options().calm() };
    play(options, |scene| {
        scene.protected_guest("a", "b")?;
        let (_, before) = seen(scene)?;
        scene.shell()?.start(WRITE)?;
        // Of each epoch what was sent when it was first seen, and last. The guest is not asked: its answer would end one.
        let mut epochs = BTreeMap::new();
        let begun = Instant::now();
        loop {
            let (epoch, sent) = seen(scene)?;
            epochs.entry(epoch).or_insert((sent, sent)).1 = sent;
            if sent - before >= WRITTEN {
                break;
            }
            ensure!(begun.elapsed() < LIMIT, "only {} bytes were sent: {epochs:?}", sent - before);
        }
        let largest = epochs.values().map(|(first, last)| last - first).max();
        println!("of {} epochs the largest was seen to have {largest:?} bytes", epochs.len());
        ensure!(largest < Some(EPOCH_DISK_BYTES + PAUSE), "{epochs:?}");
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b").map(drop)
    });
}
