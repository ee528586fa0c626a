//! A guest that runs while its memory is still being loaded: the store falls silent, or the
//! daemon dies.

use crate::refusals::says;
use crate::snapshot::{busy, json, number, prove_restored, small, store};
use crate::stage::{LIMIT, await_forgotten, daemon, play, refusal};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;
use understudy_lab::scene::VM;
use understudy_lab::{HostOptions, Scene, SceneOptions, wait_for};

/// Slow enough that most of a guest is still to come when it has started.
const SLOW_STORE: &str = "8000000";
const SILENCE: u64 = 10;

/// While this file is there, host b's store does not answer.
struct Silence {
    mark: PathBuf,
    _directory: TempDir,
}

impl Silence {
    fn new() -> Silence {
        let directory = tempfile::tempdir().expect("a directory for the test");
        Silence { mark: directory.path().join("silent"), _directory: directory }
    }

    fn options(&self) -> SceneOptions {
        let mut options = small();
        let point = format!("store-silent=return({})", self.mark.display());
        let variables = [("FAILPOINTS", point), ("UNDERSTUDY_STORE_SPEED", SLOW_STORE.to_owned())];
        let environment = variables.map(|(name, value)| (name.to_owned(), value)).into();
        options.daemons.insert("b".to_owned(), HostOptions { environment, ..daemon() });
        options
    }

    fn begin(&self) -> Result<()> {
        Ok(fs::write(&self.mark, "")?)
    }

    fn end(&self) -> Result<()> {
        Ok(fs::remove_file(&self.mark)?)
    }
}

/// A VM that is in the store and nowhere else: its sums, and how far it had counted.
fn saved(scene: &Scene) -> Result<(String, u64)> {
    scene.start_guest("a")?;
    scene.await_guest()?;
    let mut shell = scene.shell()?;
    let sums = busy(scene, &mut shell)?;
    json(scene, "a", &["vm", "snapshot", VM, "--trace", "0", "--store", &store(scene)])?;
    let count = number(&mut shell, "/tmp/count")?;
    drop(shell);
    scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
    await_forgotten(scene, "a")?;
    Ok((sums, count))
}

/// Restores it on host b; most of its memory is still to come.
fn restore_lazily(scene: &Scene, silence: &Silence) -> Result<()> {
    let store = store(scene);
    json(scene, "b", &["vm", "restore", VM, "--store", &store, "--mode", "lazy"])?;
    silence.begin()?;
    let status = scene.status("b")?;
    ensure!(status["filling"]["complete"] == false, "all is there already: {status}");
    Ok(())
}

/// How long the store has been silent, as `status` says.
fn silent_for(scene: &Scene) -> Result<Option<u64>> {
    let status = scene.status("b")?;
    ensure!(status["live"] == true, "the guest does not live any more: {status}");
    let Some(words) = status["filling"]["stalled"].as_str() else { return Ok(None) };
    says(words, &[&store(scene), "has not answered for"])?;
    let seconds = words.split(' ').rev().nth(1).context("no length")?;
    Ok(Some(seconds.parse().with_context(|| format!("how long: {words:?}"))?))
}

#[test]
fn a_silent_store_stalls_a_restored_guest_and_harms_nothing() {
    let silence = Silence::new();
    play(silence.options(), |scene| {
        let (sums, count) = saved(scene)?;
        restore_lazily(scene, &silence)?;
        wait_for("the store to be silent for long", LIMIT, || {
            Ok(silent_for(scene)?.filter(|seconds| *seconds >= SILENCE))
        })?;
        silence.end()?;
        prove_restored(scene, "b", &sums, count)?;
        wait_for("all of the guest to be there", LIMIT, || {
            Ok(scene.status("b")?["filling"].is_null().then_some(()))
        })?;
        prove_restored(scene, "b", &sums, count)?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "b")
    });
}

/// A guest ends with its daemon, this one too. Nobody starts it on what is there of its images;
/// from the snapshot it runs again.
#[test]
fn a_daemon_that_dies_while_a_guest_is_loaded_leaves_the_snapshot() {
    let silence = Silence::new();
    play(silence.options(), |scene| {
        let (sums, count) = saved(scene)?;
        restore_lazily(scene, &silence)?;
        scene.host_mut("b")?.kill_daemon()?;
        silence.end()?;
        scene.restart_with("b", daemon())?;
        await_forgotten(scene, "b")?;
        let (_, words) = refusal(scene.host("b")?, &["recover", VM, "--force"])?;
        says(&words, &["being restored", "restore the snapshot again"])?;
        json(scene, "b", &["vm", "restore", VM, "--store", &store(scene)])?;
        prove_restored(scene, "b", &sums, count)?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "b")
    });
}
