//! Frames that a guest was given and has not read: in no VM's state, so that whoever takes a
//! snapshot must save them beside it.
#![allow(unsafe_code)]

use crate::control::HeaderLength;
use crate::error::NetworkError;
use crate::header::{HEADER_BYTES, MAX_BYTES};
use crate::shared::Shared;
use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{MsgFlags, recv};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// QEMU's own end of a card's socket, borrowed while the guest stands still. To be dropped
/// before QEMU might end, of which the port would not hear else.
#[derive(Debug)]
pub struct GuestsEnd(OwnedFd);

impl GuestsEnd {
    /// The end that the process has under this number.
    ///
    /// # Errors
    /// If the process is gone, or the system does not allow it: it takes root, or
    /// `CAP_SYS_PTRACE`.
    pub fn borrow(pid: u32, number: RawFd) -> Result<GuestsEnd, NetworkError> {
        let failed = |errno| NetworkError::system("look into QEMU's end of a card's socket", errno);
        let process = owned(|| {
            // SAFETY: takes two numbers and touches no memory.
            unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) }
        });
        let process = process.map_err(failed)?;
        let end = owned(|| {
            // SAFETY: takes three numbers and touches no memory.
            unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) }
        });
        end.map(GuestsEnd).map_err(failed)
    }

    /// Every message that waits there, oldest first. They stay where they are.
    fn peek(&self, header: HeaderLength) -> nix::Result<Vec<Vec<u8>>> {
        self.peek_from(0)?;
        let mut frames = Vec::new();
        let mut message = vec![0; MAX_BYTES];
        let result = loop {
            let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
            match recv(self.0.as_raw_fd(), &mut message, flags) {
                // Shorter than any header: the agent's, not a frame.
                Ok(length) if length < header.bytes() => {
                    if length == 0 {
                        break Ok(frames);
                    }
                }
                Ok(length) => frames.push(with_full_header(&message[..length], header)),
                Err(Errno::EAGAIN) => break Ok(frames),
                Err(Errno::EINTR) => {}
                Err(errno) => break Err(errno),
            }
        };
        self.peek_from(-1)?;
        result
    }

    /// Has each peek go on behind the last one, from this byte on; -1 ends that.
    fn peek_from(&self, offset: libc::c_int) -> nix::Result<()> {
        // SAFETY: the option is one `int`, which lives through the call.
        let result = unsafe {
            libc::setsockopt(
                self.0.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEEK_OFF,
                (&raw const offset).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        Errno::result(result).map(drop)
    }
}

fn owned(call: impl FnOnce() -> libc::c_long) -> nix::Result<OwnedFd> {
    let number = Errno::result(call())?;
    // SAFETY: the kernel made it for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(number as RawFd) })
}

fn with_full_header(message: &[u8], header: HeaderLength) -> Vec<u8> {
    let (head, frame) = message.split_at(header.bytes());
    let mut packet = head.to_vec();
    packet.resize(HEADER_BYTES, 0);
    packet.extend_from_slice(frame);
    packet
}

/// All frames that were given to a guest that stands still, and that it has not read.
pub struct Unread {
    port: Arc<Shared>,
    end: GuestsEnd,
    header: HeaderLength,
}

impl Unread {
    pub(crate) fn new(port: Arc<Shared>, end: GuestsEnd) -> Unread {
        let header = port.outbound().header();
        Unread { port, end, header }
    }

    /// The frames with their headers, in the order in which the guest will read them. What
    /// comes in meanwhile waits.
    ///
    /// # Errors
    /// If the socket cannot be looked into.
    pub fn frames(&self) -> Result<Vec<Vec<u8>>, NetworkError> {
        let failed = |errno| NetworkError::system("read along on a card's socket", errno);
        let moving = self.port.moving();
        let inside = self.port.inside();
        let mut frames = self.end.peek(self.header).map_err(failed)?;
        frames.extend(moving.left().chain(inside.frames().iter()).map(<[u8]>::to_vec));
        Ok(frames)
    }
}
