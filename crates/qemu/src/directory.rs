//! The directory of a QEMU that has ended, emptied whatever it was left with: whoever took the QEMU over made
//! what is in it.

use nix::errno::Errno;
use nix::fcntl::{OFlag, RenameFlags, open, openat, renameat2};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

/// Removes a directory and all that is in it, if it is there, as [`empty`] does.
pub fn remove(path: &Path) -> io::Result<()> {
    match empty(path).and_then(|()| fs::remove_dir(path)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Removes all that is in a directory. Follows no links.
///
/// What is in a directory of its own comes up instead of this going down: they may be thousands, one inside the
/// other, for which `remove_dir_all` has neither the stack nor the descriptors.
pub fn empty(path: &Path) -> io::Result<()> {
    let top = open(path, directory(), Mode::empty())?;
    let mut moved = 0;
    loop {
        let names = names(&top)?;
        if names.is_empty() {
            return Ok(());
        }
        for name in names {
            if !is_unlinked(&top, &name)? {
                dissolve(&top, &name, &mut moved)?;
            }
        }
    }
}

/// Removes a directory that is in another; the directories in it come up.
fn dissolve(top: &OwnedFd, name: &OsStr, moved: &mut u64) -> io::Result<()> {
    let inner = openat(top, name, directory(), Mode::empty())?;
    for entry in names(&inner)? {
        if !is_unlinked(&inner, &entry)? {
            move_up(&inner, &entry, top, moved)?;
        }
    }
    Ok(unlinkat(top, name, UnlinkatFlags::RemoveDir)?)
}

/// Moves it to a name that nobody has.
fn move_up(from: &OwnedFd, entry: &OsStr, top: &OwnedFd, moved: &mut u64) -> io::Result<()> {
    loop {
        let name = format!("moved-{moved}");
        *moved += 1;
        let flags = RenameFlags::RENAME_NOREPLACE;
        match renameat2(from, entry, top, name.as_str(), flags) {
            Err(Errno::EEXIST) => {}
            result => return Ok(result?),
        }
    }
}

/// Whether it was removed; if not, it is a directory.
fn is_unlinked(inside: impl AsFd, name: &OsStr) -> io::Result<bool> {
    match unlinkat(inside, name, UnlinkatFlags::NoRemoveDir) {
        Ok(()) => Ok(true),
        Err(Errno::EISDIR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn names(of: &OwnedFd) -> io::Result<Vec<OsString>> {
    let entries = fs::read_dir(format!("/proc/self/fd/{}", of.as_raw_fd()))?;
    entries.map(|entry| Ok(entry?.file_name())).collect()
}

fn directory() -> OFlag {
    OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::mkdirat;

    /// Regression: a QEMU that had made a directory in its own was the last that this host could start for its VM; and
    /// whoever removed one with thousands, one inside the other, had no stack left.
    #[test]
    fn a_directory_is_emptied_whatever_is_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let (path, outside) = (folder.path().join("qemu"), folder.path().join("outside"));
        fs::create_dir_all(path.join("moved-1/moved-0")).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("file"), "the host's").unwrap();
        fs::write(path.join("moved-1/file"), "").unwrap();
        for link in ["link", "moved-1/link"] {
            std::os::unix::fs::symlink(&outside, path.join(link)).unwrap();
        }
        let mut inner = open(&path, directory(), Mode::empty()).unwrap();
        for _ in 0..3000 {
            mkdirat(&inner, "moved-0", Mode::S_IRWXU).unwrap();
            inner = openat(&inner, "moved-0", directory(), Mode::empty()).unwrap();
        }
        empty(&path).unwrap();
        assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
        assert!(outside.join("file").exists(), "no link is followed");
        fs::write(path.join("file"), "").unwrap();
        remove(&path).unwrap();
        assert!(!path.exists());
        remove(&path).unwrap();
    }
}
