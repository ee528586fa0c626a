//! Several paths between two hosts: the session survives the loss of any but
//! the last one, and the VM stays where it is.

use crate::stage::{
    LIMIT, PACE, await_service, options, play, play_protected, protection, prove_survival,
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use understudy_lab::{Scene, SceneOptions, wait_for};

fn two_paths() -> SceneOptions {
    SceneOptions { cables: 2, ..options() }
}

/// Waits until both hosts say that the data goes over this path, and that the
/// other one is down, or up.
fn await_path(scene: &Scene, in_use: usize, other_is_up: bool) -> Result<()> {
    let goal = |status: &Value| {
        let paths = &status["paths"];
        paths[in_use]["in_use"] == true
            && paths[in_use]["up"] == true
            && paths[1 - in_use]["up"] == other_is_up
            && paths[1 - in_use]["down_seconds"].is_null() == other_is_up
    };
    let what = format!("both hosts to use path {}, the other up: {other_is_up}", in_use + 1);
    wait_for(&what, LIMIT, || {
        let (a, b) = (scene.status("a")?, scene.status("b")?);
        ensure!(a["role"] == "primary" && b["role"] == "backup", "the VM moved: {a} {b}");
        Ok((goal(&a) && goal(&b)).then_some(()))
    })
}

fn epoch(scene: &Scene) -> Result<u64> {
    let status = scene.status("a")?;
    ensure!(protection(&status).0 == "protected", "not protected: {status}");
    status["epoch"].as_u64().context("no epoch")
}

/// The session goes on: checkpoints are committed and records acknowledged.
fn await_progress(scene: &Scene) -> Result<()> {
    let begun = epoch(scene)?;
    wait_for(
        "a checkpoint to be committed",
        LIMIT,
        || Ok((epoch(scene)? > begun + 1).then_some(())),
    )
}

#[test]
fn paths_come_and_go_and_the_vm_stays() {
    play_protected(two_paths(), |scene, client| {
        scene.shell()?.start("guest-tools dirty 2000 20")?;
        await_path(scene, 0, true)?;
        for (cut, left) in [(0, 1), (1, 0)] {
            scene.lab().cut_cable("a", cut)?;
            await_path(scene, left, false)?;
            await_service(&client)?;
            await_progress(scene)?;
            scene.lab().heal_cable("a", cut)?;
            await_path(scene, left, true)?;
        }
        ensure!(scene.status("a")?["generation"] == 1, "ownership has changed");
        // Without any path, the peer is gone: the backup takes over.
        scene.lab().cut_cable("b", 0)?;
        scene.lab().cut_cable("b", 1)?;
        scene.await_live("b")?;
        scene.await_fenced("a")?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_host_is_killed_while_a_path_is_down() {
    play_protected(two_paths(), |scene, client| {
        scene.lab().cut_cable("b", 0)?;
        await_path(scene, 1, false)?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_path_is_cut_during_first_synchronisation() {
    play(two_paths(), |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = scene.record_client(PACE)?;
        // Slow enough to be cut in its midst.
        let slow = ["qdisc", "add", "dev", "cable1", "root", "tbf"];
        let rate = ["rate", "20mbit", "burst", "64kb", "latency", "200ms"];
        let tc = scene.lab().host("a")?.command("tc").args(slow).args(rate).output()?;
        ensure!(tc.status.success(), "tc: {}", String::from_utf8_lossy(&tc.stderr));
        scene.protect("a", "b")?;
        wait_for("the first synchronisation to be under way", LIMIT, || {
            let status = scene.status("a")?;
            ensure!(protection(&status).0 == "syncing", "too fast to be cut: {status}");
            let done = status["protection"]["done_bytes"].as_u64().unwrap_or_default();
            Ok((done > 1 << 20).then_some(()))
        })?;
        scene.lab().cut_cable("a", 0)?;
        scene.await_protected("a", |_| ())?;
        await_path(scene, 1, false)?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}
