//! The devices that a keeper can open: those that each one needs, and its VMs' own. All others are seen and closed, on
//! whatever file system their nodes lie: what is below the host's file systems, other VMs' disks, the host's memory, its
//! terminals.
//!
//! `/dev` stays what it is for the host, with its names and links, so that a disk is found by what it is called.

use super::attributes::have_no_devices;
use anyhow::Context;
use rustix::fs::{CWD, StatVfsMountFlags, statvfs};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use understudy_qemu::RunAs;

/// What a keeper and its QEMU open, and their libraries.
const EVERYBODYS: [&str; 8] =
    ["null", "zero", "full", "random", "urandom", "kvm", "net/tun", "userfaultfd"];

/// Whether it is a device that can be a disk.
pub(super) fn is_disk(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device())
}

/// Whether it is a device that a QEMU may read by itself, as this user.
pub(super) fn is_read(path: &Path, user: &RunAs) -> bool {
    let may = |it: &Metadata| it.file_type().is_char_device() && user.may_read(it);
    fs::metadata(path).is_ok_and(|found| may(&found))
}

/// Whether another process cannot open a device, since it is in a namespace of its own.
pub(super) fn is_closed_for(device: &Path, process: u32) -> anyhow::Result<bool> {
    let path = fs::canonicalize(device).with_context(|| device.display().to_string())?;
    let root = Path::new("/proc").join(process.to_string()).join("root");
    match statvfs(root.join(path.strip_prefix("/")?)) {
        Ok(found) => Ok(found.f_flag.contains(StatVfsMountFlags::NODEV)),
        // It is hidden there, or has just gone.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

/// Has this namespace open what everybody needs, and its own, and no others.
pub(super) fn leave_only<'a>(own: impl Iterator<Item = &'a PathBuf>) -> anyhow::Result<()> {
    let everybodys = EVERYBODYS.map(|name| Path::new("/dev").join(name));
    let own: Vec<&PathBuf> = own.collect();
    // Held before they are closed.
    let mut left = Vec::new();
    for device in everybodys.iter().chain(own) {
        left.extend(Device::hold(device)?);
    }
    have_no_devices().context("cannot close the devices")?;
    left.iter().try_for_each(Device::open)
}

/// A device that a keeper is to open.
pub(super) struct Device {
    /// Path without links.
    path: PathBuf,
    tree: OwnedFd,
}

impl Device {
    /// Holds one of this namespace's, if it is there.
    pub(super) fn hold(path: &Path) -> anyhow::Result<Option<Device>> {
        let held = || -> std::io::Result<Device> {
            let path = fs::canonicalize(path)?;
            let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
            let tree = open_tree(CWD, &path, flags)?;
            Ok(Device { path, tree })
        };
        match held() {
            Ok(device) => Ok(Some(device)),
            // Who needs it says so.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| path.display().to_string()),
        }
    }

    /// In the namespace that it is to be opened in.
    pub(super) fn open(&self) -> anyhow::Result<()> {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        move_mount(&self.tree, "", CWD, &self.path, flags)
            .with_context(|| self.path.display().to_string())
    }
}
