//! A VM is snapshotted while its programs write, ends, and runs again as it was.

use crate::cluster_deaths::Moment;
use crate::keepers::with_keepers;
use crate::refusals::says;
use crate::sick_disks::{FLUSHES, await_hung_flush, await_more_flushes, flushed};
use crate::sick_hosts::Hanging;
use crate::stage::{
    Calm, LIMIT, await_degraded, await_forgotten, daemon, daemon_passing, hand_over, options, play,
    refusal, refused, restart_daemon,
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};
use understudy_lab::scene::VM;
use understudy_lab::{GuestShell, Scene, SceneOptions, wait_for};
use understudy_protocol::BlockId;
use understudy_snapshot::{Area, AreaEntry, ChunkId, Store};

/// Counts in memory and, right behind it, on the disk.
const COUNT: &str = "i=0; while :; do i=$((i+1)); echo $i > /tmp/count.new; \
     mv /tmp/count.new /tmp/count; echo $i > /data/count.new; mv /data/count.new /data/count; sleep 0.02; done";
/// The command that makes what does not change: a snapshot must have every bit of it.
const FILL: &str = "dd if=/dev/urandom of=/tmp/fill bs=64k count=100 2>/dev/null; \
     dd if=/dev/urandom of=/data/fill bs=64k count=30 2>/dev/null; sync; \
     md5sum /tmp/fill /data/fill";
const SUMS: &str = "echo 3 > /proc/sys/vm/drop_caches; md5sum /tmp/fill /data/fill";

pub fn small() -> SceneOptions {
    SceneOptions { memory_mib: 192, ..options().calm() }
}

pub fn store(scene: &Scene) -> String {
    scene.lab().directory().join("store").display().to_string()
}

pub fn number(shell: &mut GuestShell, file: &str) -> Result<u64> {
    let text = shell.run(&format!("cat {file}"))?.text;
    text.trim().parse().with_context(|| format!("{file} in the guest: {text:?}"))
}

pub fn json(scene: &Scene, host: &str, arguments: &[&str]) -> Result<Value> {
    let arguments = [arguments, &["--json"]].concat();
    Ok(serde_json::from_str(&scene.host(host)?.call(arguments)?)?)
}

/// Restores the VM on a host; returns what it counted to when it went on there, at least.
pub fn prove_restored(scene: &Scene, host: &str, sums: &str, most: u64) -> Result<u64> {
    let mut shell = scene.shell()?;
    let count = number(&mut shell, "/tmp/count")?;
    ensure!(shell.run(SUMS)?.text == sums, "memory or disk are not what they were");
    wait_for("the counter to go on", LIMIT, || {
        Ok((number(&mut shell, "/tmp/count")? > most).then_some(()))
    })?;
    let (before, on_disk) = (number(&mut shell, "/tmp/count")?, number(&mut shell, "/data/count")?);
    ensure!(on_disk + 1 >= before, "memory says {before}, the disk {on_disk}");
    ensure!(scene.status(host)?["live"] == true, "it does not run on host {host}");
    Ok(count)
}

#[test]
fn a_vm_runs_again_as_it_was() {
    play(small(), |scene| {
        let store = store(scene);
        scene.start_guest("a")?;
        scene.await_guest()?;
        let mut shell = scene.shell()?;
        let sums = shell.run(FILL)?.text;
        shell.start(COUNT)?;
        wait_for("the guest to count", LIMIT, || Ok(number(&mut shell, "/data/count").ok()))?;
        let before = number(&mut shell, "/tmp/count")?;
        let report = json(scene, "a", &["vm", "snapshot", VM, "--trace", "1", "--store", &store])?;
        ensure!(report["number"] == 1 && report["members"][0]["vm"] == VM, "{report}");
        let after = number(&mut shell, "/tmp/count")?;
        let restore = ["vm", "restore", VM, "--store", &store];
        let (_, words) = refusal(scene.host("a")?, &restore)?;
        says(&words, &[VM, "host a runs it", "vm stop"])?;
        let (_, words) = refusal(scene.host("b")?, &restore)?;
        says(&words, &[VM, "host a runs it"])?;
        drop(shell);
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "a")?;
        // On another host, with nothing of it but the store.
        let report = json(scene, "b", &restore)?;
        ensure!(report["members"][0]["host"] == "b", "{report}");
        let count = prove_restored(scene, "b", &sums, after)?;
        ensure!(count >= before, "it counts from {count}, it was at {before} before the snapshot");
        wait_for("all of the guest to be there", LIMIT, || {
            Ok(scene.status("b")?["filling"].is_null().then_some(()))
        })?;
        // Once more: a snapshot of what was restored, and of a member whose daemon died.
        let report = json(scene, "b", &["vm", "snapshot", VM, "--trace", "1", "--store", &store])?;
        ensure!(report["number"] == 2, "{report}");
        scene.host_mut("b")?.kill_everything()?;
        let (_, words) = refusal(scene.host("a")?, &restore)?;
        says(&words, &["may run on host b", "does not answer", "--force"])?;
        scene.restart("b")?;
        json(scene, "a", &restore)?;
        prove_restored(scene, "a", &sums, after)?;
        prove_library(scene, &store)
    });
}

// Before, host b won the VM from the arbiter, and it ran twice.
#[test]
fn a_vm_that_runs_is_not_restored_elsewhere_whoever_orders_it() {
    let mut options = small();
    let daemon = options.daemons.get_mut("b").expect("the backup's");
    daemon.environment.push(("FAILPOINTS".to_owned(), "restore-unasked=return".to_owned()));
    play(options, |scene| {
        let store = store(scene);
        scene.start_guest("a")?;
        scene.await_guest()?;
        json(scene, "a", &["vm", "snapshot", VM, "--trace", "1", "--store", &store])?;
        let (_, words) = refusal(scene.host("b")?, &["vm", "restore", VM, "--store", &store])?;
        says(&words, &[VM, "is not to be restored", "host a runs it"])?;
        ensure!(scene.status("a")?["live"] == true, "host a does not run it any more");
        ensure!(scene.shell()?.run("echo here")?.text.trim() == "here");
        Ok(())
    });
}

/// The guest's output is held by nobody: the pause once answered the flush, and what the guest said
/// then a power failure could take back. And a guest whose pause had failed stood still for good.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_snapshot_of_an_unprotected_vm_answers_no_flush_before_it_is_done() {
    let (prepared, hanging) = (Moment::new(), Hanging::new());
    let mut options = small();
    let points = [prepared.action("snapshot-prepared", "1*"), hanging.action("hang-sync")];
    options.daemons.insert("a".to_owned(), daemon_passing(points.join(";")));
    play(options, |scene| {
        let store = store(scene);
        let take = ["vm", "snapshot", VM, "--trace", "0", "--store", &store];
        scene.start_guest("a")?;
        scene.await_guest()?;
        scene.shell()?.start(FLUSHES)?;
        wait_for("the guest to flush", LIMIT, || Ok((flushed(scene)? > 0).then_some(())))?;
        let taking = scene.host("a")?.begin(take)?;
        prepared.await_reached()?;
        hanging.begin()?;
        let before = await_hung_flush(scene)?;
        prepared.end()?;
        let (_, words) = refused(&taking.wait_with_output()?, "vm snapshot")?;
        says(&words, &[VM, "did not stop the guest"])?;
        ensure!(flushed(scene)? == before, "a flush was answered that has not reached the disk");
        hanging.end()?;
        await_more_flushes(scene, before)?;
        json(scene, "a", &take)?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "a")
    });
}

/// Fills memory and disk, and has the guest count; gives the sums of what was filled.
pub fn busy(scene: &Scene, shell: &mut GuestShell) -> Result<String> {
    let sums = shell.run(FILL)?.text;
    shell.start(COUNT)?;
    let mut looking = scene.shell()?;
    wait_for("the guest to count", LIMIT, || Ok(number(&mut looking, "/data/count").ok()))?;
    Ok(sums)
}

#[test]
fn a_protected_vm_is_snapshotted_from_its_backup() {
    play(small(), |scene| {
        let store = store(scene);
        scene.protected_guest("a", "b")?;
        let mut shell = scene.shell()?;
        let sums = busy(scene, &mut shell)?;
        let take = ["vm", "snapshot", VM, "--trace", "1", "--store", &store];
        let mut last = (0, 0);
        for round in 1..3 {
            let before = number(&mut shell, "/tmp/count")?;
            let report = json(scene, "a", &take)?;
            ensure!(report["number"] == round && report["members"][0]["host"] == "a", "{report}");
            last = (before, number(&mut shell, "/tmp/count")?);
            scene.await_protected("a", |_| ()).context("a snapshot ended it")?;
        }
        let which = format!("{VM}@2");
        let verified = json(scene, "b", &["cluster", "verify", &which, "--store", &store])?;
        ensure!(verified["problems"] == Value::Array(vec![]), "{verified}");
        drop(shell);
        // Protection goes on as if nothing had been.
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        let mut shell = scene.shell()?;
        ensure!(shell.run(SUMS)?.text == sums, "the take-over lost something");
        ensure!(number(&mut shell, "/tmp/count")? >= last.1, "it is behind the snapshot");
        drop(shell);
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "b")?;
        scene.restart("a")?;
        json(scene, "a", &["vm", "restore", VM, "--store", &store])?;
        let count = prove_restored(scene, "a", &sums, last.1)?;
        ensure!(count >= last.0, "it counts from {count}, it was at {} before", last.0);
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "a")
    });
}

/// Its keeper takes them, whose knowledge of the last one outlives the daemon.
#[test]
fn a_vm_with_a_keeper_is_snapshotted_whether_protected_or_not() {
    play(with_keepers(), |scene| {
        let store = store(scene);
        scene.start_guest("a")?;
        scene.await_guest()?;
        let mut shell = scene.shell()?;
        let sums = busy(scene, &mut shell)?;
        let take = ["vm", "snapshot", VM, "--trace", "1", "--store", &store];
        ensure!(json(scene, "a", &take)?["number"] == 1, "it is not the first");
        restart_daemon(scene, "a")?;
        let second = json(scene, "a", &take)?;
        ensure!(second["number"] == 2, "{second}");
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        let before = number(&mut shell, "/tmp/count")?;
        let report = json(scene, "a", &take)?;
        ensure!(report["number"] == 3 && report["members"][0]["host"] == "a", "{report}");
        let after = number(&mut shell, "/tmp/count")?;
        drop(shell);
        let restore = ["vm", "restore", VM, "--store", &store];
        for host in ["a", "b"] {
            says(&refusal(scene.host(host)?, &restore)?.1, &[VM, "has a keeper of it"])?;
        }
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "a")?;
        await_forgotten(scene, "b")?;
        json(scene, "b", &restore)?;
        let count = prove_restored(scene, "b", &sums, after)?;
        ensure!(count >= before, "it counts from {count}, it was at {before} before");
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "b")
    });
}

/// A planned fail-over while the backup stores its image: the guest runs on that memory then, so
/// there is no such snapshot.
#[test]
fn a_take_over_ends_the_snapshot_of_a_protected_vm() {
    play(small(), |scene| {
        let store = store(scene);
        scene.protected_guest("a", "b")?;
        let mut shell = scene.shell()?;
        let sums = busy(scene, &mut shell)?;
        let take = ["vm", "snapshot", VM, "--trace", "60", "--store", &store];
        let (seen, words) = thread::scope(|scope| -> Result<_> {
            let taking = scope.spawn(|| refusal(scene.host("a")?, &take));
            let chunks = Path::new(&store).join("chunks");
            wait_for("the backup to store something", LIMIT, || {
                Ok(fs::read_dir(&chunks).ok().and_then(|mut all| all.next()).map(drop))
            })?;
            let seen = number(&mut shell, "/tmp/count")?;
            hand_over(scene.host("a")?, VM)?;
            let taken = taking.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?;
            Ok((seen, taken?.1))
        })?;
        says(&words, &[VM, "given up"])?;
        scene.await_live("b")?;
        let listed = json(scene, "b", &["cluster", "snapshots", VM, "--store", &store])?;
        ensure!(listed == Value::Array(vec![]), "a partial snapshot: {listed}");
        drop(shell);
        prove_restored(scene, "b", &sums, seen)?;
        // Where it runs now it can be snapshotted at once.
        json(scene, "b", &["vm", "snapshot", VM, "--trace", "0", "--store", &store])?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "b")
    });
}

/// Regression: a snapshot that was taken while a restored VM was still being loaded was displaced by the older one as what
/// the next builds on, which was wrong without a word.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_restored_vm_is_snapshotted_once_it_is_noted_as_whole() {
    let whole = Moment::new();
    let mut options = small();
    let held = daemon_passing(whole.action("restore-whole", "1*"));
    options.daemons.insert("b".to_owned(), held);
    play(options, |scene| {
        let store = store(scene);
        scene.start_guest("a")?;
        scene.await_guest()?;
        let mut shell = scene.shell()?;
        busy(scene, &mut shell)?;
        let take = ["vm", "snapshot", VM, "--trace", "0", "--store", &store];
        json(scene, "a", &take)?;
        drop(shell);
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "a")?;
        json(scene, "b", &["vm", "restore", VM, "--store", &store])?;
        whole.await_reached()?;
        says(&refusal(scene.host("b")?, &take)?.1, &[VM, "still being loaded", "try again"])?;
        whole.end()?;
        json(scene, "b", &take)?;
        let mut shell = scene.shell()?;
        let sums = shell.run(FILL)?.text;
        json(scene, "b", &take)?;
        let seen = number(&mut shell, "/tmp/count")?;
        drop(shell);
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "b")?;
        json(scene, "b", &["vm", "restore", VM, "--store", &store])?;
        prove_restored(scene, "b", &sums, seen)?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "b")
    });
}

/// Regression: each snapshot built on the one that had lost a chunk, and none came to exist any more.
#[test]
fn a_chunk_that_is_lost_spoils_one_snapshot_only() {
    play(small(), |scene| {
        let store = store(scene);
        scene.start_guest("a")?;
        scene.await_guest()?;
        let take = ["vm", "snapshot", VM, "--trace", "0", "--store", &store];
        json(scene, "a", &take)?;
        fs::remove_file(&some_chunks(&store)?[1])?;
        says(&refusal(scene.host("a")?, &take)?.1, &["given up", "is missing from the store"])?;
        let report = json(scene, "a", &take)?;
        ensure!(report["number"] == 3, "{report}");
        let verified = json(scene, "a", &["cluster", "verify", VM, "--store", &store])?;
        ensure!(verified["problems"] == Value::Array(vec![]), "{verified}");
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "a")
    });
}

/// Regression: what was to be removed later was removed by nobody, least of all in a keeper.
#[test]
fn what_a_snapshot_leaves_behind_while_another_is_written_is_removed_later() {
    play(with_keepers(), |scene| {
        let store = store(scene);
        scene.start_guest("a")?;
        scene.await_guest()?;
        let take = ["vm", "snapshot", VM, "--trace", "0", "--store", &store];
        json(scene, "a", &take)?;
        fs::remove_file(&some_chunks(&store)?[1])?;
        let needed = all_chunks(&store)?;
        let others = Path::new(&store).join("writing/other");
        fs::create_dir_all(&others)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
        fs::write(others.join("1"), format!("{now} another-daemon"))?;
        says(&refusal(scene.host("a")?, &take)?.1, &["given up", "is missing from the store"])?;
        ensure!(all_chunks(&store)? > needed, "nothing is left behind");
        fs::remove_file(others.join("1"))?;
        wait_for("what is not needed to be removed", LIMIT, || {
            Ok((all_chunks(&store)? == needed).then_some(()))
        })?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "a")
    });
}

/// The guest runs on alone, there is no such snapshot, and the next one is the guest's own.
#[test]
fn a_backup_dies_while_it_stores_a_snapshot() {
    let mut options = small();
    options.daemons.insert("b".to_owned(), daemon_passing("snapshot-kept=panic"));
    play(options, |scene| {
        let store = store(scene);
        scene.protected_guest("a", "b")?;
        let mut shell = scene.shell()?;
        let sums = busy(scene, &mut shell)?;
        let take = ["vm", "snapshot", VM, "--trace", "0", "--store", &store];
        let (_, words) = refusal(scene.host("a")?, &take)?;
        says(&words, &[VM, "given up", "host b"])?;
        await_degraded(scene, "a")?;
        let listed = json(scene, "a", &["cluster", "snapshots", VM, "--store", &store])?;
        ensure!(listed == Value::Array(vec![]), "a partial snapshot: {listed}");
        let report = json(scene, "a", &take)?;
        ensure!(report["number"] == 2, "{report}");
        let seen = number(&mut shell, "/tmp/count")?;
        drop(shell);
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "a")?;
        scene.restart_with("b", daemon().calm())?;
        json(scene, "b", &["vm", "restore", VM, "--store", &store])?;
        prove_restored(scene, "b", &sums, seen)?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "b")
    });
}

/// Proves what is in the store: listed, verified, deleted.
fn prove_library(scene: &Scene, store: &str) -> Result<()> {
    let in_store = |arguments: &[&'static str]| [arguments, &["--store"]].concat();
    let listed = json(scene, "b", &[&in_store(&["cluster", "snapshots"])[..], &[store]].concat())?;
    let numbers: Vec<&Value> = listed.as_array().into_iter().flatten().collect();
    ensure!(numbers.len() == 2 && numbers.iter().all(|one| one["group"] == VM), "{listed}");
    let which = format!("{VM}@2");
    let verify = ["cluster", "verify", &which, "--store", store];
    let verified = json(scene, "a", &verify)?;
    ensure!(verified["problems"] == Value::Array(vec![]), "{verified}");
    let deleted = json(scene, "a", &["cluster", "delete", &format!("{VM}@1"), "--store", store])?;
    ensure!(deleted["number"] == 1, "{deleted}");
    ensure!(json(scene, "a", &verify)? == verified, "the other snapshot lost something");
    prove_refusals(scene, store)
}

/// Proves that each wrong input gets an error of its own, and nothing is started.
fn prove_refusals(scene: &Scene, store: &str) -> Result<()> {
    let host = scene.host("b")?;
    scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
    await_forgotten(scene, "a")?;
    let words = |arguments: &[&str]| -> Result<String> { Ok(refusal(host, arguments)?.1) };
    let which = format!("{VM}@7");
    says(&words(&["vm", "restore", &which, "--store", store])?, &[VM, "no snapshot 7", "is 2"])?;
    says(&words(&["vm", "restore", VM])?, &["--store"])?;
    says(
        &words(&["vm", "restore", VM, "--store", "/nowhere"])?,
        &["no snapshot store", "/nowhere"],
    )?;
    says(&words(&["vm", "restore", VM, "--store", "ftp://x"])?, &["ftp://x", "no store"])?;
    // It ran here when the daemon was killed, which is told until the host sees who has had it since.
    wait_for("host b to forget that it ran the guest", LIMIT, || {
        let words = words(&["vm", "snapshot", VM, "--store", store])?;
        Ok(words.contains("no VM").then_some(()))
    })?;
    says(&words(&["cluster", "snapshot", "shop"])?, &["[cluster.shop]", "host b"])?;
    let restore = ["vm", "restore", VM, "--store", store, "--mode", "eager"];
    for chunk in some_chunks(store)? {
        let content = fs::read(&chunk)?;
        fs::remove_file(&chunk)?;
        says(&words(&restore)?, &["chunk", "missing"])?;
        let mut torn = content.clone();
        let last = torn.len() - 1;
        torn[last] ^= 1;
        fs::write(&chunk, &torn)?;
        says(&words(&restore)?, &["chunk", "damaged"])?;
        let output = host.cli(["cluster", "verify", VM, "--store", store, "--json"])?;
        let found: Value = serde_json::from_slice(&output.stdout)?;
        let problems = found["problems"].as_array().map_or(0, Vec::len);
        ensure!(output.status.code() == Some(1) && problems > 0, "nothing found: {found}");
        fs::write(&chunk, content)?;
    }
    await_forgotten(scene, "b")
}

/// How many chunks there are in a store.
fn all_chunks(location: &str) -> Result<usize> {
    let folders = fs::read_dir(Path::new(location).join("chunks"))?;
    folders.map(|folder| Ok(fs::read_dir(folder?.path())?.count())).sum()
}

/// Paths of some chunks: one of its device state, and one of its main memory. (The kernel that it
/// boots is on the host.)
fn some_chunks(location: &str) -> Result<Vec<PathBuf>> {
    let store = Store::open(location)?;
    let manifest = store.snapshot(&VM.parse().unwrap(), None)?;
    let member = store.member(manifest.members.first().context("no member")?)?;
    let is_main = |entry: &&AreaEntry| entry.area == Area::Memory(BlockId(0));
    let map = store.area(member.areas.iter().find(is_main).context("no memory")?)?;
    let chunks = [member.device_state.chunks.first(), map.chunks().last()];
    let path = |chunk: Option<&ChunkId>| {
        let name = chunk.context("no chunk")?.to_string();
        Ok(Path::new(location).join("chunks").join(&name[..2]).join(name))
    };
    chunks.into_iter().map(path).collect()
}
