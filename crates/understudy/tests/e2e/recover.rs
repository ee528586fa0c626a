//! All hosts are lost: which images are valid, and the VM runs again on them.

use crate::deaths::await_empty;
use crate::refusals::quick;
use crate::stage::{
    Calm, LIMIT, await_service, daemon, daemon_passing, hand_over, options, play, play_protected,
    prove_disk, refusal,
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use understudy_lab::scene::{GuestKind, VM};
use understudy_lab::{HostProcess, RecordClient, Scene, SceneOptions, wait_for};

/// Disk writes with and without flushes.
const DISK_LOAD: &str =
    "while :; do dd if=/dev/urandom of=/data/noise bs=64k count=8; sync; sleep 0.1; done";

/// Every process of these hosts is killed at one instant: all are stopped before the
/// first one dies, so that nobody sees another die.
pub fn lose(scene: &mut Scene, hosts: &[&str]) -> Result<()> {
    let all = hosts.iter().map(|host| scene.host(host)).collect::<Result<Vec<_>>>()?;
    HostProcess::pause_together(all)?;
    for host in hosts {
        scene.host_mut(host)?.kill_everything()?;
    }
    for host in hosts {
        await_empty(scene, host)?;
    }
    Ok(())
}

/// The answer of `recover --dry-run` on a host: whose images are valid, and why.
fn valid_images(scene: &Scene, host: &str) -> Result<(String, String)> {
    let report = scene.host(host)?.call(["recover", VM, "--dry-run", "--json"])?;
    let report: Value = serde_json::from_str(&report)?;
    let text = |value: &Value| value.as_str().unwrap_or("nobody").to_owned();
    ensure!(report["status"].is_null(), "--dry-run started something: {report}");
    Ok((text(&report["valid"]["host"]), text(&report["reason"])))
}

/// Recovers the guest where `valid` are its images; the other host refuses. Every
/// acknowledged record must be there.
fn prove_recovery(scene: &Scene, valid: &str, other: &str, client: RecordClient) -> Result<()> {
    let acked = client.abandon().acked();
    let definition = scene.definition().to_string_lossy().into_owned();
    for host in [valid, other] {
        let (found, why) = valid_images(scene, host)?;
        ensure!(found == valid, "{host} says that {found}'s images are valid: {why}");
    }
    let (_, words) = refusal(scene.host(other)?, &["vm", "start", &definition])?;
    ensure!(words.contains(valid) && words.contains("recover"), "`vm start` on {other}: {words}");
    let (_, words) = refusal(scene.host(other)?, &["recover", VM])?;
    ensure!(words.contains(&format!("on host {valid}")), "`recover` on {other}: {words}");
    let words = scene.host(valid)?.call(["recover", VM])?;
    ensure!(words.contains("runs, unprotected"), "`recover` on {valid}: {words}");
    scene.await_guest()?;
    prove_disk(scene, valid, acked)
}

#[test]
fn both_hosts_are_lost_at_once() {
    play_protected(options().calm(), |scene, client| {
        scene.shell()?.start(DISK_LOAD)?;
        await_service(&client)?;
        lose(scene, &["a", "b"])?;
        scene.restart("a")?;
        // Alone, it knows enough: the arbiter says that nobody took over.
        ensure!(valid_images(scene, "a")?.0 == "a", "host a does not trust its own images");
        scene.restart("b")?;
        prove_recovery(scene, "a", "b", client)
    });
}

#[test]
fn both_hosts_are_lost_after_a_fail_over() {
    play_protected(options().calm(), |scene, client| {
        scene.shell()?.start(DISK_LOAD)?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        await_service(&client)?;
        lose(scene, &["b"])?;
        scene.restart("a")?;
        // The winner does not answer: nothing is certain.
        let (found, why) = valid_images(scene, "a")?;
        ensure!(found == "nobody" && why.contains("host b"), "{found} is valid: {why}");
        let (_, words) = refusal(scene.host("a")?, &["recover", VM])?;
        ensure!(words.contains("cannot be told") && words.contains("--force"), "{words}");
        scene.restart("b")?;
        prove_recovery(scene, "b", "a", client)
    });
}

#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_backup_dies_between_winning_and_activation() {
    let point = "before-activation";
    let mut options = options().calm();
    options.daemons.insert("b".to_owned(), daemon_passing(format!("{point}=panic")));
    play_protected(options, |scene, client| {
        scene.host_mut("a")?.kill_everything()?;
        let b = scene.host_mut("b")?;
        wait_for("host b to die", LIMIT, || Ok((!b.is_running()).then_some(())))?;
        await_empty(scene, "b")?;
        scene.restart("a")?;
        ensure!(valid_images(scene, "a")?.0 == "nobody", "b may have run the guest");
        scene.restart_with("b", daemon().calm())?;
        let (_, why) = valid_images(scene, "a")?;
        ensure!(why.contains("never started the guest"), "{why}");
        let (_, words) = refusal(scene.host("b")?, &["recover", VM])?;
        ensure!(words.contains("on host a"), "`recover` on b: {words}");
        let acked = client.abandon().acked();
        scene.host("a")?.call(["recover", VM])?;
        scene.await_guest()?;
        prove_disk(scene, "a", acked)
    });
}

/// The second of them once made the images stale, and nothing was certain while another host was
/// silent.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn starts_that_come_to_nothing_after_they_have_claimed_the_vm_are_begun_again() {
    let mut options = quick();
    options.daemons.insert("a".to_owned(), daemon_passing("claimed=1*off->2*return->off"));
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        lose(scene, &["b"])?;
        for _ in 0..2 {
            let (_, words) = refusal(scene.host("a")?, &["vm", "start", VM])?;
            ensure!(words.contains("a test says so"), "{words}");
        }
        scene.host("a")?.call(["vm", "start", VM])?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"]).map(drop)
    });
}

/// Its host is gone with its disks, and there is a backup of them: nothing could start it elsewhere.
#[test]
fn a_vm_whose_host_is_gone_starts_on_a_backup_of_its_disk() {
    let options = SceneOptions { kind: GuestKind::BootSector, memory_mib: 64, ..options().calm() };
    play(options, |scene| {
        scene.start_guest("a")?;
        let definition = scene.definition().to_string_lossy().into_owned();
        // Not while it runs there.
        let (_, words) = refusal(scene.host("b")?, &["vm", "start", &definition, "--force"])?;
        ensure!(words.contains("host a runs it"), "{words}");
        lose(scene, &["a"])?;
        let (_, words) = refusal(scene.host("b")?, &["vm", "start", &definition])?;
        ensure!(words.contains("vm start FILE --force"), "{words}");
        // Nobody can know that host a, which keeps no lease, is off.
        let (_, words) = refusal(scene.host("b")?, &["vm", "start", &definition, "--force"])?;
        ensure!(words.contains("--other-host-is-off"), "{words}");
        let (_, words) = refusal(scene.host("b")?, &["recover", VM])?;
        ensure!(words.contains("no host that answers has images"), "it is on record: {words}");
        let insisting = ["vm", "start", &definition, "--force", "--other-host-is-off"];
        scene.host("b")?.call(insisting)?;
        scene.await_live("b")?;
        // Host a is back: what it has is not the newest any more.
        scene.restart("a")?;
        let (_, words) = refusal(scene.host("a")?, &["vm", "start", &definition])?;
        ensure!(words.contains("host b runs it now"), "{words}");
        scene.host("b")?.call(["vm", "stop", VM, "--force"]).map(drop)
    });
}

#[test]
fn stale_images_do_not_start() {
    let options = SceneOptions { kind: GuestKind::BootSector, memory_mib: 64, ..options().calm() };
    play(options, |scene| {
        scene.protected_guest("a", "b")?;
        hand_over(scene.host("a")?, VM)?;
        scene.await_live("b")?;
        let newest = scene.disk("b", 0)?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        // Stopped in order, it is nobody's; but host a's images are old.
        let definition = scene.definition().to_string_lossy().into_owned();
        let (_, words) = refusal(scene.host("a")?, &["vm", "start", &definition])?;
        ensure!(words.contains("stale") && words.contains("recover"), "{words}");
        // On host b the definition still names the images from before.
        let (_, words) = refusal(scene.host("b")?, &["vm", "start", &definition])?;
        let newest = newest.to_str().context("a path without text")?;
        ensure!(words.contains(newest) && words.contains("recover"), "{words}");
        let (found, why) = valid_images(scene, "a")?;
        // It was said to have been stopped in order, although its power was cut.
        ensure!(found == "b" && why.contains("its power was cut"), "{found} is valid: {why}");
        scene.host("b")?.call(["recover", VM])?;
        let (_, words) = refusal(scene.host("a")?, &["recover", VM, "--force"])?;
        ensure!(words.contains("nothing to recover") && words.contains("runs it"), "{words}");
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        // Who insists gets the old ones.
        scene.host("a")?.call(["recover", VM, "--force"])?;
        scene.await_live("a")?;
        let (code, words) = refusal(scene.host("a")?, &["recover", "nobody"])?;
        ensure!(code == 4 && words.contains("has images of nobody"), "{words}");
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        Ok(())
    });
}
