//! Groups whose VMs share a keeper, on both hosts: the daemons may die, and a keeper's end is that of its
//! group.

use crate::autostart::set_autostart;
use crate::group::{
    BOTH, Inner, await_both, await_both_fenced, await_protected_again, play_group_with, protect,
    prove_survival,
};
use crate::keepers::{begin, kept, signal_keeper, with_keepers};
use crate::kept_backups::with_repair;
use crate::recover::lose;
use crate::stage::{
    await_forgotten, await_service, close, hand_over, play, prove_disk, refusal, vms,
};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use std::fs;
use understudy_lab::companion::{COMPANION, Companion};
use understudy_lab::scene::VM;
use understudy_lab::{RecordClient, Scene, SceneOptions};

/// Hosts that have both guests in one keeper.
fn with_group(mut options: SceneOptions) -> SceneOptions {
    for daemon in options.daemons.values_mut() {
        daemon.settings += &format!("[groups]\npair = [\"{VM}\", \"{COMPANION}\"]\n");
    }
    options
}

fn play_group(story: impl FnOnce(&mut Scene, RecordClient, Inner) -> Result<()>) {
    play_group_with(with_group(with_keepers()), story);
}

/// The keeper that both guests share on a host.
fn shared(scene: &Scene, host: &str) -> Result<u64> {
    let [one, other] = BOTH.map(|vm| kept(&scene.host(host)?.status(vm)?));
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
            hand_over(scene.host(from)?, COMPANION)?;
            await_both(scene, to)?;
            await_forgotten(scene, from)?;
            await_service(&client)?;
            inner.prove_alive()?;
            protect(scene, to, from)?;
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

/// Both guests on host a are lost with their hosts, which are there again.
fn lose_both(scene: &mut Scene) -> Result<()> {
    let companion = Companion::new(scene)?;
    scene.start_guest("a")?;
    companion.start(scene.host("a")?)?;
    shared(scene, "a")?;
    protect(scene, "a", "b")?;
    lose(scene, &["a", "b"])?;
    scene.restart("a")?;
    scene.restart("b")
}

/// They are protected, and host a's daemon dies, and then all of host a.
fn prove_kept(scene: &mut Scene) -> Result<()> {
    let (before, after) = (shared(scene, "a")?, shared(scene, "b")?);
    scene.host_mut("a")?.kill_daemon()?;
    scene.revive("a")?;
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
        lose_both(scene)?;
        await_protected_again(scene, "a")?;
        prove_kept(scene)
    });
}

#[test]
fn what_is_recovered_of_a_group_shares_a_keeper() {
    play(with_group(with_keepers()), |scene| {
        lose_both(scene)?;
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

/// What cannot start leaves its group's keeper as it is, and what does not share one is no group.
#[test]
fn what_is_wrong_with_a_groups_member_is_refused_and_the_others_do_not_notice() {
    play(with_group(with_keepers()), |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = begin(scene)?;
        let keeper = kept(&scene.status("a")?).context("it has no keeper")?.keeper;
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
