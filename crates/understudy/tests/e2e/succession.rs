//! A VM goes on in another QEMU on its host, so that it can be protected in lockstep.

use crate::stage::{
    Calm, LIMIT, PACE, await_service, close, daemon, options, play, prove_disk, refusal,
};
use anyhow::{Context, Result, bail, ensure};
use std::path::Path;
use understudy_lab::scene::VM;
use understudy_lab::{GuestShell, HostOptions, Scene, SceneOptions, wait_for};

fn pid(scene: &Scene) -> Result<u64> {
    scene.status("a")?["qemu_pid"].as_u64().context("no QEMU")
}

/// Seconds by the guest's system clock and by its real-time clock, which are two clocks.
fn clocks(shell: &mut GuestShell) -> Result<(f64, f64)> {
    let said = shell.run("cut -d' ' -f1 /proc/uptime; cat /sys/class/rtc/rtc0/since_epoch")?.text;
    let mut lines = said.lines().map(|line| line.trim().parse::<f64>());
    match (lines.next(), lines.next()) {
        (Some(Ok(system)), Some(Ok(real_time))) => Ok((system, real_time)),
        _ => bail!("the guest's clocks: {said}"),
    }
}

/// The guest's clocks go on at one pace: one that counted at another rate than the guest was
/// told would be off by a factor of two or more.
fn prove_time(scene: &Scene) -> Result<()> {
    let mut shell = scene.shell()?;
    let before = clocks(&mut shell)?;
    let passed = wait_for("ten seconds of the guest's", LIMIT, || {
        let now = clocks(&mut shell)?;
        let passed = (now.0 - before.0, now.1 - before.1);
        Ok((passed.1 >= 10.0).then_some(passed))
    })?;
    let pace = passed.0 / passed.1;
    ensure!((0.7..1.4).contains(&pace), "seconds by system and real-time clock: {passed:?}");
    Ok(())
}

/// The next QEMU cannot load what it is given: the guest goes on in the former.
fn does_not_move(scene: &Scene) -> Result<()> {
    let former = pid(scene)?;
    let lockstep = ["protect", VM, "--to", "b", "--mode", "lockstep"];
    let (code, words) = refusal(scene.host("a")?, &lockstep)?;
    ensure!(code == 1 && words.contains("it goes on as it was"), "{code}: {words}");
    let status = scene.status("a")?;
    ensure!(status["qemu_pid"] == former && status["live"] == true, "{status}");
    ensure!(status["protection"]["state"] == "off", "{status}");
    let events = status["events"].to_string();
    ensure!(events.contains("cannot be moved into another QEMU"), "no event: {events}");
    Ok(())
}

#[test]
fn a_running_guest_is_moved_followed_and_taken_over() {
    let mut small = SceneOptions { memory_mib: 256, accel: Some("tcg".into()), ..options().calm() };
    let spoilt = ("FAILPOINTS".to_owned(), "spoil-state=1*return->off".to_owned());
    small
        .daemons
        .insert("a".to_owned(), HostOptions { environment: vec![spoilt], ..daemon().calm() });
    play(small, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        let former = pid(scene)?;
        does_not_move(scene)?;
        await_service(&client)?;
        scene.host("a")?.call(["protect", VM, "--to", "b", "--mode", "lockstep", "--no-wait"])?;
        let events = scene.status("a")?["events"].to_string();
        ensure!(events.contains("goes on in another QEMU"), "no event: {events}");
        ensure!(pid(scene)? != former, "it was not moved: {events}");
        ensure!(!Path::new(&format!("/proc/{former}")).exists(), "two QEMUs live");
        await_service(&client)?;
        scene.await_protected("a", |_| ())?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        await_service(&client)?;
        let acked = close(client)?;
        // The backup's QEMU counts the guest's time as the primary's did.
        prove_time(scene)?;
        prove_disk(scene, "b", acked)
    });
}

#[test]
fn a_guest_that_was_taken_over_gets_a_backup_again() {
    let recording = SceneOptions { memory_mib: 256, lockstep: true, ..options().calm() };
    play(SceneOptions { accel: Some("tcg".into()), ..recording }, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        for (from, to) in [("a", "b"), ("b", "a")] {
            let lockstep = ["protect", VM, "--to", to, "--mode", "lockstep", "--no-wait"];
            scene.host(from)?.call(lockstep)?;
            scene.await_protected(from, |_| ())?;
            await_service(&client)?;
            scene.host_mut(from)?.kill_everything()?;
            scene.await_live(to)?;
            await_service(&client)?;
            scene.restart(from)?;
        }
        let acked = close(client)?;
        prove_disk(scene, "a", acked)
    });
}
