//! Backups in lockstep that do otherwise than their primaries: replaced, and never the VM's.

use crate::cluster_deaths::Moment;
use crate::lockstep::{
    SILENCE, armed, await_logged, await_repaired, in_lockstep, lockstep, stop_qemu,
};
use crate::refusals::log_of;
use crate::resync::protect_again;
use crate::stage::{
    Calm, LIMIT, await_degraded, await_forgotten, await_service, close, play_protected, prove_disk,
    prove_survival, repairing_daemon,
};
use anyhow::{Context, Result, ensure};
use understudy_lab::scene::VM;
use understudy_lab::{HostOptions, Scene, wait_for};

#[test]
fn a_backup_that_diverges_is_replaced_and_the_second_time_distrusted() {
    let mut options = lockstep();
    let spoilt = ("FAILPOINTS".to_owned(), "spoil-log=300*off->1*return->off".to_owned());
    // However late the primary comes to read why, it hears nothing else before.
    let slow = ("FAILPOINTS".to_owned(), "before-diverged=sleep(500)".to_owned());
    let a = HostOptions { environment: vec![slow], ..repairing_daemon().calm() };
    options.daemons.insert("a".to_owned(), a);
    let b = HostOptions { environment: vec![spoilt], ..repairing_daemon().calm() };
    options.daemons.insert("b".to_owned(), b);
    play_protected(options, |scene, client| {
        await_divergences(scene, 1)?;
        let kept = scene.host("b")?.directory().join("state").join(VM).join("diverged");
        let report = std::fs::read_to_string(kept.join("report.txt"))?;
        ensure!(report.contains("QEMU got the log up to"), "{report}");
        ensure!(std::fs::metadata(kept.join("log.bin"))?.len() > 0, "no log was kept");
        await_repaired(scene, "lockstep")?;
        in_lockstep(scene, "a")?;
        await_service(&client)?;
        stop_qemu(scene, "b")?;
        await_divergences(scene, 2)?;
        let status = await_repaired(scene, "checkpoint")?;
        let events = status["events"].to_string();
        ensure!(events.contains("diverged twice in a row"), "nobody says why: {events}");
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// It won the VM if its primary died before it had said why.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_copy_that_has_diverged_wins_nothing_while_it_notes_how() {
    let found = Moment::new();
    let spoilt = "spoil-log=300*off->1*return->off";
    let points = format!("{spoilt};{}", found.action("keep-evidence", "1*"));
    play_protected(armed("b", &points), |scene, client| {
        found.await_reached()?;
        scene.host_mut("a")?.kill_everything()?;
        client.abandon();
        // Longer than any silence that it takes for none.
        std::thread::sleep(SILENCE);
        found.end()?;
        await_forgotten(scene, "b")?;
        let log = log_of(scene, "b")?;
        ensure!(!log.contains("taking over at epoch"), "{log}");
        Ok(())
    });
}

/// Only its changed blocks were copied, by the count of what it had written, whatever that was.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn the_mirrors_of_a_copy_that_proves_diverged_at_its_take_over_are_made_anew() {
    play_protected(armed("b", "rest-diverges=return"), |scene, client| {
        in_lockstep(scene, "a")?;
        scene.lab().cut("b")?;
        // Host b wins, and hands it back.
        await_logged(scene, "b", "a test says so")?;
        await_degraded(scene, "a")?;
        await_service(&client)?;
        let kept = scene.host("b")?.directory().join("state").join(VM).join("diverged");
        ensure!(kept.join("report.txt").exists(), "nothing was kept of it");
        scene.lab().heal("b")?;
        let (_, full_because) = protect_again(scene, "a", "b")?;
        ensure!(full_because.is_some(), "only what had changed was copied");
        let acked = close(client)?;
        prove_disk(scene, "a", acked)
    });
}

/// Waits until host a has lost so many backups that did not follow, and says so.
pub fn await_divergences(scene: &Scene, many: usize) -> Result<()> {
    wait_for("the backup to be given up", LIMIT, || {
        let status = scene.status("a")?;
        let events = status["events"].as_array().context("no `events` in the status")?;
        let lost = events.iter().filter(|event| event.to_string().contains("/diverged on this"));
        Ok((lost.count() >= many).then_some(()))
    })
}
