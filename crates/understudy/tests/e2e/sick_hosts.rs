//! Hosts that live and are of no use: no data gets to the backup, the standby hangs, the winner
//! cannot start the guest, a disk answers nothing.

use crate::arbiter::await_fit;
use crate::cluster_deaths::Moment;
use crate::full_epochs::LONG_EPOCHS;
use crate::refusals::log_of;
use crate::sick_disks::await_no_disk_error;
use crate::stage::{
    Calm, HOLE_BYTES, LIMIT, PACE, await_degraded, await_service, close, daemon, daemon_passing,
    fail_over, hand_over, options, play, play_protected, protect_when_taken, protection,
    prove_disk, prove_survival,
};
use anyhow::{Result, ensure};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use understudy_lab::scene::VM;
use understudy_lab::{ArbiterKind, Part, RecordClient, Scene, SceneOptions, wait_for};

fn with_fail_point(host: &str, point: String) -> SceneOptions {
    let mut options = options().calm();
    options.daemons.insert(host.to_owned(), daemon_passing(point));
    options
}

/// A fault: while this file is there, no disk of the host answers.
pub struct Hanging {
    file: PathBuf,
    _directory: TempDir,
}

impl Hanging {
    pub fn new() -> Hanging {
        let directory = tempfile::tempdir().expect("a directory for the test");
        Hanging { file: directory.path().join("hangs"), _directory: directory }
    }

    fn options(&self, host: &str) -> SceneOptions {
        with_fail_point(host, self.action("hang-disk"))
    }

    /// The fail point, of those whose calls hang.
    pub fn action(&self, point: &str) -> String {
        format!("{point}=return({})", self.file.display())
    }

    pub fn begin(&self) -> Result<()> {
        Ok(fs::write(&self.file, "")?)
    }

    pub fn end(&self) -> Result<()> {
        Ok(fs::remove_file(&self.file)?)
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        // Nothing is to wait for it any more.
        let _ = fs::remove_file(&self.file);
    }
}

/// Waits until host a says that its backup could not take over, and why.
pub fn await_unfit(scene: &Scene, words: &str) -> Result<()> {
    wait_for("the primary to say what its backup lacks", LIMIT, || {
        let status = scene.status("a")?;
        let (state, reason) = protection(&status);
        let unfit = state == "degraded" && reason.contains("could not take over now");
        Ok((unfit && reason.contains(words)).then_some(()))
    })
}

/// A time far longer than an epoch may take here on which nothing moves: three times 3 s.
const SILENCE: Duration = Duration::from_secs(30);

/// Whether host a calls its guest protected, which it may as long as nobody waits in vain; `served` has how much was
/// acknowledged, and since when nothing more.
pub fn look_whether_served(
    scene: &Scene,
    client: &RecordClient,
    served: &mut (u64, Instant),
) -> Result<bool> {
    let acked = client.acked();
    if acked != served.0 {
        *served = (acked, Instant::now());
    }
    let called = protection(&scene.status("a")?).0 == "protected";
    ensure!(!called || served.1.elapsed() < SILENCE, "output waits, and it is called protected");
    Ok(called)
}

/// Checks, until host a says that it is not protected, that nobody waits in vain, and is told
/// otherwise.
fn protected_only_while_served(scene: &Scene, client: &RecordClient) -> Result<()> {
    let mut served = (client.acked(), Instant::now());
    wait_for("host a to say that it is not protected", LIMIT, || {
        Ok((!look_whether_served(scene, client, &mut served)?).then_some(()))
    })
}

/// Heartbeats are small, and pass; nothing else does. Before, the guest's output waited until the
/// hole was gone, and `status` said "protected".
#[test]
fn a_backup_that_gets_heartbeats_and_no_data_is_given_up() {
    play(options().calm(), |scene| {
        scene.lab().cut_segments("a")?;
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        scene.lab().limit_frames("b", HOLE_BYTES)?;
        protected_only_while_served(scene, &client)?;
        let reason = await_degraded(scene, "a")?;
        ensure!(reason.contains("the backup is heard, and epoch"), "{reason}");
        await_service(&client)?;
        ensure!(scene.status("a")?["live"] == true, "the primary had the better right");
        scene.lab().limit_frames("b", 1500)?;
        protect_when_taken(scene, "a", "b")?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// Writes more than waits to be sent at most, once no epoch is on its way, and before the guest says something by itself
/// (its system looks for its neighbour after 5 s).
const WRITE_LATER: &str =
    "sleep 3; while :; do dd if=/dev/zero of=/data/much bs=1M count=64 conv=notrunc,fsync; done";

/// The guest stood still until the system gave the connection up, 20 to 30 s, and `status` said "protected": nothing was on its way
/// that could have been late.
#[test]
fn a_backup_that_gets_nothing_of_the_epoch_that_runs_is_given_up() {
    let options = SceneOptions { policy: Some(LONG_EPOCHS), ..options().calm() };
    play(options, |scene| {
        scene.lab().cut_segments("a")?;
        scene.protected_guest("a", "b")?;
        scene.shell()?.start(WRITE_LATER)?;
        thread::sleep(Duration::from_secs(2));
        scene.lab().limit_frames("b", HOLE_BYTES)?;
        let reason = await_degraded(scene, "a")?;
        // The second if a checkpoint, which a busy machine may take late, was on its way as the hole opened.
        let told = ["has waited for room on its way", "without any movement"];
        ensure!(told.iter().any(|words| reason.contains(words)), "{reason}");
        ensure!(scene.status("a")?["live"] == true, "the primary had the better right");
        scene.lab().limit_frames("b", 1500)?;
        scene.shell()?.run("true")?;
        Ok(())
    });
}

/// Host b had won the VM of host a, and handed it back to the same QEMU.
fn was_handed_back(scene: &Scene, qemu: u32) -> Result<()> {
    let status = scene.status("a")?;
    ensure!(status["generation"] == 3, "won, and handed back: {status}");
    ensure!(scene.host("a")?.qemu_pid(VM)? == qemu, "it is another QEMU: {status}");
    Ok(())
}

/// The sound guest was once ended as soon as the other host had won, and nobody had it.
fn planned_fail_over_to_a_host_that_cannot(arbiter: ArbiterKind) {
    let mut options = with_fail_point("b", "before-start=1*return".to_owned());
    options.daemons.entry("a".to_owned()).or_insert_with(|| daemon().calm());
    options.daemons.values_mut().for_each(|daemon| daemon.arbiter = arbiter);
    play_protected(options, |scene, client| {
        let qemu = scene.host("a")?.qemu_pid(VM)?;
        let output = fail_over(scene.host("a")?, VM)?;
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(!output.status.success(), "it was handed over");
        ensure!(words.contains("goes on here without having lost anything"), "{words}");
        ensure!(words.contains("a test says so"), "{words}");
        await_service(&client)?;
        was_handed_back(scene, qemu)?;
        protect_when_taken(scene, "a", "b")?;
        hand_over(scene.host("a")?, VM)?;
        prove_survival(scene, client, "b")
    });
}

#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_planned_fail_over_to_a_host_that_cannot_start_it_loses_nothing() {
    planned_fail_over_to_a_host_that_cannot(ArbiterKind::File);
}

#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn with_etcd_a_planned_fail_over_to_a_host_that_cannot_start_it_loses_nothing() {
    planned_fail_over_to_a_host_that_cannot(ArbiterKind::Etcd);
}

/// The link is cut: the backup wins first, and its QEMU ends before it has started the guest.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_guest_that_lost_the_contest_goes_on_where_the_winner_could_not_start_it() {
    // Host b stands still before its guest runs.
    let won = Moment::new();
    let point = won.action("before-activation", "1*");
    play_protected(with_fail_point("b", point), |scene, client| {
        let qemu = scene.host("a")?.qemu_pid(VM)?;
        let standby = scene.host("b")?.qemu_pid(VM)?;
        scene.lab().cut("b")?;
        won.await_reached()?;
        let output = scene.host("b")?.cli(["status", VM])?;
        let words = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(words.contains("has not started it yet"), "`status` said {words}");
        ensure!(output.status.code() == Some(3), "`status` ended with {}", output.status);
        scene.host_mut("b")?.kill(Part::Process(standby))?;
        won.end()?;
        await_service(&client)?;
        was_handed_back(scene, qemu)?;
        scene.lab().heal("b")?;
        protect_when_taken(scene, "a", "b")?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// The record is on another disk than the mirrors, say, and that one hangs. Before, the winner counted as one that starts
/// the guest, and the sound one stood still for ever.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_guest_goes_on_where_the_winner_does_not_come_to_write_its_record() {
    let recording = Moment::new();
    play_protected(with_fail_point("b", recording.action("activate", "1*")), |scene, client| {
        let qemu = scene.host("a")?.qemu_pid(VM)?;
        scene.lab().cut("b")?;
        recording.await_reached()?;
        scene.lab().heal("b")?;
        await_service(&client)?;
        was_handed_back(scene, qemu)?;
        recording.end()?;
        protect_when_taken(scene, "a", "b")?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// The arbiter grants it the VM, and its QEMU ends before it hears of that: it returns what it cannot
/// use. Nobody would have the VM.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_grant_that_comes_too_late_is_returned() {
    // The arbiter's answer is on its way to host b.
    let answered = Moment::new();
    let point = answered.action("before-verdict", "1*");
    play_protected(with_fail_point("b", point), |scene, client| {
        let qemu = scene.host("a")?.qemu_pid(VM)?;
        let standby = scene.host("b")?.qemu_pid(VM)?;
        scene.lab().cut("b")?;
        answered.await_reached()?;
        let kept = scene.await_kept("a")?;
        ensure!(kept["live"] == false, "{kept}");
        scene.host_mut("b")?.kill(Part::Process(standby))?;
        wait_for("host b to give up", LIMIT, || {
            Ok(log_of(scene, "b")?.contains("forgetting the VM").then_some(()))
        })?;
        answered.end()?;
        await_service(&client)?;
        was_handed_back(scene, qemu)?;
        let log = log_of(scene, "b")?;
        ensure!(!log.contains("taking over at epoch"), "it was not too late: {log}");
        let acked = close(client)?;
        prove_disk(scene, "a", acked)
    });
}

/// Its daemon dies after the arbiter has granted it the VM, and before anything runs: what is
/// started anew knows of no grant, and returns it when it is asked.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_winner_that_dies_before_it_starts_the_guest_returns_it_when_it_is_back() {
    let point = "before-activation=1*sleep(60000)".to_owned();
    play_protected(with_fail_point("b", point), |scene, client| {
        scene.lab().cut("b")?;
        wait_for("host b to win the VM", LIMIT, || {
            Ok(log_of(scene, "b")?.contains("taking over at epoch").then_some(()))
        })?;
        let kept = scene.await_kept("a")?;
        ensure!(kept["live"] == false, "{kept}");
        scene.host_mut("b")?.kill_everything()?;
        scene.lab().heal("b")?;
        scene.revive("b")?;
        await_service(&client)?;
        scene.await_live("a")?;
        let acked = close(client)?;
        prove_disk(scene, "a", acked)
    });
}

/// The VM was once called protected, and had nobody once its primary died.
#[test]
fn a_standby_that_hangs_is_no_protection_and_contests_nothing() {
    play_protected(options().calm(), |scene, client| {
        let standby = scene.host("b")?.qemu_pid(VM)?;
        scene.host("b")?.stall(Part::Process(standby))?;
        await_unfit(scene, "its QEMU has not answered for")?;
        await_service(&client)?;
        let refusal = scene.host("a")?.cli(["failover", VM])?;
        ensure!(!refusal.status.success(), "handed over to a QEMU that hangs");
        scene.host("b")?.resume()?;
        await_fit(scene, "a")?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// Its primary dies meanwhile: it waits until its QEMU answers, then takes over.
#[test]
fn a_standby_that_hangs_takes_over_once_it_does_not() {
    play_protected(options().calm(), |scene, client| {
        let standby = scene.host("b")?.qemu_pid(VM)?;
        scene.host("b")?.stall(Part::Process(standby))?;
        await_unfit(scene, "its QEMU has not answered for")?;
        scene.host_mut("a")?.kill_everything()?;
        wait_for("host b to say what it waits for", LIMIT, || {
            let status: Value = scene.status("b")?;
            let reason = protection(&status).1.to_owned();
            ensure!(status["live"] == false, "a QEMU that hangs went live");
            Ok(reason.contains("its QEMU has not answered").then_some(()))
        })?;
        scene.host("b")?.resume()?;
        prove_survival(scene, client, "b")
    });
}

/// The VM was once called protected for as long as nobody had to take over.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_backup_whose_disk_hangs_is_no_protection() {
    let hanging = Hanging::new();
    play_protected(hanging.options("b"), |scene, client| {
        hanging.begin()?;
        await_unfit(scene, "its disk has not answered for")?;
        hanging.end()?;
        await_fit(scene, "a")?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// The guest once stood still on the host with the bad disk, or flushed into nothing.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_primary_whose_disk_hangs_is_taken_over() {
    let hanging = Hanging::new();
    play_protected(hanging.options("a"), |scene, client| {
        hanging.begin()?;
        scene.await_live("b")?;
        wait_for("host a to say why", LIMIT, || {
            let status = scene.status("a")?;
            let reason = protection(&status).1.contains("disk0 has not answered for");
            Ok((status["role"] == "fenced" && reason).then_some(()))
        })?;
        hanging.end()?;
        scene.await_fenced("a")?;
        prove_survival(scene, client, "b")
    });
}

/// A VM was once called protected while its backup forgot it.
#[test]
fn a_vm_that_its_backup_forgets_is_not_protected() {
    play_protected(options().calm(), |scene, client| {
        scene.host("b")?.pause()?;
        thread::scope(|scope| {
            let unprotect = scope.spawn(|| scene.host("a")?.cli(["unprotect", VM]));
            let said = wait_for("host a to say that it is forgotten", LIMIT, || {
                let output = scene.host("a")?.cli(["status", VM])?;
                let words = String::from_utf8_lossy(&output.stdout);
                let forgets = words.contains("host b forgets the VM");
                ensure!(!forgets || output.status.code() == Some(3), "{}", output.status);
                Ok(forgets.then_some(()))
            });
            scene.host("b")?.resume()?;
            unprotect.join().expect("it returns errors")?;
            said
        })?;
        prove_survival(scene, client, "a")
    });
}

/// The guest has nobody who could take over: `status` says so, with exit code 3, until the disk
/// answers.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn an_unprotected_guest_whose_disk_hangs_is_said_to_stand_still() {
    let hanging = Hanging::new();
    play(hanging.options("a"), |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        hanging.begin()?;
        wait_for("status to say that the guest stands still", LIMIT, || {
            let output = scene.host("a")?.cli(["status", VM, "--json"])?;
            let status: Value = serde_json::from_slice(&output.stdout)?;
            let Some(error) = status["disk_error"].as_str() else { return Ok(None) };
            ensure!(error.contains("disk0 has not answered for"), "{error}");
            ensure!(output.status.code() == Some(3), "{:?} with {error}", output.status);
            Ok(Some(()))
        })?;
        hanging.end()?;
        await_service(&client)?;
        await_no_disk_error(scene)?;
        let acked = close(client)?;
        prove_disk(scene, "a", acked)
    });
}
