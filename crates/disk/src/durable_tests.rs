use super::*;
use crate::disk::Disk;
use crate::mirror::mirror_path;
use crate::{ChangeMap, FreshMirror, Mirror, Rounds, Synced};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use understudy_protocol::DiskIndex;

const MIB: u64 = 1 << 20;

/// A block device whose writes are lost while its backing file system is full: a loop device on
/// a sparse file in a small tmpfs. What is written to it waits in the page cache, and only a sync
/// finds out.
struct FullDevice {
    directory: tempfile::TempDir,
    device: PathBuf,
}

fn run(command: &str, arguments: &[&str]) -> String {
    let output = Command::new(command).args(arguments).output().expect(command);
    assert!(output.status.success(), "{command} {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

impl FullDevice {
    fn new() -> FullDevice {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().to_str().unwrap();
        run("mount", &["-t", "tmpfs", "-o", "size=1m", "understudy-test", place]);
        let backing = directory.path().join("backing");
        File::create(&backing).unwrap().set_len(16 * MIB).unwrap();
        let device = run("losetup", &["--find", "--show", backing.to_str().unwrap()]);
        FullDevice { directory, device: device.into() }
    }

    /// Makes room: the device works from now on.
    fn heal(&self) {
        run("mount", &["-o", "remount,size=64m", self.directory.path().to_str().unwrap()]);
    }
}

impl Drop for FullDevice {
    fn drop(&mut self) {
        run("losetup", &["--detach", self.device.to_str().unwrap()]);
        run("umount", &["--lazy", self.directory.path().to_str().unwrap()]);
    }
}

/// Four times what the device can take.
fn overfill(disk: &Disk) {
    disk.write(0, &vec![7; 4 * MIB as usize]).unwrap();
}

fn is_eio(result: io::Result<()>) -> bool {
    result.is_err_and(|error| error.raw_os_error() == Some(Errno::EIO as i32))
}

#[test]
fn what_a_failing_device_lost_is_never_called_synced() {
    let full = FullDevice::new();
    let disk = Disk::open(DiskIndex(0), &full.device, 16 * MIB).unwrap();
    overfill(&disk);
    assert!(is_eio(disk.sync()));
    // The kernel has told it once. To whoever asks it again it says that all is well.
    full.heal();
    let told = disk.image().file().sync_with_kernel();
    assert!(told.is_ok(), "the kernel has forgotten it");
    assert!(is_eio(disk.sync()), "the disk has not");
    disk.write(0, b"later").unwrap();
    assert!(is_eio(disk.sync()), "nor after what came later");
    // Whoever opens the device anew begins anew: what it reads is what there is.
    drop(disk);
    let disk = Disk::open(DiskIndex(0), &full.device, 16 * MIB).unwrap();
    overfill(&disk);
    disk.sync().unwrap();
}

/// A map of the disk's changes, as a former primary has it.
fn changes(directory: &Path, disk: &Disk) -> Arc<ChangeMap> {
    let map = directory.join("changes");
    let changes = ChangeMap::create(&map, disk.export_bytes(), &disk.path()).unwrap();
    changes.unseal().unwrap();
    Arc::new(changes)
}

#[test]
fn an_image_that_lost_writes_may_differ_anywhere() {
    let full = FullDevice::new();
    let directory = tempfile::tempdir().unwrap();
    let disk = Disk::open(DiskIndex(0), &full.device, 16 * MIB).unwrap();
    let map = changes(directory.path(), &disk);
    disk.set_changes(Some(map.clone()));
    let rounds = Rounds::of_new_session();
    disk.begin_rounds(rounds);
    overfill(&disk);
    disk.begin_round(rounds);
    map.end_round(rounds).unwrap();
    assert_eq!(map.changed_bytes(), 0, "the other host has all of it");
    assert!(is_eio(disk.sync()));
    full.heal();
    // What the other host says now counts for nothing.
    disk.begin_round(rounds);
    map.end_round(rounds).unwrap();
    assert_eq!(map.changed_bytes(), 16 * MIB);
    // Nor is it sealed when the disk is closed: a restarted host does not believe it.
    drop(disk);
    let header = std::fs::read(directory.path().join("changes")).unwrap();
    assert_eq!(header[16..24], [0; 8], "it is open");
}

#[test]
fn the_lost_writes_count_for_a_map_that_comes_later() {
    let full = FullDevice::new();
    let directory = tempfile::tempdir().unwrap();
    let disk = Disk::open(DiskIndex(0), &full.device, 16 * MIB).unwrap();
    overfill(&disk);
    assert!(is_eio(disk.sync()));
    full.heal();
    let map = changes(directory.path(), &disk);
    disk.set_changes(Some(map.clone()));
    assert_eq!(map.changed_bytes(), 16 * MIB);
}

#[test]
fn a_failure_is_told_to_syncs_that_run_beside_it() {
    let directory = tempfile::tempdir().unwrap();
    let file = Durable::new(File::create(directory.path().join("file")).unwrap());
    let (begun, has_begun) = crossbeam_channel::unbounded();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let failed = file.sync_with(|_| {
                begun.send(()).unwrap();
                // The other one is under way, or will be.
                std::thread::yield_now();
                Err(Errno::EIO.into())
            });
            assert!(is_eio(failed));
        });
        has_begun.recv().unwrap();
        assert!(is_eio(file.sync_with(|_| Ok(()))));
    });
    assert!(file.has_failed());
}

#[test]
fn a_mirror_that_cannot_be_synced_is_not_whole() {
    let directory = tempfile::tempdir().unwrap();
    let mirror = FreshMirror::create(directory.path(), DiskIndex(0), MIB).unwrap();
    let failed = mirror.disk().image().file().sync_with(|_| Err(Errno::EIO.into()));
    assert!(is_eio(failed));
    assert!(mirror.complete().is_err());
    assert!(!mirror_path(directory.path(), DiskIndex(0)).exists(), "it has not got its name");
}

/// Each took the place of a former one by itself: with the next one's failure a mixture was left, for which the former
/// ones' record vouched.
#[test]
fn all_former_mirrors_stay_if_one_cannot_be_synced() {
    let directory = tempfile::tempdir().unwrap();
    let path = |index| mirror_path(directory.path(), DiskIndex(index));
    let mirrors = || {
        let create = |index| FreshMirror::create(directory.path(), DiskIndex(index), MIB).unwrap();
        [create(0), create(1)]
    };
    let synced = |mirrors: [FreshMirror; 2]| {
        let mut told = 0;
        Synced::of(mirrors.map(Mirror::Fresh).into(), || told += 1).inspect(|_| assert_eq!(told, 2))
    };
    std::fs::write(path(0), b"the former mirror").unwrap();
    let failing = mirrors();
    let failed = failing[1].disk().image().file().sync_with(|_| Err(Errno::EIO.into()));
    assert!(is_eio(failed));
    assert!(synced(failing).is_err());
    assert_eq!(std::fs::read(path(0)).unwrap(), b"the former mirror");
    assert!(!path(1).exists());
    let synced = synced(mirrors()).unwrap();
    assert_eq!(std::fs::read(path(0)).unwrap(), b"the former mirror");
    assert!(synced.are_fresh());
    synced.take_names().unwrap();
    assert_eq!([0, 1].map(|index| std::fs::metadata(path(index)).unwrap().len()), [MIB; 2]);
}

/// A mount leaves no trace at the device's node, whose time was looked at.
#[test]
fn a_device_that_was_mounted_since_its_list_was_sealed_is_known_for_that() {
    let full = FullDevice::new();
    full.heal();
    let device = full.device.to_str().unwrap();
    run("mkfs.ext4", &["-q", device]);
    let directory = tempfile::tempdir().unwrap();
    let disk = Disk::open(DiskIndex(0), &full.device, 16 * MIB).unwrap();
    disk.set_changes(Some(changes(directory.path(), &disk)));
    disk.write(8 * MIB, b"the guest's").unwrap();
    drop(disk);
    let reopen = || ChangeMap::open(&directory.path().join("changes"), 16 * MIB, &full.device);
    assert!(reopen().unwrap().is_ok(), "nobody has written it");
    let place = directory.path().join("mounted");
    std::fs::create_dir(&place).unwrap();
    run("mount", &[device, place.to_str().unwrap()]);
    let written = std::fs::write(place.join("file"), "the operator's");
    run("umount", &[place.to_str().unwrap()]);
    written.unwrap();
    assert!(reopen().unwrap().unwrap_err().contains("other means"));
}
