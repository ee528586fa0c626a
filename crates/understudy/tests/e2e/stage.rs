//! The beginning and end of a test, and what it checks whatever happened.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;
use understudy_lab::check::check_disk;
use understudy_lab::scene::VM;
use understudy_lab::{
    HostOptions, HostProcess, LONGEST_QEMU_TIMEOUT_MS, LONGEST_TIMEOUT_MS, RecordClient, Scene,
    SceneOptions, is_followed, patience, tells_of_a_follower, wait_for,
};

/// Time between two records, so that a test is not about the disk's speed, and an emulated guest
/// leaves the processors time for other stories.
pub const PACE: Duration = Duration::from_millis(20);
/// Time between two rounds of a connection that is load: some of them are always under way, and the
/// guest, which would do nothing else, leaves the processors to other stories.
pub const LOAD_PACE: Duration = Duration::from_millis(40);
/// See [`Calm`].
const CALM_TIMEOUT_MS: u32 = 3000;
const CALM_QEMU_TIMEOUT_MS: u32 = 10_000;
/// The accelerator of all guests that have no reason for another one (`make test-kvm`).
const ACCEL: &str = "UNDERSTUDY_ACCEL";
/// Arguments of the guests' kernel that leave out its hardening, of which no test speaks, and which is a
/// tenth of what an emulated one costs.
const UNHARDENED: &str = "mitigations=off init_on_alloc=0 randomize_kstack_offset=off \
                          hardened_usercopy=off apparmor=0 audit=0 nowatchdog";
/// A length shorter than any frame with data between hosts, longer than any without.
pub const HOLE_BYTES: u32 = 600;
/// Time for anything that a living machine does by itself, on a machine several times slower
/// than most.
pub const LIMIT: Duration = Duration::from_secs(180);
/// Acknowledgements that prove that the guest serves its client.
const SERVED: u64 = 20;

/// The binary under test and the guests' files, one guest of the usual shape.
pub fn options() -> SceneOptions {
    let binary = Path::new(env!("CARGO_BIN_EXE_understudy"));
    let agent = binary.with_file_name("libunderstudy_agent.so");
    assert!(
        agent.is_file(),
        "there is no {}: run `make test`, or `cargo build -p understudy-agent` in this profile",
        agent.display()
    );
    let mut options = SceneOptions::new(binary, &guest_files());
    options.accel = std::env::var(ACCEL).ok();
    if options.accel.is_none() {
        options.kernel_arguments = UNHARDENED;
    }
    // On another accelerator the boot is part of what is tried.
    options.booted = cfg!(feature = "fail-points") && options.accel.is_none();
    for host in &options.hosts {
        options.daemons.insert(host.clone(), daemon());
    }
    options
}

/// The options of a daemon, with the detector as it is shipped. Lost protection stays lost, so
/// that a test sees it.
pub fn daemon() -> HostOptions {
    let options =
        HostOptions { settings: "[repair]\nenabled = false\n".to_owned(), ..Default::default() };
    // There its 100 ms, as many times as the machine is slower, would still be wrong.
    if patience() > 1 { options.calm() } else { options }
}

/// Has a host of the scene, and its keepers, pass these fail points.
pub fn fail_at(options: &mut SceneOptions, host: &str, points: &str) {
    let daemon = options.daemons.get_mut(host).expect("a host of the scene");
    daemon.environment.push(("FAILPOINTS".to_owned(), points.to_owned()));
}

/// [`daemon`] that is patient, and passes these fail points.
pub fn daemon_passing(points: impl Into<String>) -> HostOptions {
    let environment = vec![("FAILPOINTS".to_owned(), points.into())];
    HostOptions { environment, ..daemon().calm() }
}

/// [`daemon`] that restores lost protection, as daemons do by default.
pub fn repairing_daemon() -> HostOptions {
    HostOptions::default()
}

/// Hosts that take only a silence of 3 s for a failure, where the shipped detector takes 100 ms,
/// and one of 10 s of a QEMU, where that takes 1 s.
/// For stories that say who is primary and backup while nothing fails, or what becomes of both
/// after a failure of the backup: on a machine that several stories keep busy the shipped one is
/// wrong now and then, which costs no data, but makes it another story. Those that outlive the
/// primary end in the same way either way, and have the shipped one, as have those in which
/// nobody is protected.
pub trait Calm {
    fn calm(self) -> Self;
}

impl Calm for HostOptions {
    fn calm(mut self) -> HostOptions {
        if !self.settings.contains("[detection]") {
            let timeout = (CALM_TIMEOUT_MS * patience()).min(LONGEST_TIMEOUT_MS);
            let qemu = (CALM_QEMU_TIMEOUT_MS * patience()).min(LONGEST_QEMU_TIMEOUT_MS);
            self.settings +=
                &format!("[detection]\ntimeout_ms = {timeout}\nqemu_timeout_ms = {qemu}\n");
        }
        self
    }
}

impl Calm for SceneOptions {
    fn calm(mut self) -> SceneOptions {
        for daemon in self.daemons.values_mut() {
            *daemon = std::mem::take(daemon).calm();
        }
        self
    }
}

/// [`daemon`], which has only these peers.
pub fn daemon_with_peers(peers: &str) -> HostOptions {
    let mut options = daemon();
    options.settings += &format!("[peers]\n{peers}\n");
    options
}

fn guest_files() -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guest");
    std::env::var_os("UNDERSTUDY_GUEST").map_or(built, PathBuf::from)
}

/// Plays one test on a stage of its own, then proves that nothing of it is left
/// behind. An error shows the ends of all logs.
pub fn play(options: SceneOptions, story: impl FnOnce(&mut Scene) -> Result<()>) {
    let mut scene = Scene::start(options).unwrap_or_else(|error| panic!("{error:#}"));
    if let Err(error) = story(&mut scene) {
        // The laboratory prints its logs when a panic drops it.
        panic!("{error:#}");
    }
    scene.finish().unwrap_or_else(|error| panic!("{error:#}"));
}

/// [`play`] with the usual guest on host a, protected to host b, and a client
/// that appends records through its one connection.
pub fn play_protected(
    options: SceneOptions,
    story: impl FnOnce(&mut Scene, RecordClient) -> Result<()>,
) {
    play(options, |scene| {
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        story(scene, client)
    });
}

/// Waits until the guest has answered the client anew.
pub fn await_service(client: &RecordClient) -> Result<()> {
    let goal = client.acked() + SERVED;
    wait_for("the guest to serve its client", LIMIT, || {
        ensure!(!client.failed(), "the client's connection broke");
        Ok((client.acked() >= goal).then_some(()))
    })
}

/// The end of most tests: `host` runs the guest, serves the client on the
/// connection that it always had, and has every acknowledged record.
pub fn prove_survival(scene: &Scene, client: RecordClient, host: &str) -> Result<()> {
    scene.await_live(host)?;
    await_service(&client)?;
    let acked = close(client)?;
    prove_disk(scene, host, acked)
}

/// Ends the client, whose connection must have lived; returns what was
/// acknowledged to it.
pub fn close(client: RecordClient) -> Result<u64> {
    let report = client.stop();
    if let Some(error) = report.error() {
        bail!("the client's connection did not survive: {error}");
    }
    Ok(report.acked())
}

/// Cuts the power of the guest on `host` and looks at its first disk as a crash
/// would have left it.
pub fn prove_disk(scene: &Scene, host: &str, acked: u64) -> Result<()> {
    prove_disk_at(scene, host, 0, acked)
}

/// [`prove_disk`], with the disk that has the records.
pub fn prove_disk_at(scene: &Scene, host: &str, disk: usize, acked: u64) -> Result<()> {
    let image = scene.disk(host, disk)?;
    scene.host(host)?.call(["vm", "stop", VM, "--force"])?;
    let check = check_disk(&image, acked)?;
    ensure!(check.is_intact(), "{} after {acked} records: {check:#?}", image.display());
    Ok(())
}

/// The words of the daemon about its protection: the state and, where there
/// is one, the reason.
pub fn protection(status: &Value) -> (&str, &str) {
    let text = |field| status["protection"][field].as_str().unwrap_or_default();
    (text("state"), text("reason"))
}

/// Waits until the guest of `host` runs there alone although it should be
/// protected; returns the reason that `status` gives.
pub fn await_degraded(scene: &Scene, host: &str) -> Result<String> {
    wait_for(&format!("host {host} to say that it is degraded"), LIMIT, || {
        let status = scene.status(host)?;
        ensure!(status["role"] == "primary", "host {host} does not own the guest: {status}");
        Ok(alone(&status).map(str::to_owned))
    })
}

/// Why a guest that should be protected runs alone, if it does, and no contest or follower can end that.
pub fn alone(status: &Value) -> Option<&str> {
    let (state, reason) = protection(status);
    let undecided = reason.contains("until the arbiter decides");
    let is_alone = state == "degraded" && !undecided && !tells_of_a_follower(reason);
    is_alone.then_some(reason)
}

/// A host's daemon dies, and the next one finds what has run on.
pub fn restart_daemon(scene: &mut Scene, host: &str) -> Result<()> {
    scene.host_mut(host)?.kill_daemon()?;
    scene.revive(host)
}

/// Protects the guest of host `from` to host `to`, once that takes it: what it had of it may take a moment to end.
pub fn protect_when_taken(scene: &Scene, from: &str, to: &str) -> Result<()> {
    wait_for(&format!("host {to} to stand by again"), LIMIT, || {
        Ok(scene.protect(from, to).is_ok().then_some(()))
    })?;
    scene.await_protected(from, |_| ()).map(drop)
}

/// Begins to protect a VM of `host` by these further words of `protect`, and waits until it is.
pub fn protect(host: &HostProcess, vm: &str, words: &[&str]) -> Result<()> {
    host.call([&["protect", vm, "--no-wait"], words].concat())?;
    host.await_protected(vm, |_| ()).map(drop)
}

/// Plans a fail-over of a VM of `host` once its backup could take it over: a busy machine's disk may
/// stand still for seconds, in which it is none.
pub fn fail_over(host: &HostProcess, vm: &str) -> Result<Output> {
    wait_for("the backup to be one", LIMIT, || {
        let output = host.cli(["failover", vm])?;
        let words = String::from_utf8_lossy(&output.stderr);
        Ok((!words.contains("could not take it over now")).then_some(output))
    })
}

/// [`fail_over`] that must succeed.
pub fn hand_over(host: &HostProcess, vm: &str) -> Result<()> {
    let output = fail_over(host, vm)?;
    ensure!(output.status.success(), "host {}: `failover {vm}`: {output:?}", host.name());
    Ok(())
}

/// Whether a VM has not lost its backup, which may not have proved for a moment that it could take over.
pub fn has_backup(status: &Value) -> bool {
    protection(status).0 == "protected" || is_followed(status)
}

/// Waits until `host` knows no VM, and has no process but its daemon.
pub fn await_forgotten(scene: &Scene, host: &str) -> Result<()> {
    let daemon = scene.host(host)?;
    wait_for(&format!("host {host} to forget the VM"), LIMIT, || {
        Ok(vms(daemon)?.is_empty().then_some(()))
    })?;
    wait_for(&format!("host {host}'s QEMU to be gone"), LIMIT, || {
        Ok((daemon.namespace().processes()? == [daemon.pid()]).then_some(()))
    })?;
    scene.lab().await_no_taps(host, LIMIT)
}

/// The VMs that a host knows, by `status --json`.
pub fn vms(host: &HostProcess) -> Result<Vec<Value>> {
    let status: Value = serde_json::from_str(&host.call(["status", "--json"])?)?;
    status["vms"].as_array().cloned().context("`status --json` has no list `vms`")
}

/// Runs a command that must fail; returns its exit code and its stderr.
pub fn refusal(host: &HostProcess, arguments: &[&str]) -> Result<(i32, String)> {
    refused(&host.cli(arguments)?, &arguments.join(" "))
}

/// Runs one of the system's programs, which must succeed; returns what it printed.
pub fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program).args(arguments).output();
    let output = output.with_context(|| format!("cannot run `{program}`"))?;
    ensure!(output.status.success(), "`{program} {}`: {output:?}", arguments.join(" "));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The exit code and words of a command that must have failed.
pub fn refused(output: &Output, command: &str) -> Result<(i32, String)> {
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success(), "`{command}` succeeded");
    let code = output.status.code().with_context(|| format!("`{command}` was killed"))?;
    ensure!(!words.contains("panicked"), "`{command}` panicked: {words}");
    Ok((code, words))
}
