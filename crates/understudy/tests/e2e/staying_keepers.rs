//! Keepers that are not replaced, since their guests would lose something by it, or not go on.

use crate::cluster_deaths::Moment;
use crate::keepers::{begin, with_keepers};
use crate::refusals::log_of;
use crate::replaced_keepers::{
    Dying, Installed, answered, await_protected_again, replace, stop, with_settings,
};
use crate::sick_disks::Failing;
use crate::sick_hosts::Hanging;
use crate::stage::{
    LIMIT, await_service, daemon_passing, fail_at, play, prove_survival, restart_daemon, run,
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use understudy_lab::scene::VM;
use understudy_lab::{ArbiterKind, Scene, wait_for};

/// The words about a VM whose keeper is not replaced.
fn refused(scene: &Scene, host: &str, vm: &str) -> Result<String> {
    let output = scene.host(host)?.cli(["upgrade", "--keepers", vm])?;
    let words = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.code() == Some(1), "{output:?}");
    ensure!(words.contains(&format!("{vm}: NOT REPLACED: ")), "{words}");
    Ok(words)
}

/// Its protection ended, the last keeper with it, and no further one ever went on with the guest.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_keeper_is_not_replaced_by_one_that_does_not_speak_with_the_agent_in_its_qemu() {
    let (other_release, mut options) = Dying::at("of-later-agents").expect("a file");
    let program = options.binary.clone();
    let installed = Installed::new(&program, &mut options).expect("a copy of the program");
    play(options, |scene| {
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        let before = answered(scene)?;
        installed.upgrade(&program)?;
        restart_daemon(scene, "a")?;
        let plan = scene.host("a")?.call(["upgrade", "--plan"])?;
        ensure!(plan.contains("it cannot be replaced now: the next keeper would not"), "{plan}");
        let words = refused(scene, "a", VM)?;
        ensure!(words.contains("would not understand the agent in the QEMU"), "{words}");
        ensure!(answered(scene)? == before, "another one");
        let events = scene.host("a")?.call(["events", "--json"])?;
        ensure!(!events.contains("while its keeper is replaced"), "protection ended: {events}");
        scene.await_protected("a", |_| ())?;
        await_service(&client)?;
        other_release.no_more()?;
        replace(scene)?;
        await_protected_again(scene, "a")?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// What a failed sync has lost its process alone knows: the next keeper's would succeed, and so would the guest's flush.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_keeper_whose_disk_has_lost_writes_is_not_replaced_and_its_backup_has_them() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let failing = Failing::new(directory.path());
    let mut options = with_keepers();
    let daemon = options.daemons.get_mut("a").expect("a host a");
    daemon.environment.extend(failing.daemon().environment);
    play(options, |scene| {
        scene.protected_guest("a", "b")?;
        scene.await_protected("a", |_| ())?;
        failing.begin()?;
        let words = refused(scene, "a", VM)?;
        ensure!(words.contains("may have lost writes"), "{words}");
        let events = scene.host("a")?.call(["events", "--json"])?;
        ensure!(!events.contains("while its keeper is replaced"), "it was unprotected: {events}");
        failing.end()?;
        // Its flush is told, and the backup, which has all of it, goes on.
        scene.shell()?.start("while :; do date >> /data/more; sync; sleep 1; done")?;
        scene.await_live("b")?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"]).map(drop)
    });
}

/// Before, it waited for its disk with nobody to wait for it any more, took no orders, and left its guest once the disk
/// answered.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_keeper_whose_disk_does_not_answer_stays() {
    let hanging = Hanging::new();
    let mut options = with_keepers();
    let daemon = options.daemons.get_mut("a").expect("a host a");
    daemon.environment.extend(daemon_passing(hanging.action("hang-sync")).environment);
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let before = answered(scene)?;
        hanging.begin()?;
        let words = refused(scene, "a", VM)?;
        ensure!(words.contains("have not been synced within 30 s"), "{words}");
        hanging.end()?;
        // It goes on as before, and takes orders.
        let now = answered(scene)?;
        ensure!(now.keeper == before.keeper && now.qemu == before.qemu, "{before:?} is {now:?}");
        scene.await_guest()?;
        replace(scene)?;
        stop(scene)
    });
}

/// It left its VM once it came to it, long after its operator had heard that it stays.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_keeper_that_comes_too_late_to_leaving_stays() {
    let busy = Moment::new();
    let mut options = with_keepers();
    fail_at(&mut options, "a", &format!("impatient=return;{}", busy.action("change-medium", "")));
    play(options, |scene| {
        scene.protected_guest("a", "b")?;
        scene.await_protected("a", |_| ())?;
        let before = answered(scene)?;
        let medium = scene.host("a")?.begin(["vm", "medium", VM, "disk0", "--eject"])?;
        busy.await_reached()?;
        let words = refused(scene, "a", VM)?;
        ensure!(words.contains("has not answered for 5 s"), "{words}");
        busy.end()?;
        medium.wait_with_output()?;
        wait_for("the keeper to say that it stays", LIMIT, || {
            let words = "the daemon does not wait for it any more";
            Ok(log_of(scene, "a")?.contains(words).then_some(()))
        })?;
        ensure!(answered(scene)? == before, "another one");
        let events = scene.host("a")?.call(["events", "--json"])?;
        ensure!(!events.contains("while its keeper is replaced"), "it was unprotected: {events}");
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"]).map(drop)
    });
}

#[test]
fn a_keeper_is_not_replaced_where_that_would_lose_something() {
    play(with_keepers(), |scene| {
        let words = refused(scene, "a", "nobody")?;
        ensure!(words.contains("there is no VM"), "{words}");
        scene.protected_guest("a", "b")?;
        let words = refused(scene, "b", VM)?;
        ensure!(words.contains("it is backed up here"), "{words}");
        ensure!(scene.status("b")?["role"] == "backup", "{words}");
        scene.await_protected("a", |_| ())?;
        scene.host("a")?.call(["unprotect", VM])?;
        // A keeper of an older release says nothing of what it leaves.
        let note = scene.host("a")?.directory().join("state").join(VM).join("keeper.json");
        let mut text: Value = serde_json::from_slice(&fs::read(&note)?)?;
        text.as_object_mut().context("no note")?.remove("program");
        fs::write(&note, text.to_string())?;
        let words = refused(scene, "a", VM)?;
        ensure!(words.contains("of a release whose keepers cannot be replaced"), "{words}");
        stop(scene)
    });
}

/// The last keeper had left its guest by then.
#[test]
fn a_keeper_is_not_replaced_by_one_whose_arbiter_does_not_know_the_vm() {
    let other = tempfile::tempdir().expect("a directory for the test");
    play(with_keepers(), |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let before = answered(scene)?;
        let identity = scene.lab().arbiter_directory().join(".identity");
        fs::copy(identity, other.path().join(".identity"))?;
        let settings =
            format!("[arbiter]\nkind = \"file\"\npath = \"{}\"\n", other.path().display());
        with_settings(scene, &settings, ArbiterKind::None)?;
        let words = refused(scene, "a", VM)?;
        ensure!(words.contains("has no record of generation 1"), "{words}");
        ensure!(answered(scene)? == before, "another one");
        scene.await_guest()?;
        stop(scene)
    });
}

/// The next keeper had opened what lay there: the guest's requests had gone to an older copy of its disk.
#[test]
fn a_keeper_is_not_replaced_while_another_file_is_at_the_path_of_its_disk() {
    play(with_keepers(), |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let before = answered(scene)?;
        let shown: Value =
            serde_json::from_str(&scene.host("a")?.call(["vm", "show", VM, "--json"])?)?;
        let image = shown["disk"][0]["path"].as_str().context("no disk")?.to_owned();
        let (own, copy) = (format!("{image}.own"), format!("{image}.copy"));
        run("cp", &["--sparse=always", &image, &copy])?;
        fs::rename(&image, &own)?;
        fs::rename(&copy, &image)?;
        let words = refused(scene, "a", VM)?;
        ensure!(words.contains("another file is at") && words.contains(&image), "{words}");
        ensure!(answered(scene)? == before, "another one");
        scene.await_guest()?;
        fs::rename(&own, &image)?;
        replace(scene)?;
        scene.await_guest()?;
        stop(scene)
    });
}
