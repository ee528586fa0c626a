//! A backup without room: said before anything is copied, and what is said later is the reason.

use crate::refusals::{log_of, quick, says, unharmed};
use crate::stage::{
    Calm, LIMIT, PACE, await_degraded, await_forgotten, await_service, close, daemon, options,
    play, prove_disk, refusal,
};
use anyhow::{Context, Result, ensure};
use understudy_lab::scene::VM;
use understudy_lab::{HostOptions, Scene, SceneOptions, wait_for};

/// The words of `status` about a full disk.
const NO_SPACE: &str = "No space left on device";

/// The state directory of host b is a file system of this size.
fn small(mut options: SceneOptions, mib: u64) -> SceneOptions {
    options.daemons.insert("b".to_owned(), HostOptions { state_mib: Some(mib), ..daemon().calm() });
    options
}

/// The reason why host a's guest is not protected any more; nothing of the VM is left on host b.
fn reason(scene: &Scene) -> Result<String> {
    let reason = await_degraded(scene, "a")?;
    ensure!(reason.contains(NO_SPACE), "{reason}");
    ensure!(reason.contains("the backup cannot write to its mirror"), "{reason}");
    ensure!(!reason.contains("Broken pipe") && !reason.contains("reset"), "{reason}");
    await_forgotten(scene, "b")?;
    let log = log_of(scene, "b")?;
    let gives_up = |line: &str| line.contains("this backup gives up: ");
    let why = why(&reason)?;
    ensure!(log.lines().any(|line| gives_up(line) && line.contains(why)), "{log}");
    Ok(reason)
}

/// The backup's own words in a reason.
fn why(reason: &str) -> Result<&str> {
    let end = reason.find(NO_SPACE).context("no such words")? + NO_SPACE.len();
    let begin = reason.find("the backup cannot write").context("no such words")?;
    Ok(&reason[begin..end])
}

/// A backup without room was once accepted, and failed when the first block did not fit.
#[test]
fn a_backup_without_room_for_the_disks_refuses_at_once() {
    play(small(quick(), 12), |scene| {
        scene.start_guest("a")?;
        let (code, words) = refusal(scene.host("a")?, &["protect", VM, "--to", "b"])?;
        ensure!(code == 1, "exit code {code}: {words}");
        says(&words, &["host b refuses", "no space for the VM's disks", "host b has", "MiB left"])?;
        unharmed(scene)
    });
}

/// Room that went away between the look and the copy: the primary said "Broken pipe".
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_first_synchronisation_that_does_not_fit_says_why() {
    let mut options = small(options().calm(), 40);
    let daemon = options.daemons.get_mut("b").expect("a host of every scene");
    daemon.environment.push(("FAILPOINTS".to_owned(), "room-for-any-disk=return".to_owned()));
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let written =
            scene.shell()?.run("dd if=/dev/urandom of=/data/much bs=1M count=64; sync")?;
        ensure!(written.code == 0, "{written:?}");
        for _ in 0..5 {
            scene.protect("a", "b")?;
            reason(scene)?;
        }
        Ok(())
    });
}

/// A disk that outgrows the backup's file system ends protection, not the guest.
#[test]
fn a_disk_that_outgrows_its_mirror_ends_protection_and_says_why() {
    play(small(options().calm(), 96), |scene| {
        scene.protected_guest("a", "b")?;
        let events = scene.status("a")?["events"].to_string();
        ensure!(events.contains("can grow to"), "nobody was warned: {events}");
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        scene.shell()?.start("dd if=/dev/urandom of=/data/much bs=1M count=128; sync")?;
        reason(scene)?;
        await_service(&client)?;
        let acked = close(client)?;
        wait_for("the guest to have written all", LIMIT, || {
            let size = scene.shell()?.run("stat -c %s /data/much")?;
            Ok(size.text.contains("134217728").then_some(()))
        })?;
        prove_disk(scene, "a", acked)
    });
}
