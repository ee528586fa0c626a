//! VMs that `recover` starts in a keeper: their daemon may die, as that of others.

use crate::keepers::{kept, with_keepers};
use crate::recover::lose;
use crate::refusals::says;
use crate::stage::{await_forgotten, play, play_protected, prove_disk, refusal};
use anyhow::{Context, Result, ensure};
use understudy_lab::Scene;
use understudy_lab::scene::VM;

/// The host's daemon dies, and the next finds the guest in the keeper in which it has gone on.
pub fn prove_kept(scene: &mut Scene, host: &str) -> Result<()> {
    let before = kept(&scene.status(host)?).context("it has no keeper")?;
    scene.host_mut(host)?.kill_daemon()?;
    ensure!(scene.shell()?.run("echo here")?.text.trim() == "here", "it does not go on");
    scene.revive(host)?;
    ensure!(kept(&scene.status(host)?)? == before, "another one");
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

#[test]
fn an_order_that_is_none_starts_no_keeper() {
    play(with_keepers(), |scene| {
        for order in ["", "up", "{}", r#"{"recover":{}}"#] {
            let wrong = ["keep", "--config", "/none.toml", "--vm", VM, "--order", order];
            let (code, words) = refusal(scene.host("a")?, &wrong)?;
            ensure!(code == 2 && words.contains("--order"), "{code}: {words}");
        }
        await_forgotten(scene, "a")
    });
}
