//! The devices below the host's file systems: whoever reads one reads what is hidden, too. No VM has such a one.

use nix::libc::dev_t;
use nix::sys::stat::{major, minor};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Ways to send commands to a disk as a whole, past the devices of its parts: what their names begin with.
const RAW: [&str; 4] = ["sg", "bsg", "ng", "nvme"];

/// Those that there are, as files of /dev.
pub(super) fn all() -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let names = below_mounts(&mounts, Path::new("/sys/dev/block"));
    let below = names.into_iter().map(|name| Path::new("/dev").join(name));
    below.chain(raw(Path::new("/dev"), true)).collect()
}

/// Devices of characters; of a directory with such a name all.
fn raw(directory: &Path, is_named: bool) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let meant = |name: &str| !is_named || RAW.iter().any(|begin| name.starts_with(begin));
    let mut found = Vec::new();
    for entry in entries.filter(|entry| entry.file_name().to_str().is_some_and(meant)) {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => found.extend(raw(&entry.path(), false)),
            Ok(kind) if kind.is_char_device() => found.push(entry.path()),
            _ => {}
        }
    }
    found
}

/// The names of devices that lines of mountinfo are of, and of those that they are made of.
fn below_mounts(mounts: &str, by_number: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for line in mounts.lines() {
        let mut fields = line.split_whitespace();
        let number = fields.nth(2).map(str::to_owned);
        // A file system of several devices has no number of theirs.
        let source = fields.skip_while(|field| *field != "-").nth(2).and_then(number_of);
        for number in [number, source].into_iter().flatten() {
            if let Ok(device) = fs::canonicalize(by_number.join(number)) {
                add(&device, &mut found);
            }
        }
    }
    found
}

fn number_of(device: &str) -> Option<String> {
    let found = fs::metadata(device).ok().filter(|it| it.file_type().is_block_device())?;
    let number: dev_t = found.rdev();
    Some(format!("{}:{}", major(number), minor(number)))
}

/// A device's directory in sysfs: it, the disk whose part it is, and those that it is put together from.
fn add(device: &Path, found: &mut BTreeSet<String>) {
    let told = fs::read_to_string(device.join("uevent")).unwrap_or_default();
    let name = told.lines().find_map(|line| line.strip_prefix("DEVNAME="));
    if !name.is_some_and(|name| found.insert(name.to_owned())) {
        return;
    }
    let whole = device.join("partition").exists().then(|| device.parent()).flatten();
    let parts = fs::read_dir(device.join("slaves")).into_iter().flatten().flatten();
    let parts = parts.filter_map(|part| fs::canonicalize(part.path()).ok());
    for further in parts.chain(whole.map(Path::to_owned)) {
        add(&further, found);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_file_systems_devices_are_all_that_it_is_made_of_and_no_others() {
        let sys = tempfile::tempdir().unwrap();
        let place = |path: &str| sys.path().join(path);
        for (device, name) in [
            ("devices/sda", "sda"),
            ("devices/sda/sda1", "sda1"),
            ("devices/sda/sda2", "sda2"),
            ("devices/dm-0", "dm-0"),
            ("devices/dm-1", "dm-1"),
        ] {
            fs::create_dir_all(place(device).join("slaves")).unwrap();
            fs::write(place(device).join("uevent"), format!("MAJOR=8\nDEVNAME={name}\n")).unwrap();
        }
        for part in ["sda1", "sda2"] {
            fs::write(place("devices/sda").join(part).join("partition"), "1").unwrap();
        }
        for logical in ["dm-0", "dm-1"] {
            let slave = place("devices").join(logical).join("slaves/sda2");
            symlink(place("devices/sda/sda2"), slave).unwrap();
        }
        fs::create_dir(place("block")).unwrap();
        symlink(place("devices/dm-0"), place("block/253:0")).unwrap();
        let mounts = "22 27 0:21 / /proc rw,relatime - proc proc rw\n\
                      27 1 253:0 / / rw,relatime shared:1 - ext4 /dev/nothing rw\n";
        let found = below_mounts(mounts, &place("block"));
        assert_eq!(found.iter().map(String::as_str).collect::<Vec<_>>(), ["dm-0", "sda", "sda2"]);
    }
}
