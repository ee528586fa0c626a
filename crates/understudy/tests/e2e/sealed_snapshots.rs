//! Snapshots in an encrypted store.

use crate::refusals::says;
use crate::snapshot::{busy, json, number, prove_restored, small};
use crate::stage::{await_forgotten, daemon, play, refusal};
use anyhow::{Context, Result, bail, ensure};
use std::path::Path;
use std::process::Command;
use understudy_lab::HostOptions;
use understudy_lab::scene::VM;

/// Whether any file below a directory has these words.
fn holds(directory: &Path, words: &str) -> Result<bool> {
    let search = Command::new("grep").args(["-rqF", "--", words]).arg(directory).status()?;
    match search.code() {
        Some(0) => Ok(true),
        Some(1) => Ok(false),
        _ => bail!("grep: {search}"),
    }
}

#[test]
fn an_encrypted_snapshot_is_restored_with_its_key_alone() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let [store, plain, key, other] = ["store", "plain", "key", "other"]
        .map(|name| directory.path().join(name).display().to_string());
    let with = |key: &str| {
        let settings = format!("{}[snapshot_keys]\n\"{store}\" = \"{key}\"\n", daemon().settings);
        HostOptions { settings, ..daemon() }
    };
    let mut options = small();
    options.daemons.insert("a".to_owned(), with(&key));
    play(options, |scene| {
        for file in [&key, &other] {
            scene.host("a")?.call(["snapshot-key", file])?;
        }
        scene.start_guest("a")?;
        scene.await_guest()?;
        let mut shell = scene.shell()?;
        let sums = busy(scene, &mut shell)?;
        let take = ["vm", "snapshot", VM, "--compression", "none", "--store", &store];
        json(scene, "a", &take)?;
        json(scene, "a", &["vm", "snapshot", VM, "--compression", "none", "--store", &plain])?;
        // Before, the list of all groups did without the key.
        let all = json(scene, "a", &["cluster", "snapshots", "--store", &store])?;
        ensure!(all[0]["group"] == VM && all[0]["damage"].is_null(), "{all}");
        let after = number(&mut shell, "/tmp/count")?;
        drop(shell);
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "a")?;
        // What every snapshot of a Linux guest has in the clear otherwise.
        for words in ["\"definition\"", "Linux version"] {
            ensure!(!holds(Path::new(&store), words)?, "{words:?}");
            ensure!(holds(Path::new(&plain), words)?, "it is in no snapshot: {words:?}");
        }
        let restore = ["vm", "restore", VM, "--store", &store];
        let (_, words) = refusal(scene.host("b")?, &restore)?;
        says(&words, &["is encrypted", "[snapshot_keys]"])?;
        scene.restart_with("b", with(&other))?;
        let (_, words) = refusal(scene.host("b")?, &restore)?;
        says(&words, &["another key"])?;
        scene.restart_with("b", with(&key))?;
        json(scene, "b", &restore)?;
        prove_restored(scene, "b", &sums, after).context("on host b")?;
        Ok(())
    });
}
