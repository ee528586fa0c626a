//! A guest that runs while its memory is still being loaded: the store falls silent, or the
//! daemon dies.

use crate::refusals::says;
use crate::snapshot::{busy, json, number, prove_restored, small, store};
use crate::stage::{
    Calm, LIMIT, await_forgotten, daemon, daemon_passing, options, play, refusal, vms,
};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread;
use tempfile::TempDir;
use understudy_lab::scene::VM;
use understudy_lab::{HostOptions, Scene, SceneOptions, wait_for};

const SILENCE: u64 = 10;

/// Writes that a disk must have carried out, one after the other.
const WRITE: &str = "i=0; while :; do i=$((i+1)); \
     dd if=/dev/zero of=/data/zeros bs=4k count=64 conv=notrunc,fsync 2>/dev/null; \
     echo $i > /data/round.new; mv /data/round.new /data/round; sync; done";
const DROP: &str = "sync; echo 3 > /proc/sys/vm/drop_caches";

/// A host's store that a story holds back: until it is let go, nothing is read of it but what a guest
/// waits for, and once it has fallen silent nothing at all. Loading does not end before, whatever
/// the machine.
pub struct HeldStore {
    waiters_only: PathBuf,
    silent: PathBuf,
    _directory: TempDir,
}

impl HeldStore {
    pub fn new() -> HeldStore {
        let directory = tempfile::tempdir().expect("a directory for the test");
        let [waiters_only, silent] =
            ["waiters-only", "silent"].map(|name| directory.path().join(name));
        fs::write(&waiters_only, "").expect("a mark for the test");
        HeldStore { waiters_only, silent, _directory: directory }
    }

    /// The variable that the host's daemon must be given for it.
    pub fn environment(&self) -> (String, String) {
        let (waiters, silent) = (self.waiters_only.display(), self.silent.display());
        let points = format!("store-silent=return({silent});only-waiters=return({waiters})");
        ("FAILPOINTS".to_owned(), points)
    }

    pub fn fall_silent(&self) -> Result<()> {
        Ok(fs::write(&self.silent, "")?)
    }

    pub fn let_go(&self) -> Result<()> {
        fs::remove_file(&self.waiters_only)?;
        if self.silent.exists() {
            fs::remove_file(&self.silent)?;
        }
        Ok(())
    }
}

/// Host b's store is held back.
fn held(store: &HeldStore) -> SceneOptions {
    let mut options = small();
    let environment = vec![store.environment()];
    options.daemons.insert("b".to_owned(), HostOptions { environment, ..daemon().calm() });
    options
}

/// A VM that is in the store and nowhere else: its sums, and how far it had counted.
pub fn saved(scene: &Scene) -> Result<(String, u64)> {
    scene.start_guest("a")?;
    scene.await_guest()?;
    let mut shell = scene.shell()?;
    let sums = busy(scene, &mut shell)?;
    json(scene, "a", &["vm", "snapshot", VM, "--trace", "0", "--store", &store(scene)])?;
    let count = number(&mut shell, "/tmp/count")?;
    drop(shell);
    scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
    await_forgotten(scene, "a")?;
    Ok((sums, count))
}

/// Restores it on host b; most of its memory is still to come.
pub fn restore_lazily(scene: &Scene, held_store: &HeldStore) -> Result<()> {
    let store = store(scene);
    json(scene, "b", &["vm", "restore", VM, "--store", &store, "--mode", "lazy"])?;
    held_store.fall_silent()?;
    let status = scene.status("b")?;
    ensure!(status["filling"]["complete"] == false, "all is there already: {status}");
    Ok(())
}

/// The time for which the store has been silent, as `status` says.
fn silent_for(scene: &Scene) -> Result<Option<u64>> {
    let status = scene.status("b")?;
    ensure!(status["live"] == true, "the guest does not live any more: {status}");
    let Some(words) = status["filling"]["stalled"].as_str() else { return Ok(None) };
    says(words, &[&store(scene), "has not answered for"])?;
    let seconds = words.split(' ').rev().nth(1).context("no length")?;
    Ok(Some(seconds.parse().with_context(|| format!("how long: {words:?}"))?))
}

#[test]
fn a_silent_store_stalls_a_restored_guest_and_harms_nothing() {
    let held_store = HeldStore::new();
    play(held(&held_store), |scene| {
        let (sums, count) = saved(scene)?;
        restore_lazily(scene, &held_store)?;
        wait_for("the store to be silent for long", LIMIT, || {
            Ok(silent_for(scene)?.filter(|seconds| *seconds >= SILENCE))
        })?;
        held_store.let_go()?;
        prove_restored(scene, "b", &sums, count)?;
        wait_for("all of the guest to be there", LIMIT, || {
            Ok(scene.status("b")?["filling"].is_null().then_some(()))
        })?;
        prove_restored(scene, "b", &sums, count)?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "b")
    });
}

/// The restore had once failed with that, and nothing could be started on what was there of the
/// disk.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_guest_that_powers_off_while_it_is_loaded_is_started_again_when_its_disk_is_there() {
    let held_store = HeldStore::new();
    play(held(&held_store), |scene| {
        saved(scene)?;
        let store = store(scene);
        json(scene, "b", &["vm", "restore", VM, "--store", &store, "--mode", "lazy"])?;
        let mut shell = scene.shell()?;
        shell.run("echo later > /data/later; sync")?;
        shell.start("poweroff")?;
        await_forgotten(scene, "b")?;
        let start = ["vm", "start", VM];
        let (_, words) = refusal(scene.host("b")?, &start)?;
        says(&words, &["is being restored", "try again once it is"])?;
        held_store.let_go()?;
        wait_for("the rest of the disk", LIMIT, || {
            Ok(scene.host("b")?.cli(start)?.status.success().then_some(()))
        })?;
        scene.await_guest()?;
        let read = scene.shell()?.run("cat /data/later")?.text;
        ensure!(read.trim() == "later", "{read}");
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "b")
    });
}

/// A guest once stood still for good, as what it had still to load went with the snapshot.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_snapshot_is_not_deleted_while_a_guest_is_restored_from_it() {
    let held_store = HeldStore::new();
    play(held(&held_store), |scene| {
        let (sums, count) = saved(scene)?;
        restore_lazily(scene, &held_store)?;
        let (which, store) = (format!("{VM}@1"), store(scene));
        let delete = ["cluster", "delete", &which, "--store", &store];
        let (_, words) = refusal(scene.host("a")?, &delete)?;
        says(&words, &["snapshot 1", "host b began", VM, "--force"])?;
        held_store.let_go()?;
        wait_for("all of the guest to be there", LIMIT, || {
            Ok(scene.status("b")?["filling"].is_null().then_some(()))
        })?;
        prove_restored(scene, "b", &sums, count)?;
        wait_for("the snapshot to be free", LIMIT, || Ok(json(scene, "a", &delete).ok()))?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "b")
    });
}

/// Four threads read. One that finds nothing left to read while another still has to say that
/// it has filled in the last must not leave the guest without its zeros.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn loading_ends_whoever_sees_it_first() {
    let mut options = small();
    options.daemons.insert("b".to_owned(), daemon_passing("all-filled=sleep(1000)"));
    play(options, |scene| {
        let (sums, count) = saved(scene)?;
        json(scene, "b", &["vm", "restore", VM, "--store", &store(scene), "--mode", "lazy"])?;
        wait_for("all of the guest to be there", LIMIT, || {
            Ok(scene.status("b")?["filling"].is_null().then_some(()))
        })?;
        prove_restored(scene, "b", &sums, count)?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "b")
    });
}

/// A guest's QEMU on host b, while its daemon is away.
pub struct Orphaned {
    qemu: u64,
}

impl Orphaned {
    /// Kills host b's daemon while the VM is being loaded there.
    pub fn make(scene: &mut Scene, vm: &str) -> Result<Orphaned> {
        let host = scene.host("b")?;
        let custodian = host.directory().join("state").join(vm).join("custodian");
        wait_for("a custodian", LIMIT, || Ok(custodian.exists().then_some(())))?;
        let status = host.status(vm)?;
        ensure!(status["filling"]["complete"] == false, "all is there already: {status}");
        let qemu = status["qemu_pid"].as_u64().context("no QEMU")?;
        scene.host_mut("b")?.kill_daemon()?;
        let orphaned = Orphaned { qemu };
        wait_for("the guest to stand still", LIMIT, || Ok(orphaned.stands_still()?.then_some(())))?;
        Ok(orphaned)
    }

    /// Whether no vCPU runs; an error if QEMU has ended.
    fn stands_still(&self) -> Result<bool> {
        let mut vcpus = 0;
        let tasks = fs::read_dir(format!("/proc/{}/task", self.qemu));
        for task in tasks.context("QEMU has ended")? {
            // Others than vCPUs come and go.
            let Ok(stat) = fs::read_to_string(task?.path().join("stat")) else { continue };
            let (name, state) = stat.rsplit_once(") ").context("no state of a thread")?;
            if name.contains("(CPU ") {
                vcpus += 1;
                if !state.starts_with('T') {
                    return Ok(false);
                }
            }
        }
        ensure!(vcpus > 0, "QEMU has no vCPU");
        Ok(true)
    }

    /// The next daemon has taken the VM back, in the QEMU in which it was.
    pub fn await_taken_back(&self, scene: &Scene, vm: &str) -> Result<()> {
        let host = scene.host("b")?;
        let status = wait_for("the VM to be taken back, and to say so", LIMIT, || {
            let known = vms(host)?.into_iter().find(|known| known["name"] == vm);
            Ok(known.filter(|known| known["events"].to_string().contains("stood still for")))
        })?;
        ensure!(status["qemu_pid"] == self.qemu && status["live"] == true, "{status}");
        says(&status["events"].to_string(), &["this host's daemon had ended"])?;
        wait_for("the guest to go on", LIMIT, || Ok((!self.stands_still()?).then_some(())))
    }

    /// All of it is there, and nobody keeps it any more.
    pub fn await_whole(&self, scene: &Scene, vm: &str) -> Result<()> {
        let host = scene.host("b")?;
        wait_for("all of the guest to be there", LIMIT, || {
            Ok(host.status(vm)?["filling"].is_null().then_some(()))
        })?;
        let expected = [u64::from(host.pid()), self.qemu];
        wait_for("the custodian to end", LIMIT, || {
            let processes = host.namespace().processes()?;
            Ok(processes.iter().all(|&pid| expected.contains(&pid.into())).then_some(()))
        })
    }
}

/// The guest's connections live, its counter goes on, and what it had not read yet is right.
/// While nobody knows whose the VM is, nobody can start it.
#[test]
fn a_guest_goes_on_whose_daemon_died_while_it_was_loaded() {
    let held_store = HeldStore::new();
    play(held(&held_store), |scene| {
        let (sums, count) = saved(scene)?;
        let store = store(scene);
        let restore = ["vm", "restore", VM, "--store", &store];
        json(scene, "b", &[&restore[..], &["--mode", "lazy"]].concat())?;
        let (mut shell, mut writer) = (scene.shell()?, scene.shell()?);
        shell.run("echo written > /data/written; sync")?;
        let before = number(&mut shell, "/tmp/count")?;
        writer.start(WRITE)?;
        wait_for("the guest to write", LIMIT, || Ok(number(&mut shell, "/data/round").ok()))?;
        held_store.fall_silent()?;
        let orphaned = Orphaned::make(scene, VM)?;
        let arbiter = scene.lab().arbiter_directory();
        let away = arbiter.with_extension("away");
        fs::rename(&arbiter, &away)?;
        scene.revive("b")?;
        prove_refusals(scene, &restore)?;
        ensure!(orphaned.stands_still()?, "it runs, and nobody knows whose it is");
        fs::rename(&away, &arbiter)?;
        orphaned.await_taken_back(scene, VM)?;
        let (_, words) = refusal(scene.host("b")?, &restore)?;
        says(&words, &["host b runs it"])?;
        // The second death finds faults and requests that the first one has left.
        let orphaned = Orphaned::make(scene, VM)?;
        scene.revive("b")?;
        orphaned.await_taken_back(scene, VM)?;
        held_store.let_go()?;
        ensure!(number(&mut shell, "/tmp/count")? >= before, "it began anew");
        let written = shell.run(&format!("{DROP}; cat /data/written"))?.text;
        ensure!(written.trim() == "written", "a write was lost: {written}");
        let round = number(&mut shell, "/data/round")?;
        wait_for("the guest to write on", LIMIT, || {
            Ok((number(&mut shell, "/data/round")? > round + 1).then_some(()))
        })?;
        let errors = shell.run("dmesg | grep -i 'error' | grep -v RAS")?.text;
        ensure!(errors.trim().is_empty(), "the guest saw: {errors}");
        prove_restored(scene, "b", &sums, count)?;
        orphaned.await_whole(scene, VM)?;
        prove_restored(scene, "b", &sums, count)?;
        // It is a VM like others: it can be protected, saved, and ends with its daemon.
        json(scene, "b", &["vm", "snapshot", VM, "--trace", "0", "--store", &store])?;
        scene.protect("b", "a")?;
        scene.await_protected("b", |_| ())?;
        drop((shell, writer));
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "b")?;
        await_forgotten(scene, "a")
    });
}

fn prove_refusals(scene: &Scene, restore: &[&str]) -> Result<()> {
    let definition = scene.definition().display().to_string();
    let starts: [&[&str]; 3] =
        [&["vm", "start", &definition], restore, &["recover", VM, "--force"]];
    for start in starts {
        let (_, words) = refusal(scene.host("b")?, start)?;
        says(&words, &[VM, "outlived this host's last daemon"])?;
    }
    let (_, words) = refusal(scene.host("a")?, restore)?;
    says(&words, &["host b", "outlived this host's last daemon"])?;
    // Before, no status told of it, and an upgrade ended it.
    let told = |arguments: &[&str], code| -> Result<String> {
        let output = scene.host("b")?.cli(arguments)?;
        ensure!(output.status.code() == Some(code), "{arguments:?} ended with {}", output.status);
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    says(&told(&["status", VM], 3)?, &["DEGRADED", "is being taken back"])?;
    says(&told(&["status"], 0)?, &["WRONG", VM, "is being taken back"])?;
    says(&told(&["upgrade", "--plan"], 1)?, &[VM, "would be ended"])
}

/// Before, the guest was ended, and only the log said so.
#[test]
fn a_guest_of_which_the_next_daemon_can_read_nothing_is_in_status_until_it_is_ended() {
    play(options().calm(), |scene| {
        scene.host_mut("b")?.kill_daemon()?;
        let directory = scene.host("b")?.directory().join("state").join(VM);
        fs::create_dir_all(&directory)?;
        let custodian = directory.join("custodian");
        let listener = UnixListener::bind(&custodian)?;
        let ended = thread::spawn(move || keep_what_nobody_reads(&listener, &custodian));
        scene.revive("b")?;
        let output = scene.host("b")?.cli(["status", VM])?;
        let words = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(output.status.code() == Some(3), "`status` ended with {}", output.status);
        for word in ["DEGRADED", "outlived this host's last daemon", "vm stop guest --force"] {
            ensure!(words.contains(word), "{words}");
        }
        let words = scene.host("b")?.cli(["status"])?.stdout;
        let words = String::from_utf8_lossy(&words).into_owned();
        for word in ["WRONG", VM, "cannot be read by this version"] {
            ensure!(words.contains(word), "{words}");
        }
        let definition = scene.definition().display().to_string();
        let (_, words) = refusal(scene.host("b")?, &["vm", "start", &definition])?;
        says(&words, &["outlived this host's last daemon"])?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        ended.join().expect("a custodian")?;
        await_forgotten(scene, "b")
    });
}

/// What a custodian does whose text is of a version to come, until it is told to end.
fn keep_what_nobody_reads(listener: &UnixListener, socket: &Path) -> Result<()> {
    for daemon in listener.incoming() {
        let mut daemon = daemon?;
        // Whoever only wants it to end does not read.
        let _ = daemon.write_all(&[2, 0, 0, 0, 0, 0, 0, 0, b'{', b'}']);
        let mut word = [0];
        if daemon.read(&mut word)? == 1 {
            ensure!(word == *b"e", "it was told {word:?}");
            return Ok(fs::remove_file(socket)?);
        }
    }
    Ok(())
}

/// The operator says that host b is down for good, and it is not: its copy ends.
#[test]
fn a_guest_that_was_restored_elsewhere_meanwhile_is_not_taken_back() {
    let held_store = HeldStore::new();
    play(held(&held_store), |scene| {
        let (sums, count) = saved(scene)?;
        restore_lazily(scene, &held_store)?;
        let orphaned = Orphaned::make(scene, VM)?;
        let store = store(scene);
        json(scene, "a", &["vm", "restore", VM, "--store", &store, "--force"])?;
        scene.revive("b")?;
        wait_for("host b to end its copy", LIMIT, || {
            Ok(vms(scene.host("b")?)?.into_iter().find(|vm| vm["role"] == "fenced"))
        })?;
        wait_for("the copy's QEMU to end", LIMIT, || {
            Ok(orphaned.stands_still().is_err().then_some(()))
        })?;
        prove_restored(scene, "a", &sums, count)?;
        for host in ["a", "b"] {
            scene.host(host)?.call(["vm", "stop", VM, "--force"])?;
            await_forgotten(scene, host)?;
        }
        held_store.let_go()
    });
}

/// The operator does not wait for the arbiter: what stands still ends, and nothing is left of it.
#[test]
fn a_guest_that_stands_still_can_be_given_up() {
    let held_store = HeldStore::new();
    play(held(&held_store), |scene| {
        let (sums, count) = saved(scene)?;
        restore_lazily(scene, &held_store)?;
        Orphaned::make(scene, VM)?;
        let arbiter = scene.lab().arbiter_directory();
        let away = arbiter.with_extension("away");
        fs::rename(&arbiter, &away)?;
        scene.revive("b")?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "b")?;
        fs::rename(&away, &arbiter)?;
        held_store.let_go()?;
        json(scene, "b", &["vm", "restore", VM, "--store", &store(scene)])?;
        prove_restored(scene, "b", &sums, count)?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "b")
    });
}

/// A guest dies with its host. Nobody starts it on what is there of its images; from the
/// snapshot it runs again.
#[test]
fn a_host_that_dies_while_a_guest_is_loaded_leaves_the_snapshot() {
    let held_store = HeldStore::new();
    play(held(&held_store), |scene| {
        let (sums, count) = saved(scene)?;
        restore_lazily(scene, &held_store)?;
        scene.host_mut("b")?.kill_everything()?;
        held_store.let_go()?;
        scene.restart_with("b", daemon().calm())?;
        await_forgotten(scene, "b")?;
        let (_, words) = refusal(scene.host("b")?, &["recover", VM, "--force"])?;
        says(&words, &["host b has no images of"])?;
        json(scene, "b", &["vm", "restore", VM, "--store", &store(scene)])?;
        prove_restored(scene, "b", &sums, count)?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "b")
    });
}
