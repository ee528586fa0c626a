//! A daemon, or a whole host, stops in its tracks and comes back as if nothing
//! had happened: for longer than the time-out, and for much longer.
//!
//! Network load is under way, so that there is output to be let out too late.

use crate::deaths::{await_rounds, unharmed};
use crate::refusals::quick;
use crate::stage::{
    Calm, LIMIT, LOAD_PACE, await_degraded, options, play, play_protected, protect_when_taken,
    prove_survival,
};
use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};
use understudy_lab::scene::{ECHO_PORT, VM};
use understudy_lab::{ChatterClient, Load, Part, Scene, SceneOptions, wait_for};

/// Lengths of the stalls.
const STALLS: [Duration; 2] = [Duration::from_secs(4), Duration::from_secs(12)];
fn play_stalls(story: impl FnOnce(&mut Scene, &ChatterClient) -> Result<&'static str>) {
    // Silence counts as a failure before the shorter stall is over.
    let options = SceneOptions { memory_mib: 192, ..options().calm() };
    play_protected(options, |scene, client| {
        let bulk = ChatterClient::start(
            scene.lab(),
            scene.guest(ECHO_PORT),
            2,
            Load::Bulk(64 * 1024),
            LOAD_PACE,
        )?;
        let survivor = story(scene, &bulk)?;
        unharmed(&bulk.stop())?;
        prove_survival(scene, client, survivor)
    });
}

/// The primary stalls: its backup takes over, and what returns is halted before
/// it has let anything out. Each host has its turn.
fn primaries_stall(part: Part) {
    play_stalls(|scene, bulk| {
        let (mut primary, mut backup) = ("a", "b");
        for stall in STALLS {
            await_rounds(bulk, 20)?;
            let (old, new) = (scene.watch_uplink(primary, 0)?, scene.watch_uplink(backup, 0)?);
            let stalled_at = scene.host(primary)?.stall(part)?;
            scene.await_live(backup)?;
            await_rounds(bulk, 5)?;
            await_end(stalled_at + stall)?;
            scene.host(primary)?.resume()?;
            scene.await_fenced(primary)?;
            await_rounds(bulk, 5)?;
            let first = new.first_frame_after(stalled_at)?.context("the survivor was silent")?;
            let late = old.frames_after(first)?;
            ensure!(late == 0, "{late} frames left the stalled host after it had lost the VM");
            scene.protect(backup, primary)?;
            scene.await_protected(backup, |_| ())?;
            (primary, backup) = (backup, primary);
        }
        scene.host_mut(primary)?.kill_everything()?;
        Ok(backup)
    });
}

/// The backup stalls: the primary goes on alone, and what returns goes away
/// quietly and can serve again.
fn backups_stall(part: Part) {
    play_stalls(|scene, bulk| {
        for stall in STALLS {
            let silence = scene.watch_uplink("b", 0)?;
            let standby = scene.host("b")?.qemu_pid(VM)?;
            let stalled_at = scene.host("b")?.stall(part)?;
            await_degraded(scene, "a")?;
            await_rounds(bulk, 5)?;
            await_end(stalled_at + stall)?;
            scene.host("b")?.resume()?;
            let host = scene.host("b")?.namespace();
            wait_for("the standby to be gone", LIMIT, || {
                Ok((!host.processes()?.contains(&standby)).then_some(()))
            })?;
            await_rounds(bulk, 5)?;
            ensure!(silence.count()? == 0, "the stalled backup sent something");
            protect_when_taken(scene, "a", "b")?;
            await_rounds(bulk, 5)?;
        }
        scene.host_mut("a")?.kill_everything()?;
        Ok("b")
    });
}

/// Time passes, whatever happens meanwhile.
fn await_end(instant: Instant) -> Result<()> {
    wait_for("the stall to be over", LIMIT, || Ok((Instant::now() >= instant).then_some(())))
}

#[test]
fn a_primary_host_stalls_and_returns() {
    primaries_stall(Part::Everything);
}

#[test]
fn a_primary_daemon_stalls_and_returns() {
    primaries_stall(Part::Daemon);
}

#[test]
fn a_backup_host_stalls_and_returns() {
    backups_stall(Part::Everything);
}

#[test]
fn a_backup_daemon_stalls_and_returns() {
    backups_stall(Part::Daemon);
}

/// The primary notes the session on stable storage before it changes anything, which takes its time
/// on a busy disk. Before, its first heartbeat waited for that, and the backup gave up: "the
/// primary has been silent for 3013 ms, before the first synchronisation ended".
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_primary_with_a_slow_disk_is_heard_when_protection_begins() {
    let mut options = options().calm();
    let slow = ("FAILPOINTS".to_owned(), "note-session=sleep(5000)".to_owned());
    options.daemons.get_mut("a").expect("a host of every scene").environment.push(slow);
    play_protected(options, |scene, client| {
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// The first proof that it could take over might once come before the word that it is ready: "the
/// peer sent MayTakeOver where Ready was due".
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_backup_that_is_held_up_is_ready_before_all_else() {
    let mut options = quick();
    let slow = ("FAILPOINTS".to_owned(), "before-ready=sleep(1000)".to_owned());
    options.daemons.get_mut("b").expect("a host of every scene").environment.push(slow);
    play(options, |scene| {
        scene.protected_guest("a", "b")?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"]).map(drop)
    });
}
