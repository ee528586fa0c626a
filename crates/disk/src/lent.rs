//! Parts of the page cache on their way to a socket: lent, not copied.
//!
//! A pipe holds references to the pages, and so does the socket until its reader has copied
//! them. Whoever writes to the image meanwhile changes what is read: for a guest that reads and
//! writes the same place at once, one result is as good as the other.

use crate::cached::is_cached;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, SpliceFFlags, fcntl, splice};
use nix::libc;
use nix::unistd::{pipe2, write};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Size that anybody may have at most; twice QEMU's usual largest request.
const PIPE_BYTES: libc::c_int = 1024 * 1024;

/// The way from an image to a socket. Empty unless something is in flight.
#[derive(Default)]
pub(crate) struct Loan {
    pipe: Option<Pipe>,
    /// Bytes in the pipe.
    bytes: usize,
}

struct Pipe {
    inlet: OwnedFd,
    outlet: OwnedFd,
}

impl Pipe {
    fn new() -> nix::Result<Pipe> {
        let (outlet, inlet) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
        // Where others have used up what this user may have, small loans still fit.
        let _ = fcntl(&inlet, FcntlArg::F_SETPIPE_SZ(PIPE_BYTES));
        Ok(Pipe { inlet, outlet })
    }
}

impl Loan {
    /// Takes `header`, and after it a range of the file, if all of the range is in the page
    /// cache and fits. If not, nothing is taken.
    pub(crate) fn take(&mut self, header: &[u8], file: impl AsFd, offset: u64, len: usize) -> bool {
        is_cached(&file, offset, len as u64)
            && self.try_take(header, &file, offset, len).unwrap_or_else(|_| {
                // With whatever is in it.
                self.pipe = None;
                false
            })
    }

    fn try_take(
        &mut self,
        header: &[u8],
        file: impl AsFd,
        offset: u64,
        len: usize,
    ) -> nix::Result<bool> {
        let pipe = match &mut self.pipe {
            Some(pipe) => pipe,
            none => none.insert(Pipe::new()?),
        };
        write(&pipe.inlet, header)?;
        let (mut at, mut left) = (offset as libc::loff_t, len);
        while left > 0 {
            let flags = SpliceFFlags::SPLICE_F_NONBLOCK;
            match splice(&file, Some(&mut at), &pipe.inlet, None, left, flags)? {
                // The file has become shorter.
                0 => return Err(Errno::ENODATA),
                count => left -= count,
            }
        }
        self.bytes = header.len() + len;
        Ok(true)
    }

    /// Sends what was taken.
    pub(crate) fn send(&mut self, socket: &UnixStream) -> io::Result<()> {
        let pipe = self.pipe.as_ref().expect("something was taken");
        while self.bytes > 0 {
            match splice(&pipe.outlet, None, socket, None, self.bytes, SpliceFFlags::empty()) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.bytes -= count,
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "lent_tests.rs"]
mod tests;
