//! A primary whose image has no room to grow: the file system that it lies on is full.

use crate::lockstep::{in_lockstep, lockstep};
use crate::sick_disks::{Failing, SmallDisk, await_no_disk_error, await_stop};
use crate::stage::{
    Calm, PACE, await_forgotten, await_service, close, options, play, play_protected, prove_disk,
    prove_survival,
};
use anyhow::{Result, ensure};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use understudy_lab::Scene;
use understudy_qemu::VmDefinition;

/// The guest's image is sparse, and has far more to come than fits.
const MIB: u64 = 64;
/// The words of `status` about it.
const NO_SPACE: &str = "No space left on device";

/// Puts the image of the guest, which was not started yet, on a small file system of its own.
fn confine(scene: &mut Scene, directory: &Path) -> Result<SmallDisk> {
    let place = directory.join("small");
    fs::create_dir(&place)?;
    let small = SmallDisk::mount(&directory.join("image"), place.clone(), MIB)?;
    let definition: VmDefinition = toml::from_str(&fs::read_to_string(scene.definition())?)?;
    let (image, there) = (&definition.disks[0].path, place.join("disk.img"));
    let (from, to) = (image.to_string_lossy(), there.to_string_lossy());
    crate::stage::run("cp", &["--sparse=always", &*from, &*to])?;
    fs::remove_file(image)?;
    symlink(there, image)?;
    // A daemon has mounts of its own, those of its beginning.
    scene.host_mut("a")?.terminate()?;
    scene.restart("a")?;
    Ok(small)
}

#[test]
fn a_primary_without_room_for_its_image_is_taken_over() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    play(options().calm(), |scene| {
        let small = confine(scene, directory.path())?;
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        small.fill()?;
        scene.await_live("b")?;
        let fenced = scene.await_fenced("a")?;
        let reason = fenced["protection"]["reason"].as_str().unwrap_or_default();
        ensure!(reason.contains("an error on disk0") && reason.contains(NO_SPACE), "{fenced}");
        prove_survival(scene, client, "b")?;
        scene.host_mut("a")?.kill_everything().map(drop)
    });
}

#[test]
fn an_unprotected_guest_goes_on_when_there_is_room_again() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    play(options().calm(), |scene| {
        let small = confine(scene, directory.path())?;
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        small.fill()?;
        let error = await_stop(scene)?;
        ensure!(error.contains(NO_SPACE), "{error}");
        small.clear()?;
        await_service(&client)?;
        await_no_disk_error(scene)?;
        let acked = close(client)?;
        prove_disk(scene, "a", acked)?;
        scene.host_mut("a")?.kill_everything().map(drop)
    });
}

/// The guest goes on and waits for its disk, and is handed over with the log.
#[test]
fn a_primary_in_lockstep_whose_disk_lost_writes_is_taken_over() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let failing = Failing::new(directory.path());
    let mut options = lockstep();
    options.daemons.insert("a".to_owned(), failing.daemon());
    play_protected(options, |scene, client| {
        in_lockstep(scene, "a")?;
        failing.begin()?;
        scene.await_live("b")?;
        await_forgotten(scene, "a")?;
        prove_survival(scene, client, "b")
    });
}
