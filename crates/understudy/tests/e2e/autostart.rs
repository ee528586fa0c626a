//! VMs that come up with their hosts: each once, on its valid images, and not what somebody has ended.

use crate::api;
use crate::cluster_deaths::Moment;
use crate::group;
use crate::recover::lose;
use crate::refusals::{definition, log_of, quick, write};
use crate::sick_hosts::Hanging;
use crate::stage::{
    Calm, LIMIT, PACE, await_degraded, await_service, daemon_passing, options, play, protect,
    prove_disk, refusal, repairing_daemon,
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use std::net::TcpListener;
use understudy_lab::companion::Companion;
use understudy_lab::scene::VM;
use understudy_lab::{Scene, SceneOptions, in_namespace, wait_for};

/// The scene's guest comes up with its host from now on.
pub(crate) fn set_autostart(scene: &Scene) -> Result<()> {
    let mut definition: toml::Table = fs::read_to_string(scene.definition())?.parse()?;
    definition.insert("autostart".to_owned(), true.into());
    Ok(fs::write(scene.definition(), definition.to_string())?)
}

/// A guest without a disk, of daemons that wait a second for it to power off, which it never does.
fn hasty() -> SceneOptions {
    let mut options = quick();
    for host in options.daemons.values_mut() {
        host.settings += "[shutdown]\npower_off_seconds = 1\n";
    }
    options
}

fn status(scene: &Scene, host: &str) -> Result<Value> {
    Ok(serde_json::from_str(&scene.host(host)?.call(["status", "--json"])?)?)
}

/// The reason why the guest waits before it comes up on a host; none if nobody waits for it there.
pub(crate) fn awaited(scene: &Scene, host: &str) -> Result<Option<String>> {
    let status = status(scene, host)?;
    let awaited = status["awaited"].as_array().context("no list `awaited`")?;
    let found = awaited.iter().find(|awaited| awaited["name"] == VM);
    Ok(found.and_then(|found| Some(found["reason"].as_str()?.to_owned())))
}

/// The host has nothing to do with the guest: it neither has it nor waits for it.
fn ensure_nothing(scene: &Scene, host: &str) -> Result<()> {
    let status = status(scene, host)?;
    let nothing = status["vms"] == Value::Array(Vec::new()) && awaited(scene, host)?.is_none();
    ensure!(nothing, "host {host}: {status}");
    Ok(())
}

/// Host b had taken the guest over from host a when it died; host a is up again, alone.
fn leave_former_primary_alone(scene: &mut Scene) -> Result<()> {
    lose_both_after_a_take_over(scene)?;
    scene.restart("a")
}

fn lose_both_after_a_take_over(scene: &mut Scene) -> Result<()> {
    set_autostart(scene)?;
    scene.protected_guest("a", "b")?;
    scene.host_mut("a")?.kill_everything()?;
    scene.await_live("b")?;
    lose(scene, &["b"])
}

/// Puts a new arbiter in the place of the one that there was, as docs/operating.md says.
fn renew_arbiter(scene: &Scene) -> Result<()> {
    let directory = scene.lab().arbiter_directory();
    fs::remove_dir_all(&directory)?;
    fs::create_dir(&directory)?;
    for host in ["a", "b"] {
        fs::remove_file(scene.host(host)?.directory().join("state/arbiter.id"))?;
    }
    Ok(())
}

pub(crate) fn await_coming_up(scene: &Scene, host: &str) -> Result<()> {
    wait_for(&format!("the guest to come up on host {host}"), LIMIT, || {
        let status = scene.host(host)?.status(VM).unwrap_or_default();
        Ok((status["role"] == "primary" && status["live"] == true).then_some(()))
    })?;
    // It is told a moment after the guest has begun to run.
    wait_for("that to be told", LIMIT, || {
        let events = scene.host(host)?.call(["events", "--vm", VM])?;
        Ok(events.contains("came up by itself").then_some(()))
    })?;
    ensure!(awaited(scene, host)?.is_none(), "host {host} waits for what has come up");
    Ok(())
}

/// A host that died, and a daemon that was ended; but not what its operator has stopped.
#[test]
fn a_vm_comes_up_with_its_host_unless_somebody_ended_it() {
    play(hasty(), |scene| {
        set_autostart(scene)?;
        scene.start_guest("a")?;
        scene.host_mut("a")?.kill_everything()?;
        scene.restart("a")?;
        await_coming_up(scene, "a")?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        scene.host_mut("a")?.kill_everything()?;
        scene.restart("a")?;
        ensure_nothing(scene, "a")?;
        scene.host("a")?.call(["vm", "start", VM])?;
        scene.host_mut("a")?.terminate()?;
        scene.restart("a")?;
        await_coming_up(scene, "a")
    });
}

/// Storage that hung kept all VMs of its host down, and the host from being a backup.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_vm_whose_images_hang_keeps_no_other_down() {
    let hanging = tempfile::tempdir().expect("a directory for the test");
    let image = hanging.path().join(VM);
    let mut options = hasty();
    let daemon = options.daemons.get_mut("a").expect("a host a");
    let points = format!("open-disks=return({})", hanging.path().display());
    daemon.environment.push(("FAILPOINTS".to_owned(), points));
    play(options, |scene| {
        set_autostart(scene)?;
        scene.start_guest("a")?;
        let other = format!("autostart = true\n{}", definition(scene, "other")?);
        let other = write(scene, "other.toml", &other)?;
        scene.host("a")?.call(["vm", "start", &other.to_string_lossy()])?;
        scene.host_mut("a")?.kill_everything()?;
        fs::write(&image, "")?;
        scene.restart("a")?;
        let runs = |host: &str, vm: &str| {
            wait_for(&format!("{vm} to run on host {host}"), LIMIT, || {
                let status = scene.host(host)?.status(vm).unwrap_or_default();
                Ok((status["live"] == true).then_some(()))
            })
        };
        runs("a", "other")?;
        let waits = awaited(scene, "a")?.context("nobody waits for the guest")?;
        ensure!(waits.contains("its images are being opened"), "{waits}");
        // Another host's is taken, and its operator is told what the name is kept for.
        let third = definition(scene, "third")?.replace("75:73:01", "75:73:02");
        let third = write(scene, "third.toml", &third)?;
        scene.host("b")?.call(["vm", "start", &third.to_string_lossy()])?;
        protect(scene.host("b")?, "third", &["--to", "a"])?;
        let (_, words) = refusal(scene.host("a")?, &["vm", "start", VM])?;
        ensure!(words.contains("about to bring"), "{words}");
        fs::remove_file(&image)?;
        await_coming_up(scene, "a")
    });
}

/// The guest was booted, and its power cut, at each try to start.
#[test]
fn a_host_whose_api_has_no_address_starts_no_guest() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut options = hasty();
    api::serve(&mut options, "a", directory.path()).expect("tokens");
    play(options, |scene| {
        set_autostart(scene)?;
        scene.start_guest("a")?;
        scene.host_mut("a")?.kill_everything()?;
        let address = ("0.0.0.0", api::PORT);
        let other = in_namespace(&scene.lab().host("a")?, || TcpListener::bind(address))??;
        let begun = |scene: &Scene| -> Result<usize> {
            Ok(log_of(scene, "a")?.matches("host a listens on").count())
        };
        let before = begun(scene)?;
        let error = scene.revive("a").err().context("it starts without its address")?;
        ensure!(format!("{error:#}").contains("daemon ended"), "{error:#}");
        let log = log_of(scene, "a")?;
        ensure!(log.contains("cannot serve the API on 0.0.0.0:7780"), "{log}");
        ensure!(before == 1 && begun(scene)? == before, "its VMs had been looked after: {log}");
        drop(other);
        scene.revive("a")?;
        await_coming_up(scene, "a")
    });
}

/// Both hosts lose their power at one instant: the guest comes up where it ran, with every record, and
/// is protected again.
#[test]
fn a_protected_vm_comes_up_where_it_ran_and_is_protected_again() {
    let mut options = options().calm();
    for host in options.daemons.values_mut() {
        *host = repairing_daemon().calm();
    }
    play(options, |scene| {
        set_autostart(scene)?;
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        lose(scene, &["a", "b"])?;
        let acked = client.abandon().acked();
        scene.restart("b")?;
        ensure_nothing(scene, "b")?;
        scene.restart("a")?;
        await_coming_up(scene, "a")?;
        wait_for("the guest to be protected again", LIMIT, || {
            let status = scene.status("a")?;
            Ok((status["protection"]["state"] == "protected").then_some(()))
        })?;
        scene.await_guest()?;
        prove_disk(scene, "a", acked)
    });
}

/// Its backup won it and could not settle what it had. Before, both hosts counted as having run it, and it waited for
/// ever although everybody answered.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_vm_comes_up_where_it_ran_if_its_backup_won_it_in_vain() {
    let (won, failing) = (Moment::new(), Hanging::new());
    let points = [won.action("before-activation", "1*"), failing.action("sync-disk")];
    let mut options = options().calm();
    options.daemons.insert("b".to_owned(), daemon_passing(points.join(";")));
    play(options, |scene| {
        set_autostart(scene)?;
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        won.await_reached()?;
        failing.begin()?;
        won.end()?;
        let handed_back = scene.lab().arbiter_directory().join(VM).join("3");
        wait_for("host b to hand it back", LIMIT, || Ok(handed_back.exists().then_some(())))?;
        failing.end()?;
        let acked = client.abandon().acked();
        scene.restart("a")?;
        await_coming_up(scene, "a")?;
        scene.await_guest()?;
        prove_disk(scene, "a", acked)
    });
}

/// The second restart forgot what the first one had read: the guest ran on unprotected, and nobody was told.
#[test]
fn how_a_vm_is_to_be_protected_is_not_forgotten_while_there_is_no_backup() {
    play(hasty(), |scene| {
        set_autostart(scene)?;
        scene.protected_guest("a", "b")?;
        lose(scene, &["a", "b"])?;
        for _ in 0..2 {
            scene.restart("a")?;
            await_coming_up(scene, "a")?;
            let reason = await_degraded(scene, "a")?;
            ensure!(reason.contains("protect"), "{reason}");
            lose(scene, &["a"])?;
        }
        scene.restart("a")?;
        await_coming_up(scene, "a")?;
        // Who starts it says anew how it is protected.
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        let words = scene.host("a")?.call(["vm", "start", VM])?;
        let advice = format!("understudy protect {VM} --to b");
        ensure!(words.contains(&advice), "{words}");
        let words = scene.host("a")?.call(["status", VM])?;
        ensure!(words.contains(&advice), "{words}");
        scene.host("a")?.call(["vm", "stop", VM, "--force"]).map(drop)
    });
}

/// A VM without a backup was once gone without a word after a crash of its daemon: it was in the
/// log alone.
#[test]
fn a_vm_that_nothing_brings_up_again_is_told_until_somebody_decides() {
    play(hasty(), |scene| {
        scene.start_guest("a")?;
        for command in [&["recover", VM][..], &["vm", "stop", VM]] {
            lose(scene, &["a"])?;
            scene.restart("a")?;
            let advice = format!("understudy recover {VM}");
            wait_for("host a to miss its guest", LIMIT, || {
                let told = scene.host("a")?.call(["status"])?;
                Ok((told.contains("WRONG: guest ran here") && told.contains(&advice)).then_some(()))
            })?;
            let (code, words) = refusal(scene.host("a")?, &["status", VM])?;
            ensure!(code == 4 && words.contains(&advice), "{code}: {words}");
            scene.host("a")?.call(command)?;
            let told = scene.host("a")?.call(["status"])?;
            ensure!(!told.contains("WRONG"), "{told}");
        }
        lose(scene, &["a"])?;
        scene.restart("a")?;
        ensure_nothing(scene, "a")
    });
}

/// Members come up one by one, whichever is quicker, and are one group again.
#[test]
fn the_members_of_a_group_come_up_and_are_protected_as_one() {
    play(group::repairing(), |scene| {
        set_autostart(scene)?;
        let companion = Companion::new(scene)?;
        scene.start_guest("a")?;
        companion.start(scene.host("a")?)?;
        group::protect(scene, "a", "b")?;
        lose(scene, &["a", "b"])?;
        scene.restart("a")?;
        scene.restart("b")?;
        group::await_protected_again(scene, "a")
    });
}

/// Host b is back, and the guest's: host a leaves it to that.
fn await_successor(scene: &mut Scene) -> Result<()> {
    scene.restart("b")?;
    await_coming_up(scene, "b")?;
    wait_for("host a to leave it to host b", LIMIT, || {
        Ok(awaited(scene, "a")?.is_none().then_some(()))
    })?;
    ensure_nothing(scene, "a")
}

/// A host that lost the guest does not bring it up, whatever its record says, while its successor may
/// have it; that one does.
#[test]
fn a_former_primary_waits_for_its_successor() {
    play(hasty(), |scene| {
        leave_former_primary_alone(scene)?;
        let reason = wait_for("host a to say what it waits for", LIMIT, || {
            Ok(awaited(scene, "a")?.filter(|reason| reason.contains("host b")))
        })?;
        let told = scene.host("a")?.call(["status"])?;
        ensure!(told.contains("is to come up here") && told.contains(&reason), "{told}");
        let (_, words) = refusal(scene.host("a")?, &["unprotect", VM])?;
        ensure!(words.contains("is to come up here"), "{words}");
        await_successor(scene)
    });
}

// Before, it came up on its old images: an arbiter that knew nothing of the guest was taken at its word.
#[test]
fn a_former_primary_waits_for_its_successor_if_the_arbiter_has_lost_its_records() {
    play(hasty(), |scene| {
        lose_both_after_a_take_over(scene)?;
        renew_arbiter(scene)?;
        scene.restart("a")?;
        wait_for("host a to say what it waits for", LIMIT, || {
            let is_said = |reason: &String| {
                reason.contains("has lost its records") && reason.contains("host b")
            };
            Ok(awaited(scene, "a")?.filter(is_said))
        })?;
        let dry = scene.host("a")?.cli(["recover", VM, "--dry-run", "--json"])?;
        let found: Value = serde_json::from_slice(&dry.stdout)?;
        ensure!(found["valid"].is_null(), "{found}");
        await_successor(scene)
    });
}

#[test]
fn an_operator_ends_the_wait() {
    play(hasty(), |scene| {
        leave_former_primary_alone(scene)?;
        ensure!(awaited(scene, "a")?.is_some(), "host a does not wait for its guest");
        scene.host("a")?.call(["vm", "stop", VM])?;
        ensure_nothing(scene, "a")?;
        scene.host_mut("a")?.kill_everything()?;
        scene.restart("a")?;
        ensure_nothing(scene, "a")
    });
}
