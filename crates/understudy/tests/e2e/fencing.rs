//! Partitions, and an arbiter that one host, or no host, can reach: exactly one
//! copy goes on, and the other one is stopped.

use crate::sick_hosts::await_unfit;
use crate::stage::{
    Calm, LIMIT, await_degraded, await_forgotten, await_service, daemon, options, play_protected,
    prove_survival,
};
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::time::{Duration, Instant};
use understudy_lab::scene::VM;
use understudy_lab::{ArbiterKind, HostOptions, Scene, SceneOptions, wait_for};

/// A time many times longer than either side waits before it asks the arbiter again.
const MANY_RETRIES: Duration = Duration::from_secs(2);

fn with_arbiter(arbiter: ArbiterKind) -> SceneOptions {
    let mut options = options().calm();
    for host in options.hosts.clone() {
        options.daemons.insert(host, HostOptions { arbiter, ..daemon().calm() });
    }
    options
}

/// A host cannot reach the arbiter: its link is cut, or the directory is not
/// mounted, and empty in its place.
pub fn hide(scene: &mut Scene, arbiter: ArbiterKind, host: &str) -> Result<()> {
    match arbiter {
        ArbiterKind::Etcd => scene.etcd()?.cut(host),
        _ => scene.host(host)?.hide(&scene.lab().arbiter_directory()),
    }
}

pub fn unhide(scene: &mut Scene, arbiter: ArbiterKind, host: &str) -> Result<()> {
    match arbiter {
        ArbiterKind::Etcd => scene.etcd()?.heal(host),
        _ => scene.host(host)?.unhide(&scene.lab().arbiter_directory()),
    }
}

fn await_reason(scene: &Scene, host: &str, words: &str) -> Result<()> {
    wait_for(&format!("host {host} to say {words:?}"), LIMIT, || {
        let reason = scene.status(host)?["protection"]["reason"].clone();
        Ok(reason.as_str().unwrap_or_default().contains(words).then_some(()))
    })
}

fn await_holding(scene: &Scene, primary: &str) -> Result<()> {
    await_reason(scene, primary, "until the arbiter decides")
}

fn await_contesting(scene: &Scene, backup: &str) -> Result<()> {
    await_reason(scene, backup, "waiting for the arbiter")
}

pub fn pass(time: Duration) -> Result<()> {
    let until = Instant::now() + time;
    wait_for("time to pass", LIMIT, || Ok((Instant::now() >= until).then_some(())))
}

pub fn is_gone(pid: u32) -> Result<()> {
    let path = format!("/proc/{pid}");
    wait_for(&format!("QEMU {pid} to end"), LIMIT, || {
        Ok((!std::path::Path::new(&path).exists()).then_some(()))
    })
}

/// A host's record of its images.
fn image_role(scene: &Scene, host: &str) -> Result<String> {
    let path = scene.host(host)?.directory().join("state").join(VM).join("record.json");
    let record: Value = serde_json::from_slice(&std::fs::read(&path)?)?;
    let role = record["image"]["role"].as_str().context("a record has a role")?;
    Ok(role.to_owned())
}

/// The primary can ask, its backup cannot: the primary goes on alone.
fn arbiter_on_the_primarys_side(arbiter: ArbiterKind) {
    play_protected(with_arbiter(arbiter), |scene, client| {
        let standby = scene.host("b")?.qemu_pid(VM)?;
        hide(scene, arbiter, "b")?;
        scene.lab().cut("b")?;
        await_degraded(scene, "a")?;
        await_service(&client)?;
        await_contesting(scene, "b")?;
        pass(MANY_RETRIES)?;
        ensure!(scene.status("b")?["live"] == false, "b went live without a verdict");
        unhide(scene, arbiter, "b")?;
        scene.lab().heal("b")?;
        await_forgotten(scene, "b")?;
        is_gone(standby)?;
        prove_survival(scene, client, "a")
    });
}

/// The backup can ask, the primary cannot: the backup takes over, and the
/// primary computes and lets nothing out until it hears that it lost.
fn arbiter_on_the_backups_side(arbiter: ArbiterKind) {
    play_protected(with_arbiter(arbiter), |scene, client| {
        let former = scene.host("a")?.qemu_pid(VM)?;
        let (a, b) = (scene.watch_uplink("a", 0)?, scene.watch_uplink("b", 0)?);
        hide(scene, arbiter, "a")?;
        let cut_at = Instant::now();
        scene.lab().cut("a")?;
        scene.await_live("b")?;
        await_service(&client)?;
        await_holding(scene, "a")?;
        pass(MANY_RETRIES)?;
        ensure!(scene.status("a")?["live"] == true, "a ended without a verdict");
        unhide(scene, arbiter, "a")?;
        // Whether b could start the guest it cannot know before it can ask.
        let kept = scene.await_kept("a")?;
        ensure!(kept["live"] == false, "{kept}");
        scene.lab().heal("a")?;
        scene.await_fenced("a")?;
        is_gone(former)?;
        ensure!(image_role(scene, "a")? == "stale", "a's images are {}", image_role(scene, "a")?);
        await_service(&client)?;
        let first = b.first_frame_after(cut_at)?.context("b answered no client")?;
        ensure!(a.frames_after(first)? == 0, "a still sent something after b had begun to");
        prove_survival(scene, client, "b")
    });
}

#[test]
fn file_arbiter_on_the_primarys_side() {
    arbiter_on_the_primarys_side(ArbiterKind::File);
}

#[test]
fn etcd_on_the_primarys_side() {
    arbiter_on_the_primarys_side(ArbiterKind::Etcd);
}

#[test]
fn file_arbiter_on_the_backups_side() {
    arbiter_on_the_backups_side(ArbiterKind::File);
}

#[test]
fn etcd_on_the_backups_side() {
    arbiter_on_the_backups_side(ArbiterKind::Etcd);
}

/// An etcd that nobody can ask is killed meanwhile: nobody acts. Once it is back,
/// exactly one goes on.
#[test]
fn etcd_out_of_everybodys_reach() {
    let kind = ArbiterKind::Etcd;
    play_protected(with_arbiter(kind), |scene, client| {
        let pids = [scene.host("a")?.qemu_pid(VM)?, scene.host("b")?.qemu_pid(VM)?];
        let watchers = [scene.watch_uplink("a", 0)?, scene.watch_uplink("b", 0)?];
        hide(scene, kind, "a")?;
        hide(scene, kind, "b")?;
        scene.lab().cut("b")?;
        await_holding(scene, "a")?;
        await_contesting(scene, "b")?;
        let held_at = Instant::now();
        scene.etcd()?.kill()?;
        pass(MANY_RETRIES)?;
        for watcher in &watchers {
            ensure!(watcher.frames_after(held_at)? == 0, "output left without a verdict");
        }
        ensure!(scene.status("b")?["live"] == false, "b went live without a verdict");
        scene.lab().heal("b")?;
        scene.etcd()?.restart()?;
        unhide(scene, kind, "a")?;
        unhide(scene, kind, "b")?;
        let (winner, loser_pid) = await_winner(scene, pids)?;
        is_gone(loser_pid)?;
        prove_survival(scene, client, winner)
    });
}

/// Waits until one host goes on and the other one has given way; the winner, and
/// the process id of the loser's QEMU.
fn await_winner(scene: &Scene, pids: [u32; 2]) -> Result<(&'static str, u32)> {
    let lives = |host: &str| -> Result<bool> {
        let status: Value = serde_json::from_str(&scene.host(host)?.call(["status", "--json"])?)?;
        let vms = status["vms"].as_array().context("no list of VMs")?;
        let contested = |vm: &Value| {
            let reason = vm["protection"]["reason"].as_str().unwrap_or_default();
            reason.contains("the arbiter")
        };
        Ok(vms.iter().any(|vm| vm["live"] == true && !contested(vm)))
    };
    wait_for("the arbiter's word to be followed", LIMIT, || match (lives("a")?, lives("b")?) {
        (true, true) => bail!("both hosts run the guest"),
        (true, false) => Ok(Some(("a", pids[1]))),
        (false, true) => Ok(Some(("b", pids[0]))),
        (false, false) => Ok(None),
    })
}

/// A full etcd still says whose the VM is, and gives it to nobody. Before, its backup was one that could take over, as far
/// as anybody could tell.
#[test]
fn a_full_etcd_is_no_arbiter() {
    play_protected(with_arbiter(ArbiterKind::Etcd), |scene, client| {
        scene.etcd()?.set_full(true)?;
        await_unfit(scene, "space exceeded")?;
        await_service(&client)?;
        scene.etcd()?.set_full(false)?;
        scene.await_protected("a", |_| ())?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// etcd dies just before the primary does, and comes back.
#[test]
fn etcd_is_killed_before_a_take_over() {
    play_protected(with_arbiter(ArbiterKind::Etcd), |scene, client| {
        scene.etcd()?.kill()?;
        // Protection goes on without the arbiter.
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        await_contesting(scene, "b")?;
        scene.etcd()?.restart()?;
        prove_survival(scene, client, "b")
    });
}
