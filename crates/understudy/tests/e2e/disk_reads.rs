//! Lockstep: where the backup gets what its guest reads, and disks that fail. A file tells the
//! daemons' fail points that no image of their host can be read, or written, for now.

use crate::lockstep::{console_of, in_lockstep, lockstep};
use crate::sick_disks::Failing;
use crate::sick_hosts::await_unfit;
use crate::stage::{LIMIT, await_degraded, await_service, play_protected, prove_survival, refusal};
use anyhow::{Context, Result, ensure};
use std::path::Path;
use understudy_lab::scene::VM;
use understudy_lab::{Scene, wait_for};

/// Reads a mebibyte from the disk again and again, and says their sum each time.
const READ: &str = "dd if=/dev/urandom of=/data/read bs=64k count=16; sync; n=0; while :; do \
                    echo 3 > /proc/sys/vm/drop_caches; s=$(md5sum < /data/read); n=$((n + 1)); \
                    echo sum $n $s > /dev/console; sleep 0.2; done";

/// Lets no disk be read on the host.
fn reads(directory: &Path, host: &str) -> Failing {
    Failing::of("read-disk", directory.join(format!("{host}-cannot-read")))
}

/// Lets no disk be written there.
fn writes(directory: &Path, host: &str) -> Failing {
    Failing::of("write-disk", directory.join(format!("{host}-cannot-write")))
}

#[test]
fn reads_that_travel_with_the_log_need_no_disk_of_the_backup() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let [a, b] = ["a", "b"].map(|host| reads(directory.path(), host));
    let mut options = lockstep();
    options.daemons.insert("a".to_owned(), a.daemon());
    options.daemons.insert("b".to_owned(), b.daemon());
    play_protected(options, |scene, client| {
        // From its own mirror by default: a backup that cannot is given up, and says why.
        in_lockstep(scene, "a")?;
        scene.shell()?.start(READ)?;
        await_sums(scene, "a", 1)?;
        b.begin()?;
        let reason = await_degraded(scene, "a")?;
        ensure!(reason.contains("of its mirror of disk 0, again and again"), "{reason}");
        await_service(&client)?;

        protect_with_reads(scene)?;
        await_sums(scene, "a", 3)?;
        in_lockstep(scene, "a")?;
        wait_for("reads to travel with the log", LIMIT, || {
            let report = scene.status("a")?["lockstep"].clone();
            ensure!(report["disk_reads"] == "log", "{report}");
            Ok((report["disk_read_mbit_s"].as_f64() > Some(0.0)).then_some(()))
        })?;

        // A read that fails on the primary waits for a sound disk, that of the backup.
        let before = sums(scene, "a")?;
        b.end()?;
        a.begin()?;
        scene.await_live("b")?;
        await_sums(scene, "b", 2)?;
        await_service(&client)?;
        let mut all = [before, sums(scene, "b")?].concat();
        all.sort_unstable();
        all.dedup();
        ensure!(all.len() == 1, "the guest read something else on the other host: {all:?}");
        prove_survival(scene, client, "b")
    });
}

// Before, it waited for its operator: `understudy failover`.
#[test]
fn a_guest_whose_disk_fails_is_handed_over_as_soon_as_its_backup_is_fit() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let a = reads(directory.path(), "a");
    let mut options = lockstep();
    options.daemons.insert("a".to_owned(), a.daemon());
    play_protected(options, |scene, client| {
        scene.host("a")?.call(["unprotect", VM])?;
        protect_with_reads(scene)?;
        in_lockstep(scene, "a")?;
        scene.shell()?.start(READ)?;
        await_sums(scene, "a", 1)?;
        scene.host("b")?.hide(&scene.lab().arbiter_directory())?;
        await_unfit(scene, "is its storage mounted?")?;
        a.begin()?;
        await_disk_error(scene, "a")?;
        let turn = ["protect", VM, "--to", "b", "--mode", "checkpoint"];
        let (_, words) = refusal(scene.host("a")?, &turn)?;
        ensure!(words.contains("waits for a disk that fails"), "{words}");
        scene.host("b")?.unhide(&scene.lab().arbiter_directory())?;
        scene.await_live("b")?;
        await_sums(scene, "b", 2)?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_backup_that_cannot_write_is_given_up_and_says_why() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let b = writes(directory.path(), "b");
    let mut options = lockstep();
    options.daemons.insert("b".to_owned(), b.daemon());
    play_protected(options, |scene, client| {
        in_lockstep(scene, "a")?;
        b.begin()?;
        let reason = await_degraded(scene, "a")?;
        ensure!(reason.contains("mirror of disk 0 failed"), "{reason}");
        await_service(&client)?;
        b.end()?;
        scene.host("a")?.call(["protect", VM, "--to", "b", "--mode", "lockstep", "--no-wait"])?;
        scene.await_protected("a", |_| ())?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

fn protect_with_reads(scene: &Scene) -> Result<()> {
    let line = ["protect", VM, "--to", "b", "--disk-reads", "log"];
    let (_, words) = refusal(scene.host("a")?, &line)?;
    ensure!(words.contains("--mode lockstep"), "{words}");
    scene.host("a")?.call([&line[..], &["--mode", "lockstep", "--no-wait"]].concat())?;
    scene.await_protected("a", |_| ()).map(drop)
}

/// Waits until the guest on `host` has said so many more sums.
fn await_sums(scene: &Scene, host: &str, more: usize) -> Result<()> {
    let before = sums(scene, host)?.len();
    wait_for("the guest to read its disk", LIMIT, || {
        Ok((sums(scene, host)?.len() >= before + more).then_some(()))
    })
}

/// The sums that the guest has said on `host`, without one that it may be saying.
fn sums(scene: &Scene, host: &str) -> Result<Vec<String>> {
    let console = String::from_utf8_lossy(&console_of(scene, host)?).into_owned();
    let whole = console.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let sum = |line: &str| Some(line.split_once("sum ")?.1.split_whitespace().nth(1)?.to_owned());
    // After a take-over the console may begin in the midst of a line.
    Ok(whole.lines().filter_map(sum).filter(|sum| sum.len() == 32).collect())
}

fn await_disk_error(scene: &Scene, host: &str) -> Result<()> {
    wait_for("the guest's disk to fail", LIMIT, || {
        let status = scene.status(host)?;
        let events = status["events"].as_array().context("no `events` in the status")?;
        Ok(events.iter().any(|event| event.to_string().contains("an error on")).then_some(()))
    })
}
