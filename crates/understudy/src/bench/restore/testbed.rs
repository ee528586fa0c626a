//! The laboratory: a managed guest and a plain one, with the same memory and the same load.

use super::plan::Step;
use crate::api::Subject;
use crate::bench::machine::Machine;
use crate::bench::words;
use crate::cli::BenchRestoreArgs;
use crate::client::Client;
use crate::demo::scene_options;
use anyhow::{Context, Result};
use std::thread;
use std::time::{Duration, Instant};
use understudy_daemon::snapshot::report::{RestoreRequest, SnapshotRequest};
use understudy_lab::scene::{ECHO_PORT, SHELL_PORT, VM};
use understudy_lab::{GuestShell, HostOptions, PlainGuest, PlainOptions, Scene, wait_for};
use understudy_protocol::{BlockId, PAGE_SIZE};
use understudy_snapshot::{Area, Mode, SnapshotNumber, Store};

/// For a guest to be gone, or to answer.
const LIMIT: Duration = Duration::from_secs(60);
/// For the guest's load to have touched what it touches.
const SETTLE: Duration = Duration::from_secs(3);
/// Where what is read is slowed down.
const SPEED: &str = "UNDERSTUDY_STORE_SPEED";

/// What all of it was measured on.
pub struct Setting {
    /// The machine.
    pub machine: Machine,
    /// Memory of each guest in MiB.
    pub memory_mib: u32,
    /// Megabytes a second that come from the store; as many as it gives without.
    pub store_mb_s: Option<f64>,
}

/// What a step measured. Times are in milliseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Taken {
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

impl Taken {
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
    // Before the scene, on whose host it runs: fields are dropped in order.
    plain: PlainGuest,
    client: Client,
    store: String,
    setting: Setting,
    scene: Scene,
}

impl Testbed {
    /// Boots both, fills their memory and starts their load. The plain one stands still.
    pub fn start(args: &BenchRestoreArgs) -> Result<Testbed> {
        let mut options = scene_options(args.guest.as_deref()).map_err(words)?;
        options.memory_mib = args.memory_mib;
        options.accel = Some("tcg".to_owned());
        if let Some(megabytes) = args.store_speed {
            let speed = (SPEED.to_owned(), (megabytes * 1e6).to_string());
            let slow = HostOptions { environment: vec![speed], ..Default::default() };
            options.daemons =
                options.hosts.iter().map(|host| (host.clone(), slow.clone())).collect();
        }
        let scene = Scene::start(options)?;
        let client = Client::new(scene.host("a")?.socket()).map_err(words)?;
        let plain_options = PlainOptions {
            memory_mib: args.memory_mib,
            ..PlainOptions::test_guest(scene.guest_files())
        };
        let plain = PlainGuest::start(scene.lab(), "a", &plain_options)?;
        plain.await_boot(scene.lab(), &[SHELL_PORT, ECHO_PORT])?;
        let load = load(args.memory_mib);
        begin(GuestShell::connect(scene.lab(), plain.server(SHELL_PORT))?, &load)?;
        plain.pause()?;
        scene.start_guest("a")?;
        scene.await_guest()?;
        begin(scene.shell()?, &load)?;
        let status = client.vm_status(VM).map_err(words)?;
        let qemu_pid = status.qemu_pid.context("the guest has no QEMU")?;
        let machine =
            Machine::look(env!("CARGO_PKG_VERSION").to_owned(), plain.qemu_version(), qemu_pid);
        let setting =
            Setting { machine, memory_mib: args.memory_mib, store_mb_s: args.store_speed };
        let store = scene.lab().directory().join("store").display().to_string();
        Ok(Testbed { plain, client, store, setting, scene })
    }

    /// What all of it is measured on.
    pub fn setting(&self) -> Setting {
        Setting { machine: self.setting.machine.clone(), ..self.setting }
    }

    /// Ends of the logs.
    pub fn diagnostics(&self) -> String {
        self.scene.diagnostics()
    }

    /// Ends all, and proves that nothing is left.
    pub fn end(self) -> Result<()> {
        drop(self.plain);
        self.scene.finish()
    }

    /// Saves a guest and has it back.
    pub fn measure(&mut self, step: Step) -> Result<Taken> {
        match step.way.mode() {
            Some(mode) => self.restore(mode),
            None => self.incoming(),
        }
    }

    fn restore(&mut self, mode: Mode) -> Result<Taken> {
        thread::sleep(SETTLE);
        let store = Some(self.store.clone());
        let began = Instant::now();
        let request = SnapshotRequest { store: store.clone(), ..Default::default() };
        let snapshot = self.client.snapshot(&subject(), &request).map_err(words)?;
        let snapshot_ms = ms(began.elapsed());
        let (pause_ms, pages) = self.look(snapshot.number)?;
        self.scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        wait_for("the guest to be gone", LIMIT, || {
            Ok(self.scene.status("a").is_err().then_some(()))
        })?;
        drop_caches();
        let request = RestoreRequest { store, mode, wait: true, ..Default::default() };
        let began = Instant::now();
        let answered = thread::scope(|scope| {
            let answer = scope.spawn(|| self.await_answer().map(|()| ms(began.elapsed())));
            let report = self.client.restore(&subject(), &request).map_err(words);
            (report, answer.join())
        });
        let report = answered.0?;
        let answer_ms = answered.1.map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        let member = report.members.first().context("nothing was restored")?;
        Ok(Taken {
            restore_ms: member.started_ms,
            whole_ms: member.restored_ms.unwrap_or(member.started_ms),
            answer_ms,
            pages_before_start: Some(member.pages_before_start),
            pages,
            pause_ms,
            snapshot_ms,
        })
    }

    /// The pause of a snapshot, and how many pages it has.
    fn look(&self, number: SnapshotNumber) -> Result<(f64, u64)> {
        let store = Store::open(&self.store)?;
        let manifest = store.snapshot(VM, Some(number))?;
        let member = store.member(manifest.members.first().context("it has no member")?)?;
        let is_main = |area: Area| area == Area::Memory(BlockId(0));
        let main = member.areas.iter().find(|entry| is_main(entry.area));
        let pages = store.area(main.context("it has no memory")?)?.stored();
        Ok((member.pause_us as f64 / 1e3, pages))
    }

    fn await_answer(&self) -> Result<()> {
        wait_for("the guest to answer", LIMIT, || {
            let mut shell = match self.scene.shell() {
                Ok(shell) => shell,
                Err(_) => return Ok(None),
            };
            Ok(shell.run("true").ok().map(|_| ()))
        })
    }

    fn incoming(&mut self) -> Result<Taken> {
        self.plain.resume()?;
        thread::sleep(SETTLE);
        let saved = self.plain.save()?;
        drop_caches();
        let speed = self.setting.store_mb_s.map(|megabytes| megabytes * 1e6);
        let began = Instant::now();
        let took = self.plain.load(self.scene.lab(), &saved, speed)?;
        self.plain.await_boot(self.scene.lab(), &[SHELL_PORT])?;
        // Without the start of QEMU, which the product's figures contain.
        let answer_ms = ms(began.elapsed());
        self.plain.pause()?;
        Ok(Taken {
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

/// About half of the memory holds what does not shrink; a twelfth of it is read again and again.
fn load(memory_mib: u32) -> Vec<String> {
    let (fill, hot) = (memory_mib * 2 / 5, memory_mib / 12);
    vec![
        format!("dd if=/dev/urandom of=/tmp/hot bs=1M count={hot} 2>/dev/null"),
        format!("dd if=/dev/urandom of=/tmp/cold bs=1M count={fill} 2>/dev/null"),
        "while :; do md5sum /tmp/hot > /tmp/sum; done".to_owned(),
    ]
}

fn begin(mut shell: GuestShell, load: &[String]) -> Result<()> {
    let (last, first) = load.split_last().context("there is no load")?;
    for line in first {
        shell.run(line)?;
    }
    shell.start(last).map(drop)
}

fn subject() -> Subject {
    Subject::Vm(VM.to_owned())
}

/// What is restored after a failure comes from the device. Not everybody may do it.
fn drop_caches() {
    nix::unistd::sync();
    let _: std::io::Result<()> = std::fs::write("/proc/sys/vm/drop_caches", "3");
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
