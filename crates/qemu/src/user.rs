//! The user that a QEMU runs as: never root, and by default a user that nobody else is.
//!
//! A guest that breaks out of its QEMU finds a process without capabilities that
//! owns nothing but its own memory, sockets and directory. What it needs of the
//! host's is handed to it open.

#![allow(unsafe_code)] // System calls between fork and exec.

use crate::directory;
use nix::fcntl::AtFlags;
use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::{Mode, fchmod};
use nix::unistd::{Gid, Uid, fchown, fchownat, geteuid};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Numbers that no convention gives to anybody: 0x70000000 to 0x7fffffff.
const FIRST_UNUSED: u32 = 0x7000_0000;
/// Numbers of one daemon or keeper, and how many of them are told apart by the end of their process's number.
const NUMBERS: u32 = 1 << 12;
const DAEMONS: u32 = 1 << 16;
/// The numbers between the first ones of those that only its beginning tells apart: Linux has 64
/// beginnings.
const STRIDE: u32 = NUMBERS / 64;

/// Permissions to read.
const OTHERS_READ: u32 = 0o004;
const GROUP_READS: u32 = 0o040;
const OWNER_READS: u32 = 0o400;

/// User that the QEMUs of a host run as.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RunAs {
    /// Every one as a user of its own, a number without a name; as this process's user
    /// if that is not root, and has no others to give.
    #[default]
    OwnNumber,
    /// All as this user.
    Named(User),
}

/// A user that a QEMU runs as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User {
    uid: Uid,
    gid: Gid,
}

/// A user that QEMU cannot run as.
#[derive(Debug, thiserror::Error)]
pub enum UserError {
    /// No user has that name.
    #[error(
        "there is no user \"{0}\" on this host: create it (`useradd --system {0}`), or leave it \
         out, so that each QEMU runs as a user of its own"
    )]
    Unknown(String),
    /// The user is root.
    #[error("\"{0}\" is root: QEMU is to run without its rights")]
    Root(String),
    /// The user is one that this process may not become.
    #[error("only root can run QEMU as \"{0}\": run the daemon as root, or leave the user out")]
    NotAllowed(String),
    /// The system's database cannot be read.
    #[error("cannot look up the user \"{0}\": {1}")]
    LookUp(String, io::Error),
}

impl RunAs {
    /// All QEMUs run as the user of that name.
    pub fn named(name: &str) -> Result<RunAs, UserError> {
        let found = nix::unistd::User::from_name(name)
            .map_err(|error| UserError::LookUp(name.to_owned(), error.into()))?;
        let user = found.ok_or_else(|| UserError::Unknown(name.to_owned()))?;
        if user.uid.is_root() {
            return Err(UserError::Root(name.to_owned()));
        }
        if !geteuid().is_root() && geteuid() != user.uid {
            return Err(UserError::NotAllowed(name.to_owned()));
        }
        Ok(RunAs::Named(User { uid: user.uid, gid: user.gid }))
    }

    /// Whether a QEMU may read a file that is not handed to it open.
    pub fn may_read(&self, file: &fs::Metadata) -> bool {
        let mode = file.mode();
        let is_named = |User { uid, gid }: &User| {
            uid.as_raw() == file.uid() && mode & OWNER_READS != 0
                || gid.as_raw() == file.gid() && mode & GROUP_READS != 0
        };
        mode & OTHERS_READ != 0 || matches!(self, RunAs::Named(user) if is_named(user))
    }

    /// The user of the next QEMU; none if it is to be this process's own.
    pub fn next(&self) -> Option<User> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        match self {
            _ if !geteuid().is_root() => None,
            RunAs::Named(user) => Some(*user),
            RunAs::OwnNumber => {
                let number = free_number(std::process::id(), &NEXT, &in_use());
                Some(User { uid: Uid::from_raw(number), gid: Gid::from_raw(number) })
            }
        }
    }
}

/// The number of the next QEMU that a process starts: none of those in use, which its own QEMUs of long ago may have, and
/// those of a process before it.
fn free_number(process: u32, next: &AtomicU32, in_use: &BTreeSet<u32>) -> u32 {
    let own = (0..NUMBERS).map(|_| number(process, next.fetch_add(1, Ordering::Relaxed)));
    let all = FIRST_UNUSED..FIRST_UNUSED + DAEMONS * NUMBERS;
    // There are more numbers than processes.
    own.chain(all).find(|number| !in_use.contains(number)).expect("a free number")
}

/// The users of this host's processes: each has its directory there.
fn in_use() -> BTreeSet<u32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter_map(|process| Some(process.metadata().ok()?.uid())).collect()
}

/// The number of the nth QEMU that a process starts.
fn number(process: u32, nth: u32) -> u32 {
    let within = (process / DAEMONS * STRIDE).wrapping_add(nth) % NUMBERS;
    FIRST_UNUSED + process % DAEMONS * NUMBERS + within
}

impl User {
    /// Returns the owner of a QEMU's directory; none if it is this process's user.
    pub fn of_directory(path: &Path) -> io::Result<Option<User>> {
        let found = fs::symlink_metadata(path)?;
        let (uid, gid) = (Uid::from_raw(found.uid()), Gid::from_raw(found.gid()));
        Ok((uid != geteuid()).then_some(User { uid, gid }))
    }
}

/// Makes an inherited file in memory QEMU's own, which nobody else can open.
pub fn give(file: impl AsFd, user: Option<User>) -> io::Result<()> {
    if let Some(User { uid, gid }) = user {
        fchown(&file, Some(uid), Some(gid))?;
    }
    fchmod(&file, Mode::S_IRUSR | Mode::S_IWUSR)?;
    Ok(())
}

/// Makes a socket in QEMU's directory its own.
pub fn give_socket(path: &Path, user: Option<User>) -> io::Result<()> {
    let Some(User { uid, gid }) = user else { return Ok(()) };
    // Never through a link: the directory is QEMU's.
    let flags = AtFlags::AT_SYMLINK_NOFOLLOW;
    fchownat(nix::fcntl::AT_FDCWD, path, Some(uid), Some(gid), flags)?;
    Ok(())
}

/// Makes the directory that a QEMU works in, and empties it of what another QEMU,
/// which may have been another user, has left there, but for the file `keep`.
pub fn give_directory(path: &Path, user: Option<User>) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    directory::empty(path)?;
    give_socket(path, user)
}

/// A file of the host's, opened for a QEMU to read as `/proc/self/fd/N`, whoever
/// may look into its directory. What only its owner may read is copied.
pub fn lend(path: &Path, user: Option<User>) -> io::Result<File> {
    let mut file = File::open(path)?;
    if user.is_none() || file.metadata()?.mode() & OTHERS_READ != 0 {
        return Ok(file);
    }
    let mut copy: File = memfd_create(c"lent", MFdFlags::MFD_CLOEXEC)?.into();
    io::copy(&mut file, &mut copy)?;
    give(&copy, user)?;
    Ok(copy)
}

/// The name of an inherited descriptor inside QEMU.
pub fn path_in_qemu(descriptor: i32) -> PathBuf {
    format!("/proc/self/fd/{descriptor}").into()
}

/// Enters, between fork and exec, `directory`, which the user need not be able to
/// reach, then becomes the user for good.
pub(crate) fn become_user(directory: Option<BorrowedFd<'_>>, user: Option<User>) -> io::Result<()> {
    let check = |result: libc::c_int| match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    if let Some(directory) = directory {
        nix::unistd::fchdir(directory)?;
    }
    if let Some(User { uid, gid }) = user {
        // SAFETY: system calls without pointers but for an empty list. The groups
        // go first: an ordinary user may not change them. `setuid` as root changes
        // all of the user's numbers, and with them go the capabilities.
        unsafe {
            check(libc::setgroups(0, std::ptr::null()))?;
            check(libc::setgid(gid.as_raw()))?;
            check(libc::setuid(uid.as_raw()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    use std::process::Command;

    fn root() -> bool {
        let root = geteuid().is_root();
        if !root {
            eprintln!("SKIPPED: needs root");
        }
        root
    }

    #[test]
    fn each_process_has_numbers_of_its_own() {
        // The highest process number of Linux has 22 bits.
        let first = |beginning: u32| number(beginning * DAEMONS + 1234, 0);
        let numbers: BTreeSet<u32> = (0..64).map(first).collect();
        assert_eq!(numbers.len(), 64);
        assert!(numbers.iter().all(|number| (0x7000_0000..=0x7fff_ffff).contains(number)));
        assert_ne!(number(1234, 0), number(1235, 0));
        assert_ne!(number(1234, 0), number(1234, 1));
    }

    /// Regression: after 4 096 starts another QEMU, which still ran, had the same one.
    #[test]
    fn a_number_in_use_is_nobody_elses_however_many_are_taken() {
        let next = AtomicU32::new(0);
        let held = free_number(1234, &next, &BTreeSet::new());
        let in_use = BTreeSet::from([held]);
        let taken: Vec<u32> = (0..2 * NUMBERS).map(|_| free_number(1234, &next, &in_use)).collect();
        assert!(!taken.contains(&held));
        // All of its own.
        let in_use: BTreeSet<u32> = taken.into_iter().chain([held]).collect();
        let other = free_number(1234, &next, &in_use);
        assert!(!in_use.contains(&other) && (0x7000_0000..=0x7fff_ffff).contains(&other));
    }

    #[test]
    fn a_process_has_its_number_for_as_long_as_it_lives() {
        if !root() {
            return;
        }
        let user = RunAs::OwnNumber.next().unwrap();
        let mut process = Command::new("sleep").arg("600").uid(user.uid.as_raw()).spawn().unwrap();
        let is_in_use = in_use().contains(&user.uid.as_raw());
        process.kill().unwrap();
        process.wait().unwrap();
        assert!(is_in_use && !in_use().contains(&user.uid.as_raw()));
    }

    #[test]
    fn wrong_users_are_refused_and_told_why() {
        let words = |name| RunAs::named(name).unwrap_err().to_string();
        assert!(words("no-such-user").contains("useradd --system no-such-user"));
        assert!(words("root").contains("without its rights"));
    }

    #[test]
    fn each_qemu_has_a_number_of_its_own() {
        if !root() {
            return assert_eq!(RunAs::OwnNumber.next(), None);
        }
        let (one, two) = (RunAs::OwnNumber.next().unwrap(), RunAs::OwnNumber.next().unwrap());
        assert_ne!(one.uid, two.uid);
        assert!(one.uid.as_raw() >= FIRST_UNUSED && two.uid.as_raw() < 1 << 31);
        let named = RunAs::named("nobody").unwrap();
        assert_eq!(named.next(), named.next());
    }

    #[test]
    fn what_nobody_else_may_read_is_lent_as_a_copy() {
        if !root() {
            return;
        }
        let user = RunAs::OwnNumber.next();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernel");
        fs::write(&path, "secret").unwrap();
        for (mode, copied) in [(0o600, true), (0o644, false)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let lent = lend(&path, user).unwrap();
            assert_eq!(
                lent.metadata().unwrap().ino() != fs::metadata(&path).unwrap().ino(),
                copied
            );
            let inside = path_in_qemu(lent.as_raw_fd());
            assert_eq!(fs::read_to_string(inside).unwrap(), "secret");
            if copied {
                let found = lent.metadata().unwrap();
                assert_eq!(
                    (found.mode() & 0o777, Some(found.uid())),
                    (0o600, user.map(|u| u.uid.as_raw()))
                );
            }
        }
    }

    #[test]
    fn a_directory_changes_hands_without_what_was_in_it() {
        if !root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let (directory, outside) = (folder.path().join("qemu"), folder.path().join("outside"));
        fs::write(&outside, "the host's").unwrap();
        let first = RunAs::OwnNumber.next();
        give_directory(&directory, first).unwrap();
        fs::write(directory.join("log"), "gone").unwrap();
        fs::create_dir_all(directory.join("left/in/it")).unwrap();
        // Links that a guest has planted lead nowhere.
        std::os::unix::fs::symlink(&outside, directory.join("socket")).unwrap();
        let second = RunAs::OwnNumber.next();
        give_directory(&directory, second).unwrap();
        let owner = |path: &Path| Uid::from_raw(fs::symlink_metadata(path).unwrap().uid());
        assert_eq!(Some(owner(&directory)), second.map(|user| user.uid));
        assert_eq!(User::of_directory(&directory).unwrap(), second);
        assert_eq!(User::of_directory(folder.path()).unwrap(), None);
        assert!(!directory.join("log").exists() && !directory.join("left").exists());
        assert!(owner(&outside).is_root());
        assert!(!directory.join("socket").exists());
        assert_eq!(fs::metadata(&directory).unwrap().mode() & 0o777, 0o700);
    }
}
