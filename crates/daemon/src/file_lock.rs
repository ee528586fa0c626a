//! Locks of files that the kernel gives back when their process ends, however it ends.
//!
//! They are those of an open file (`F_OFD_SETLK`), of all of it. A lock lasts until the file is closed, and no program that
//! is started inherits it.

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use std::fs::File;
use std::io;

/// Takes a file's lock; false if another has it.
pub(crate) fn try_take(file: &File) -> io::Result<bool> {
    match fcntl(file, FcntlArg::F_OFD_SETLK(&exclusive())) {
        Ok(_) => Ok(true),
        Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether another has a file's lock.
pub(crate) fn is_taken(file: &File) -> io::Result<bool> {
    let mut lock = exclusive();
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock))?;
    Ok(lock.l_type != libc::F_UNLCK as libc::c_short)
}

fn exclusive() -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}
