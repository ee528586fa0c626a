//! A QEMU that lives and does nothing (SIGSTOP): for longer than the bound it is a failed guest,
//! for a shorter time nothing happens.

use crate::arbiter::await_fit;
use crate::lockstep::{in_lockstep, lockstep};
use crate::refusals::log_of;
use crate::stage::{
    Calm, LIMIT, await_service, options, play_protected, protection, prove_survival,
};
use anyhow::{Result, ensure};
use std::time::{Duration, Instant};
use understudy_lab::scene::VM;
use understudy_lab::{Part, Scene, SceneOptions, wait_for};

/// A time well within a bound of ten seconds, and far over the default of one.
const SHORT: Duration = Duration::from_secs(3);

fn is_gone(pid: u32) -> Result<()> {
    let path = format!("/proc/{pid}");
    wait_for(&format!("QEMU {pid} to end"), LIMIT, || {
        Ok((!std::path::Path::new(&path).exists()).then_some(()))
    })
}

/// Hosts with a bound for QEMUs that is over the shipped one of a second, which a busy machine's reach,
/// and well under the time-out of a checkpoint.
fn strict(mut options: SceneOptions) -> SceneOptions {
    for daemon in options.daemons.values_mut() {
        let settings = daemon.settings.replace("qemu_timeout_ms = 10000", "qemu_timeout_ms = 4000");
        daemon.settings = settings;
    }
    options
}

/// Stops the primary's QEMU for good; its backup goes on, and it never lives again.
fn hang(scene: &mut Scene, primary: &str, backup: &str) -> Result<()> {
    let qemu = scene.host(primary)?.qemu_pid(VM)?;
    let silent = scene.watch_uplink(primary, 0)?;
    let hung = scene.host(primary)?.stall(Part::Process(qemu))?;
    scene.await_live(backup)?;
    println!("{backup} runs the guest {:.1} s after its QEMU hung", hung.elapsed().as_secs_f64());
    scene.await_fenced(primary)?;
    let live = Instant::now();
    let reason = scene.status(primary)?["protection"]["reason"].to_string();
    ensure!(reason.contains("QEMU has not answered for"), "{reason}");
    is_gone(qemu)?;
    ensure!(silent.frames_after(live)? == 0, "the halted copy sent something");
    Ok(())
}

/// A hang once lasted 20 s until the checkpoint's time-out, "protected" all the while, and the
/// guest then went on alone where it hung.
#[test]
fn a_guest_that_hangs_is_taken_over() {
    play_protected(strict(options().calm()), |scene, client| {
        hang(scene, "a", "b")?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_guest_that_hangs_for_less_than_the_bound_goes_on() {
    play_protected(options().calm(), |scene, client| {
        let qemu = scene.host("a")?.qemu_pid(VM)?;
        for _ in 0..3 {
            let stopped = scene.host("a")?.stall(Part::Process(qemu))?;
            wait_for("the stall to be over", LIMIT, || {
                Ok((stopped.elapsed() >= SHORT).then_some(()))
            })?;
            scene.host("a")?.resume()?;
            await_service(&client)?;
        }
        scene.await_protected("a", |_| ())?;
        ensure!(scene.host("a")?.qemu_pid(VM)? == qemu, "it is another QEMU");
        ensure!(!log_of(scene, "a")?.contains("QEMU has not answered"), "a false alarm");
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// The same where the backup executes the log: it executes what it has, and goes on.
#[test]
fn a_guest_in_lockstep_that_hangs_is_taken_over() {
    play_protected(strict(lockstep()), |scene, client| {
        in_lockstep(scene, "a")?;
        hang(scene, "a", "b")?;
        prove_survival(scene, client, "b")
    });
}

/// The backup of a guest that hangs cannot ask the arbiter: nobody could go on with it, so it is
/// not ended, and runs on when it wakes up.
#[test]
fn a_guest_that_hangs_without_a_fit_backup_is_left_alone() {
    play_protected(strict(options().calm()), |scene, client| {
        scene.host("b")?.hide(&scene.lab().arbiter_directory())?;
        wait_for("the primary to say that its backup could not take over", LIMIT, || {
            let status = scene.status("a")?;
            Ok(protection(&status).1.contains("is its storage mounted?").then_some(()))
        })?;
        let qemu = scene.host("a")?.qemu_pid(VM)?;
        scene.host("a")?.stall(Part::Process(qemu))?;
        wait_for("the primary to notice", LIMIT, || {
            let log = log_of(scene, "a")?;
            Ok(log.contains("QEMU has not answered for").then_some(()))
        })?;
        scene.host("a")?.resume()?;
        await_service(&client)?;
        ensure!(scene.host("a")?.qemu_pid(VM)? == qemu, "it is another QEMU");
        scene.host("b")?.unhide(&scene.lab().arbiter_directory())?;
        await_fit(scene, "a")?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}
