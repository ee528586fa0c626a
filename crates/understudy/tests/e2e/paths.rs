//! Several paths between two hosts: the session survives the loss of any but
//! the last one, and the VM stays where it is.

use crate::stage::{
    Calm, HOLE_BYTES, LIMIT, PACE, await_service, has_backup, options, play, play_protected,
    protect_when_taken, protection, prove_survival, repairing_daemon,
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use understudy_lab::scene::VM;
use understudy_lab::{Scene, SceneOptions, wait_for};

fn two_paths() -> SceneOptions {
    SceneOptions { cables: 2, ..options().calm() }
}

/// Waits until both hosts, which keep their parts, say so of the session's paths.
fn await_paths(scene: &Scene, what: &str, goal: impl Fn(&Value) -> bool) -> Result<()> {
    wait_for(&format!("both hosts to say: {what}"), LIMIT, || {
        let (a, b) = (scene.status("a")?, scene.status("b")?);
        ensure!(a["role"] == "primary" && b["role"] == "backup", "the VM moved: {a} {b}");
        Ok((goal(&a["paths"]) && goal(&b["paths"])).then_some(()))
    })
}

pub fn await_both_up(scene: &Scene) -> Result<()> {
    await_paths(scene, "both paths are up", |paths| {
        (0..2).all(|path| paths[path]["up"] == true && paths[path]["down_seconds"].is_null())
    })
}

/// Cuts the cable that the data goes over, and waits until it goes over the
/// other one. Which it is, a busy machine may have changed. Returns it.
pub fn cut_the_one_in_use(scene: &Scene) -> Result<usize> {
    let paths = scene.status("a")?["paths"].clone();
    let cut = usize::from(paths[1]["in_use"] == true);
    scene.lab().cut_cable("a", cut)?;
    await_paths(scene, "the data goes over the path that is left", |paths| {
        let (gone, left) = (&paths[cut], &paths[1 - cut]);
        left["in_use"] == true
            && left["up"] == true
            && gone["up"] == false
            && !gone["down_seconds"].is_null()
    })?;
    Ok(cut)
}

fn epoch(scene: &Scene) -> Result<u64> {
    let status = scene.status("a")?;
    ensure!(has_backup(&status), "it has lost its backup: {status}");
    status["epoch"].as_u64().context("no epoch")
}

/// A time so long that the path's connection takes no more heartbeats, and is given up.
const LONG_SECONDS: f64 = 7.0;

fn await_long_outage(scene: &Scene, path: usize) -> Result<()> {
    await_paths(scene, "a path is down for long", |paths| {
        paths[path]["down_seconds"].as_f64().is_some_and(|seconds| seconds > LONG_SECONDS)
    })
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
        await_both_up(scene)?;
        for long in [false, true] {
            let cut = cut_the_one_in_use(scene)?;
            await_service(&client)?;
            await_progress(scene)?;
            if long {
                await_long_outage(scene, cut)?;
            }
            scene.lab().heal_cable("a", cut)?;
            await_both_up(scene)?;
        }
        ensure!(scene.status("a")?["generation"] == 1, "ownership has changed");
        // Without any path, the peer is gone: the backup takes over.
        scene.lab().cut_cable("b", 0)?;
        scene.lab().cut_cable("b", 1)?;
        scene.await_live("b")?;
        scene.await_kept("a")?;
        scene.lab().heal_cable("b", 0)?;
        scene.await_fenced("a")?;
        prove_survival(scene, client, "b")
    });
}

/// Messages longer than heartbeats vanish on the path in use, which therefore counts as up.
#[test]
fn a_path_that_carries_heartbeats_alone_is_left_for_the_other() {
    play(two_paths(), |scene| {
        scene.lab().cut_segments("a")?;
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        await_both_up(scene)?;
        await_service(&client)?;
        let sick = usize::from(scene.status("a")?["paths"][1]["in_use"] == true);
        scene.lab().limit_frames_of_cable("b", sick, HOLE_BYTES)?;
        await_paths(scene, "the data goes over the sound path", |paths| {
            paths[1 - sick]["in_use"] == true
        })?;
        await_service(&client)?;
        await_progress(scene)?;
        ensure!(scene.status("a")?["generation"] == 1, "ownership has changed");
        // Protected anew, over the addresses in their order, it takes the sound one as well.
        scene.host("a")?.call(["unprotect", VM])?;
        protect_when_taken(scene, "a", "b")?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_host_is_killed_while_a_path_is_down() {
    play_protected(two_paths(), |scene, client| {
        cut_the_one_in_use(scene)?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

// Before, host b was never found again: a survey gives a host less time than the dead path took.
#[test]
fn protection_is_restored_to_a_host_whose_first_path_is_dead() {
    let mut options = two_paths();
    options.daemons.insert("a".to_owned(), repairing_daemon().calm());
    play_protected(options, |scene, client| {
        await_both_up(scene)?;
        scene.lab().cut_cable("a", 0)?;
        await_paths(scene, "the data goes over the second path", |paths| {
            paths[1]["in_use"] == true && paths[0]["up"] == false
        })?;
        scene.host_mut("b")?.kill_daemon()?;
        let is_protected = |scene: &Scene| -> Result<bool> {
            Ok(protection(&scene.status("a")?).0 == "protected")
        };
        wait_for("the loss of host b to be noticed", LIMIT, || {
            Ok((!is_protected(scene)?).then_some(()))
        })?;
        scene.restart("b")?;
        wait_for("protection to be restored to host b", LIMIT, || {
            Ok(is_protected(scene)?.then_some(()))
        })?;
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
        cut_the_one_in_use(scene)?;
        scene.await_protected("a", |_| ())?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}
