//! Tests that only what changed of the disks is copied after a failure; the mirror is the same as
//! the primary's image all the same.

use crate::lockstep::lockstep;
use crate::recover::lose;
use crate::stage::{
    Calm, LIMIT, await_degraded, await_forgotten, await_service, close, options, play_protected,
    prove_disk, prove_survival, refusal,
};
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use understudy_lab::scene::VM;
use understudy_lab::{Scene, SceneOptions, wait_for};

/// The bytes that a guest that writes a few MiB can change at most, journal and tables included.
const MOST_BYTES: u64 = 24 << 20;

/// Writes all the time, flushed or not, until told to stop.
const BUSY: &str =
    "while [ ! -e /tmp/stop ]; do dd if=/dev/urandom of=/data/busy bs=64k count=16; done";

/// Command that writes far more on the disk than [`MOST_BYTES`].
const FILL: &str =
    "tr '\\0' x < /dev/zero | dd of=/data/fill bs=1M count=64 iflag=fullblock && sync";

/// Protects the guest of `from` to `to` again; returns the bytes of the disks that were
/// copied, and why all of them were, if so.
pub fn protect_again(scene: &Scene, from: &str, to: &str) -> Result<(u64, Option<String>)> {
    scene.protect(from, to)?;
    let status = scene.await_protected(from, |_| ())?;
    let sync = &status["disk_sync"];
    let bytes = sync["bytes"].as_u64().with_context(|| format!("no bytes in {sync}"))?;
    Ok((bytes, sync["full_because"].as_str().map(str::to_owned)))
}

fn expect_resync(scene: &Scene, from: &str, to: &str) -> Result<()> {
    let (bytes, full_because) = protect_again(scene, from, to)?;
    ensure!(full_because.is_none(), "everything was copied: {full_because:?}");
    ensure!(bytes < MOST_BYTES, "{bytes} bytes were copied, which is more than had changed");
    Ok(())
}

/// Writes 4 MiB of noise, and frees what was written the last time.
fn write_some(scene: &Scene) -> Result<()> {
    let line = "rm -f /data/noise && dd if=/dev/urandom of=/data/noise bs=1M count=4 && sync";
    let output = scene.shell()?.run(line)?;
    ensure!(output.code == 0, "`{line}` failed: {output:?}");
    Ok(())
}

/// Waits until the primary knows that its backup has most of it on its disk.
fn await_settled(scene: &Scene) -> Result<()> {
    wait_for("the backup to have the changes on its disk", LIMIT, || {
        let bytes = scene.status("a")?["disk_sync"]["differing_bytes"].as_u64();
        Ok((bytes.context("no differing_bytes")? < MOST_BYTES / 3).then_some(()))
    })
}

/// Waits until the images of both hosts are the same, byte by byte: at the latest when
/// the guest leaves its disk alone.
fn await_equal_images(scene: &Scene) -> Result<()> {
    wait_for("the images to be equal", LIMIT, || {
        // Asked each time: a mirror takes the name of the former image when the first copy is on the disks.
        let (a, b) = (scene.disk("a", 0)?, scene.disk("b", 0)?);
        ensure!(a != b, "both hosts use {}", a.display());
        let (Some(a), Some(b)) = (if_there(&a)?, if_there(&b)?) else { return Ok(None) };
        Ok(are_equal(a, b)?.then_some(()))
    })
}

fn if_there(image: &Path) -> Result<Option<File>> {
    match File::open(image) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("{}", image.display())),
    }
}

fn are_equal(mut a: File, mut b: File) -> Result<bool> {
    if a.metadata()?.len() != b.metadata()?.len() {
        return Ok(false);
    }
    let (mut of_a, mut of_b) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    loop {
        let count = a.read(&mut of_a)?;
        if count == 0 {
            return Ok(true);
        }
        b.read_exact(&mut of_b[..count])?;
        if of_a[..count] != of_b[..count] {
            return Ok(false);
        }
    }
}

#[test]
fn a_former_primary_is_brought_up_to_date() {
    bring_up_to_date(options().calm());
}

#[test]
fn a_former_primary_in_lockstep_is_brought_up_to_date() {
    bring_up_to_date(lockstep());
}

fn bring_up_to_date(options: SceneOptions) {
    play_protected(options, |scene, client| {
        let output = scene.shell()?.run(FILL)?;
        ensure!(output.code == 0, "`{FILL}` failed: {output:?}");
        await_settled(scene)?;
        // What was written on a in epochs that b never saw must go, too.
        scene.shell()?.start(BUSY)?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        scene.shell()?.run("touch /tmp/stop")?;
        write_some(scene)?;
        scene.restart("a")?;
        let old_image = scene.lab().directory().join("disk.img");
        expect_resync(scene, "b", "a")?;
        ensure!(scene.disk("a", 0)? == old_image, "host a's image was not used");
        await_service(&client)?;
        // And back: nothing is left of either host's own ways.
        scene.host_mut("b")?.kill_everything()?;
        scene.await_live("a")?;
        write_some(scene)?;
        scene.restart("b")?;
        expect_resync(scene, "a", "b")?;
        let acked = close(client)?;
        await_equal_images(scene)?;
        prove_disk(scene, "a", acked)
    });
}

#[test]
fn a_backup_that_was_away_is_brought_up_to_date() {
    play_protected(options().calm(), |scene, client| {
        scene.shell()?.start(BUSY)?;
        scene.host_mut("b")?.kill_everything()?;
        await_degraded(scene, "a")?;
        scene.shell()?.run("touch /tmp/stop")?;
        write_some(scene)?;
        await_service(&client)?;
        scene.restart("b")?;
        expect_resync(scene, "a", "b")?;
        await_service(&client)?;
        // An end of protection that was asked for, and its begin.
        scene.host("a")?.call(["unprotect", VM])?;
        write_some(scene)?;
        expect_resync(scene, "a", "b")?;
        await_equal_images(scene)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn after_the_loss_of_both_hosts_only_what_changed_is_copied() {
    play_protected(options().calm(), |scene, client| {
        write_some(scene)?;
        lose(scene, &["a", "b"])?;
        let acked = client.abandon().acked();
        scene.restart("a")?;
        scene.restart("b")?;
        scene.host("a")?.call(["recover", VM])?;
        scene.await_guest()?;
        expect_resync(scene, "a", "b")?;
        await_equal_images(scene)?;
        // Before it is complete, a mirror that is brought up to date is nothing to start on.
        let (_, words) = refusal(scene.host("b")?, &["recover", VM, "--force"])?;
        ensure!(words.contains("nothing to recover"), "{words}");
        prove_disk(scene, "a", acked)
    });
}

/// Host a's list of changes was still open, and lacked that: the mirror would have been without it.
#[test]
fn an_image_that_somebody_writes_after_its_daemon_was_killed_is_copied_whole() {
    play_protected(options().calm(), |scene, client| {
        write_some(scene)?;
        scene.host("a")?.call(["unprotect", VM])?;
        await_forgotten(scene, "b")?;
        scene.host_mut("a")?.kill_everything()?;
        let acked = client.abandon().acked();
        scene.restart("a")?;
        await_sealed(scene, "a")?;
        let image = File::options().write(true).open(scene.lab().directory().join("disk.img"))?;
        image.write_all_at(b"changed by other means", image.metadata()?.len() - 100)?;
        drop(image);
        scene.host("a")?.call(["vm", "start", VM])?;
        scene.await_guest()?;
        let (_, full_because) = protect_again(scene, "a", "b")?;
        ensure!(full_because.is_some(), "only what the guest had changed was copied");
        await_equal_images(scene)?;
        prove_disk(scene, "a", acked)
    });
}

/// Waits until the list of changes of a host that runs nothing is sealed.
fn await_sealed(scene: &Scene, host: &str) -> Result<()> {
    let list = scene.host(host)?.directory().join("state").join(VM).join("disk0.changes");
    wait_for("the list of changes to be sealed", LIMIT, || {
        Ok((std::fs::read(&list)?[16..24] != [0; 8]).then_some(()))
    })
}

#[test]
fn a_mirror_that_somebody_writes_between_two_sessions_is_made_anew() {
    play_protected(options().calm(), |scene, client| {
        scene.host("a")?.call(["unprotect", VM])?;
        await_forgotten(scene, "b")?;
        // As a mount does, of a file that is not in use.
        let mirror = scene.host("b")?.directory().join("state").join(VM).join("disk0.img");
        let file = File::options().write(true).open(&mirror)?;
        file.write_all_at(b"changed by other means", file.metadata()?.len() / 2)?;
        let (_, full_because) = protect_again(scene, "a", "b")?;
        let why = full_because.context("only what had changed was copied")?;
        ensure!(why.contains("changed by other means"), "{why}");
        let acked = close(client)?;
        await_equal_images(scene)?;
        prove_disk(scene, "a", acked)
    });
}

#[test]
fn when_in_doubt_everything_is_copied() {
    play_protected(options().calm(), |scene, client| {
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        // As after a power failure of host a: the list is of another run of the kernel.
        let list = scene.host("a")?.directory().join("state").join(VM).join("disk0.changes");
        let mut bytes = std::fs::read(&list)?;
        bytes[32..40].copy_from_slice(b"00000000");
        std::fs::write(&list, bytes)?;
        scene.restart("a")?;
        let (_, full_because) = protect_again(scene, "b", "a")?;
        let why = full_because.context("only what had changed was copied")?;
        ensure!(why.contains("restarted"), "{why}");
        let acked = close(client)?;
        await_equal_images(scene)?;
        prove_disk(scene, "b", acked)
    });
}
