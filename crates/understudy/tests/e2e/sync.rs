//! Failures during the first synchronisation: the VM is not protected yet, so
//! its host's death is its own, and nobody else's is.

use crate::deaths::await_empty;
use crate::relay::{Fault, Relay, Then};
use crate::stage::{
    Calm, PACE, await_degraded, await_forgotten, await_service, close, options, play, protection,
    prove_disk, prove_survival,
};
use anyhow::{Context, Result, ensure};
use std::process::{Child, Command, Stdio};
use understudy_lab::scene::VM;
use understudy_lab::{RecordClient, Scene, SceneOptions, check::check_disk};
use understudy_protocol::Epoch;
use understudy_protocol::wire::Kind;

/// The usual guest, its host's way to host b through the relay.
fn relayed() -> SceneOptions {
    let mut options = options().calm();
    options.daemons.insert("a".to_owned(), Relay::options());
    options
}

/// The first synchronisation of memory stops in its midst.
const STALL: Fault = Fault {
    from_primary: true,
    fits: |header| header.kind == Kind::Pages && header.epoch == Epoch(0),
    damage: |_| Then::Hold,
};

/// Boots the guest on host a, serves a client, and lets `protect` come to a
/// stand; returns that command, which waits.
fn stall(scene: &Scene, relay: &Relay) -> Result<(RecordClient, Child)> {
    scene.start_guest("a")?;
    scene.await_guest()?;
    let client = scene.record_client(PACE)?;
    await_service(&client)?;
    relay.arm(STALL);
    let protect = protect_and_wait(scene)?;
    relay.await_strike()?;
    let status = scene.status("a")?;
    ensure!(protection(&status).0 == "syncing", "a does not synchronise: {status}");
    Ok((client, protect))
}

/// `understudy protect guest --to b`, which waits for the end of the first
/// synchronisation.
fn protect_and_wait(scene: &Scene) -> Result<Child> {
    Command::new(env!("CARGO_BIN_EXE_understudy"))
        .arg("--socket")
        .arg(scene.host("a")?.socket())
        .args(["protect", VM, "--to", "b"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot run `understudy protect`")
}

#[test]
fn a_host_is_killed_during_first_synchronisation() {
    play(relayed(), |scene| {
        let relay = Relay::start(scene)?;
        let (client, protect) = stall(scene, &relay)?;
        let watcher = scene.watch_uplink("b", 0)?;
        let image = scene.disk("a", 0)?;
        let acked = client.acked();
        scene.host_mut("a")?.kill_everything()?;
        await_forgotten(scene, "b")?;
        ensure!(watcher.count()? == 0, "b sent something in the guest's name");
        ensure!(!protect.wait_with_output()?.status.success(), "`protect` succeeded");
        // The guest died, as any guest does with its host; its disk is a crash's.
        drop(client);
        let check = check_disk(&image, acked)?;
        ensure!(check.is_intact(), "{check:#?}");
        // And it is still host a's to start.
        scene.restart("a")?;
        scene.start_guest("a")?;
        scene.await_guest()?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        Ok(())
    });
}

#[test]
fn a_backup_vanishes_during_first_synchronisation() {
    play(relayed(), |scene| {
        let relay = Relay::start(scene)?;
        let (client, protect) = stall(scene, &relay)?;
        scene.host_mut("b")?.kill_everything()?;
        await_empty(scene, "b")?;
        let reason = await_degraded(scene, "a")?;
        let protect = protect.wait_with_output()?;
        let words = String::from_utf8_lossy(&protect.stderr);
        ensure!(protect.status.code() == Some(3), "`protect` ended with {protect:?}");
        ensure!(words.contains(&reason), "`protect` said {words}, `status` {reason}");
        await_service(&client)?;
        scene.restart("b")?;
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_first_synchronisation_is_called_off() {
    play(relayed(), |scene| {
        let relay = Relay::start(scene)?;
        let (client, protect) = stall(scene, &relay)?;
        scene.host("a")?.call(["unprotect", VM])?;
        let status = scene.status("a")?;
        ensure!(protection(&status).0 == "off", "still protected: {status}");
        ensure!(protect.wait_with_output()?.status.code() == Some(3), "`protect` succeeded");
        drop(relay);
        await_forgotten(scene, "b")?;
        await_service(&client)?;
        let acked = close(client)?;
        prove_disk(scene, "a", acked)
    });
}
