//! A managed guest that is snapshotted, ended, and restored.

use crate::bench::words;
use crate::cli::BenchRestoreArgs;
use anyhow::{Context, Result};
use std::path::Path;
use std::time::{Duration, Instant};
use understudy_client::{Client, Subject};
use understudy_lab::scene::VM;
use understudy_lab::{HostOptions, Scene, SceneOptions, wait_for};
use understudy_protocol::BlockId;
use understudy_protocol::literal;
use understudy_report::cluster::{RestoreReport, RestoreRequest, SnapshotRequest};
use understudy_report::traces;
use understudy_snapshot::{Area, SnapshotNumber, Store, WorkingSet};

/// Time for a guest to be gone, or to answer.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Variable by which what is read is slowed down.
const SPEED: &str = "UNDERSTUDY_STORE_SPEED";

/// Figures of a snapshot: what it took, and what it has.
pub struct Taken {
    /// Its number.
    pub number: SnapshotNumber,
    /// Time for which it stopped the guest, in milliseconds.
    pub pause_ms: f64,
    /// Time from the command to its end, in milliseconds.
    pub took_ms: f64,
    /// Pages of main memory that have content.
    pub pages: u64,
    /// First accesses after it, and the working set that was made of them.
    pub working_set: WorkingSet,
    /// Estimate by sampling in normal running, if there was any.
    pub sampled: Option<u64>,
}

/// The guest on host `a`, and its store.
pub struct Stage {
    client: Client,
    store: String,
    scene: Scene,
}

impl Stage {
    /// Boots the guest. Traces of what it touches go to `traces`.
    pub fn start(
        args: &BenchRestoreArgs,
        options: SceneOptions,
        traces: Option<&Path>,
    ) -> Result<Stage> {
        let scene = Scene::start(equipped(options, args.store_speed, traces))?;
        let client = Client::new(scene.host("a")?.socket()).map_err(words)?;
        scene.start_guest("a")?;
        scene.await_guest()?;
        let store = store_of(&scene);
        Ok(Stage { client, store, scene })
    }

    /// The laboratory.
    pub fn scene(&self) -> &Scene {
        &self.scene
    }

    /// Takes a snapshot while the guest runs.
    pub fn snapshot(&self, request: SnapshotRequest) -> Result<Taken> {
        let began = Instant::now();
        let request = SnapshotRequest { store: Some(self.store.clone()), ..request };
        let report = self.client.snapshot(&subject(), &request).map_err(words)?;
        let took_ms = ms(began.elapsed());
        let store = Store::open(&self.store)?;
        let manifest = store.snapshot(&literal(VM), Some(report.number))?;
        let member = store.member(manifest.members.first().context("it has no member")?)?;
        let is_main = |area: Area| area == Area::Memory(BlockId(0));
        let main = member.areas.iter().find(|entry| is_main(entry.area));
        Ok(Taken {
            number: report.number,
            pause_ms: member.pause_us as f64 / 1e3,
            took_ms,
            pages: store.area(main.context("it has no memory")?)?.stored(),
            working_set: store.working_set(&member)?,
            sampled: member.sampled,
        })
    }

    /// Ends the guest, as if its power had been cut.
    pub fn end_guest(&self) -> Result<()> {
        self.scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        wait_for("the guest to be gone", LIMIT, || {
            Ok(self.scene.status("a").is_err().then_some(()))
        })
    }

    /// Restores it from a store that is not cached.
    pub fn restore(&self, request: RestoreRequest) -> Result<RestoreReport> {
        drop_caches();
        self.restore_at_once(request)
    }

    /// Restores it.
    pub fn restore_at_once(&self, request: RestoreRequest) -> Result<RestoreReport> {
        let request = RestoreRequest { store: Some(self.store.clone()), ..request };
        self.client.restore(&subject(), &request).map_err(words)
    }

    /// Waits until a client outside has an answer.
    pub fn await_answer(&self) -> Result<()> {
        wait_for("the guest to answer", LIMIT, || {
            let Ok(mut shell) = self.scene.shell() else { return Ok(None) };
            Ok(shell.run("true").ok().map(drop))
        })
    }

    /// Ends all, and proves that nothing is left.
    pub fn end(self) -> Result<()> {
        self.scene.finish()
    }
}

fn subject() -> Subject {
    Subject::Vm(literal(VM))
}

/// Store of a laboratory's snapshots.
pub fn store_of(scene: &Scene) -> String {
    scene.lab().directory().join("store").display().to_string()
}

/// Options with daemons that read so slowly, write traces, and do not suspect each other of death
/// while all of this machine is busy.
pub fn equipped(
    options: SceneOptions,
    store_mb_s: Option<f64>,
    traces: Option<&Path>,
) -> SceneOptions {
    let mut options = crate::bench::patient(options);
    let speed = store_mb_s.map(|megabytes| (SPEED.to_owned(), (megabytes * 1e6).to_string()));
    let traces = traces.map(|path| (traces::VARIABLE.to_owned(), path.display().to_string()));
    let environment: Vec<(String, String)> = speed.into_iter().chain(traces).collect();
    for host in options.daemons.values_mut() {
        *host = HostOptions { environment: environment.clone(), ..host.clone() };
    }
    options
}

/// Drops the caches: what is restored after a failure comes from the device. Not everybody may do
/// it.
pub fn drop_caches() {
    nix::unistd::sync();
    let _: std::io::Result<()> = std::fs::write("/proc/sys/vm/drop_caches", "3");
}

/// Milliseconds of a time.
pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
