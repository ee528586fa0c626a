//! The end of a daemon: what becomes of the guests that nobody takes over, and what is said of it.

use crate::autostart::set_autostart;
use crate::fencing::pass;
use crate::keepers::{answered, in_keepers};
use crate::refusals::{log_of, quick};
use crate::sick_hosts::await_unfit;
use crate::stage::{
    Calm, LIMIT, PACE, await_forgotten, await_service, close, fail_at, hand_over, options, play,
    play_protected, protection, prove_disk, prove_survival, refusal, repairing_daemon, run,
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;
use understudy_lab::check::check_disk;
use understudy_lab::scene::VM;
use understudy_lab::{Scene, SceneOptions, wait_for};
use understudy_qemu::VmDefinition;

/// The bytes that do not get to the other host before a test's patience has ended, and how fast it
/// goes there.
const SLOW_BYTES: u64 = 256 << 20;
const SLOW_MBITS: u32 = 4;

/// The daemons of these options wait so long for guests that power off.
fn waiting(mut options: SceneOptions, seconds: u64) -> SceneOptions {
    for host in options.daemons.values_mut() {
        host.settings += &format!("[shutdown]\npower_off_seconds = {seconds}\n");
    }
    options
}

/// The record that a host has of the guest.
fn record(scene: &Scene, host: &str) -> Result<Value> {
    let record = scene.host(host)?.directory().join("state").join(VM).join("record.json");
    Ok(serde_json::from_slice(&fs::read(&record)?)?)
}

/// The role of a host's images, as its record says.
fn role(scene: &Scene, host: &str) -> Result<String> {
    let record = record(scene, host)?;
    Ok(record["image"]["role"].as_str().context("no role in the record")?.to_owned())
}

/// Whether the next mount of the image would replay its journal.
fn needs_recovery(image: &Path) -> Result<bool> {
    Ok(run("dumpe2fs", &["-h", &image.to_string_lossy()])?.contains("needs_recovery"))
}

/// Ends host a's daemon, whose guest powers off before it: its disk is unmounted and has every
/// record, and its own record says so. Returns the daemon's log.
fn terminate_in_order(scene: &mut Scene, image: &Path, acked: u64) -> Result<String> {
    let status = scene.host_mut("a")?.terminate()?;
    ensure!(status.success(), "the daemon ended with {status}");
    ended_in_order(scene, image, acked)
}

fn ended_in_order(scene: &Scene, image: &Path, acked: u64) -> Result<String> {
    ensure!(!needs_recovery(image)?, "the guest did not unmount its disk");
    let check = check_disk(image, acked)?;
    ensure!(check.is_intact(), "{check:#?}");
    ensure!(role(scene, "a")? == "stopped", "the record says {}", role(scene, "a")?);
    log_of(scene, "a")
}

/// Starts the guest, which then has written; its image, and what was acknowledged.
fn begin_unprotected(scene: &Scene) -> Result<(PathBuf, u64)> {
    scene.start_guest("a")?;
    scene.await_guest()?;
    let client = scene.record_client(PACE)?;
    await_service(&client)?;
    let image = scene.disk("a", 0)?;
    let acked = close(client)?;
    ensure!(needs_recovery(&image)?, "a mounted file system shows no journal to replay");
    Ok((image, acked))
}

/// It was called protected by a host that would have ended the guest which came to it.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_host_that_shuts_down_protects_nobody() {
    let mut options = options().calm();
    fail_at(&mut options, "b", "end-backups=sleep(15000)");
    play_protected(options, |scene, client| {
        let daemon = scene.host("b")?.pid().to_string();
        run("kill", &["-TERM", &daemon])?;
        await_unfit(scene, "it is shutting down")?;
        ensure!(scene.host_mut("b")?.is_running(), "it ended too early to tell");
        ensure!(scene.host_mut("b")?.terminate()?.success(), "host b did not end in order");
        prove_survival(scene, client, "a")
    });
}

/// The power was cut, the journal was left to be replayed, and the record said "stopped".
#[test]
fn an_unprotected_guest_powers_off_with_its_daemon() {
    play(waiting(options().calm(), LIMIT.as_secs()), |scene| {
        let (image, acked) = begin_unprotected(scene)?;
        let log = terminate_in_order(scene, &image, acked)?;
        ensure!(!log.contains("power was cut"), "{log}");
        Ok(())
    });
}

/// Ctrl-C at the daemon's terminal, or `systemctl kill`: QEMU ended at once, and the power was cut.
#[test]
fn an_unprotected_guest_powers_off_when_all_processes_are_told_to_end() {
    play(waiting(options().calm(), LIMIT.as_secs()), |scene| {
        let (image, acked) = begin_unprotected(scene)?;
        let mut all = scene.host("a")?.namespace().processes()?;
        let daemon = scene.host("a")?.pid();
        ensure!(all.contains(&daemon) && all.len() > 1, "not the daemon and its QEMU: {all:?}");
        // QEMU first: nothing else has ended it.
        all.sort_by_key(|&pid| pid == daemon);
        for pid in all {
            run("kill", &["-INT", &pid.to_string()])?;
        }
        wait_for("the daemon to end", LIMIT, || {
            Ok((!scene.host_mut("a")?.is_running()).then_some(()))
        })?;
        let log = ended_in_order(scene, &image, acked)?;
        ensure!(!log.contains("power was cut"), "{log}");
        Ok(())
    });
}

/// A guest whose power was cut was once recorded as stopped in order.
#[test]
fn a_guest_that_does_not_power_off_is_cut_and_said_to_be() {
    play(waiting(quick(), 1), |scene| {
        scene.start_guest("a")?;
        scene.host_mut("a")?.terminate()?;
        let log = log_of(scene, "a")?;
        ensure!(log.contains("its power was cut: it did not power off within 1 s"), "{log}");
        ensure!(role(scene, "a")? == "cut", "the record says {}", role(scene, "a")?);
        scene.restart("a")?;
        let report = scene.host("a")?.call(["recover", VM, "--dry-run"])?;
        ensure!(report.contains("power was cut") && !report.contains("in order"), "{report}");
        // By its name, on the images that it had.
        scene.host("a")?.call(["vm", "start", VM])?;
        scene.await_live("a").map(drop)
    });
}

/// It came up again: that its operator had ended it was taken for its daemon's doing.
#[test]
fn a_guest_that_is_being_stopped_when_its_daemon_ends_does_not_come_up_again() {
    play(waiting(quick(), 1), |scene| {
        set_autostart(scene)?;
        scene.start_guest("a")?;
        let mut stop = scene.host("a")?.begin(["vm", "stop", VM])?;
        wait_for("the guest to be asked", LIMIT, || {
            Ok(log_of(scene, "a")?.contains("its operator has it power off").then_some(()))
        })?;
        scene.host_mut("a")?.terminate()?;
        // Told that it has ended, or not any more.
        stop.wait()?;
        ensure!(role(scene, "a")? == "cut", "the record says {}", role(scene, "a")?);
        let wanted = |scene: &Scene| -> Result<bool> { Ok(record(scene, "a")?["wanted"] == true) };
        ensure!(!wanted(scene)?, "it is to come up again");
        // Its daemon's wish is none of its operator's.
        scene.restart("a")?;
        scene.host("a")?.call(["vm", "start", VM])?;
        scene.host_mut("a")?.terminate()?;
        ensure!(wanted(scene)?, "it does not come up again");
        Ok(())
    });
}

/// A second signal ends the wait.
#[test]
fn who_signals_twice_does_not_wait() {
    play(waiting(quick(), 3600), |scene| {
        scene.start_guest("a")?;
        signal_twice(scene, "shutting down guest")
    });
}

/// The second signal comes once the daemon has said that it waits.
fn signal_twice(scene: &mut Scene, waits: &str) -> Result<()> {
    let pid = scene.host("a")?.pid().to_string();
    run("kill", &["-TERM", &pid])?;
    wait_for("the daemon to say what it waits for", LIMIT, || {
        Ok(log_of(scene, "a")?.contains(waits).then_some(()))
    })?;
    let status = scene.host_mut("a")?.terminate()?;
    ensure!(status.success(), "the daemon ended with {status}");
    let log = log_of(scene, "a")?;
    ensure!(log.contains("its power was cut: a second signal asked for it"), "{log}");
    ensure!(role(scene, "a")? == "cut", "the record says {}", role(scene, "a")?);
    Ok(())
}

/// A second signal does not wait for protection that is about to be, either.
#[test]
fn who_signals_twice_does_not_wait_for_protection() {
    play(waiting(quick(), 3600), |scene| {
        let definition =
            VmDefinition::from_toml(&fs::read_to_string(scene.definition())?, scene.definition())?;
        let mut image = fs::OpenOptions::new().append(true).open(&definition.disks[0].path)?;
        io::copy(&mut fs::File::open("/dev/urandom")?.take(SLOW_BYTES), &mut image)?;
        scene.lab().limit_speed("b", SLOW_MBITS)?;
        scene.start_guest("a")?;
        scene.protect("a", "b")?;
        signal_twice(scene, "waiting for the protection of guest")
    });
}

/// The hand-over failed, and the power was cut.
#[test]
fn a_guest_that_cannot_be_handed_over_powers_off() {
    play(waiting(options().calm(), LIMIT.as_secs()), |scene| {
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        let image = scene.disk("a", 0)?;
        let acked = close(client)?;
        scene.host("b")?.pause()?;
        let log = terminate_in_order(scene, &image, acked)?;
        ensure!(log.contains("not handed over: "), "{log}");
        scene.host("b")?.resume()?;
        Ok(())
    });
}

/// The backup's host was restarted a moment before, and the guest was powered off.
#[test]
fn a_guest_that_is_about_to_be_protected_again_is_handed_over() {
    let mut options = options();
    for daemon in options.daemons.values_mut() {
        *daemon = repairing_daemon().calm();
    }
    play_protected(waiting(options, LIMIT.as_secs()), |scene, client| {
        await_service(&client)?;
        scene.host_mut("b")?.kill_everything()?;
        wait_for("host a to notice", LIMIT, || {
            Ok((protection(&scene.status("a")?).0 != "protected").then_some(()))
        })?;
        scene.restart("b")?;
        let status = scene.host_mut("a")?.terminate()?;
        ensure!(status.success(), "the daemon ended with {status}");
        scene.await_live("b")?;
        prove_survival(scene, client, "b")
    });
}

/// The backup could not take over at that moment, and the guest was powered off.
#[test]
fn a_guest_whose_backup_is_unfit_for_a_moment_is_handed_over_behind_it() {
    play_protected(waiting(options().calm(), LIMIT.as_secs()), |scene, client| {
        await_service(&client)?;
        scene.host("b")?.hide(&scene.lab().arbiter_directory())?;
        await_unfit(scene, "is its storage mounted?")?;
        let pid = scene.host("a")?.pid().to_string();
        run("kill", &["-TERM", &pid])?;
        // It has tried by then; ended is the guest only by what follows.
        pass(Duration::from_secs(1))?;
        await_service(&client)?;
        scene.host("b")?.unhide(&scene.lab().arbiter_directory())?;
        scene.await_live("b")?;
        prove_survival(scene, client, "b")
    });
}

/// A daemon that is started while the one before still ends waits for its addresses.
#[test]
fn a_daemon_that_is_restarted_at_once_waits_for_the_one_before() {
    play(waiting(quick(), 1), |scene| {
        scene.start_guest("a")?;
        let config = scene.host("a")?.directory().join("host.toml");
        let pid = scene.host("a")?.pid().to_string();
        run("kill", &["-TERM", &pid])?;
        let a = scene.host("a")?;
        let mut next = a
            .namespace()
            .command(env!("CARGO_BIN_EXE_understudy"))
            .args(["host", "--config", &config.to_string_lossy()])
            .stderr(std::process::Stdio::null())
            .spawn()?;
        let came = wait_for("the next daemon to answer", LIMIT, || {
            if let Some(status) = next.try_wait()? {
                anyhow::bail!("the next daemon ended with {status}");
            }
            let output = a.cli(["recover", VM, "--dry-run"])?;
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            Ok(text.contains("power was cut").then_some(()))
        });
        run("kill", &["-TERM", &next.id().to_string()])?;
        next.wait()?;
        came?;
        scene.host_mut("a")?.terminate().map(drop)
    });
}

/// Each line that could not be written ended who wrote it: a daemon whose terminal was gone at the first, and then the
/// keepers that it had started.
#[test]
fn who_cannot_write_its_log_any_more_goes_on_without_one() {
    play(in_keepers(quick()), |scene| {
        scene.host_mut("a")?.terminate()?;
        let a = scene.host("a")?;
        let config = a.directory().join("host.toml");
        let mut daemon = a
            .namespace()
            .command(env!("CARGO_BIN_EXE_understudy"))
            .args(["host", "--config", &config.to_string_lossy()])
            .stderr(std::process::Stdio::piped())
            .spawn()?;
        // Nobody reads what it says.
        drop(daemon.stderr.take());
        let lived = wait_for("the daemon to answer", LIMIT, || {
            if let Some(status) = daemon.try_wait()? {
                anyhow::bail!("the daemon has ended: {status}");
            }
            Ok(a.cli(["status"])?.status.success().then_some(()))
        })
        .and_then(|()| scene.start_guest("a"))
        .and_then(|()| answered(scene, VM))
        .and_then(|_| a.call(["vm", "stop", VM, "--force"]))
        .and_then(|_| {
            wait_for("the VM to be gone", LIMIT, || Ok(a.known(VM)?.is_none().then_some(())))
        });
        let told = run("kill", &["-TERM", &daemon.id().to_string()]);
        let ended = daemon.wait()?;
        lived.and(told)?;
        ensure!(ended.success(), "{ended}");
        Ok(())
    });
}

/// Its images lie elsewhere then, and its definition was refused.
#[test]
fn a_vm_is_started_by_its_name_where_it_was_last() {
    play(options().calm(), |scene| {
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        hand_over(scene.host("a")?, VM)?;
        scene.await_live("b")?;
        await_service(&client)?;
        let newest = scene.disk("b", 0)?;
        let shown = shown(scene, "b")?;
        ensure!(shown.disks[0].path == newest, "{shown:?}");
        // Host a is told who runs it, and not to recover what needs no recovery.
        let file = scene.definition().to_string_lossy().into_owned();
        for what in [VM, &file] {
            let (_, words) = refusal(scene.host("a")?, &["vm", "start", what])?;
            ensure!(words.contains("host b runs it now") && !words.contains("recover"), "{words}");
        }
        let acked = close(client)?;
        scene.host("b")?.call(["vm", "stop", VM])?;
        await_forgotten(scene, "b")?;
        let (_, words) = refusal(scene.host("b")?, &["vm", "start", &file])?;
        let by_name = format!("`understudy vm start {VM}`");
        ensure!(words.contains(&by_name) && !words.contains('?'), "{words}");
        ensure!(self::shown(scene, "b")? == shown, "another definition once it is stopped");
        scene.host("b")?.call(["vm", "start", VM])?;
        scene.await_guest()?;
        ensure!(scene.disk("b", 0)? == newest, "it runs on other images");
        prove_disk(scene, "b", acked)
    });
}

/// The definition that `vm show` prints.
fn shown(scene: &Scene, host: &str) -> Result<VmDefinition> {
    let text = scene.host(host)?.call(["vm", "show", VM])?;
    let shown = VmDefinition::from_toml(&text, &PathBuf::from("/shown.toml"))?;
    let json = scene.host(host)?.call(["vm", "show", VM, "--json"])?;
    ensure!(serde_json::from_str::<VmDefinition>(&json)? == shown, "{text}\n{json}");
    Ok(shown)
}
