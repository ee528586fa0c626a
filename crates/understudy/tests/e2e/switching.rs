//! A VM that is protected with checkpoints turns to lockstep, and back, and stays protected.

use crate::deaths::{await_rounds, unharmed};
use crate::lockstep::{FLOOD, console_of, in_lockstep};
use crate::sick_disks::{Failing, await_no_disk_error, await_stop};
use crate::stage::{
    Calm, LIMIT, LOAD_PACE, await_degraded, await_service, daemon_passing, has_backup, options,
    play_protected, prove_survival, refusal,
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use understudy_lab::scene::{ECHO_PORT, RECORDS_PORT, VM};
use understudy_lab::{ChatterClient, Load, Scene, SceneOptions, wait_for};

/// Writes to the disk and reads it from there, and checks what it reads.
const DISK: &str = "mkdir -p /data/load; n=0; while :; do dd if=/dev/urandom of=/data/load/a bs=64k \
                    count=8 2>/dev/null; sync; s=$(md5sum < /data/load/a); echo 3 > \
                    /proc/sys/vm/drop_caches; t=$(md5sum < /data/load/a); [ \"$s\" = \"$t\" ] || \
                    echo DAMAGED > /dev/console; n=$((n + 1)); echo round $n > /dev/console; sleep 0.1; done";

/// A guest in a QEMU that may record one day, and does not yet.
fn plain() -> SceneOptions {
    SceneOptions { memory_mib: 256, accel: Some("tcg".into()), ..options().calm() }
}

/// The same; this host's daemon passes these fail points.
fn armed(host: &str, points: &str) -> SceneOptions {
    let mut options = plain();
    options.daemons.insert(host.to_owned(), daemon_passing(points));
    options
}

fn turn(scene: &Scene, mode: &str) -> Result<()> {
    scene.host("a")?.call(["protect", VM, "--to", "b", "--mode", mode, "--no-wait"])?;
    ensure!(scene.status("a")?["mode"] == mode, "{}", scene.status("a")?);
    // By which it is protected when its host starts it anew.
    let wished = wished_mode(scene)?;
    ensure!(wished == mode, "{wished} is on record");
    match mode {
        "lockstep" => in_lockstep(scene, "a"),
        _ => in_checkpoints(scene),
    }
}

/// The mode that host a has on record as wished.
fn wished_mode(scene: &Scene) -> Result<String> {
    let path = scene.host("a")?.directory().join("state").join(VM).join("record.json");
    let record: Value = serde_json::from_slice(&std::fs::read(path)?)?;
    let wish = record["wish"].as_object().context("no wish is on record")?;
    // Left out if it is the usual one.
    Ok(wish.get("mode").and_then(Value::as_str).unwrap_or("checkpoint").to_owned())
}

/// Waits until checkpoints are taken.
fn in_checkpoints(scene: &Scene) -> Result<()> {
    let checkpoints = || {
        let status = scene.status("a")?;
        ensure!(status["mode"] == "checkpoint", "{status}");
        ensure!(has_backup(&status), "{status}");
        status["checkpoints"].as_u64().context("no `checkpoints`")
    };
    let goal = checkpoints()? + 3;
    wait_for("checkpoints", LIMIT, || Ok((checkpoints()? >= goal).then_some(())))
}

/// The backup has turned, too. It acknowledges what it has received, and may have log to execute
/// that came before the turn.
fn await_followed(scene: &Scene, mode: &str) -> Result<()> {
    wait_for(&format!("the backup to follow in {mode} mode"), LIMIT, || {
        Ok((scene.status("b")?["mode"] == mode).then_some(()))
    })
}

fn rounds(scene: &Scene, host: &str) -> Result<u64> {
    let said = String::from_utf8_lossy(&console_of(scene, host)?).into_owned();
    ensure!(!said.contains("DAMAGED"), "the guest read what it had not written: {said}");
    Ok(said.matches("round ").count() as u64)
}

fn await_disk_rounds(scene: &Scene, host: &str, more: u64) -> Result<()> {
    let goal = rounds(scene, host)? + more;
    wait_for("the guest to write and read its disk", LIMIT, || {
        Ok((rounds(scene, host)? >= goal).then_some(()))
    })
}

#[test]
fn a_guest_turns_to_lockstep_and_is_taken_over() {
    play_protected(plain(), |scene, client| {
        turn(scene, "lockstep")?;
        await_service(&client)?;
        let events = scene.status("a")?["events"].to_string();
        ensure!(events.contains("protection goes on in lockstep"), "no event: {events}");
        await_followed(scene, "lockstep")?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_guest_turns_back_to_checkpoints_and_is_taken_over() {
    play_protected(plain(), |scene, client| {
        turn(scene, "lockstep")?;
        await_service(&client)?;
        turn(scene, "checkpoint")?;
        await_service(&client)?;
        await_followed(scene, "checkpoint")?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// The log was once read by nobody while the guest was to be stopped, and it could not be.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_log_that_is_full_as_it_ends_holds_nobody_up() {
    a_log_ends_under(FLOOD, "log-fills=return");
}

/// What came beyond 4 MiB while the guest was being stopped was once left out: it was executed nowhere but on the
/// primary, whose backup lacked what it wrote to its disk.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_log_that_is_long_as_it_ends_goes_over_whole() {
    let writes = "yes > /dev/console & while :; do dd if=/dev/urandom of=/data/noise bs=64k count=8; sync; done";
    a_log_ends_under(writes, "log-fills=return(5)");
}

fn a_log_ends_under(load: &str, points: &str) {
    play_protected(armed("a", points), |scene, client| {
        turn(scene, "lockstep")?;
        scene.shell()?.start(load)?;
        turn(scene, "checkpoint")?;
        await_service(&client)?;
        await_followed(scene, "checkpoint")?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn turns_under_load_lose_nothing() {
    play_protected(plain(), |scene, client| {
        scene.shell()?.start(DISK)?;
        let lab = scene.lab();
        let pings =
            ChatterClient::start(lab, scene.guest(RECORDS_PORT), 4, Load::Pings, LOAD_PACE)?;
        let bulk =
            ChatterClient::start(lab, scene.guest(ECHO_PORT), 1, Load::Bulk(16 * 1024), LOAD_PACE)?;
        await_rounds(&pings, 20)?;
        await_disk_rounds(scene, "a", 2)?;
        for mode in ["lockstep", "checkpoint", "lockstep"] {
            turn(scene, mode)?;
            await_rounds(&pings, 20)?;
            await_rounds(&bulk, 2)?;
            await_disk_rounds(scene, "a", 2)?;
            ensure!(scene.status("a")?["mode"] == mode, "{}", scene.status("a")?);
        }
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        await_rounds(&pings, 5)?;
        await_rounds(&bulk, 2)?;
        await_disk_rounds(scene, "b", 2)?;
        unharmed(&pings.stop())?;
        unharmed(&bulk.stop())?;
        prove_survival(scene, client, "b")
    });
}

/// The primary's daemon dies at this point of a turn to lockstep.
fn dies_on_the_way(point: &str) {
    play_protected(armed("a", &format!("{point}=panic")), |scene, client| {
        scene.shell()?.start(DISK)?;
        await_disk_rounds(scene, "a", 1)?;
        // Whether it is told before the daemon dies depends on the point. Without a death b would
        // never be live.
        scene.host("a")?.cli(["protect", VM, "--to", "b", "--mode", "lockstep"])?;
        scene.await_live("b")?;
        await_disk_rounds(scene, "b", 2)?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_primary_dies_before_it_turns() {
    dies_on_the_way("turn-prepared");
}

#[test]
fn a_primary_dies_between_two_of_its_qemus() {
    dies_on_the_way("turn-moved");
}

#[test]
fn a_primary_dies_with_the_first_epoch_of_its_log() {
    dies_on_the_way("turn-captured");
}

#[test]
fn a_primary_dies_before_it_sends_any_log() {
    dies_on_the_way("before-log");
}

#[test]
fn a_primary_dies_on_the_way_back() {
    play_protected(armed("a", "turn-captured=1*off->panic"), |scene, client| {
        turn(scene, "lockstep")?;
        scene.shell()?.start(DISK)?;
        await_disk_rounds(scene, "a", 1)?;
        let asked = scene.host("a")?.cli(["protect", VM, "--to", "b"])?;
        ensure!(!asked.status.success(), "the daemon lives");
        scene.await_live("b")?;
        await_disk_rounds(scene, "b", 2)?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_backup_that_dies_on_the_way_leaves_the_guest_alone() {
    play_protected(armed("b", "turn-applied=panic"), |scene, client| {
        // Committed, or protection is lost before: both are right.
        let _ = scene.host("a")?.cli(["protect", VM, "--to", "b", "--mode", "lockstep"])?;
        await_degraded(scene, "a")?;
        prove_survival(scene, client, "a")
    });
}

/// Before, the log that began behind the end of protection withheld errors of disks for good: the
/// request that failed waited for ever.
#[test]
fn a_disk_error_stops_a_guest_whose_backup_died_as_its_log_began() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let failing = Failing::of("write-disk", directory.path().join("a-cannot-write"));
    play_protected(
        armed("a", &format!("turn-moved=sleep(3000);{}", failing.points())),
        |scene, _| {
            scene.shell()?.start(DISK)?;
            await_disk_rounds(scene, "a", 1)?;
            let before = scene.host("a")?.qemu_pid(VM)?;
            scene.host("a")?.call([
                "protect",
                VM,
                "--to",
                "b",
                "--mode",
                "lockstep",
                "--no-wait",
            ])?;
            wait_for("the guest's next QEMU", LIMIT, || {
                let pid = scene.status("a")?["qemu_pid"].as_u64();
                Ok(pid.filter(|&pid| pid != u64::from(before)))
            })?;
            scene.host_mut("b")?.kill_everything()?;
            await_degraded(scene, "a")?;
            await_disk_rounds(scene, "a", 2)?;
            failing.begin()?;
            await_stop(scene)?;
            failing.end()?;
            await_no_disk_error(scene)?;
            await_disk_rounds(scene, "a", 2)
        },
    );
}

#[test]
fn a_turn_that_is_not_possible_changes_nothing() {
    let mut options = armed("b", "turn-launch=1*return->off");
    options.daemons.insert("a".to_owned(), daemon_passing("note-turn=1*return->off"));
    play_protected(options, |scene, client| {
        let lockstep = ["protect", VM, "--to", "b", "--mode", "lockstep"];
        let (code, words) = refusal(scene.host("a")?, &lockstep)?;
        ensure!(code == 1 && words.contains("b refuses"), "{code}: {words}");
        ensure!(words.contains("protection goes on with checkpoints"), "{words}");
        in_checkpoints(scene)?;
        await_service(&client)?;
        // The guest once left a host that could not write its record.
        let before = scene.status("a")?["qemu_pid"].clone();
        let (code, words) = refusal(scene.host("a")?, &lockstep)?;
        ensure!(code == 1 && words.contains("cannot note it: a test says so"), "{code}: {words}");
        ensure!(scene.status("a")?["qemu_pid"] == before, "it was moved into another QEMU");
        in_checkpoints(scene)?;
        await_service(&client)?;
        let (_, words) =
            refusal(scene.host("a")?, &[&lockstep[..], &["--policy", "interval"]].concat())?;
        ensure!(words.contains("stays as it is"), "{words}");
        turn(scene, "lockstep")?;
        await_service(&client)?;
        let (_, words) = refusal(scene.host("a")?, &lockstep)?;
        ensure!(words.contains("is protected to b already"), "{words}");
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}
