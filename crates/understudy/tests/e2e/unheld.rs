//! Output that is not held: never without being asked for and allowed, never called
//! protection, and one live copy all the same.

use crate::refusals::{log_of, quick, says};
use crate::stage::{Calm, LIMIT, daemon, options, play, protection, refusal};
use anyhow::{Context, Result, ensure};
use std::time::Instant;
use understudy_lab::scene::VM;
use understudy_lab::{CLIENT_ADDRESS, Scene, SceneOptions, wait_for};

const ALLOWED: &str = "[experiments]\nallow_unheld_output = true\n";
const PROTECT: [&str; 5] = ["protect", VM, "--to", "b", "--unheld-output"];

fn allowed(mut options: SceneOptions) -> SceneOptions {
    for host in options.daemons.values_mut() {
        host.settings += ALLOWED;
    }
    options
}

#[test]
fn output_is_held_unless_the_configuration_allows_otherwise() {
    assert!(!daemon().settings.contains("experiments"));
    play(quick(), |scene| {
        scene.start_guest("a")?;
        let (code, words) = refusal(scene.host("a")?, &PROTECT)?;
        ensure!(code == 1, "exit code {code}");
        says(&words, &["allow_unheld_output = true", "[experiments]"])?;
        ensure!(protection(&scene.status("a")?).0 == "off", "protection began all the same");
        Ok(())
    });
}

fn follow(scene: &Scene) -> Result<()> {
    let host = scene.host("a")?;
    let output = host.cli(PROTECT)?;
    ensure!(output.status.code() == Some(3), "`protect` ended with {}", output.status);
    let words = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(words.contains("NOT protected"), "`protect` said {words}");
    // Its backup may not have proved for a moment that it could take over.
    wait_for("`status` to say that output is not held", LIMIT, || {
        let output = host.cli(["status", VM])?;
        ensure!(output.status.code() == Some(3), "`status` ended with {}", output.status);
        let words = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok(words.contains("NOT PROTECTED: output is not held").then_some(()))
    })?;
    for host in ["a", "b"] {
        wait_for(&format!("host {host} to say so"), LIMIT, || {
            Ok((protection(&scene.status(host)?).0 == "unheld").then_some(()))
        })?;
    }
    ensure!(log_of(scene, "a")?.contains("NOT PROTECTED"), "the log does not say so");
    Ok(())
}

/// The guest sends without rest, to nobody's answer. While the hosts are cut off from each
/// other, its output stops before the backup's copy runs.
#[test]
fn there_is_one_live_copy_although_nothing_is_held() {
    play(allowed(options().calm()), |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        follow(scene)?;
        scene.shell()?.start(&format!("ping -i 0.05 {CLIENT_ADDRESS} >/dev/null"))?;
        let (a, b) = (scene.watch_uplink("a", 0)?, scene.watch_uplink("b", 0)?);
        wait_for("the guest to send", LIMIT, || Ok((a.count()? > 20).then_some(())))?;
        // Only the backup reaches the arbiter.
        scene.host("a")?.hide(&scene.lab().arbiter_directory())?;
        let cut_at = Instant::now();
        scene.lab().cut("a")?;
        scene.await_live("b")?;
        ensure!(a.frames_after(cut_at)? > 0, "nothing left before its epoch was on the backup");
        scene.host("a")?.unhide(&scene.lab().arbiter_directory())?;
        scene.await_kept("a")?;
        let mut first = None;
        wait_for("b to let the guest's output go", LIMIT, || {
            first = b.first_frame_after(cut_at)?;
            Ok(first.map(drop))
        })?;
        let first = first.context("b sent nothing")?;
        ensure!(a.frames_after(first)? == 0, "a still sent something after b had begun to");
        scene.lab().heal("a")
    });
}
