//! A managed guest and a plain one, with the same memory and the same load. One of them runs at a
//! time.

use super::stage::{Stage, drop_caches, ms};
use crate::bench::words;
use crate::cli::BenchRestoreArgs;
use crate::parts::scene_options;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::thread;
use std::time::{Duration, Instant};
use understudy_lab::scene::{ECHO_PORT, SHELL_PORT};
use understudy_lab::{GuestShell, PlainGuest, PlainOptions, SceneOptions};

/// Time for the load to have touched what it touches, and to be what it is for long.
const SETTLE: Duration = Duration::from_secs(3);

/// Both guests.
pub struct Pair {
    // Before the stage, on whose host it runs: fields are dropped in order.
    plain: PlainGuest,
    store_mb_s: Option<f64>,
    stage: Stage,
}

/// Times that plain QEMU took to save its guest and have it back. Times are in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Plain {
    /// Time of saving: for as long the guest stands still.
    pub saved_ms: f64,
    /// Time of loading it again; without QEMU's start.
    pub loaded_ms: f64,
    /// Time until the guest answered a request; with QEMU's start, where one is started.
    pub answer_ms: f64,
    /// Bytes of the file.
    pub bytes: u64,
}

impl Plain {
    /// Words for the progress.
    pub fn words(&self) -> String {
        format!("stood still for {:.0} ms, loaded in {:.0} ms", self.saved_ms, self.loaded_ms)
    }
}

impl Pair {
    /// Boots both and starts their load. The plain one stands still.
    pub fn start(args: &BenchRestoreArgs, load: &[String]) -> Result<Pair> {
        let options = SceneOptions {
            memory_mib: args.memory_mib,
            accel: Some("tcg".to_owned()),
            ..scene_options(args.guest.as_deref()).map_err(words)?
        };
        let stage = Stage::start(args, options, None)?;
        let plain_options = PlainOptions {
            memory_mib: args.memory_mib,
            ..PlainOptions::test_guest(stage.scene().guest_files())
        };
        let lab = stage.scene().lab();
        let plain = PlainGuest::start(lab, "a", &plain_options)?;
        plain.await_boot(lab, &[SHELL_PORT, ECHO_PORT])?;
        begin(GuestShell::connect(lab, plain.server(SHELL_PORT))?, load)?;
        plain.pause()?;
        begin(stage.scene().shell()?, load)?;
        Ok(Pair { plain, store_mb_s: args.store_speed, stage })
    }

    /// The managed guest, once its load has run for a while.
    pub fn settled(&self) -> &Stage {
        thread::sleep(SETTLE);
        &self.stage
    }

    /// `migrate file:` of the plain guest, and `-incoming` from there.
    pub fn migrate(&mut self) -> Result<Plain> {
        self.resume_plain()?;
        let saved = self.plain.save()?;
        drop_caches();
        let lab = self.stage.scene().lab();
        let speed = self.store_mb_s.map(|megabytes| megabytes * 1e6);
        let began = Instant::now();
        let took = self.plain.load(lab, &saved, speed)?;
        self.plain.await_boot(lab, &[SHELL_PORT])?;
        let answer_ms = ms(began.elapsed());
        self.plain.pause()?;
        let (saved_ms, loaded_ms) = (ms(saved.took), ms(took));
        Ok(Plain { saved_ms, loaded_ms, answer_ms, bytes: saved.bytes })
    }

    /// Its savevm and loadvm.
    pub fn save_inside(&mut self) -> Result<Plain> {
        self.resume_plain()?;
        let saved = self.plain.save_inside()?;
        self.plain.pause()?;
        drop_caches();
        let began = Instant::now();
        let took = self.plain.load_inside()?;
        self.plain.resume()?;
        self.plain.await_boot(self.stage.scene().lab(), &[SHELL_PORT])?;
        let answer_ms = ms(began.elapsed());
        let (saved_ms, loaded_ms) = (ms(saved.took), ms(took));
        Ok(Plain { saved_ms, loaded_ms, answer_ms, bytes: saved.bytes })
    }

    fn resume_plain(&self) -> Result<()> {
        self.plain.resume()?;
        thread::sleep(SETTLE);
        Ok(())
    }

    /// Ends of the logs.
    pub fn diagnostics(&self) -> String {
        self.stage.scene().diagnostics()
    }

    /// Ends all, and proves that nothing is left.
    pub fn end(self) -> Result<()> {
        drop(self.plain);
        self.stage.end()
    }
}

/// A third of the memory, nearly all that /tmp takes, and a twelfth hold what does not shrink.
pub fn fill(memory_mib: u32) -> Vec<String> {
    let (cold, hot) = (memory_mib / 3, hot(memory_mib));
    vec![
        format!("dd if=/dev/urandom of=/tmp/hot bs=1M count={hot} 2>/dev/null"),
        format!("dd if=/dev/urandom of=/tmp/cold bs=1M count={cold} 2>/dev/null"),
    ]
}

/// MiB of `/tmp/hot`, which a load reads again and again.
pub fn hot(memory_mib: u32) -> u32 {
    memory_mib / 12
}

/// Prepares and starts a load: the last line runs for ever. Returns its pid in the guest.
pub fn begin(mut shell: GuestShell, load: &[String]) -> Result<u32> {
    let (last, first) = load.split_last().context("there is no load")?;
    for line in first {
        let output = shell.run(line)?;
        ensure!(output.code == 0, "`{line}` failed in the guest: {}", output.text);
    }
    shell.start(last)
}
