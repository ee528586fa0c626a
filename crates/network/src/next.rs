//! A QEMU that is to go on in the place of the one that a port is attached to.

use crate::control::{Control, HeaderLength};
use crate::error::NetworkError;
use crate::header::Offloads;
use crate::messages::{self, Inbox, Message, READ_AT_ONCE};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

/// The port's end of such a QEMU's socket. The agent there is answered while QEMU starts and
/// loads the card's state; no guest sends frames yet.
#[derive(Debug)]
pub struct NextGuest {
    socket: Arc<OwnedFd>,
    over: Arc<EventFd>,
    thread: Option<JoinHandle<FrameFormat>>,
}

/// The format of frames that the agent has told for the card.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FrameFormat {
    pub header: HeaderLength,
    pub offloads: Offloads,
}

impl NextGuest {
    pub(crate) fn serve(socket: OwnedFd) -> Result<NextGuest, NetworkError> {
        let socket = Arc::new(socket);
        let over = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)
            .map_err(|errno| NetworkError::system("make an eventfd", errno))?;
        let over = Arc::new(over);
        let (of_thread, until) = (socket.clone(), over.clone());
        let thread = understudy_threads::spawn("net-next", move || listen(&of_thread, &until))
            .map_err(|source| NetworkError::system("start a thread", source))?;
        Ok(NextGuest { socket, over, thread: Some(thread) })
    }

    /// The socket, and what was said on it, which is read by the caller from now on.
    pub(crate) fn take(mut self) -> (Arc<OwnedFd>, Option<FrameFormat>) {
        let format = self.end();
        (self.socket.clone(), format)
    }

    fn end(&mut self) -> Option<FrameFormat> {
        // Fails only if it is signalled 2^64 times already.
        let _ = self.over.write(1);
        // A thread that panicked has reported that itself.
        self.thread.take().and_then(|thread| thread.join().ok())
    }
}

impl Drop for NextGuest {
    fn drop(&mut self) {
        self.end();
    }
}

/// Listens until QEMU has ended, or somebody else listens; what was said before is taken in.
fn listen(socket: &OwnedFd, over: &EventFd) -> FrameFormat {
    let mut format = FrameFormat { header: HeaderLength::Short, offloads: Offloads::NONE };
    let mut inbox = Inbox::new();
    loop {
        let mut waited =
            [socket.as_fd(), over.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        if poll(&mut waited, PollTimeout::NONE).is_err_and(|errno| errno != Errno::EINTR) {
            return format;
        }
        let is_over = waited[1].any().unwrap_or(true);
        let more = hear(socket, &mut inbox, &mut format);
        if is_over || !more {
            return format;
        }
    }
}

/// Takes in what was said; false if there is nobody any more.
fn hear(socket: &OwnedFd, inbox: &mut Inbox, format: &mut FrameFormat) -> bool {
    loop {
        let count = match inbox.receive(socket, format.header) {
            Ok(count) => count,
            Err(errno) => return matches!(errno, Errno::EAGAIN | Errno::EINTR),
        };
        for n in 0..count {
            match inbox.message(n) {
                Message::Control(bytes) => match Control::decode(bytes) {
                    Some(Control::Header(length)) => {
                        format.header = length;
                        // Nothing else was written to this socket: there is room.
                        if messages::answer(socket).is_err() {
                            return false;
                        }
                    }
                    Some(Control::Offloads(offloads)) => format.offloads = offloads,
                    None => return false,
                },
                Message::End => return false,
                // Of a guest that does not run.
                Message::Frame(_) | Message::TooLong | Message::Short => {}
            }
        }
        if count < READ_AT_ONCE {
            return true;
        }
    }
}
