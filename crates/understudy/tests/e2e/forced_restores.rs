//! Restores by force of a VM that a silent host may run: they wait for the end of its lease.

use crate::cluster_deaths::Moment;
use crate::fencing::{hide, is_gone, unhide};
use crate::lease::{LENGTH, await_lease, short, unprotect};
use crate::snapshot::store;
use crate::stage::{
    LIMIT, await_service, fail_at, play_protected, prove_survival, refusal, refused,
};
use anyhow::{Context, ensure};
use std::time::Instant;
use understudy_lab::scene::VM;
use understudy_lab::{ArbiterKind, CLIENT_ADDRESS, wait_for};

/// A snapshot is no way around the lease: who restores one of a VM that a silent host may run waits, too.
#[test]
fn a_restore_by_force_waits_until_a_silent_host_lets_nothing_out() {
    play_protected(short(ArbiterKind::File), |scene, client| {
        let store = store(scene);
        scene.host("a")?.call(["vm", "snapshot", VM, "--store", &store])?;
        unprotect(scene)?;
        await_lease(scene)?;
        scene.shell()?.start(&format!("ping -i 0.02 {CLIENT_ADDRESS} >/dev/null"))?;
        await_service(&client)?;
        client.abandon();
        let (a, b) = (scene.watch_uplink("a", 0)?, scene.watch_uplink("b", 0)?);
        wait_for("the guest to send", LIMIT, || Ok((a.count()? > 20).then_some(())))?;
        let former = scene.host("a")?.qemu_pid(VM)?;
        scene.host("a")?.pause()?;
        let asked = Instant::now();
        let restore = ["vm", "restore", VM, "--store", &store];
        let (_, words) = refusal(scene.host("b")?, &restore)?;
        ensure!(words.contains("does not answer") && words.contains("--force"), "{words}");
        scene.host("b")?.call([&restore[..], &["--force"]].concat())?;
        ensure!(asked.elapsed() > LENGTH, "host b did not wait for the lease's end");
        scene.await_guest()?;
        let first = b.first_frame_after(asked)?.context("b sent nothing")?;
        scene.host("a")?.resume()?;
        scene.await_fenced("a")?;
        is_gone(former)?;
        ensure!(a.frames_after(first)? == 0, "a still sent something after b had begun to");
        // Host a has a copy of it: before, it was restored as one that nobody else ever had.
        let lease = format!("{}.lease", scene.status("b")?["generation"]);
        let lease = scene.lab().arbiter_directory().join(VM).join(lease);
        wait_for("its lease", LIMIT, || Ok(lease.exists().then_some(())))?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        Ok(())
    });
}

/// Before, the second one found its own host, or nobody, to be the owner, and waited for no lease: the silent host's guest could
/// still answer.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_second_restore_by_force_waits_as_the_first_did() {
    let mut options = short(ArbiterKind::File);
    fail_at(&mut options, "b", "restore-claimed=1*return");
    play_protected(options, |scene, client| {
        let store = store(scene);
        scene.host("a")?.call(["vm", "snapshot", VM, "--store", &store])?;
        unprotect(scene)?;
        await_lease(scene)?;
        await_service(&client)?;
        client.abandon();
        scene.host("a")?.pause()?;
        let restore = ["vm", "restore", VM, "--store", &store, "--force"];
        let (_, words) = refusal(scene.host("b")?, &restore)?;
        ensure!(words.contains("a test says so"), "{words}");
        let asked = Instant::now();
        scene.host("b")?.call(restore)?;
        ensure!(asked.elapsed() > LENGTH, "the second one waited for nobody");
        scene.await_guest()?;
        scene.host("a")?.resume()?;
        scene.await_fenced("a")?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        Ok(())
    });
}

/// Before, an arbiter that did not answer the one question about the owner counted as one that names nobody: no lease
/// was waited for.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_restore_by_force_is_refused_while_the_arbiter_names_no_owner() {
    let (asks, loaded) = (Moment::new(), Moment::new());
    let mut options = short(ArbiterKind::File);
    let points = [asks.action("ask-owner", "1*"), loaded.action("restore-loaded", "1*")];
    fail_at(&mut options, "b", &points.join(";"));
    play_protected(options, |scene, client| {
        let store = store(scene);
        scene.host("a")?.call(["vm", "snapshot", VM, "--store", &store])?;
        unprotect(scene)?;
        scene.host("a")?.pause()?;
        let restore = ["vm", "restore", VM, "--store", &store, "--force"];
        let mut restore = scene.host("b")?.begin(restore)?;
        asks.await_reached()?;
        hide(scene, ArbiterKind::File, "b")?;
        asks.end()?;
        wait_for("the restore to go on, or to end", LIMIT, || {
            Ok((loaded.is_reached() || restore.try_wait()?.is_some()).then_some(()))
        })?;
        unhide(scene, ArbiterKind::File, "b")?;
        if loaded.is_reached() {
            loaded.end()?;
        }
        let (_, words) = refused(&restore.wait_with_output()?, "vm restore")?;
        ensure!(words.contains("the arbiter does not answer"), "{words}");
        scene.host("a")?.resume()?;
        prove_survival(scene, client, "a")
    });
}
