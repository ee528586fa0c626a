//! VMs that `recover` or a restore starts in a keeper: their daemon may die, as that of others.

use crate::autostart::{await_coming_up, awaited, set_autostart};
use crate::keepers::{answered, begin, in_keepers, kept, signal_keeper, told, with_keepers};
use crate::lazy::{HeldStore, restore_lazily, saved};
use crate::recover::lose;
use crate::refusals::{definition, quick, says, write};
use crate::snapshot::{json, number, prove_restored, store};
use crate::stage::{
    LIMIT, await_forgotten, play, play_protected, prove_disk, prove_survival, refusal, refused,
};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::process::Child;
use understudy_lab::scene::{GuestKind, VM};
use understudy_lab::{Scene, SceneOptions, wait_for};

/// The host's daemon dies, and the next finds the guest in the keeper in which it has gone on.
pub fn prove_kept(scene: &mut Scene, host: &str) -> Result<()> {
    let before = kept(&told(scene, host, VM)?).context("it has no keeper")?;
    scene.host_mut(host)?.kill_daemon()?;
    ensure!(scene.shell()?.run("echo here")?.text.trim() == "here", "it does not go on");
    scene.revive(host)?;
    ensure!(kept(&told(scene, host, VM)?)? == before, "another one");
    Ok(())
}

#[test]
fn what_is_recovered_on_a_host_whose_peer_died_outlives_its_daemon() {
    play_protected(with_keepers(), |scene, client| {
        lose(scene, &["a", "b"])?;
        let acked = client.abandon().acked();
        scene.restart("a")?;
        let words = scene.host("a")?.call(["recover", VM])?;
        ensure!(words.contains("runs, unprotected"), "{words}");
        scene.await_guest()?;
        prove_kept(scene, "a")?;
        let (_, words) = refusal(scene.host("a")?, &["recover", VM, "--force"])?;
        says(&words, &["nothing to recover", "has a keeper of it"])?;
        scene.restart("b")?;
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        prove_disk(scene, "b", acked)
    });
}

#[test]
fn a_recovery_that_is_refused_leaves_no_keeper() {
    play_protected(with_keepers(), |scene, client| {
        lose(scene, &["a", "b"])?;
        let acked = client.abandon().acked();
        for host in ["a", "b"] {
            scene.restart(host)?;
        }
        let (_, words) = refusal(scene.host("b")?, &["recover", VM])?;
        says(&words, &["on host a", "there"])?;
        let (code, words) = refusal(scene.host("b")?, &["recover", "nobody"])?;
        ensure!(code == 4, "{code}: {words}");
        await_forgotten(scene, "b")?;
        let report = scene.host("a")?.call(["recover", VM, "--dry-run"])?;
        ensure!(report.contains("host a"), "{report}");
        await_forgotten(scene, "a")?;
        scene.host("a")?.call(["recover", VM])?;
        scene.await_guest()?;
        prove_kept(scene, "a")?;
        prove_disk(scene, "a", acked)
    });
}

/// Host b's store is held back.
fn held(store: &HeldStore) -> SceneOptions {
    let mut options = SceneOptions { memory_mib: 192, ..with_keepers() };
    let daemon = options.daemons.get_mut("b").expect("host b's");
    daemon.environment.push(store.environment());
    options
}

#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn what_is_restored_goes_on_and_is_loaded_without_its_daemon() {
    let held_store = HeldStore::new();
    play(held(&held_store), |scene| {
        let (sums, count) = saved(scene)?;
        restore_lazily(scene, &held_store)?;
        let before = kept(&told(scene, "b", VM)?).context("it has no keeper")?;
        scene.host_mut("b")?.kill_daemon()?;
        held_store.let_go()?;
        let mut shell = scene.shell()?;
        let counted = number(&mut shell, "/tmp/count")?;
        wait_for("the guest to count on", LIMIT, || {
            Ok((number(&mut shell, "/tmp/count")? > counted).then_some(()))
        })?;
        drop(shell);
        scene.revive("b")?;
        wait_for("all of the guest to be there", LIMIT, || {
            Ok(scene.status("b")?["filling"].is_null().then_some(()))
        })?;
        ensure!(kept(&told(scene, "b", VM)?)? == before, "another one");
        prove_restored(scene, "b", &sums, count)?;
        // It is a VM like others.
        let store = store(scene);
        json(scene, "b", &["vm", "snapshot", VM, "--trace", "0", "--store", &store])?;
        scene.protect("b", "a")?;
        scene.await_protected("b", |_| ())?;
        prove_kept(scene, "b")?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "b")?;
        await_forgotten(scene, "a")
    });
}

/// A restore on host b that does not get to its start, as its store is held back, and its keeper's process.
fn begin_restore(scene: &Scene) -> Result<(Child, u64)> {
    let store = store(scene);
    let restore =
        scene.host("b")?.begin(["vm", "restore", VM, "--mode", "eager", "--store", &store])?;
    let directory = scene.host("b")?.directory().join("state").join(VM);
    wait_for("a keeper to load it", LIMIT, || {
        let files = fs::read_dir(&directory).into_iter().flatten().flatten();
        let mut names = files.map(|file| file.file_name().to_string_lossy().into_owned());
        Ok(names.any(|name| name.starts_with("restored-")).then_some(()))
    })?;
    let note: Value = serde_json::from_slice(&fs::read(directory.join("keeper.json"))?)?;
    let keeper = note["pid"].as_u64().context("it has no keeper")?;
    Ok((restore, keeper))
}

/// Proves that what was begun on host b is over and has left nothing: it can be done again.
fn prove_again(scene: &Scene, sums: &str, count: u64) -> Result<()> {
    await_forgotten(scene, "b")?;
    json(scene, "b", &["vm", "restore", VM, "--store", &store(scene)])?;
    kept(&told(scene, "b", VM)?).context("it has no keeper")?;
    prove_restored(scene, "b", sums, count)?;
    scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
    await_forgotten(scene, "b")
}

#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_restore_whose_keeper_dies_has_failed_and_is_done_again() {
    let held_store = HeldStore::new();
    play(held(&held_store), |scene| {
        let (sums, count) = saved(scene)?;
        let (restore, keeper) = begin_restore(scene)?;
        kill(Pid::from_raw(keeper.try_into()?), Signal::SIGKILL)?;
        let (_, words) = refused(&restore.wait_with_output()?, "vm restore")?;
        says(&words, &["was not restored", "its keeper has ended"])?;
        held_store.let_go()?;
        prove_again(scene, &sums, count)
    });
}

/// A restore of which nobody is told any more that it has begun is given up by its keeper.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_restore_whose_daemon_dies_before_the_guest_runs_is_given_up() {
    let held_store = HeldStore::new();
    play(held(&held_store), |scene| {
        let (sums, count) = saved(scene)?;
        let (restore, _) = begin_restore(scene)?;
        scene.host_mut("b")?.kill_daemon()?;
        refused(&restore.wait_with_output()?, "vm restore")?;
        scene.revive("b")?;
        await_forgotten(scene, "b")?;
        held_store.let_go()?;
        prove_again(scene, &sums, count)
    });
}

/// A start of another VM once waited until the keeper of the first had started that, or was given
/// up: a minute and more. No VM was offered meanwhile either.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_start_that_takes_long_holds_up_no_other() {
    let held = tempfile::tempdir().expect("a directory");
    let slow = held.path().join("slow");
    fs::write(&slow, "").expect("a file");
    let mut options =
        SceneOptions { kind: GuestKind::BootSector, memory_mib: 64, ..with_keepers() };
    let point = format!("start=return({})", held.path().display());
    let daemon = options.daemons.get_mut("a").expect("host a's");
    daemon.environment.push(("FAILPOINTS".to_owned(), point));
    play(options, |scene| {
        let [slow_file, quick_file] = ["slow", "quick"].map(|name| {
            let card = if name == "slow" { "73:01" } else { "73:02" };
            let text = definition(scene, name)?.replace("73:01", card);
            write(scene, &format!("{name}.toml"), &text).map(|file| file.display().to_string())
        });
        let host = scene.host("a")?;
        let mut first = host.begin(["vm", "start", &slow_file?])?;
        let note = host.directory().join("state/slow/keeper.json");
        wait_for("a keeper for the first", LIMIT, || {
            Ok(fs::read_to_string(&note).unwrap_or_default().contains("\"pid\"").then_some(()))
        })?;
        host.call(["vm", "start", &quick_file?])?;
        ensure!(first.try_wait()?.is_none(), "it was waited for");
        // What the first is to be is its own meanwhile.
        let same_card = definition(scene, "third")?;
        let third = write(scene, "third.toml", &same_card)?.display().to_string();
        let (_, words) = refusal(host, &["vm", "start", &third])?;
        says(&words, &["52:54:00:75:73:01", "\"slow\""])?;
        fs::remove_file(&slow)?;
        let output = first.wait_with_output()?;
        ensure!(output.status.success(), "{output:?}");
        for vm in ["slow", "quick"] {
            kept(&host.status(vm)?).with_context(|| format!("{vm} has no keeper"))?;
            host.call(["vm", "stop", vm, "--force"])?;
        }
        await_forgotten(scene, "a")
    });
}

/// Its daemon had died before: the images that its operator had named stayed on record, and those that it had were forgotten.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_start_on_other_images_that_ends_with_its_keeper_leaves_those_that_were_there() {
    let held = tempfile::tempdir().expect("a directory");
    let holds = held.path().join("holds");
    let mut options =
        SceneOptions { kind: GuestKind::BootSector, memory_mib: 64, ..with_keepers() };
    let daemon = options.daemons.get_mut("a").expect("host a's");
    let point = format!("first-order=return({})", holds.display());
    daemon.environment.push(("FAILPOINTS".to_owned(), point));
    play(options, |scene| {
        let text = definition(scene, "slow")?;
        let file = write(scene, "slow.toml", &text)?.display().to_string();
        scene.host("a")?.call(["vm", "start", &file])?;
        scene.host("a")?.call(["vm", "stop", "slow", "--force"])?;
        let image = scene.lab().directory().join("slow.img");
        fs::copy(&image, image.with_file_name("other.img"))?;
        let other = text.replace("/slow.img", "/other.img");
        let other = write(scene, "other.toml", &other)?.display().to_string();
        let state = scene.host("a")?.directory().join("state/slow");
        let named = |words: &str| -> Result<bool> {
            Ok(fs::read_to_string(state.join("record.json"))?.contains(words))
        };
        fs::write(&holds, "")?;
        let mut start = scene.host("a")?.begin(["vm", "start", &other, "--force"])?;
        let pid = || -> Result<Option<i32>> {
            let Ok(note) = fs::read(state.join("keeper.json")) else { return Ok(None) };
            let note: Value = serde_json::from_slice(&note).unwrap_or_default();
            Ok(note["pid"].as_i64().map(i32::try_from).transpose()?)
        };
        let keeper = wait_for("a keeper that is to start it", LIMIT, || {
            Ok(if named("/other.img")? { pid()? } else { None })
        })?;
        scene.host_mut("a")?.kill_daemon()?;
        start.wait()?;
        scene.revive("a")?;
        ensure!(named("/other.img")?, "the keeper may start it still");
        kill(Pid::from_raw(keeper), Signal::SIGKILL)?;
        wait_for("the former images to be on record again", LIMIT, || {
            Ok((named("/slow.img")? && !named("/other.img")?).then_some(()))
        })?;
        fs::remove_file(&holds)?;
        scene.host("a")?.call(["vm", "start", "slow"])?;
        scene.host("a")?.call(["vm", "stop", "slow", "--force"])?;
        await_forgotten(scene, "a")
    });
}

/// Whoever had ended the VM was told that it had failed, and an evacuation stopped there.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn what_is_done_is_answered_although_its_keeper_takes_long_to_end() {
    let mut options =
        SceneOptions { kind: GuestKind::BootSector, memory_mib: 64, ..with_keepers() };
    let daemon = options.daemons.get_mut("a").expect("host a's");
    // The daemon waits 10 s.
    daemon.environment.push(("FAILPOINTS".to_owned(), "leave-all=sleep(20000)".to_owned()));
    play(options, |scene| {
        let file = write(scene, "slow.toml", &definition(scene, "slow")?)?.display().to_string();
        let host = scene.host("a")?;
        host.call(["vm", "start", &file])?;
        let before = kept(&host.status("slow")?).context("it has no keeper")?.keeper;
        host.call(["vm", "stop", "slow", "--force"])?;
        // That keeper is there.
        kill(Pid::from_raw(i32::try_from(before)?), None::<Signal>)?;
        host.call(["vm", "start", "slow"])?;
        ensure!(kept(&host.status("slow")?).context("it has no keeper")?.keeper != before);
        host.call(["vm", "stop", "slow", "--force"])?;
        await_forgotten(scene, "a")
    });
}

#[test]
fn an_order_that_is_none_starts_no_keeper() {
    play(with_keepers(), |scene| {
        for order in ["", "up", "{}", r#"{"recover":{}}"#] {
            let none = "/none";
            let wrong = ["keep", "--config", none, "--agent", none, "--vm", VM, "--order", order];
            let (code, words) = refusal(scene.host("a")?, &wrong)?;
            ensure!(code == 2 && words.contains("--order"), "{code}: {words}");
        }
        await_forgotten(scene, "a")
    });
}

/// A keeper reads the file as it is when it begins: it ended, and its daemon knew no more than the status with which.
#[test]
fn a_configuration_that_no_keeper_can_read_is_named_and_once_it_is_right_they_begin() {
    play(in_keepers(quick()), |scene| {
        let wrong = |host: &str| -> Result<(PathBuf, String)> {
            let file = scene.host(host)?.directory().join("host.toml");
            let sound = fs::read_to_string(&file)?;
            fs::write(&file, format!("nonsense = 1\n{sound}"))?;
            Ok((file, sound))
        };
        let named = ["no keeper can begin", "host.toml:1", "nonsense"];
        let (file, sound) = wrong("a")?;
        let start = ["vm", "start", &*scene.definition().to_string_lossy()];
        let (code, words) = refusal(scene.host("a")?, &start)?;
        ensure!(code == 1, "{code}: {words}");
        says(&words, &named)?;
        wait_for("the status to say it", LIMIT, || {
            let status = scene.host("a")?.cli(["status"])?;
            let status = String::from_utf8_lossy(&status.stdout).into_owned();
            Ok((status.contains("WRONG: ") && status.contains("no VM starts in a keeper"))
                .then_some(()))
        })?;
        fs::write(&file, sound)?;
        scene.host("a")?.call(start)?;
        let (file, sound) = wrong("b")?;
        let (_, words) = refusal(scene.host("a")?, &["protect", VM, "--to", "b"])?;
        says(&words, &named)?;
        fs::write(&file, sound)?;
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        ["a", "b"].iter().try_for_each(|host| await_forgotten(scene, host))
    });
}

/// It stayed off until its daemon was restarted, for whatever reason.
#[test]
fn a_vm_that_comes_up_with_its_host_comes_up_again_when_its_keeper_is_killed() {
    play(with_keepers(), |scene| {
        set_autostart(scene)?;
        scene.start_guest("a")?;
        scene.await_guest()?;
        let killed = answered(scene, VM)?;
        let daemon = scene.host("a")?.pid();
        signal_keeper(&killed, Signal::SIGKILL)?;
        await_coming_up(scene, "a")?;
        ensure!(kept(&told(scene, "a", VM)?)?.keeper != kept(&killed)?.keeper, "the same keeper");
        ensure!(scene.host("a")?.pid() == daemon, "another daemon");
        scene.await_guest()?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "a")
    });
}

/// Its backup has the first word.
#[test]
fn a_protected_vm_whose_keeper_is_killed_comes_up_nowhere_but_at_its_backup() {
    play(with_keepers(), |scene| {
        set_autostart(scene)?;
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        signal_keeper(&answered(scene, VM)?, Signal::SIGKILL)?;
        scene.await_live("b")?;
        scene.await_fenced("a")?;
        wait_for("host a to await it no more", LIMIT, || {
            Ok(awaited(scene, "a")?.is_none().then_some(()))
        })?;
        let events = scene.host("a")?.call(["events", "--vm", VM])?;
        ensure!(!events.contains("came up by itself"), "{events}");
        prove_survival(scene, client, "b")
    });
}
