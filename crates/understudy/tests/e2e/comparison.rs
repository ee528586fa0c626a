//! `understudy lockstep verify`: both machines are compared while they run, and a backup that
//! differs is given up.

use crate::deaths::{await_rounds, unharmed};
use crate::lockstep::{BUSY, await_repaired, in_lockstep, lockstep};
use crate::lockstep_divergences::await_divergences;
use crate::stage::{
    Calm, LIMIT, LOAD_PACE, await_degraded, await_service, fail_at, options, play, play_protected,
    prove_survival, refusal, repairing_daemon,
};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use understudy_lab::scene::{ECHO_PORT, RECORDS_PORT, VM};
use understudy_lab::{ChatterClient, Load, Scene, SceneOptions, wait_for};

const MEBIBYTE: u64 = 1 << 20;

/// Comparisons of a test: samples are taken meanwhile, too.
const TIMES: usize = 2;

/// Memory that a guest at rest does not use.
const UNUSED_MEMORY: u64 = 150 * MEBIBYTE + 0x123;

#[test]
fn both_machines_are_the_same_under_load() {
    play_protected(lockstep(), |scene, client| {
        in_lockstep(scene, "a")?;
        scene.shell()?.start(BUSY)?;
        let lab = scene.lab();
        let pings =
            ChatterClient::start(lab, scene.guest(RECORDS_PORT), 8, Load::Pings, LOAD_PACE)?;
        let bulk =
            ChatterClient::start(lab, scene.guest(ECHO_PORT), 2, Load::Bulk(16 * 1024), LOAD_PACE)?;
        await_rounds(&pings, 20)?;
        for _ in 0..TIMES {
            let (code, report) = verify(scene)?;
            println!("{report}");
            ensure!(code == Some(0), "{report}");
            let pages = u64::from(lockstep().memory_mib) * 256;
            ensure!(report["pages"].as_u64() >= Some(pages), "{report}");
            ensure!(report["extents"].as_u64() > Some(0), "no disk was compared: {report}");
            await_rounds(&pings, 5)?;
        }
        let counts = wait_for("a sample", LIMIT, || {
            let counts = scene.status("a")?["lockstep"]["comparison"].clone();
            Ok((counts["comparisons"].as_u64() > Some(TIMES as u64)).then_some(counts))
        })?;
        println!("{counts}");
        await_service(&client)?;
        unharmed(&pings.stop())?;
        unharmed(&bulk.stop())?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_byte_of_a_backups_memory_is_another() {
    play_protected(repairing(), |scene, client| {
        in_lockstep(scene, "a")?;
        spoil_memory(scene, "b", UNUSED_MEMORY)?;
        let page = UNUSED_MEMORY & !4095;
        differs(scene, &json!({"memory": "ram", "offset": page, "bytes": 4096}))?;
        let kept = scene.host("b")?.directory().join("state").join(VM).join("diverged");
        let content = fs::read(kept.join(format!("memory-0-{page:#x}.bin")))?;
        ensure!(content[0x123] == 0xa5, "what differed was not kept");
        await_repaired(scene, "lockstep")?;
        in_lockstep(scene, "a")?;
        let (code, report) = verify(scene)?;
        ensure!(code == Some(0), "the new backup: {report}");
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_byte_of_a_mirror_is_another() {
    play_protected(repairing(), |scene, client| {
        in_lockstep(scene, "a")?;
        let image = OpenOptions::new().write(true).open(scene.disk("b", 0)?)?;
        let end = image.metadata()?.len();
        image.write_all_at(&[0xa5], end - 100)?;
        let offset = (end - 1) / 65536 * 65536;
        differs(scene, &json!({"disk": 0, "offset": offset, "bytes": 65536}))?;
        await_repaired(scene, "lockstep")?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// It was forgotten with the host that was to hear it, and the next session copied what had changed alone: the guest would
/// have gone on with the wrong byte.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_divergence_that_the_backup_does_not_hear_of_is_not_forgotten() {
    let mut options = repairing();
    fail_at(&mut options, "a", "condemn=1*return");
    play_protected(options, |scene, client| {
        in_lockstep(scene, "a")?;
        let image = OpenOptions::new().write(true).open(scene.disk("b", 0)?)?;
        image.write_all_at(&[0xa5], image.metadata()?.len() - 100)?;
        drop(image);
        let (code, report) = verify(scene)?;
        ensure!(code == Some(1), "exit code {code:?}: {report}");
        scene.host_mut("b")?.kill_everything()?;
        await_degraded(scene, "a")?;
        scene.restart("b")?;
        let status = await_repaired(scene, "lockstep")?;
        let sync = &status["disk_sync"];
        ensure!(sync["full_because"].is_string(), "only what had changed was copied: {sync}");
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn there_is_nothing_to_compare_without_lockstep() {
    play(options().calm(), |scene| {
        let command = ["lockstep", "verify", VM];
        let (code, words) = refusal(scene.host("a")?, &command)?;
        ensure!(code == 4, "no such VM: {code}: {words}");
        scene.protected_guest("a", "b")?;
        let (code, words) = refusal(scene.host("a")?, &command)?;
        ensure!(code == 1 && words.contains("--mode lockstep"), "{code}: {words}");
        let (code, words) = refusal(scene.host("b")?, &command)?;
        ensure!(code == 1 && words.contains("runs on a"), "{code}: {words}");
        Ok(())
    });
}

/// The options of a scene in lockstep in which lost protection is restored.
fn repairing() -> SceneOptions {
    let mut options = lockstep();
    for daemon in options.daemons.values_mut() {
        *daemon = repairing_daemon().calm();
    }
    options
}

/// Compares; gives the exit code and the report.
fn verify(scene: &Scene) -> Result<(Option<i32>, Value)> {
    let output = scene.host("a")?.cli(["lockstep", "verify", VM, "--json"])?;
    let said = String::from_utf8_lossy(&output.stdout);
    let report =
        serde_json::from_str(&said).with_context(|| format!("`verify` said {output:?}"))?;
    Ok((output.status.code(), report))
}

/// The comparison finds this one difference, and the backup is given up for it.
fn differs(scene: &Scene, difference: &Value) -> Result<()> {
    let (code, report) = verify(scene)?;
    println!("{report}");
    ensure!(code == Some(1), "exit code {code:?}: {report}");
    ensure!(report["differences"] == json!([difference]), "{report}");
    await_divergences(scene, 1)?;
    let events = scene.status("a")?["events"].to_string();
    ensure!(events.contains("it differs from the primary in"), "nobody says why: {events}");
    Ok(())
}

/// Changes a byte of a guest's main memory behind its back.
fn spoil_memory(scene: &Scene, host: &str, offset: u64) -> Result<()> {
    let pid = scene.status(host)?["qemu_pid"].as_i64().context("no QEMU")?;
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let memory = maps.lines().find(|line| line.contains("understudy-guest-ram"));
    let begins = memory.and_then(|line| line.split('-').next()).context("no memory")?;
    let begins = u64::from_str_radix(begins, 16)?;
    let process = OpenOptions::new().write(true).open(format!("/proc/{pid}/mem"))?;
    process.write_all_at(&[0xa5], begins + offset)?;
    Ok(())
}
