//! Disks that lose writes, and disks that are full.

use crate::cluster_deaths::Moment;
use crate::lockstep::console_of;
use crate::refusals::log_of;
use crate::sick_hosts::Hanging;
use crate::stage::{
    Calm, LIMIT, PACE, await_degraded, await_service, close, daemon_passing, hand_over, options,
    play, play_protected, protect, protect_when_taken, prove_disk, prove_survival, run,
};
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use understudy_lab::scene::VM;
use understudy_lab::{HostOptions, Scene, wait_for};

/// The score of a process for running out of memory.
fn oom_score(pid: u64) -> Result<i32> {
    Ok(fs::read_to_string(format!("/proc/{pid}/oom_score_adj"))?.trim().parse()?)
}

/// A fail point: while this file is there, what it stands for fails on the host. Afterwards that
/// succeeds again; syncs do, too, as Linux has it.
pub struct Failing {
    point: &'static str,
    file: PathBuf,
}

impl Failing {
    pub fn new(directory: &Path) -> Failing {
        Failing::of("sync-disk", directory.join("fails"))
    }

    pub fn of(point: &'static str, file: PathBuf) -> Failing {
        Failing { point, file }
    }

    pub fn daemon(&self) -> HostOptions {
        daemon_passing(self.points())
    }

    /// What a daemon's fail points are to be.
    pub fn points(&self) -> String {
        format!("{}=return({})", self.point, self.file.display())
    }

    pub fn begin(&self) -> Result<()> {
        Ok(fs::write(&self.file, "")?)
    }

    pub fn end(&self) -> Result<()> {
        Ok(fs::remove_file(&self.file)?)
    }
}

/// Waits until a flush of host a's guest hangs; how many were answered before.
pub fn await_hung_flush(scene: &Scene) -> Result<usize> {
    wait_for("a flush to hang", LIMIT, || {
        let status = scene.status("a")?;
        let error = status["disk_error"].as_str().unwrap_or_default();
        Ok(error.contains("disk0 has not answered for").then_some(()))
    })?;
    flushed(scene)
}

/// Waits until more were answered than the one that hung.
pub fn await_more_flushes(scene: &Scene, before: usize) -> Result<()> {
    wait_for("the guest to go on", LIMIT, || Ok((flushed(scene)? > before + 1).then_some(())))
}

/// A guest's words are held by nobody before its first checkpoint. The pause of that once answered
/// its flush, and what it said then a power failure could take back.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn the_first_checkpoint_answers_no_flush_before_it_is_done() {
    let (synchronised, hanging) = (Moment::new(), Hanging::new());
    let points = [synchronised.action("synchronised", "1*"), hanging.action("hang-sync")];
    let mut options = options().calm();
    options.daemons.insert("a".to_owned(), daemon_passing(points.join(";")));
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        scene.shell()?.start(FLUSHES)?;
        wait_for("the guest to flush", LIMIT, || Ok((flushed(scene)? > 0).then_some(())))?;
        scene.host("a")?.call(["protect", VM, "--to", "b", "--no-wait"])?;
        synchronised.await_reached()?;
        hanging.begin()?;
        let before = await_hung_flush(scene)?;
        synchronised.end()?;
        let reason = await_degraded(scene, "a")?;
        ensure!(reason.contains("cannot take a checkpoint"), "{reason}");
        ensure!(flushed(scene)? == before, "a flush was answered that has not reached the disk");
        hanging.end()?;
        await_more_flushes(scene, before)?;
        protect(scene.host("a")?, VM, &["--to", "b"])?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"]).map(drop)
    });
}

#[test]
fn a_backup_whose_mirror_lost_writes_says_so_and_is_given_up() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let failing = Failing::new(directory.path());
    let mut options = options().calm();
    options.daemons.insert("b".to_owned(), failing.daemon());
    play_protected(options, |scene, client| {
        failing.begin()?;
        let reason = await_degraded(scene, "a")?;
        ensure!(reason.contains("cannot sync the mirror"), "{reason}");
        failing.end()?;
        await_service(&client)?;
        // What it has of the VM is no copy of it any more; a new session makes one.
        protect_when_taken(scene, "a", "b")?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// All of a mirror was synced behind the first acknowledgement alone, when the guest was said to be protected.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_mirror_is_synced_while_it_is_filled() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let (synchronised, failing) = (Moment::new(), Failing::new(directory.path()));
    let mut options = options().calm();
    let point = synchronised.action("synchronised", "1*");
    options.daemons.insert("a".to_owned(), daemon_passing(point));
    options.daemons.insert("b".to_owned(), failing.daemon());
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        scene.host("a")?.call(["protect", VM, "--to", "b", "--no-wait"])?;
        synchronised.await_reached()?;
        failing.begin()?;
        let reason = await_degraded(scene, "a")?;
        ensure!(reason.contains("cannot sync the mirror"), "{reason}");
        failing.end()?;
        synchronised.end()?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"]).map(drop)
    });
}

/// The clients may hear of what the guest reads: a mirror's last writes are to outlive the power.
#[test]
fn no_guest_starts_on_an_image_that_cannot_be_synced() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let failing = Failing::new(directory.path());
    let mut options = options();
    options.daemons.insert("a".to_owned(), failing.daemon());
    play(options, |scene| {
        failing.begin()?;
        let refused = scene.start_guest("a").err().context("it was started")?;
        ensure!(format!("{refused:#}").contains("cannot sync"), "{refused:#}");
        failing.end()?;
        scene.start_guest("a")?;
        scene.await_guest()?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        Ok(())
    });
}

// Before, epoch 2 was applied behind it and made the mirrors whole, unless the session was over
// by then.
#[test]
fn a_backup_that_cannot_apply_the_first_epoch_says_so_and_another_session_can() {
    let mut options = options().calm();
    options.daemons.insert("b".to_owned(), daemon_passing("apply-epoch=1*return"));
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        // It may be over before the command has seen that it began.
        scene.host("a")?.cli(["protect", VM, "--to", "b"])?;
        let reason = await_degraded(scene, "a")?;
        ensure!(reason.contains("epoch 1 could not be applied: a test says so"), "{reason}");
        protect_when_taken(scene, "a", "b")?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        scene.await_guest()?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        Ok(())
    });
}

/// Writes a block of a file and syncs it, again and again; each success goes to the console.
pub const FLUSHES: &str = "while :; do dd if=/dev/zero of=/data/flushed bs=4k count=1 conv=fsync && \
                       echo FLUSHED > /dev/console; sleep 1; done";

/// The number of times that the guest has said that a flush succeeded.
pub fn flushed(scene: &Scene) -> Result<usize> {
    let said = console_of(scene, "a")?;
    Ok(String::from_utf8_lossy(&said).matches("FLUSHED").count())
}

/// Waits until `status` says with 3 that an error of a disk has stopped host a's guest.
pub fn await_stop(scene: &Scene) -> Result<String> {
    wait_for("the guest to stand still", LIMIT, || {
        let output = scene.host("a")?.cli(["status", VM, "--json"])?;
        let status: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let Some(error) = status["disk_error"].as_str() else { return Ok(None) };
        ensure!(output.status.code() == Some(3), "{:?} with {error}", output.status);
        Ok(Some(error.to_owned()))
    })
}

/// Waits until `status` of host a's guest says nothing of a disk's error any more.
pub fn await_no_disk_error(scene: &Scene) -> Result<()> {
    wait_for("the guest to be said to go on", LIMIT, || {
        Ok(scene.status("a")?["disk_error"].is_null().then_some(()))
    })
}

/// Proves that the QEMU of one VM ends before the daemon of all when memory runs out.
fn spares_the_daemon(scene: &Scene) -> Result<()> {
    let qemu = scene.status("a")?["qemu_pid"].as_u64().context("no QEMU")?;
    let (own, daemon) = (oom_score(std::process::id().into())?, scene.host("a")?.pid());
    let (daemon, qemu) = (oom_score(daemon.into())?, oom_score(qemu)?);
    ensure!(qemu == 300.max(own), "QEMU has {qemu}, this test {own}");
    // Without CAP_SYS_RESOURCE it cannot be spared, and says so.
    let said = log_of(scene, "a")?.contains("cannot write /proc/self/oom_score_adj");
    ensure!(daemon == -900 || (daemon == own && said), "the daemon has {daemon}, this test {own}");
    Ok(())
}

// Before, the second flush succeeded, although what the first one lost was still lost. And nobody
// was told that the guest stood still.
#[test]
fn a_guest_whose_disk_lost_writes_never_flushes_again() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let failing = Failing::new(directory.path());
    let mut options = options().calm();
    options.daemons.insert("a".to_owned(), failing.daemon());
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        spares_the_daemon(scene)?;
        // It runs already when the disk fails: a guest that stands still takes no orders.
        scene.shell()?.start(FLUSHES)?;
        wait_for("the disk to be sound", LIMIT, || Ok((flushed(scene)? > 0).then_some(())))?;
        failing.begin()?;
        let error = await_stop(scene)?;
        ensure!(error.contains("what the guest wrote is lost"), "{error}");
        ensure!(error.contains(&format!("`understudy vm start {VM}`")), "{error}");
        let before = flushed(scene)?;
        failing.end()?;
        // QEMU asks again for what failed, and again.
        let asked =
            || -> Result<usize> { Ok(log_of(scene, "a")?.matches("request failed").count()) };
        for _ in 0..2 {
            let tried = asked()?;
            wait_for("another try", LIMIT, || Ok((asked()? > tried).then_some(())))?;
            await_stop(scene)?;
        }
        // A success from before may be told in between.
        let after = flushed(scene)?;
        ensure!(
            after <= before + 1,
            "{before} flushes, then {after}, and what was written is lost"
        );
        // The way out that it names.
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        scene.host("a")?.call(["vm", "start", VM])?;
        scene.await_guest()?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        Ok(())
    });
}

// Before, the guest stood still on the host with the bad disk, and status said "protected".
#[test]
fn a_primary_whose_disk_lost_writes_is_taken_over() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let failing = Failing::new(directory.path());
    let mut options = options().calm();
    options.daemons.insert("a".to_owned(), failing.daemon());
    play_protected(options, |scene, client| {
        failing.begin()?;
        scene.await_live("b")?;
        let fenced = scene.await_fenced("a")?;
        let reason = fenced["protection"]["reason"].as_str().unwrap_or_default();
        ensure!(reason.contains("an error on disk0"), "{fenced}");
        prove_survival(scene, client, "b")
    });
}

// Before, it stood still for good: nobody asked QEMU to try again.
#[test]
fn a_guest_whose_disk_recovers_goes_on() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let failing = Failing::of("read-disk", directory.path().join("fails"));
    let mut options = options().calm();
    options.daemons.insert("a".to_owned(), failing.daemon());
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        let mut shell = scene.shell()?;
        failing.begin()?;
        shell.start("dd if=/dev/vda of=/dev/null bs=1M count=8 iflag=direct")?;
        let error = await_stop(scene)?;
        ensure!(error.contains("it is tried again every 5 s"), "{error}");
        failing.end()?;
        await_service(&client)?;
        await_no_disk_error(scene)?;
        let acked = close(client)?;
        prove_disk(scene, "a", acked)
    });
}

const FILLER: &str = "filler";

/// A small file system of its own.
pub struct SmallDisk {
    place: PathBuf,
}

impl SmallDisk {
    pub fn mount(image: &Path, place: PathBuf, mib: u64) -> Result<SmallDisk> {
        File::create(image)?.set_len(mib << 20)?;
        let (image, at) = (image.to_str().context("a path")?, place.to_str().context("a path")?);
        run("mkfs.ext4", &["-q", "-m", "0", image])?;
        run("mount", &["-o", "loop", image, at])?;
        Ok(SmallDisk { place })
    }

    /// Fills it to the last byte.
    pub fn fill(&self) -> Result<()> {
        let mut filler = File::create(self.place.join(FILLER))?;
        for bytes in [1 << 20, 4096, 1] {
            while filler.write_all(&vec![1; bytes]).is_ok() {}
        }
        filler.sync_all()?;
        let more = fs::write(self.place.join("more"), [1; 8192]);
        ensure!(more.is_err_and(|error| error.kind() == io::ErrorKind::StorageFull), "not full");
        Ok(())
    }

    /// Makes it take nothing any more, as ext4 does itself when it finds that its device has
    /// failed.
    pub fn fail(&self) -> Result<()> {
        run("mount", &["-o", "remount,abort", &self.place.to_string_lossy()]).map(drop)
    }

    /// Removes what it was filled with.
    pub fn clear(&self) -> Result<()> {
        Ok(fs::remove_file(self.place.join(FILLER))?)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        if let Err(error) = run("umount", &["--lazy", &self.place.to_string_lossy()]) {
            eprintln!("{error:#}");
        }
    }
}

#[test]
fn a_full_disk_does_not_stop_a_take_over() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let mut small = None;
    play(options().calm(), |scene| {
        let state = scene.host("b")?.directory().join("state");
        scene.host_mut("b")?.terminate()?;
        small = Some(SmallDisk::mount(&directory.path().join("image"), state, 512)?);
        scene.restart("b")?;
        scene.protected_guest("a", "b")?;
        small.as_ref().context("mounted")?.fill()?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        scene.await_guest()?;
        // Its record is of this host and generation, on the full disk.
        let record =
            fs::read(scene.host("b")?.directory().join("state").join(VM).join("record.json"))?;
        let record: serde_json::Value = serde_json::from_slice(&record)?;
        ensure!(record["image"]["role"] == "active", "{record}");
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        // Nothing is to be left behind.
        scene.host_mut("b")?.kill_everything()?;
        drop(small.take());
        Ok(())
    });
}

/// Its mirror, the image that the guest was started on, is sound, and elsewhere. Before, it was called
/// protected by a host that would have won the VM, and could have noted nothing of it.
#[test]
fn a_backup_that_can_write_no_record_is_given_up() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let mut small = None;
    play(options().calm(), |scene| {
        let state = scene.host("a")?.directory().join("state");
        scene.host_mut("a")?.terminate()?;
        small = Some(SmallDisk::mount(&directory.path().join("image"), state, 64)?);
        scene.restart("a")?;
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        hand_over(scene.host("a")?, VM)?;
        scene.await_live("b")?;
        scene.protect("b", "a")?;
        scene.await_protected("b", |_| ())?;
        // Made once the mirror is whole, and the last of what a take-over needs.
        let activation = scene.host("a")?.directory().join("state").join(VM).join("activation");
        wait_for("the backup to be ready", LIMIT, || Ok(activation.exists().then_some(())))?;
        small.as_ref().context("mounted")?.fail()?;
        let reason = await_degraded(scene, "b")?;
        ensure!(reason.contains("cannot write what a take-over needs"), "{reason}");
        ensure!(reason.contains("Read-only file system"), "{reason}");
        prove_survival(scene, client, "b")?;
        // Nothing is to be left behind.
        scene.host_mut("a")?.kill_everything()?;
        drop(small.take());
        Ok(())
    });
}
