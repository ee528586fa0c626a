//! Disks that lose writes, and disks that are full.

use crate::stage::{
    Calm, await_degraded, await_service, daemon, options, play, play_protected, prove_survival,
};
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use understudy_lab::HostOptions;
use understudy_lab::scene::VM;

/// What a process has been told about running out of memory.
fn oom_score(pid: u64) -> Result<i32> {
    Ok(fs::read_to_string(format!("/proc/{pid}/oom_score_adj"))?.trim().parse()?)
}

/// While this file is there, no image on the host can be synced. Afterwards each sync succeeds
/// again, as Linux has it.
struct Failing(PathBuf);

impl Failing {
    fn new(directory: &Path) -> Failing {
        Failing(directory.join("cannot-sync"))
    }

    fn daemon(&self) -> HostOptions {
        let point = format!("sync-disk=return({})", self.0.display());
        HostOptions { environment: vec![("FAILPOINTS".to_owned(), point)], ..daemon().calm() }
    }

    fn begin(&self) -> Result<()> {
        Ok(fs::write(&self.0, "")?)
    }

    fn end(&self) -> Result<()> {
        Ok(fs::remove_file(&self.0)?)
    }
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
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

// Before, epoch 2 was applied behind it and made the mirrors whole, unless the session was over
// by then.
#[test]
fn a_backup_that_cannot_apply_the_first_epoch_says_so_and_another_session_can() {
    let mut options = options();
    let point = ("FAILPOINTS".to_owned(), "apply-epoch=1*return".to_owned());
    options.daemons.insert("b".to_owned(), HostOptions { environment: vec![point], ..daemon() });
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        // It may be over before the command has seen that it began.
        scene.host("a")?.cli(["protect", VM, "--to", "b"])?;
        let reason = await_degraded(scene, "a")?;
        ensure!(reason.contains("epoch 1 could not be applied: a test says so"), "{reason}");
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        scene.await_guest()?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        Ok(())
    });
}

// Before, the second flush succeeded, although what the first one lost was still lost.
#[test]
fn a_guest_whose_disk_lost_writes_hears_of_it_with_every_flush() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let failing = Failing::new(directory.path());
    let mut options = options().calm();
    options.daemons.insert("a".to_owned(), failing.daemon());
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        // When memory runs out, the kernel ends a QEMU before the daemon.
        let qemu = scene.status("a")?["qemu_pid"].as_u64().context("no QEMU")?;
        let (daemons, qemus) = (oom_score(scene.host("a")?.pid().into())?, oom_score(qemu)?);
        ensure!(qemus == 300 && daemons <= 0, "{daemons}, {qemus}");
        // Without CAP_SYS_RESOURCE it cannot be spared, and says so.
        let said = scene.diagnostics().contains("cannot write /proc/self/oom_score_adj");
        ensure!(daemons == -900 || said, "{daemons}");
        let mut shell = scene.shell()?;
        let mut flush = || -> Result<bool> {
            let line =
                "dd if=/dev/zero of=/data/flushed bs=4k count=1 conv=fsync 2>&1 && echo WELL";
            Ok(shell.run(line)?.text.contains("WELL"))
        };
        ensure!(flush()?, "the disk is sound");
        failing.begin()?;
        ensure!(!flush()?, "the sync failed");
        failing.end()?;
        ensure!(!flush()?, "the next one succeeded although the first one's writes are lost");
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        Ok(())
    });
}

/// A small file system of its own, mounted at a host's state directory.
struct SmallDisk {
    place: PathBuf,
}

fn run(command: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(command).args(arguments).output().context(command.to_owned())?;
    ensure!(output.status.success(), "{command} {arguments:?}: {output:?}");
    Ok(())
}

impl SmallDisk {
    fn mount(image: &Path, place: PathBuf, mib: u64) -> Result<SmallDisk> {
        File::create(image)?.set_len(mib << 20)?;
        let (image, at) = (image.to_str().context("a path")?, place.to_str().context("a path")?);
        run("mkfs.ext4", &["-q", "-m", "0", image])?;
        run("mount", &["-o", "loop", image, at])?;
        Ok(SmallDisk { place })
    }

    /// To the last byte.
    fn fill(&self) -> Result<()> {
        let mut filler = File::create(self.place.join("filler"))?;
        for bytes in [1 << 20, 4096, 1] {
            while filler.write_all(&vec![1; bytes]).is_ok() {}
        }
        filler.sync_all()?;
        let more = fs::write(self.place.join("more"), [1; 8192]);
        ensure!(more.is_err_and(|error| error.kind() == io::ErrorKind::StorageFull), "not full");
        Ok(())
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
