//! Both ways to pause a guest: by the agent inside QEMU, and through QMP.

use crate::planned::{fail_over_and_reboot, power_off, reboot};
use crate::stage::{Calm, daemon, daemon_passing, options, play, play_protected, prove_survival};
use anyhow::{Result, ensure};
use understudy_lab::{Scene, SceneOptions};

/// The way that it is, and why, as `status` says.
fn way(scene: &Scene, host: &str) -> Result<String> {
    Ok(scene.status(host)?["pauses_through_qmp"].as_str().unwrap_or_default().to_owned())
}

/// Daemons that are told not to have the agent pause.
pub fn through_qmp() -> SceneOptions {
    let mut options = options().calm();
    for host in options.hosts.clone() {
        let mut daemon = daemon().calm();
        daemon.environment.push(("UNDERSTUDY_PAUSE".to_owned(), "qmp".to_owned()));
        options.daemons.insert(host, daemon);
    }
    options
}

#[test]
fn this_qemu_is_paused_by_the_agent() {
    play_protected(options().calm(), |scene, client| {
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
        fail_over_and_reboot(scene)
    });
}

#[test]
fn a_guest_paused_through_qmp_powers_off() {
    play_protected(through_qmp(), power_off);
}

/// As it is of a guest that keeps pictures in its graphics card. The thread that sends panicked, and the
/// guest was ended.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_guest_whose_devices_have_more_state_than_a_message_survives() {
    let mut options = options();
    for daemon in options.daemons.values_mut() {
        *daemon = daemon_passing("pad-device-state=return(9)");
    }
    play_protected(options, |scene, client| {
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}
