//! Groups whose VMs share a keeper, on both hosts: the daemons may die, and a keeper's end is that of its
//! group.

use crate::autostart::set_autostart;
use crate::group::{
    BOTH, Inner, await_both, await_both_fenced, await_protected_again, hand_both_over,
    play_group_with, protect, prove_survival,
};
use crate::keepers::{begin, kept, signal_keeper, told, with_keepers};
use crate::kept_backups::with_repair;
use crate::recover::lose;
use crate::stage::{
    LIMIT, await_forgotten, await_service, close, play, prove_disk, refusal, refused,
    restart_daemon, vms,
};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;
use understudy_lab::companion::{COMPANION, Companion};
use understudy_lab::scene::VM;
use understudy_lab::{RecordClient, Scene, SceneOptions, wait_for};

/// Hosts that have both guests in one keeper.
pub fn with_group(mut options: SceneOptions) -> SceneOptions {
    for daemon in options.daemons.values_mut() {
        daemon.settings += &format!("[groups]\npair = [\"{VM}\", \"{COMPANION}\"]\n");
    }
    options
}

fn play_group(story: impl FnOnce(&mut Scene, RecordClient, Inner) -> Result<()>) {
    play_group_with(with_group(with_keepers()), story);
}

/// The keeper that both guests share on a host.
pub fn shared(scene: &Scene, host: &str) -> Result<u64> {
    let [one, other] = BOTH.map(|vm| kept(&told(scene, host, vm)?));
    let (one, other) = (one?.keeper, other?.keeper);
    ensure!(one == other, "two keepers on host {host}: {one} and {other}");
    Ok(one)
}

#[test]
fn the_daemons_of_a_groups_hosts_die_and_it_does_not_notice() {
    play_group(|scene, client, mut inner| {
        for host in ["a", "b"] {
            let before = shared(scene, host)?;
            scene.host_mut(host)?.kill_daemon()?;
            await_service(&client)?;
            inner.prove_alive()?;
            scene.revive(host)?;
            ensure!(shared(scene, host)? == before, "another one");
        }
        let before = shared(scene, "b")?;
        for host in ["a", "b"] {
            scene.host_mut(host)?.kill_daemon()?;
        }
        scene.host_mut("a")?.kill_everything()?;
        // Nobody is there to be asked but the guests.
        await_service(&client)?;
        inner.prove_alive()?;
        scene.revive("b")?;
        await_both(scene, "b")?;
        ensure!(shared(scene, "b")? == before, "another one");
        prove_survival(scene, client, inner, "b")
    });
}

#[test]
fn a_groups_keeper_is_killed_and_the_group_moves() {
    play_group(|scene, client, inner| {
        signal_keeper(&scene.status("a")?, Signal::SIGKILL)?;
        prove_survival(scene, client, inner, "b")?;
        await_both_fenced(scene, "a")
    });
}

#[test]
fn a_group_is_handed_to_and_fro_between_keepers() {
    play_group(|scene, client, mut inner| {
        for (from, to) in [("a", "b"), ("b", "a")] {
            hand_both_over(scene, &client, &mut inner, (from, to))?;
            shared(scene, from)?;
        }
        let keeper = shared(scene, "a")?;
        scene.host("a")?.call(["unprotect", VM])?;
        await_forgotten(scene, "b")?;
        // One ends, and its name is free; the other one goes on.
        inner.stop()?;
        scene.host("a")?.call(["vm", "stop", COMPANION, "--force"])?;
        ensure!(vms(scene.host("a")?)?.len() == 1, "it is still there");
        await_service(&client)?;
        scene.host("a")?.call(["vm", "start", COMPANION])?;
        ensure!(shared(scene, "a")? == keeper, "another one");
        scene.host("a")?.call(["vm", "stop", COMPANION, "--force"])?;
        prove_disk(scene, "a", close(client)?)?;
        await_forgotten(scene, "a")
    });
}

/// Loses both guests on host a with their hosts.
fn lose_both(scene: &mut Scene) -> Result<()> {
    let companion = Companion::new(scene)?;
    scene.start_guest("a")?;
    companion.start(scene.host("a")?)?;
    shared(scene, "a")?;
    protect(scene, "a", "b")?;
    lose(scene, &["a", "b"])
}

/// [`lose_both`]; the hosts are there again.
fn lose_both_for_a_moment(scene: &mut Scene) -> Result<()> {
    lose_both(scene)?;
    scene.restart("a")?;
    scene.restart("b")
}

/// Proves that the group is kept: it is protected, and host a's daemon dies, and then all of host
/// a.
fn prove_kept(scene: &mut Scene) -> Result<()> {
    let (before, after) = (shared(scene, "a")?, shared(scene, "b")?);
    restart_daemon(scene, "a")?;
    ensure!(shared(scene, "a")? == before, "another one");
    scene.host_mut("a")?.kill_everything()?;
    await_both(scene, "b")?;
    ensure!(shared(scene, "b")? == after, "another one");
    for vm in BOTH {
        scene.host("b")?.call(["vm", "stop", vm, "--force"])?;
    }
    await_forgotten(scene, "b")
}

#[test]
fn a_group_comes_up_with_its_host_in_one_keeper_and_is_protected_again() {
    play(with_group(with_repair()), |scene| {
        set_autostart(scene)?;
        lose_both_for_a_moment(scene)?;
        await_protected_again(scene, "a")?;
        prove_kept(scene)
    });
}

#[test]
fn what_is_recovered_of_a_group_shares_a_keeper() {
    play(with_group(with_keepers()), |scene| {
        lose_both_for_a_moment(scene)?;
        // Both at once.
        let host = scene.host("a")?;
        let begun = BOTH.map(|vm| host.begin(["recover", vm]));
        for recovery in begun {
            let output = recovery?.wait_with_output()?;
            ensure!(output.status.success(), "{output:?}");
        }
        shared(scene, "a")?;
        let (_, words) = refusal(scene.host("a")?, &["recover", COMPANION, "--force"])?;
        ensure!(words.contains("has a keeper of it"), "{words}");
        let (_, words) = refusal(scene.host("b")?, &["recover", COMPANION])?;
        ensure!(words.contains("host a"), "{words}");
        protect(scene, "a", "b")?;
        prove_kept(scene)
    });
}

/// A member that cannot start leaves its group's keeper as it is, and VMs that do not share one are
/// no group.
#[test]
fn what_is_wrong_with_a_groups_member_is_refused_and_the_others_do_not_notice() {
    play(with_group(with_keepers()), |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = begin(scene)?;
        let keeper = kept(&told(scene, "a", VM)?).context("it has no keeper")?.keeper;
        let companion = Companion::new(scene)?;
        let good = fs::read_to_string(companion.definition())?;
        let wrong = scene.lab().directory().join("wrong.toml");
        fs::write(&wrong, good.replace("bridge = \"br0\"", "bridge = \"br9\""))?;
        let (_, words) = refusal(scene.host("a")?, &["vm", "start", &wrong.to_string_lossy()])?;
        ensure!(words.contains("bridge br9 does not exist"), "{words}");
        ensure!(vms(scene.host("a")?)?.len() == 1, "there is something of it");
        await_service(&client)?;
        companion.start(scene.host("a")?)?;
        ensure!(shared(scene, "a")? == keeper, "another one");
        companion.await_boot(scene)?;
        await_service(&client)?;
        client.stop();
        for vm in BOTH {
            scene.host("a")?.call(["vm", "stop", vm, "--force"])?;
        }
        await_forgotten(scene, "a")
    });
}

/// A first order that a test holds back on host a, and then lets go, or has fail.
struct HeldOrder {
    file: PathBuf,
    _directory: TempDir,
}

impl HeldOrder {
    fn new() -> Result<HeldOrder> {
        let directory = tempfile::tempdir()?;
        let file = directory.path().join("held");
        fs::write(&file, "")?;
        Ok(HeldOrder { file, _directory: directory })
    }

    /// Restarts both hosts; what is ordered of a keeper that starts on host a is held back.
    fn restart(&self, scene: &mut Scene) -> Result<()> {
        scene.restart("b")?;
        let mut host = with_group(with_keepers()).daemons.remove("a").context("no host a")?;
        let point = format!("first-order=return({})", self.file.display());
        host.environment.push(("FAILPOINTS".to_owned(), point));
        scene.restart_with("a", host)
    }

    fn fail(&self) -> Result<()> {
        Ok(fs::write(&self.file, "a test says so")?)
    }

    fn let_go(&self) -> Result<()> {
        Ok(fs::remove_file(&self.file)?)
    }
}

/// The note of a VM's keeper on host a about itself, if there is one or nobody has heard its last
/// words.
fn note(scene: &Scene, vm: &str) -> Result<String> {
    let file = scene.host("a")?.directory().join("state").join(vm).join("keeper.json");
    Ok(fs::read_to_string(file).unwrap_or_default())
}

fn await_note(scene: &Scene, vm: &str) -> Result<()> {
    wait_for(&format!("a keeper for {vm}"), LIMIT, || {
        Ok(note(scene, vm)?.contains("\"pid\"").then_some(()))
    })
}

fn stop_both(scene: &Scene) -> Result<()> {
    for vm in BOTH {
        scene.host("a")?.call(["vm", "stop", vm, "--force"])?;
    }
    await_forgotten(scene, "a")
}

#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn the_first_order_of_a_groups_keeper_fails_and_who_came_meanwhile_goes_on() {
    let held = HeldOrder::new().expect("a file for the test");
    play(with_group(with_keepers()), |scene| {
        lose_both(scene)?;
        held.restart(scene)?;
        let first = scene.host("a")?.begin(["recover", VM])?;
        await_note(scene, VM)?;
        scene.host("a")?.call(["recover", COMPANION])?;
        let keeper = kept(&told(scene, "a", COMPANION)?)?;
        held.fail()?;
        let (_, words) = refused(&first.wait_with_output()?, "recover")?;
        ensure!(words.contains("a test says so"), "{words}");
        ensure!(kept(&told(scene, "a", COMPANION)?)? == keeper, "another one");
        scene.host("a")?.call(["recover", VM])?;
        ensure!(shared(scene, "a")? == keeper.keeper, "another one");
        stop_both(scene)
    });
}

/// Loses both, which come up with host a, where the order about the first is held.
fn come_up_and_be_held(scene: &mut Scene, held: &HeldOrder) -> Result<()> {
    set_autostart(scene)?;
    lose_both(scene)?;
    held.restart(scene)?;
    // By their names it is the first.
    await_note(scene, COMPANION)
}

/// Its operator ends the wait for the first while it is being started.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn what_is_not_wanted_any_more_ends_alone_and_its_end_is_noticed() {
    let held = HeldOrder::new().expect("a file for the test");
    play(with_group(with_keepers()), |scene| {
        come_up_and_be_held(scene, &held)?;
        scene.host("a")?.call(["recover", VM])?;
        let keeper = kept(&told(scene, "a", VM)?)?;
        scene.host("a")?.call(["vm", "stop", COMPANION])?;
        held.let_go()?;
        wait_for("the end of what nobody wants to be noticed", LIMIT, || {
            Ok(note(scene, COMPANION)?.is_empty().then_some(()))
        })?;
        ensure!(kept(&told(scene, "a", VM)?)? == keeper, "another one");
        scene.host("a")?.call(["vm", "start", COMPANION])?;
        ensure!(shared(scene, "a")? == keeper.keeper, "another one");
        stop_both(scene)
    });
}

/// The next daemon finds a keeper that has nothing yet, does not take that for its VM, and brings it up once the keeper
/// is no more.
fn play_left_order(end_keeper: impl FnOnce(&Scene, &HeldOrder) -> Result<()>) {
    let held = HeldOrder::new().expect("a file for the test");
    play(with_group(with_keepers()), |scene| {
        come_up_and_be_held(scene, &held)?;
        restart_daemon(scene, "a")?;
        wait_for("the next daemon to say what it waits for", LIMIT, || {
            let told = scene.host("a")?.call(["status"])?;
            Ok(told.contains("its keeper has not said yet that it runs").then_some(()))
        })?;
        let before = note(scene, COMPANION)?;
        end_keeper(scene, &held)?;
        wait_for("the keeper to be no more", LIMIT, || {
            Ok((note(scene, COMPANION)? != before).then_some(()))
        })?;
        held.let_go()?;
        await_both(scene, "a")?;
        shared(scene, "a")?;
        stop_both(scene)
    });
}

#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn what_a_keeper_of_the_last_daemon_fails_to_start_the_next_brings_up() {
    play_left_order(|_, held| held.fail());
}

#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn what_a_keeper_of_the_last_daemon_was_killed_over_the_next_brings_up() {
    play_left_order(|scene, _| {
        let note: Value = serde_json::from_str(&note(scene, COMPANION)?)?;
        let pid = note["pid"].as_i64().context("no process")?;
        Ok(kill(Pid::from_raw(pid.try_into()?), Signal::SIGKILL)?)
    });
}
