//! A managed guest and a plain one with the same load.

use super::super::modes::{begin, load};
use super::super::stage::{Stage, drop_caches, ms};
use super::report::{Cost, Plain};
use crate::bench::words;
use crate::cli::BenchRestoreArgs;
use crate::demo::scene_options;
use anyhow::{Context, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use understudy_daemon::snapshot::report::SnapshotRequest;
use understudy_lab::scene::{ECHO_PORT, SHELL_PORT};
use understudy_lab::{GuestShell, PlainGuest, PlainOptions, SceneOptions, round_trips};

/// For the load to be what it is for long, and to tell how fast it is.
const SETTLE: Duration = Duration::from_secs(3);
const LOOK: Duration = Duration::from_secs(6);
/// Requests of a client at once; between two of them it thinks for so long.
const REQUESTS: u64 = 20;
const THINK: Duration = Duration::from_millis(5);

/// Both guests, of which one runs at a time.
pub struct Testbed {
    // Before the stage, on whose host it runs: fields are dropped in order.
    plain: PlainGuest,
    store_mb_s: Option<f64>,
    /// Dropped with the managed guest's shell before the scene.
    shell: GuestShell,
    stage: Stage,
}

impl Testbed {
    /// Boots both and starts their load. The plain one stands still.
    pub fn start(args: &BenchRestoreArgs) -> Result<Testbed> {
        let options = SceneOptions {
            memory_mib: args.memory_mib,
            accel: Some("tcg".to_owned()),
            ..scene_options(args.guest.as_deref()).map_err(words)?
        };
        let stage = Stage::start(args, options, None)?;
        let (lab, load) = (stage.scene().lab(), counted(args.memory_mib));
        let plain_options = PlainOptions {
            memory_mib: args.memory_mib,
            ..PlainOptions::test_guest(stage.scene().guest_files())
        };
        let plain = PlainGuest::start(lab, "a", &plain_options)?;
        plain.await_boot(lab, &[SHELL_PORT, ECHO_PORT])?;
        begin(GuestShell::connect(lab, plain.server(SHELL_PORT))?, &load)?;
        plain.pause()?;
        begin(stage.scene().shell()?, &load)?;
        let shell = stage.scene().shell()?;
        Ok(Testbed { plain, store_mb_s: args.store_speed, shell, stage })
    }

    /// Ends of the logs.
    pub fn diagnostics(&self) -> String {
        self.stage.scene().diagnostics()
    }

    /// Ends all, and proves that nothing is left.
    pub fn end(self) -> Result<()> {
        drop((self.plain, self.shell));
        self.stage.end()
    }

    /// Takes a snapshot while the guest works and is asked.
    pub fn snapshot(&mut self) -> Result<Cost> {
        thread::sleep(SETTLE);
        let before = self.speed(|| {
            thread::sleep(LOOK);
            Ok(())
        })?;
        let mut taken = None;
        let during = self.speed(|| {
            taken = Some(self.stage.snapshot(SnapshotRequest::default())?);
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

    /// How fast the managed guest works, and answers, while something is done.
    fn speed(&self, work: impl FnOnce() -> Result<()>) -> Result<Speed> {
        let scene = self.stage.scene();
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
                let (first, began) = (self.read_mib()?, Instant::now());
                work()?;
                let took = began.elapsed();
                Ok((self.read_mib()? - first) as f64 / took.as_secs_f64())
            };
            let measured = measured();
            ended.store(true, Ordering::Release);
            let silence = asked.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            Ok(Speed { mib_per_second: measured?, silence_ms: ms(silence?) })
        })
    }

    fn read_mib(&self) -> Result<u64> {
        let mut shell = self.stage.scene().shell()?;
        let output = shell.run("wc -c < /tmp/read")?;
        output.text.trim().parse().with_context(|| format!("the guest says {:?}", output.text))
    }

    /// `migrate file:`, and `-incoming` from there.
    pub fn migrate(&mut self) -> Result<Plain> {
        self.plain.resume()?;
        thread::sleep(SETTLE);
        let saved = self.plain.save()?;
        drop_caches();
        let lab = self.stage.scene().lab();
        let speed = self.store_mb_s.map(|megabytes| megabytes * 1e6);
        let took = self.plain.load(lab, &saved, speed)?;
        self.plain.await_boot(lab, &[SHELL_PORT])?;
        self.plain.pause()?;
        Ok(Plain { saved_ms: ms(saved.took), loaded_ms: ms(took), bytes: saved.bytes })
    }

    /// savevm and loadvm.
    pub fn inside(&mut self) -> Result<Plain> {
        self.plain.resume()?;
        thread::sleep(SETTLE);
        let saved = self.plain.save_inside()?;
        self.plain.pause()?;
        drop_caches();
        let took = self.plain.load_inside()?;
        self.plain.resume()?;
        self.plain.await_boot(self.stage.scene().lab(), &[SHELL_PORT])?;
        Ok(Plain { saved_ms: ms(saved.took), loaded_ms: ms(took), bytes: saved.bytes })
    }
}

struct Speed {
    mib_per_second: f64,
    silence_ms: f64,
}

/// The load of `modes`, which says what it has done: a byte for each MiB that it has read.
fn counted(memory_mib: u32) -> Vec<String> {
    let mut lines = load(memory_mib);
    lines.pop();
    let hot = memory_mib / 12;
    lines.push(format!(
        "while :; do n=0; while [ $n -lt {hot} ]; do dd if=/tmp/hot bs=1M skip=$n count=1 \
         2>/dev/null | md5sum > /tmp/sum; printf . >> /tmp/read; n=$((n + 1)); done; done"
    ));
    lines
}
