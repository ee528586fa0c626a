//! VMs in lockstep: the backup executes the primary's log. The same failures as of VMs with
//! checkpoints; what clients see is proved in the same way, and the console of the backup is
//! that of the primary, and more.

use crate::cluster_deaths::Moment;
use crate::datagrams::Datagrams;
use crate::deaths::kill_the_standby_qemu;
use crate::deaths::{await_rounds, unharmed};
use crate::planned::power_off;
use crate::refusals::log_of;
use crate::stage::{
    Calm, LIMIT, LOAD_PACE, PACE, await_degraded, await_forgotten, await_service, close,
    daemon_passing, hand_over, options, play, play_protected, prove_disk, prove_survival, refusal,
    refused, repairing_daemon,
};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use serde_json::Value;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use understudy_lab::scene::{ECHO_PORT, RECORDS_PORT, VM};
use understudy_lab::{ChatterClient, Load, Part, Scene, SceneOptions, wait_for};

/// The words of the guest once it has booted.
const READY: &str = "UNDERSTUDY-GUEST-READY";

/// The command that keeps the guest's disk and its console busy.
pub const BUSY: &str = "n=0; while :; do dd if=/dev/urandom of=/data/noise bs=64k count=8; sync; \
                    n=$((n + 1)); echo round $n > /dev/console; done";

/// The bytes of words on the console, more than a socket has room for the log of.
const LOG_ROOM: usize = 256 << 10;

/// The command that fills the log.
pub const FLOOD: &str = "exec yes > /dev/console";

/// The command that has the guest say something ten times a second, and a silence that it does not
/// keep then.
const TICKS: &str = "while :; do echo tick > /dev/console; sleep 0.1; done";
pub const SILENCE: Duration = Duration::from_secs(5);

pub fn lockstep() -> SceneOptions {
    SceneOptions { lockstep: true, memory_mib: 256, ..options().calm() }
}

/// The same; this host's daemon passes these fail points.
pub fn armed(host: &str, points: &str) -> SceneOptions {
    let mut options = lockstep();
    options.daemons.insert(host.to_owned(), daemon_passing(points));
    options
}

#[test]
fn a_primary_is_killed_at_rest() {
    play_protected(lockstep(), |scene, client| {
        in_lockstep(scene, "a")?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_primary_is_killed_under_load() {
    play_protected(lockstep(), |scene, client| {
        in_lockstep(scene, "a")?;
        let quiet = console_of(scene, "a")?.len();
        scene.shell()?.start(BUSY)?;
        let lab = scene.lab();
        let pings =
            ChatterClient::start(lab, scene.guest(RECORDS_PORT), 8, Load::Pings, LOAD_PACE)?;
        let bulk =
            ChatterClient::start(lab, scene.guest(ECHO_PORT), 2, Load::Bulk(16 * 1024), LOAD_PACE)?;
        await_rounds(&pings, 20)?;
        await_rounds(&bulk, 5)?;
        wait_for("the primary to say something", LIMIT, || {
            Ok((console_of(scene, "a")?.len() > quiet).then_some(()))
        })?;
        let console = console_log(scene, "a")?;
        scene.host_mut("a")?.kill_everything()?;
        let said = std::fs::read(console)?;
        scene.await_live("b")?;
        await_rounds(&pings, 5)?;
        await_rounds(&bulk, 2)?;
        await_service(&client)?;
        unharmed(&pings.stop())?;
        unharmed(&bulk.stop())?;
        no_disk_errors(scene, "b")?;
        wait_for("the backup to say what the primary said", LIMIT, || {
            Ok((console_of(scene, "b")?.len() >= said.len() - quiet).then_some(()))
        })?;
        let says = console_of(scene, "b")?;
        let [primary, backup] = [&said[quiet..], &says].map(String::from_utf8_lossy);
        ensure!(
            backup.starts_with(&*primary),
            "the primary said {primary:?}, the backup {backup:?}"
        );
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_primary_is_killed_while_its_guest_boots() {
    // Its log is one of a boot from the first instruction, too.
    play(SceneOptions { booted: false, ..lockstep() }, |scene| {
        scene.protected_guest("a", "b")?;
        let console = console_log(scene, "a")?;
        scene.shell()?.start("reboot -f")?;
        wait_for("the guest to reboot", LIMIT, || {
            let events = scene.status("a")?["events"].to_string();
            Ok(events.contains("the guest rebooted").then_some(()))
        })?;
        scene.host_mut("a")?.kill_everything()?;
        let said = String::from_utf8_lossy(&std::fs::read(console)?).into_owned();
        ensure!(said.matches(READY).count() == 1, "the guest was up again: {said}");
        // What was left of the log of a boot takes its time.
        wait_for("the backup to run the guest", LIMIT, || {
            Ok((scene.status("b")?["live"] == true).then_some(()))
        })?;
        scene.await_guest()?;
        prove_survival(scene, scene.record_client(PACE)?, "b")
    });
}

#[test]
fn a_primary_is_cut_off() {
    play_protected(lockstep(), |scene, client| {
        scene.shell()?.start(BUSY)?;
        let (a, b) = (scene.watch_uplink("a", 0)?, scene.watch_uplink("b", 0)?);
        let cut_at = Instant::now();
        scene.lab().cut("a")?;
        scene.await_live("b")?;
        await_service(&client)?;
        let kept = scene.await_kept("a")?;
        ensure!(kept["live"] == false, "a still lives: {kept}");
        let first = b.first_frame_after(cut_at)?.context("b answered no client")?;
        ensure!(a.frames_after(first)? == 0, "a still sent something after b had begun to");
        scene.lab().heal("a")?;
        scene.await_fenced("a")?;
        await_service(&client)?;
        prove_survival(scene, client, "b")
    });
}

/// A copy that lost once ran on, unseen.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_copy_that_lost_the_contest_stands_still_until_it_is_handed_back() {
    // Host b stands still before its guest runs.
    let won = Moment::new();
    play_protected(armed("b", &won.action("before-activation", "1*")), |scene, client| {
        in_lockstep(scene, "a")?;
        scene.shell()?.start(TICKS)?;
        let standby = scene.host("b")?.qemu_pid(VM)?;
        scene.lab().cut("b")?;
        won.await_reached()?;
        scene.await_kept("a")?;
        let said = await_silence(scene, "a")?;
        scene.host_mut("b")?.kill(Part::Process(standby))?;
        won.end()?;
        await_service(&client)?;
        wait_for("the guest to say something again", LIMIT, || {
            Ok((console_of(scene, "a")?.len() > said).then_some(()))
        })?;
        let acked = close(client)?;
        prove_disk(scene, "a", acked)
    });
}

/// Waits until the guest, which says something ten times a second, does not any more; how much it
/// has said.
fn await_silence(scene: &Scene, host: &str) -> Result<usize> {
    wait_for("the guest to stand still", LIMIT, || {
        let said = console_of(scene, host)?.len();
        std::thread::sleep(SILENCE);
        Ok((console_of(scene, host)?.len() == said).then_some(said))
    })
}

#[test]
fn qemu_of_a_primary_is_killed() {
    play_protected(lockstep(), |scene, client| {
        scene.host("a")?.kill_qemu(VM)?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_backup_dies_and_another_one_follows() {
    play_protected(lockstep(), |scene, client| {
        scene.shell()?.start(BUSY)?;
        scene.host_mut("b")?.kill_everything()?;
        await_degraded(scene, "a")?;
        await_service(&client)?;
        scene.restart("b")?;
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        in_lockstep(scene, "a")?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn the_qemu_of_a_backup_dies() {
    kill_the_standby_qemu(lockstep());
}

#[test]
fn a_planned_fail_over_loses_nothing() {
    hand_over_under(BUSY, lockstep());
}

fn hand_over_under(load: &str, options: SceneOptions) {
    play_protected(options, |scene, client| {
        in_lockstep(scene, "a")?;
        scene.shell()?.start(load)?;
        hand_over(scene.host("a")?, VM)?;
        scene.await_live("b")?;
        await_forgotten(scene, "a")?;
        prove_survival(scene, client, "b")
    });
}

/// The log was once read by nobody while the guest was to be stopped, and it could not be.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_log_that_is_full_as_the_guest_is_handed_over_holds_nobody_up() {
    hand_over_under(FLOOD, armed("a", "log-fills=return"));
}

/// What came beyond 4 MiB while the guest was being stopped was once left out, and what the guest had sent meanwhile left.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_log_that_is_long_as_the_guest_is_handed_over_goes_over_whole() {
    play_protected(armed("a", "log-fills=return(5)"), |scene, client| {
        in_lockstep(scene, "a")?;
        let datagrams = Datagrams::start(scene)?;
        hand_over(scene.host("a")?, VM)?;
        drop(datagrams);
        scene.await_live("b")?;
        await_forgotten(scene, "a")?;
        prove_survival(scene, client, "b")
    });
}

/// A guest once stood still for good when nobody read what it logged.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_guest_whose_log_cannot_begin_goes_on_without_a_backup() {
    play(armed("a", "log-begins=1*return"), |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = scene.record_client(PACE)?;
        scene.shell()?.start(FLOOD)?;
        scene.protect("a", "b")?;
        let reason = await_degraded(scene, "a")?;
        ensure!(reason.contains("a test says so"), "{reason}");
        let said = console_of(scene, "a")?.len();
        wait_for("the guest to say more than a log has room for", LIMIT, || {
            Ok((console_of(scene, "a")?.len() > said + LOG_ROOM).then_some(()))
        })?;
        await_service(&client)?;
        let acked = close(client)?;
        prove_disk(scene, "a", acked)
    });
}

#[test]
fn the_end_of_protection_leaves_nothing_on_the_backup() {
    play_protected(lockstep(), |scene, client| {
        scene.host("a")?.call(["unprotect", VM])?;
        await_forgotten(scene, "b")?;
        await_service(&client)?;
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        scene.host("a")?.call(["unprotect", VM])?;
        scene.host_mut("b")?.kill_everything()?;
        await_service(&client)?;
        let acked = close(client)?;
        prove_disk(scene, "a", acked)
    });
}

#[test]
fn a_guest_powers_off() {
    play_protected(lockstep(), power_off);
}

/// The end of its log was waited for, without end or until it was said to have diverged.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_guest_that_powers_off_as_its_host_dies_is_said_to_be_off() {
    play_protected(armed("a", "powered-off=sleep(600000)"), |scene, client| {
        in_lockstep(scene, "a")?;
        close(client)?;
        scene.shell()?.start("poweroff")?;
        for host in ["a", "b"] {
            await_logged(scene, host, "PoweredOff")?;
        }
        scene.host_mut("a")?.kill_everything()?;
        await_logged(scene, "b", "the guest has powered off, as its log says")?;
        ensure!(!log_of(scene, "b")?.contains("diverged"), "{}", log_of(scene, "b")?);
        await_forgotten(scene, "b")
    });
}

pub fn await_logged(scene: &Scene, host: &str, words: &str) -> Result<()> {
    wait_for(&format!("host {host} to log {words:?}"), LIMIT, || {
        Ok(log_of(scene, host)?.contains(words).then_some(()))
    })
}

/// The button was pressed on the primary alone: its backup diverged.
#[test]
fn a_guest_that_ignores_its_power_button_stays_in_lockstep() {
    let mut options = lockstep();
    options.daemons.values_mut().for_each(|host| *host = repairing_daemon().calm());
    play_protected(options, |scene, client| {
        in_lockstep(scene, "a")?;
        let killed = scene.shell()?.run("killall acpid")?;
        ensure!(killed.code == 0, "{killed:?}");
        let (_, words) = refusal(scene.host("a")?, &["vm", "stop", VM])?;
        ensure!(words.contains("has not powered off"), "{words}");
        await_repaired(scene, "lockstep")?;
        in_lockstep(scene, "a")?;
        let events = scene.status("a")?["events"].to_string();
        ensure!(!events.contains("diverged"), "{events}");
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// A stop whose time was over forgot the protection that was begun meanwhile: that went on, and nothing could end it.
#[test]
fn while_a_vm_is_being_stopped_it_is_not_protected_and_that_it_is_not_to_be_counts() {
    play_protected(lockstep(), |scene, client| {
        in_lockstep(scene, "a")?;
        let killed = scene.shell()?.run("killall acpid")?;
        ensure!(killed.code == 0, "{killed:?}");
        let host = scene.host("a")?;
        let stop = host.begin(["vm", "stop", VM])?;
        await_forgotten(scene, "b")?;
        let (_, words) = refusal(host, &["protect", VM, "--to", "b", "--no-wait"])?;
        ensure!(words.contains("is being stopped"), "{words}");
        host.call(["unprotect", VM])?;
        let (_, words) = refused(&stop.wait_with_output()?, "vm stop")?;
        ensure!(words.contains("has not powered off"), "{words}");
        let status = scene.status("a")?;
        ensure!(status["protection"]["state"] == "off", "{status}");
        scene.protect("a", "b")?;
        in_lockstep(scene, "a")?;
        hand_over(scene.host("a")?, VM)?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_backup_that_stalls_is_waited_for() {
    play_protected(lockstep(), |scene, client| {
        in_lockstep(scene, "a")?;
        scene.shell()?.start(BUSY)?;
        let qemu = stop_qemu(scene, "b")?;
        let behind = await_blocked(scene, true)?;
        ensure!(behind["lag_instructions"].as_u64() > Some(0), "{behind}");
        signal::kill(qemu, Signal::SIGCONT)?;
        await_blocked(scene, false)?;
        await_service(&client)?;
        let qemu = stop_qemu(scene, "b")?;
        await_blocked(scene, true)?;
        scene.host_mut("a")?.kill_everything()?;
        signal::kill(qemu, Signal::SIGCONT)?;
        let takeover = &scene.await_live("b")?["takeover"];
        ensure!(takeover["lag_ms"].as_f64() > Some(2e3), "b was not behind: {takeover}");
        prove_survival(scene, client, "b")
    });
}

/// It was given up as one to which nothing gets: it read no more.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_backup_that_stalls_with_all_the_log_that_there_is_room_for_is_waited_for() {
    let mut options = armed("b", "little-room=return");
    // Its section of the detector is the last.
    options.daemons.entry("a".to_owned()).or_default().settings += "epoch_timeout_ms = 2000\n";
    play_protected(options, |scene, client| {
        in_lockstep(scene, "a")?;
        scene.shell()?.start(FLOOD)?;
        let qemu = stop_qemu(scene, "b")?;
        await_blocked(scene, true)?;
        std::thread::sleep(SILENCE);
        signal::kill(qemu, Signal::SIGCONT)?;
        await_blocked(scene, false)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// Waits until the guest on host a is protected again, in this mode.
pub fn await_repaired(scene: &Scene, mode: &str) -> Result<Value> {
    wait_for("the VM to be protected again", LIMIT, || {
        let status = scene.status("a")?;
        let again = status["protection"]["state"] == "protected";
        ensure!(!again || status["mode"] == mode, "not in {mode} mode: {status}");
        Ok(again.then_some(status))
    })
}

/// Stops the QEMU of the backup.
pub fn stop_qemu(scene: &Scene, host: &str) -> Result<Pid> {
    let pid = scene.status(host)?["qemu_pid"].as_i64().context("no QEMU")?;
    scene.host(host)?.stall(Part::Process(pid.try_into()?))?;
    Ok(Pid::from_raw(pid.try_into()?))
}

/// Waits until the guest on host a stands still for its backup, or does not any more.
fn await_blocked(scene: &Scene, blocked: bool) -> Result<Value> {
    wait_for("the primary to wait, or to go on", LIMIT, || {
        let report = scene.status("a")?["lockstep"].clone();
        let far = report["lag_ms"].as_f64().context("no lag_ms")? > 2e3;
        Ok((report["blocked"] == blocked && far == blocked).then_some(report))
    })
}

/// Waits until the backup of the guest on `host` follows, and checks what `status` says.
pub fn in_lockstep(scene: &Scene, host: &str) -> Result<()> {
    wait_for("the backup to execute the log", LIMIT, || {
        let status = scene.status(host)?;
        ensure!(status["mode"] == "lockstep", "not in lockstep: {status}");
        let report = &status["lockstep"];
        let flows = report["log_mbit_s"].as_f64().context("no log_mbit_s")? > 0.0;
        Ok((flows && report["lag_ms"].as_f64().context("no lag_ms")? < 1e3).then_some(()))
    })
}

fn console_log(scene: &Scene, host: &str) -> Result<PathBuf> {
    Ok(scene.host(host)?.directory().join("state").join(VM).join("console.log"))
}

pub fn console_of(scene: &Scene, host: &str) -> Result<Vec<u8>> {
    Ok(std::fs::read(console_log(scene, host)?)?)
}

fn no_disk_errors(scene: &Scene, host: &str) -> Result<()> {
    let status = scene.status(host)?;
    let events = status["events"].as_array().context("no `events` in the status")?;
    let bad: Vec<_> =
        events.iter().filter(|event| event.to_string().contains("an error on")).collect();
    ensure!(bad.is_empty(), "{bad:?}");
    let kernel = scene.shell()?.run("dmesg | grep -i 'i/o error' | head -3")?;
    ensure!(kernel.code != 0 || kernel.text.is_empty(), "the guest saw {kernel:?}");
    Ok(())
}
