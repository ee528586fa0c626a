//! Both ways to pause a guest: by the agent inside QEMU, and through QMP.

use crate::planned::reboot;
use crate::stage::{
    PACE, await_forgotten, await_service, close, daemon, options, play, play_protected, prove_disk,
    prove_survival,
};
use anyhow::{Result, ensure};
use understudy_lab::check::check_disk;
use understudy_lab::{Scene, SceneOptions};

/// Which way it is, and why, as `status` says.
fn way(scene: &Scene, host: &str) -> Result<String> {
    Ok(scene.status(host)?["pauses_through_qmp"].as_str().unwrap_or_default().to_owned())
}

/// Daemons that are told not to have the agent pause.
fn through_qmp() -> SceneOptions {
    let mut options = options();
    for host in options.hosts.clone() {
        let mut daemon = daemon();
        daemon.environment.push(("UNDERSTUDY_PAUSE".to_owned(), "qmp".to_owned()));
        options.daemons.insert(host, daemon);
    }
    options
}

#[test]
fn this_qemu_is_paused_by_the_agent() {
    play_protected(options(), |scene, client| {
        for host in ["a", "b"] {
            let way = way(scene, host)?;
            ensure!(way.is_empty(), "host {host} pauses through QMP: {way}");
        }
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_guest_paused_through_qmp_survives_and_reboots() {
    play(through_qmp(), |scene| {
        scene.protected_guest("a", "b")?;
        let way = way(scene, "a")?;
        ensure!(way.contains("UNDERSTUDY_PAUSE"), "the reason: {way}");
        reboot(scene, "a")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        await_service(&client)?;
        let acked = close(client)?;
        reboot(scene, "b")?;
        prove_disk(scene, "b", acked)
    });
}

#[test]
fn a_guest_paused_through_qmp_powers_off() {
    play_protected(through_qmp(), |scene, client| {
        let image = scene.disk("a", 0)?;
        let acked = close(client)?;
        scene.shell()?.start("poweroff")?;
        await_forgotten(scene, "a")?;
        await_forgotten(scene, "b")?;
        let check = check_disk(&image, acked)?;
        ensure!(check.is_intact(), "{check:#?}");
        Ok(())
    });
}
