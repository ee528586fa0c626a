//! What lockstep is not proven for is refused before anything starts, with the way out.

use crate::refusals::{quick, says, unharmed};
use crate::stage::{play, refusal};
use anyhow::{Context, Result, ensure};
use understudy_lab::scene::{GuestKind, VM};
use understudy_lab::{Scene, SceneOptions};

/// The guest on host a, for which lockstep is refused in these words.
fn refused(options: SceneOptions, expected: &[&str]) {
    play(options, |scene| {
        scene.start_guest("a")?;
        let lockstep = ["protect", VM, "--to", "b", "--mode", "lockstep"];
        let (code, words) = refusal(scene.host("a")?, &lockstep)?;
        ensure!(code == 1, "exit code {code}: {words}");
        says(&words, expected)?;
        says(&words, &["--mode checkpoint"])?;
        unharmed(scene)?;
        // The way out is one.
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ()).map(drop)
    });
}

#[test]
fn what_is_not_proven_is_refused_and_checkpoints_work() {
    let linux = SceneOptions { kind: GuestKind::Linux, memory_mib: 128, ..quick() };
    let two_vcpus = SceneOptions { vcpus: 2, ..linux.clone() };
    refused(two_vcpus, &["2 vCPUs; lockstep works with one"]);
    let qcow2 = SceneOptions { disks: 2, second_disk_is_qcow2: true, ..linux };
    refused(qcow2, &["disk 1 is not a raw virtio disk"]);
}

#[test]
fn a_definition_that_wants_lockstep_must_fit_it() {
    play(SceneOptions { vcpus: 2, lockstep: true, ..quick() }, |scene| {
        let path = scene.definition().to_string_lossy().into_owned();
        let (code, words) = refusal(scene.host("a")?, &["vm", "start", &path])?;
        ensure!(code == 1, "exit code {code}: {words}");
        says(&words, &["2 vCPUs", "host a"])
    });
}

#[test]
fn a_group_is_not_protected_in_lockstep() {
    play(quick(), |scene: &mut Scene| -> Result<()> {
        let group = ["protect", "x", "y", "--group", "g", "--to", "b", "--mode", "lockstep"];
        let (code, words) = refusal(scene.host("a")?, &group).context("a group")?;
        ensure!(code == 2, "exit code {code}: {words}");
        says(&words, &["group", "one by one", "--mode checkpoint"])
    });
}
