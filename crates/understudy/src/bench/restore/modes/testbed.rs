//! The laboratory: a managed guest and a plain one, with the same memory and the same load.

use super::super::stage::{Stage, drop_caches, ms};
use super::plan::Step;
use crate::bench::words;
use crate::cli::BenchRestoreArgs;
use crate::demo::scene_options;
use anyhow::{Context, Result, ensure};
use std::thread;
use std::time::{Duration, Instant};
use understudy_daemon::snapshot::report::{RestoreRequest, SnapshotRequest};
use understudy_lab::scene::{ECHO_PORT, SHELL_PORT};
use understudy_lab::{GuestShell, PlainGuest, PlainOptions, SceneOptions};
use understudy_protocol::PAGE_SIZE;
use understudy_snapshot::Mode;

/// For the guest's load to have touched what it touches.
const SETTLE: Duration = Duration::from_secs(3);

/// What a step measured. Times are in milliseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// From the command until the guest ran.
    pub restore_ms: f64,
    /// Until nothing was left to load.
    pub whole_ms: f64,
    /// Until the guest answered a request.
    pub answer_ms: f64,
    /// Pages that the start waited for.
    pub pages_before_start: Option<u64>,
    /// All pages that have content.
    pub pages: u64,
    /// For how long taking the snapshot stopped the guest.
    pub pause_ms: f64,
    /// How long taking it took.
    pub snapshot_ms: f64,
}

impl Measured {
    /// For the progress.
    pub fn words(&self) -> String {
        format!(
            "ran after {:.0} ms, answered after {:.0} ms, whole after {:.0} ms",
            self.restore_ms, self.answer_ms, self.whole_ms
        )
    }
}

/// Both guests.
pub struct Testbed {
    // Before the stage, on whose host it runs: fields are dropped in order.
    plain: PlainGuest,
    store_mb_s: Option<f64>,
    stage: Stage,
}

impl Testbed {
    /// Boots both, fills their memory and starts their load. The plain one stands still.
    pub fn start(args: &BenchRestoreArgs) -> Result<Testbed> {
        let options = SceneOptions {
            memory_mib: args.memory_mib,
            accel: Some("tcg".to_owned()),
            ..scene_options(args.guest.as_deref()).map_err(words)?
        };
        let stage = Stage::start(args, options, None)?;
        let (lab, load) = (stage.scene().lab(), load(args.memory_mib));
        begin(stage.scene().shell()?, &load)?;
        let plain_options = PlainOptions {
            memory_mib: args.memory_mib,
            ..PlainOptions::test_guest(stage.scene().guest_files())
        };
        let plain = PlainGuest::start(lab, "a", &plain_options)?;
        plain.await_boot(lab, &[SHELL_PORT, ECHO_PORT])?;
        begin(GuestShell::connect(lab, plain.server(SHELL_PORT))?, &load)?;
        plain.pause()?;
        Ok(Testbed { plain, store_mb_s: args.store_speed, stage })
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

    /// Saves a guest and has it back.
    pub fn measure(&mut self, step: Step) -> Result<Measured> {
        match step.way.mode() {
            Some(mode) => self.restore(mode),
            None => self.incoming(),
        }
    }

    fn restore(&mut self, mode: Mode) -> Result<Measured> {
        thread::sleep(SETTLE);
        // The mode that needs it has the trace that it needs.
        let recency = mode == Mode::WorkingSet;
        let taken = self.stage.snapshot(SnapshotRequest { recency, ..Default::default() })?;
        self.stage.end_guest()?;
        let request = RestoreRequest { mode, wait: true, ..Default::default() };
        drop_caches();
        let began = Instant::now();
        let (report, answered) = thread::scope(|scope| {
            let answer = scope.spawn(|| self.stage.await_answer().map(|()| ms(began.elapsed())));
            (self.stage.restore_at_once(request), answer.join())
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

    fn incoming(&mut self) -> Result<Measured> {
        self.plain.resume()?;
        thread::sleep(SETTLE);
        let saved = self.plain.save()?;
        drop_caches();
        let lab = self.stage.scene().lab();
        let speed = self.store_mb_s.map(|megabytes| megabytes * 1e6);
        let began = Instant::now();
        let took = self.plain.load(lab, &saved, speed)?;
        self.plain.await_boot(lab, &[SHELL_PORT])?;
        // Without the start of QEMU, which the product's figures contain.
        let answer_ms = ms(began.elapsed());
        self.plain.pause()?;
        Ok(Measured {
            restore_ms: ms(took),
            whole_ms: ms(took),
            answer_ms,
            pages_before_start: None,
            pages: saved.bytes / PAGE_SIZE as u64,
            pause_ms: ms(saved.took),
            snapshot_ms: ms(saved.took),
        })
    }
}

/// Two fifths of the memory hold what does not shrink, nearly all that /tmp takes; a twelfth is read
/// again and again.
pub fn load(memory_mib: u32) -> Vec<String> {
    let (fill, hot) = (memory_mib / 3, memory_mib / 12);
    vec![
        format!("dd if=/dev/urandom of=/tmp/hot bs=1M count={hot} 2>/dev/null"),
        format!("dd if=/dev/urandom of=/tmp/cold bs=1M count={fill} 2>/dev/null"),
        "while :; do md5sum /tmp/hot > /tmp/sum; done".to_owned(),
    ]
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
