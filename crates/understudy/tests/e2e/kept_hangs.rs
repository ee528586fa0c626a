//! Keepers that hang, and are ended by command: their guests end with them, and nobody else's.

use crate::keepers::{answered, begin, kept, signal_keeper, told, with_keepers};
use crate::kept_backups::with_repair;
use crate::kept_groups::{shared, with_group};
use crate::refusals::quick;
use crate::stage::{LIMIT, await_forgotten, has_backup, play, prove_survival, refusal, refused};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};
use understudy_lab::companion::{COMPANION, Companion};
use understudy_lab::scene::VM;
use understudy_lab::{Part, Scene, SceneOptions, wait_for};

const STOP: [&str; 4] = ["vm", "stop", VM, "--force"];

/// The bound on the silence of a keeper, as it is documented, and what it may take on a busy machine to tell of it.
const SILENCE: Duration = Duration::from_secs(30);
const TOLD_WITHIN: Duration = Duration::from_secs(90);

/// A VM in a keeper whose guest hears nobody who asks it to power off, and is given an hour for that.
fn with_a_deaf_guest() -> SceneOptions {
    let mut options = quick();
    if let Some(daemon) = options.daemons.get_mut("a") {
        let settings = std::mem::take(&mut daemon.settings);
        daemon.settings =
            format!("keepers = true\n{settings}[shutdown]\npower_off_seconds = 3600\n");
    }
    options
}

/// Has the VM's keeper on a host hang for good; its process.
fn hang(scene: &Scene, host: &str) -> Result<u64> {
    let keeper = kept(&told(scene, host, VM)?)?.keeper;
    scene.host(host)?.stall(Part::Process(keeper.try_into()?))?;
    Ok(keeper)
}

fn recorded(scene: &Scene) -> Result<Value> {
    let directory = scene.host("a")?.directory().join("state").join(VM);
    Ok(serde_json::from_str(&fs::read_to_string(directory.join("record.json"))?)?)
}

/// The command waited without end, whatever was done to the daemon.
#[test]
fn a_keeper_that_hangs_is_ended_by_force_with_its_guest() {
    play(with_keepers(), |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        hang(scene, "a")?;
        let hangs = scene.status("a")?["protection"].to_string();
        ensure!(hangs.contains(&format!("`understudy vm stop {VM} --force` ends it")), "{hangs}");
        scene.host("a")?.call(STOP)?;
        await_forgotten(scene, "a")?;
        let record = recorded(scene)?;
        ensure!(record["image"]["role"] == "cut" && record["wanted"] == false, "{record}");
        let events = scene.host("a")?.call(["events"])?;
        ensure!(events.contains("did not answer, and its operator ended it"), "{events}");
        ensure!(!events.contains("was killed"), "taken for a failure: {events}");
        scene.host("a")?.call(["vm", "start", VM])?;
        answered(scene, VM)?;
        scene.host("a")?.call(STOP)?;
        await_forgotten(scene, "a")
    });
}

/// Its backup has the VM by then, and goes on with it: who ends the copy here is told.
#[test]
fn a_hung_keeper_of_a_guest_that_was_taken_over_is_ended_and_the_guest_goes_on() {
    play(with_keepers(), |scene| {
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        hang(scene, "a")?;
        scene.await_live("b")?;
        let (code, words) = refusal(scene.host("a")?, &STOP)?;
        ensure!(code == 1 && words.contains("host b has taken it over"), "{code}: {words}");
        await_forgotten(scene, "a")?;
        // Its place is free.
        scene.protect("b", "a")?;
        scene.await_protected("b", |_| ())?;
        scene.host_mut("b")?.kill_everything()?;
        prove_survival(scene, client, "a")
    });
}

/// The VM stayed unprotected for good: each offer and survey was refused.
#[test]
fn a_backups_keeper_that_hangs_is_ended_by_force_and_protection_comes_back() {
    play(with_repair(), |scene| {
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        let hung = hang(scene, "b")?;
        wait_for("protection to be lost", LIMIT, || {
            Ok((scene.status("a")?["protection"]["state"] == "degraded").then_some(()))
        })?;
        scene.host("b")?.call(STOP)?;
        wait_for("another backup", LIMIT, || Ok(has_backup(&scene.status("a")?).then_some(())))?;
        ensure!(kept(&told(scene, "b", VM)?)?.keeper != hung, "the same keeper");
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_hung_keeper_that_has_other_vms_too_is_not_ended_for_one_of_them() {
    play(with_group(with_keepers()), |scene| {
        scene.start_guest("a")?;
        Companion::new(scene)?.start(scene.host("a")?)?;
        let keeper = shared(scene, "a")?;
        let status = answered(scene, VM)?;
        hang(scene, "a")?;
        let (code, words) = refusal(scene.host("a")?, &STOP)?;
        ensure!(code == 1 && words.contains(COMPANION), "{code}: {words}");
        ensure!(words.contains(&format!("`kill -9 {keeper}`")), "{words}");
        signal_keeper(&status, Signal::SIGCONT)?;
        // What was asked while it hung it may do now.
        let other = kept(&answered(scene, COMPANION)?).context("the other one has ended")?;
        ensure!(other.keeper == keeper, "another one");
        scene.host("a")?.call(["vm", "stop", COMPANION, "--force"])?;
        // Fails if it has ended.
        let _ = scene.host("a")?.cli(STOP)?;
        await_forgotten(scene, "a")
    });
}

/// Each waited without end, whatever the keeper did.
#[test]
fn orders_about_a_hung_keeper_end_and_one_that_takes_long_does_not_while_it_lives() {
    play(with_a_deaf_guest(), |scene| {
        scene.start_guest("a")?;
        answered(scene, VM)?;
        let host = scene.host("a")?;
        let mut stop = host.begin(["vm", "stop", VM])?;
        thread::sleep(SILENCE + SILENCE / 2);
        ensure!(stop.try_wait()?.is_none(), "it was given up: {:?}", stop.wait_with_output()?);
        hang(scene, "a")?;
        let begun = Instant::now();
        let orders: [&[&str]; 5] = [
            &["failover", VM],
            &["unprotect", VM],
            &["protect", VM, "--to", "b"],
            &["vm", "stop", VM],
            &["vm", "console", VM],
        ];
        let mut told = vec![("the stop before".to_owned(), stop)];
        for order in orders {
            told.push((order.join(" "), host.begin(order)?));
        }
        for (order, child) in told {
            let (code, words) = refused(&child.wait_with_output()?, &order)?;
            ensure!(code == 1 && words.contains("does not answer"), "{order}: {code}: {words}");
            ensure!(words.contains(&format!("`understudy vm stop {VM} --force`")), "{words}");
        }
        ensure!(begun.elapsed() < TOLD_WITHIN, "after {:?}", begun.elapsed());
        host.call(STOP)?;
        await_forgotten(scene, "a")
    });
}

/// The end of the host waited four minutes for it, and said no more than that it was late.
#[test]
fn a_hung_keeper_is_named_and_given_up_when_all_are_to_end() {
    play(with_a_deaf_guest(), |scene| {
        scene.start_guest("a")?;
        hang(scene, "a")?;
        let host = scene.host("a")?;
        let config = host.directory().join("host.toml");
        let begun = Instant::now();
        let (code, words) = refusal(host, &["end-keepers", "--config", &config.to_string_lossy()])?;
        ensure!(
            code == 1 && words.contains(&format!("the keepers of {VM} have answered nothing")),
            "{words}"
        );
        ensure!(begun.elapsed() < TOLD_WITHIN, "after {:?}", begun.elapsed());
        host.call(STOP)?;
        await_forgotten(scene, "a")
    });
}
