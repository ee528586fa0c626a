//! Tests of what people do on purpose: fail over, end protection, stop, reboot.

use crate::stage::{
    Calm, LIMIT, PACE, await_forgotten, await_service, close, hand_over, options, play,
    play_protected, protection, prove_disk, prove_survival, vms,
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::io::Write;
use std::process::{Command, Stdio};
use understudy_lab::check::check_disk;
use understudy_lab::scene::VM;
use understudy_lab::{RecordClient, Scene, wait_for};

#[test]
fn planned_fail_overs_lose_nothing() {
    play_protected(options().calm(), |scene, client| {
        for (from, to) in [("a", "b"), ("b", "a")] {
            hand_over(scene.host(from)?, VM)?;
            let status = scene.await_live(to)?;
            await_forgotten(scene, from)?;
            told_as_planned(scene, to, from, &status)?;
            await_service(&client)?;
            scene.protect(to, from)?;
            scene.await_protected(to, |_| ())?;
        }
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// The new host says that it was planned, and raises no alarm: not in events, not in metrics.
fn told_as_planned(scene: &Scene, host: &str, from: &str, status: &Value) -> Result<()> {
    let words = format!("came over from {from} as planned");
    ensure!(protection(status).1.contains(&words), "{status}");
    ensure!(status["takeover"]["planned"] == true, "{status}");
    let events: Value = serde_json::from_str(&scene.host(host)?.call(["events", "--json"])?)?;
    let events = events["events"].as_array().context("no events")?;
    let last = |kind: &str| events.iter().rev().find(|event| event["kind"] == kind);
    let came = last("came-over").with_context(|| format!("no event: {events:?}"))?;
    ensure!(came["severity"] == "info" && came["from"] == *from, "{came}");
    ensure!(last("took-over").is_none(), "it is told as a failure, too: {events:?}");
    Ok(())
}

// Before, a backup that was silent while it forgot the VM was lost, and the arbiter was asked: without one the guest's
// output stood still.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_backup_that_takes_its_time_to_forget_is_no_loss_and_needs_no_arbiter() {
    let mut options = options().calm();
    for daemon in options.daemons.values_mut() {
        daemon.settings += "lease_seconds = 0\n";
    }
    let slow = ("FAILPOINTS".to_owned(), "forget=sleep(1500)".to_owned());
    options.daemons.get_mut("b").expect("a host b").environment.push(slow);
    play_protected(options, |scene, client| {
        await_service(&client)?;
        for host in ["a", "b"] {
            scene.host(host)?.hide(&scene.lab().arbiter_directory())?;
        }
        scene.host("a")?.call(["unprotect", VM])?;
        let status = scene.status("a")?;
        ensure!(protection(&status).0 == "off" && status["generation"] == 1, "{status}");
        let events: Value = serde_json::from_str(&scene.host("a")?.call(["events", "--json"])?)?;
        let events = events["events"].as_array().context("no events")?;
        ensure!(events.iter().all(|event| event["kind"] != "contested"), "{events:?}");
        await_service(&client)?;
        for host in ["a", "b"] {
            scene.host(host)?.unhide(&scene.lab().arbiter_directory())?;
        }
        await_forgotten(scene, "b")?;
        prove_disk(scene, "a", close(client)?)
    });
}

// Before, the backup stood by for a VM that was no more.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_guest_that_powers_off_as_its_protection_begins_leaves_nothing_on_the_backup() {
    let mut options = options().calm();
    let slow = ("FAILPOINTS".to_owned(), "note-session=sleep(15000)".to_owned());
    options.daemons.get_mut("a").expect("a host a").environment.push(slow);
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let (a, b) = (scene.host("a")?, scene.host("b")?);
        let protecting = a.begin(["protect", VM, "--to", "b", "--no-wait"])?;
        wait_for("host b to stand by", LIMIT, || Ok((vms(b)?.len() == 1).then_some(())))?;
        scene.shell()?.start("poweroff")?;
        wait_for("the VM to be gone", LIMIT, || Ok(vms(a)?.is_empty().then_some(())))?;
        protecting.wait_with_output()?;
        await_forgotten(scene, "b")
    });
}

#[test]
fn the_end_of_protection_leaves_nothing_on_the_backup() {
    play_protected(options().calm(), |scene, client| {
        scene.host("a")?.call(["unprotect", VM])?;
        let status = scene.status("a")?;
        ensure!(protection(&status).0 == "off", "still protected: {status}");
        await_forgotten(scene, "b")?;
        await_service(&client)?;
        // The backup's death is nothing to a guest that it does not back up.
        scene.host_mut("b")?.kill_everything()?;
        await_service(&client)?;
        let acked = close(client)?;
        prove_disk(scene, "a", acked)
    });
}

#[test]
fn a_protected_guest_is_stopped() {
    play_protected(options().calm(), |scene, client| {
        let image = scene.disk("a", 0)?;
        let acked = close(client)?;
        scene.host("a")?.call(["vm", "stop", VM])?;
        await_forgotten(scene, "a")?;
        await_forgotten(scene, "b")?;
        let check = check_disk(&image, acked)?;
        ensure!(check.is_intact(), "{check:#?}");
        // Stopped in order, it is nobody's: it can be started anew.
        scene.start_guest("a")?;
        ensure!(scene.status("a")?["live"] == true, "the guest does not run");
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        Ok(())
    });
}

#[test]
fn a_protected_guest_powers_off() {
    play_protected(options().calm(), power_off);
}

/// The guest must find its firmware after the fail-over where it always was.
#[test]
fn a_guest_reboots_on_either_host() {
    play(options().calm(), |scene| {
        scene.protected_guest("a", "b")?;
        reboot(scene, "a")?;
        scene.await_protected("a", |_| ()).context("a reboot ended protection")?;
        fail_over_and_reboot(scene)
    });
}

/// The guest, protected on host a, powers off; its disk is whole and both hosts forget it.
pub fn power_off(scene: &mut Scene, client: RecordClient) -> Result<()> {
    let image = scene.disk("a", 0)?;
    let acked = close(client)?;
    scene.shell()?.start("poweroff")?;
    await_forgotten(scene, "a")?;
    await_forgotten(scene, "b")?;
    let check = check_disk(&image, acked)?;
    ensure!(check.is_intact(), "{check:#?}");
    Ok(())
}

/// Host a dies, and the guest reboots where it goes on.
pub fn fail_over_and_reboot(scene: &mut Scene) -> Result<()> {
    let client = scene.record_client(PACE)?;
    await_service(&client)?;
    scene.host_mut("a")?.kill_everything()?;
    scene.await_live("b")?;
    await_service(&client)?;
    let acked = close(client)?;
    reboot(scene, "b")?;
    prove_disk(scene, "b", acked)
}

/// Reboots the guest on `host` and waits until its servers answer again.
pub fn reboot(scene: &Scene, host: &str) -> Result<()> {
    scene.shell()?.start("reboot")?;
    wait_for("the guest to reboot", LIMIT, || {
        let status = scene.status(host)?;
        let events = status["events"].as_array().context("no `events` in the status")?;
        Ok(events.iter().any(|event| event == "the guest rebooted").then_some(()))
    })?;
    scene.await_guest()?;
    // Its firmware resets the machine once more, which was told as another reboot.
    let status = scene.status(host)?;
    let events = status["events"].as_array().context("no `events` in the status")?;
    let told = events.iter().filter(|event| *event == "the guest rebooted").count();
    ensure!(told == 1, "one reboot was told {told} times: {events:?}");
    Ok(())
}

#[test]
fn the_console_follows_the_guest() {
    play_protected(options().calm(), |scene, client| {
        await_answer(scene, "a", "echo one-$((40 + 1))", "one-41")?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        await_answer(scene, "b", "echo two-$((40 + 2))", "two-42")?;
        prove_survival(scene, client, "b")
    });
}

/// The command waits a moment for an answer, which a busy machine's guest may miss.
fn await_answer(scene: &Scene, host: &str, line: &str, answer: &str) -> Result<()> {
    wait_for(&format!("{answer:?} on host {host}"), LIMIT, || {
        Ok(console(scene, host, VM, line)?.contains(answer).then_some(()))
    })
}

/// The output of `vm console` when a line is piped into it.
pub fn console(scene: &Scene, host: &str, vm: &str, line: &str) -> Result<String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_understudy"))
        .arg("--socket")
        .arg(scene.host(host)?.socket())
        .args(["vm", "console", vm])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    command.stdin.take().context("no pipe")?.write_all(format!("{line}\n").as_bytes())?;
    let output = command.wait_with_output()?;
    ensure!(output.status.success(), "`vm console` failed: {output:?}");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// SIGTERM to a daemon hands its protected guests over.
#[test]
fn a_daemon_that_ends_hands_its_guest_over() {
    play_protected(options().calm(), |scene, client| {
        scene.await_protected("a", |_| ())?;
        let status = scene.host_mut("a")?.terminate()?;
        ensure!(status.success(), "the daemon ended with {status}");
        scene.await_live("b")?;
        ensure!(vms(scene.host("b")?)?.len() == 1, "b knows other VMs");
        prove_survival(scene, client, "b")
    });
}
