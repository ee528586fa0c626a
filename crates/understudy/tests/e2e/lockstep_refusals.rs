//! Tests that what lockstep is not proven for is refused before anything starts, with the way out.

use crate::keepers::with_keepers;
use crate::refusals::{quick, says, unharmed};
use crate::stage::{Calm, daemon, play, refusal, restart_daemon};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use understudy_lab::scene::{GuestKind, VM};
use understudy_lab::{HostOptions, Scene, SceneOptions};
use understudy_qemu::build_id;

/// The guest on host a, for which lockstep is refused in these words.
fn refused(options: SceneOptions, expected: &[&str]) {
    play(options, |scene| {
        scene.start_guest("a")?;
        let qemu = scene.status("a")?["qemu_pid"].clone();
        let lockstep = ["protect", VM, "--to", "b", "--mode", "lockstep"];
        let (code, words) = refusal(scene.host("a")?, &lockstep)?;
        ensure!(code == 1, "exit code {code}: {words}");
        says(&words, expected)?;
        says(&words, &["--mode checkpoint"])?;
        unharmed(scene)?;
        let status = scene.status("a")?;
        ensure!(status["qemu_pid"] == qemu, "it was moved into another QEMU: {status}");
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

/// The installed QEMU, but for its build id; it finds its firmware as the other does.
fn another_build(place: &Path) -> Result<PathBuf> {
    let installed = fs::canonicalize("/usr/bin/qemu-system-x86_64")?;
    let id = build_id(&installed)?.context("the installed QEMU has no build id")?;
    let byte = |i| u8::from_str_radix(&id[i..i + 2], 16);
    let id: Vec<u8> = (0..id.len()).step_by(2).map(byte).collect::<Result<_, _>>()?;
    let mut program = fs::read(installed)?;
    let at = program.windows(id.len()).position(|part| part == id).context("no such id")?;
    program[at] ^= 1;
    fs::set_permissions(place, fs::Permissions::from_mode(0o755))?;
    fs::create_dir(place.join("bin"))?;
    symlink("/usr/share", place.join("share"))?;
    let path = place.join("bin/qemu-system-x86_64");
    fs::write(&path, program)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

#[test]
fn a_backup_with_another_build_of_qemu_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let qemu = another_build(place.path()).unwrap();
    let settings = format!("qemu = \"{}\"\n{}", qemu.display(), daemon().calm().settings);
    let mut options = SceneOptions { accel: Some("tcg".into()), ..quick() };
    options.daemons.insert("b".to_owned(), HostOptions { settings, ..daemon().calm() });
    refused(options, &["host b refuses", "another build than the primary's"]);
}

/// Its primary's QEMU was asked about, in which the guest ran before, not the one that it goes on in.
#[test]
fn a_turn_into_another_build_of_qemu_than_the_backups_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let upgrade = another_build(place.path()).unwrap();
    let qemu = place.path().join("bin/qemu");
    fs::copy("/usr/bin/qemu-system-x86_64", &qemu).unwrap();
    let mut options = SceneOptions { accel: Some("tcg".into()), ..with_keepers() };
    let a = options.daemons.get_mut("a").expect("host a");
    a.settings = format!("qemu = \"{}\"\n{}", qemu.display(), a.settings);
    play(options, |scene| {
        scene.start_guest("a")?;
        // The guest stays in what was there, until it moves.
        fs::rename(&upgrade, &qemu)?;
        restart_daemon(scene, "a")?;
        scene.host("a")?.call(["upgrade", "--keepers", VM])?;
        scene.protect("a", "b")?;
        let before = scene.await_protected("a", |_| ())?;
        let lockstep = ["protect", VM, "--to", "b", "--mode", "lockstep"];
        let (code, words) = refusal(scene.host("a")?, &lockstep)?;
        ensure!(code == 1, "exit code {code}: {words}");
        says(&words, &["b refuses", "another build than the primary's"])?;
        let status = scene.await_protected("a", |_| ())?;
        ensure!(status["qemu_pid"] == before["qemu_pid"], "it was moved: {status}");
        Ok(())
    });
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
