//! Every way in which a host, a daemon or a QEMU can die.

use crate::stage::{
    Calm, LIMIT, LOAD_PACE, await_degraded, await_service, close, options, play_protected,
    protect_when_taken, prove_disk, prove_survival,
};
use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};
use understudy_lab::scene::{ECHO_PORT, RECORDS_PORT, VM};
use understudy_lab::{ChatterClient, ChatterReport, Load, Scene, SceneOptions, wait_for};

#[test]
fn a_host_is_killed_at_rest() {
    play_protected(options(), |scene, client| {
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_host_is_killed_under_load() {
    play_protected(options().calm(), |scene, client| {
        let mut shell = scene.shell()?;
        shell.start("guest-tools dirty 2000 20")?;
        shell.start("while :; do dd if=/dev/urandom of=/data/noise bs=64k count=8; sync; done")?;
        let lab = scene.lab();
        let pings =
            ChatterClient::start(lab, scene.guest(RECORDS_PORT), 24, Load::Pings, LOAD_PACE)?;
        let bulk =
            ChatterClient::start(lab, scene.guest(ECHO_PORT), 4, Load::Bulk(32 * 1024), LOAD_PACE)?;
        await_rounds(&pings, 5)?;
        await_rounds(&bulk, 2)?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        await_rounds(&pings, 5)?;
        await_rounds(&bulk, 2)?;
        await_service(&client)?;
        unharmed(&pings.stop())?;
        unharmed(&bulk.stop())?;
        prove_survival(scene, client, "b")
    });
}

/// Waits until every connection has been answered so many times more.
pub fn await_rounds(chatter: &ChatterClient, rounds: u64) -> Result<()> {
    let goal = chatter.least_rounds() + rounds;
    wait_for("answers on all connections", LIMIT, || {
        Ok((chatter.least_rounds() >= goal).then_some(()))
    })
}

pub fn unharmed(report: &ChatterReport) -> Result<()> {
    ensure!(report.errors().is_empty(), "connections were harmed: {:?}", report.errors());
    Ok(())
}

#[test]
fn a_host_is_cut_off() {
    // A copy that lost the VM before the cut is not kept.
    play_protected(options().calm(), |scene, client| {
        let (a, b) = (scene.watch_uplink("a", 0)?, scene.watch_uplink("b", 0)?);
        let cut_at = Instant::now();
        scene.lab().cut("a")?;
        scene.await_live("b")?;
        await_service(&client)?;
        let kept = scene.await_kept("a")?;
        ensure!(kept["live"] == false, "a still lives: {kept}");
        let first = b.first_frame_after(cut_at)?.context("b answered no client")?;
        ensure!(a.frames_after(first)? == 0, "a still sent something after b had begun to");
        // Back on the network, the fenced host stays silent.
        scene.lab().heal("a")?;
        scene.await_fenced("a")?;
        await_service(&client)?;
        ensure!(a.frames_after(first)? == 0, "a sent something once it was back");
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_backup_is_killed_and_another_one_serves() {
    play_protected(options().calm(), |scene, client| {
        scene.host_mut("b")?.kill_everything()?;
        await_degraded(scene, "a")?;
        await_service(&client)?;
        let status = scene.host("a")?.cli(["status", VM])?;
        ensure!(status.status.code() == Some(3), "`status` of a degraded VM: {status:?}");
        scene.restart("b")?;
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn qemu_alone_is_killed() {
    play_protected(options().calm(), |scene, client| {
        scene.host("a")?.kill_qemu(VM)?;
        prove_survival(scene, client, "b")?;
        let fenced = scene.await_fenced("a")?;
        let reason = fenced["protection"]["reason"].as_str().unwrap_or_default();
        ensure!(reason.contains("SIGKILL"), "the reason is not QEMU's death: {reason}");
        Ok(())
    });
}

// Before, it was live for good, as its new host said: whoever heard of the death took it for a standby's.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_guest_that_dies_before_its_host_calls_it_its_own_is_not_live() {
    let mut options = options().calm();
    let slow = ("FAILPOINTS".to_owned(), "note-take-over=sleep(20000)".to_owned());
    options.daemons.get_mut("b").expect("a host b").environment.push(slow);
    play_protected(options, |scene, client| {
        scene.host_mut("a")?.kill_everything()?;
        await_service(&client)?;
        let status = scene.status("b")?;
        ensure!(status["role"] == "backup", "it is known already whose it is: {status}");
        scene.host("b")?.kill_qemu(VM)?;
        let fenced = scene.await_fenced("b")?;
        let reason = fenced["protection"]["reason"].as_str().unwrap_or_default();
        ensure!(reason.contains("SIGKILL"), "the reason is not QEMU's death: {reason}");
        Ok(())
    });
}

#[test]
fn the_standby_qemu_alone_is_killed() {
    kill_the_standby_qemu(options().calm());
}

/// Plays the death of the standby's QEMU in either mode.
pub fn kill_the_standby_qemu(options: SceneOptions) {
    play_protected(options, |scene, client| {
        scene.host("b")?.kill_qemu(VM)?;
        await_degraded(scene, "a")?;
        await_service(&client)?;
        // Its daemon lives: it can serve again at once.
        protect_when_taken(scene, "a", "b")?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_daemon_alone_is_killed() {
    play_protected(options(), |scene, client| {
        scene.host_mut("a")?.kill_daemon()?;
        await_empty(scene, "a")?;
        prove_survival(scene, client, "b")
    });
}

/// Waits until no process is left on a host.
pub fn await_empty(scene: &Scene, host: &str) -> Result<()> {
    let namespace = scene.host(host)?.namespace().clone();
    wait_for(&format!("every process on host {host} to end"), LIMIT, || {
        Ok(namespace.processes()?.is_empty().then_some(()))
    })
}

#[test]
fn a_backup_is_cut_off_while_the_arbiter_is_away() {
    play_protected(options().calm(), |scene, client| {
        let arbiter = scene.lab().arbiter_directory();
        let aside = arbiter.with_extension("aside");
        std::fs::rename(&arbiter, &aside)?;
        scene.lab().cut("b")?;
        // Neither may act: the primary computes and releases nothing.
        let watcher = scene.watch_uplink("a", 0)?;
        wait_for("host a to hold all output", LIMIT, || {
            let status = scene.status("a")?;
            let reason = status["protection"]["reason"].as_str().unwrap_or_default();
            Ok(reason.contains("until the arbiter decides").then_some(()))
        })?;
        wait_for("host b to wait for the arbiter", LIMIT, || {
            let reason = scene.status("b")?["protection"]["reason"].clone();
            let reason = reason.as_str().unwrap_or_default().to_owned();
            Ok(reason.contains("waiting for the arbiter").then_some(()))
        })?;
        let held_at = Instant::now();
        // Many retries of both sides.
        let patience = held_at + Duration::from_secs(2);
        wait_for("the arbiter to stay away for a while", LIMIT, || {
            Ok((Instant::now() >= patience).then_some(()))
        })?;
        ensure!(watcher.frames_after(held_at)? == 0, "a released output without a verdict");
        ensure!(scene.status("b")?["live"] == false, "b went live without a verdict");
        std::fs::rename(&aside, &arbiter)?;
        await_one_owner(scene)?;
        scene.lab().heal("b")?;
        let owner = await_one_owner(scene)?;
        await_service(&client)?;
        let acked = close(client)?;
        prove_disk(scene, owner, acked)
    });
}

/// Waits until one host runs the guest and the other one does not.
pub fn await_one_owner(scene: &Scene) -> Result<&'static str> {
    let lives = |host: &str| -> Result<bool> {
        let vms = crate::stage::vms(scene.host(host)?)?;
        Ok(vms.iter().any(|vm| vm["role"] == "primary" && vm["live"] == true))
    };
    let settled = |host: &str| -> Result<bool> {
        let vms = crate::stage::vms(scene.host(host)?)?;
        Ok(!vms.iter().any(|vm| {
            vm["role"] == "backup"
                || vm["protection"]["reason"]
                    .as_str()
                    .is_some_and(|reason| reason.contains("until the arbiter decides"))
        }))
    };
    wait_for("one host to own the guest", LIMIT, || {
        if !(settled("a")? && settled("b")?) {
            return Ok(None);
        }
        match (lives("a")?, lives("b")?) {
            (true, false) => Ok(Some("a")),
            (false, true) => Ok(Some("b")),
            // The one that has lost it computes, and lets nothing out, until it has noticed.
            (true, true) | (false, false) => Ok(None),
        }
    })
}
