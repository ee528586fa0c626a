//! One snapshot of the managed guest, which works and is asked meanwhile.

use super::super::pair::{Pair, fill, hot};
use super::super::stage::{Stage, ms};
use super::report::Cost;
use anyhow::{Context, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use understudy_lab::round_trips;
use understudy_lab::scene::ECHO_PORT;
use understudy_report::cluster::SnapshotRequest;

/// Time to tell how fast the load is.
const LOOK: Duration = Duration::from_secs(6);
/// Requests of a client at once; between two of them it thinks for so long.
const REQUESTS: u64 = 20;
const THINK: Duration = Duration::from_millis(5);

/// Speed of the managed guest, and the longest that it took to answer.
struct Speed {
    mib_per_second: f64,
    silence_ms: f64,
}

/// Takes a snapshot while the guest works and is asked.
pub fn snapshot(pair: &Pair) -> Result<Cost> {
    let stage = pair.settled();
    let before = speed(stage, || {
        thread::sleep(LOOK);
        Ok(())
    })?;
    let mut taken = None;
    let during = speed(stage, || {
        taken = Some(stage.snapshot(SnapshotRequest::default())?);
        Ok(())
    });
    let (during, taken) = (during?, taken.context("no snapshot was taken")?);
    Ok(Cost {
        pause_ms: taken.pause_ms,
        snapshot_ms: taken.took_ms,
        slow_down: 1.0 - during.mib_per_second / before.mib_per_second,
        silence_before_ms: before.silence_ms,
        silence_ms: during.silence_ms,
    })
}

/// Speed at which the managed guest works, and answers, while something is done.
fn speed(stage: &Stage, work: impl FnOnce() -> Result<()>) -> Result<Speed> {
    let scene = stage.scene();
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let asked = scope.spawn(|| -> Result<Duration> {
            let mut longest = Duration::ZERO;
            while !ended.load(Ordering::Acquire) {
                let trips = round_trips(scene.lab(), scene.guest(ECHO_PORT), REQUESTS, THINK)?;
                longest = trips.into_iter().fold(longest, Duration::max);
            }
            Ok(longest)
        });
        let measured = || -> Result<f64> {
            let (first, began) = (read_mib(stage)?, Instant::now());
            work()?;
            let took = began.elapsed();
            Ok((read_mib(stage)? - first) as f64 / took.as_secs_f64())
        };
        let measured = measured();
        ended.store(true, Ordering::Release);
        let silence = asked.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok(Speed { mib_per_second: measured?, silence_ms: ms(silence?) })
    })
}

fn read_mib(stage: &Stage) -> Result<u64> {
    let mut shell = stage.scene().shell()?;
    let output = shell.run("wc -c < /tmp/read")?;
    output.text.trim().parse().with_context(|| format!("the guest says {:?}", output.text))
}

/// The load of `modes`, which says what it has done: a byte for each MiB that it has read.
pub fn load(memory_mib: u32) -> Vec<String> {
    let (mut lines, hot) = (fill(memory_mib), hot(memory_mib));
    lines.push(format!(
        "while :; do n=0; while [ $n -lt {hot} ]; do dd if=/tmp/hot bs=1M skip=$n count=1 \
         2>/dev/null | md5sum > /tmp/sum; printf . >> /tmp/read; n=$((n + 1)); done; done"
    ));
    lines
}
