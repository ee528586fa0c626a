//! `understudy doctor` with a host's configuration: the peers and the arbiter, tried as a daemon would.

use crate::keepers::in_keepers;
use crate::refusals::{log_of, quick};
use crate::stage::{await_forgotten, play, run};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use understudy_lab::Scene;
use understudy_lab::scene::VM;

/// The state and words of doctor on host a about one thing, and whether all is well.
fn examine(scene: &Scene, config: &Path, name: &str) -> Result<(String, String, bool)> {
    let output = scene
        .host("a")?
        .namespace()
        .command(env!("CARGO_BIN_EXE_understudy"))
        .args(["doctor", "--json", "--config", &config.to_string_lossy()])
        .output()?;
    let report: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    let checks = report["checks"].as_array().context("no checks")?;
    let check = checks.iter().find(|check| check["name"] == name);
    let check = check.with_context(|| format!("no check of {name}: {report}"))?;
    let text = |field: &str| check[field].as_str().unwrap_or_default().to_owned();
    let failed = checks.iter().any(|check| check["state"] == "fail");
    ensure!(output.status.success() != failed, "{report}");
    Ok((text("state"), text("detail"), failed))
}

/// Lines of a host's log that want attention.
fn warnings(scene: &Scene, host: &str) -> Result<Vec<String>> {
    let log = log_of(scene, host)?;
    let wanted = |line: &&str| line.contains(" WARN ") || line.contains("ERROR");
    Ok(log.lines().filter(wanted).map(str::to_owned).collect())
}

/// The configuration of host a with a certificate of an authority that host b does not know.
fn of_a_stranger(scene: &Scene, config: &Path) -> Result<PathBuf> {
    let pki = scene.lab().directory().join("strangers");
    let binary = env!("CARGO_BIN_EXE_understudy");
    let folder = pki.to_string_lossy();
    run(binary, &["pki", "init", "--dir", &folder])?;
    run(binary, &["pki", "issue", "a", "--dir", &folder])?;
    let mut table: toml::Table = fs::read_to_string(config)?.parse()?;
    for (field, file) in [("ca", "ca.pem"), ("cert", "a.pem"), ("key", "a.key")] {
        table["tls"][field] = pki.join(file).to_string_lossy().into_owned().into();
    }
    let path = scene.lab().directory().join("stranger.toml");
    fs::write(&path, table.to_string())?;
    Ok(path)
}

/// The configuration of host a with an arbiter that is nobody else's.
fn elsewhere(scene: &Scene, config: &Path) -> Result<PathBuf> {
    let directory = scene.lab().directory().join("unmounted");
    fs::create_dir(&directory)?;
    let mut table: toml::Table = fs::read_to_string(config)?.parse()?;
    table["arbiter"]["path"] = directory.to_string_lossy().into_owned().into();
    let path = scene.lab().directory().join("elsewhere.toml");
    fs::write(&path, table.to_string())?;
    Ok(path)
}

/// The check once looked only whether the port was open: a peer with another authority was "ok",
/// each look was a warning in the peer's log, and a peer that was not up yet was a failure.
#[test]
fn peers_are_asked_as_a_daemon_would() {
    play(quick(), |scene| {
        let config = scene.host("a")?.directory().join("host.toml");
        let before = warnings(scene, "b")?;
        let (state, detail, _) = examine(scene, &config, "peer b")?;
        ensure!(state == "ok" && detail.contains("over TLS"), "{state}: {detail}");
        let after = warnings(scene, "b")?;
        ensure!(after == before, "the look left warnings: {after:?}");
        scene.protected_guest("b", "a")?;
        let (state, detail, _) = examine(scene, &config, "arbiter with b")?;
        ensure!(state == "ok" && detail.contains("of the VM that"), "{state}: {detail}");
        // A directory of its own where the shared one should be mounted.
        let (state, detail, failed) =
            examine(scene, &elsewhere(scene, &config)?, "arbiter with b")?;
        ensure!(
            state == "fail" && failed && detail.contains("another arbiter"),
            "{state}: {detail}"
        );
        let left = fs::read_dir(scene.lab().directory().join("unmounted"))?.count();
        ensure!(left == 0, "doctor left {left} files in the other arbiter's directory");
        let stranger = of_a_stranger(scene, &config)?;
        let (state, detail, failed) = examine(scene, &stranger, "peer b")?;
        ensure!(state == "fail" && failed, "{state}: {detail}");
        scene.host_mut("b")?.kill_everything()?;
        let (state, detail, failed) = examine(scene, &config, "peer b")?;
        ensure!(state == "note" && !failed, "{state}: {detail}");
        for controller in ["cpu controller", "memory controller", "pids controller"] {
            let (state, detail, _) = examine(scene, &config, controller)?;
            ensure!(["ok", "note"].contains(&&*state), "{state}: {detail}");
        }
        Ok(())
    });
}

/// The peer named VMs of its own process alone, so that of those in keepers nothing was tried.
#[test]
fn what_keepers_protect_is_tried_as_well() {
    play(in_keepers(quick()), |scene| {
        let config = scene.host("a")?.directory().join("host.toml");
        scene.start_guest("b")?;
        let (state, detail, _) = examine(scene, &config, "arbiter with b")?;
        ensure!(state == "ok" && detail.contains("the 0 VMs"), "{state}: {detail}");
        scene.protect("b", "a")?;
        scene.await_protected("b", |_| ())?;
        let (state, detail, _) = examine(scene, &config, "arbiter with b")?;
        ensure!(state == "ok" && detail.contains("of the VM that"), "{state}: {detail}");
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        ["a", "b"].iter().try_for_each(|host| await_forgotten(scene, host))
    });
}
