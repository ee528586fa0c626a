//! Frames as messages on a card's socket, many in one system call.
#![allow(unsafe_code)]

use crate::control::{ANSWER, HeaderLength};
use crate::fabric::without_mark;
use crate::frames::Frames;
use crate::header::{HEADER_BYTES, MAX_BYTES};
use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{MsgFlags, send};
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Messages read at once. Who waits for the output buffer waits for one reading.
pub(crate) const READ_AT_ONCE: usize = 16;

/// Bytes that a socket's room has less for each message, beside the message's own: the kernel takes more.
const BESIDE_MESSAGE: usize = 256;

/// Messages written at once.
const WRITE_AT_ONCE: usize = 64;

/// Room for a message: as much as QEMU has for one.
const SLOT_BYTES: usize = 69_632;
const _: () = assert!(SLOT_BYTES > MAX_BYTES);

/// Room for the descriptors beside a message, more than one needs.
type Beside = [u64; 4];

/// Whether the other end has read all that was written. True if that cannot be told.
pub(crate) fn is_taken(connection: &OwnedFd) -> bool {
    let mut unread: libc::c_int = 0;
    // SAFETY: the kernel writes one `int`, which lives here.
    let result =
        unsafe { libc::ioctl(connection.as_raw_fd(), libc::TIOCOUTQ as _, &raw mut unread) };
    result != 0 || unread == 0
}

/// One message, as it came.
pub(crate) enum Message<'a> {
    /// A frame with its header.
    Frame(&'a [u8]),
    /// A message longer than a frame can be.
    TooLong,
    /// A message that is not even a header.
    Short,
    /// A message from the agent.
    Control(&'a [u8]),
    /// The end: nobody is at the other one.
    End,
}

#[derive(Clone, Copy)]
enum Kind {
    Frame,
    TooLong,
    Short,
    Control,
    End,
}

/// The buffers that messages are read to.
pub(crate) struct Inbox {
    slots: Box<[u8]>,
    arrived: Vec<(Kind, usize)>,
}

impl Inbox {
    pub fn new() -> Self {
        let slots = vec![0; READ_AT_ONCE * SLOT_BYTES].into_boxed_slice();
        Inbox { slots, arrived: Vec::with_capacity(READ_AT_ONCE) }
    }

    /// Reads what waits, without blocking, in place of what was read before.
    /// Returns how many messages those are.
    ///
    /// # Errors
    /// `EAGAIN` if nothing waits; what the system says else.
    pub fn receive(&mut self, socket: &OwnedFd, header: HeaderLength) -> nix::Result<usize> {
        self.arrived.clear();
        let mut beside = [Beside::default(); READ_AT_ONCE];
        // SAFETY: both are plain data, for which all zeroes are valid.
        let mut parts: [[libc::iovec; 2]; READ_AT_ONCE] = unsafe { mem::zeroed() };
        // SAFETY: as above.
        let mut messages: [libc::mmsghdr; READ_AT_ONCE] = unsafe { mem::zeroed() };
        for (n, slot) in self.slots.chunks_exact_mut(SLOT_BYTES).enumerate() {
            // A short header leaves the end of this crate's, which is zero, out.
            let (head, frame) = slot.split_at_mut(HEADER_BYTES);
            parts[n] = [part(&mut head[..header.bytes()]), part(frame)];
            let message = &mut messages[n].msg_hdr;
            message.msg_iov = parts[n].as_mut_ptr();
            message.msg_iovlen = parts[n].len();
            message.msg_control = beside[n].as_mut_ptr().cast();
            message.msg_controllen = size_of::<Beside>();
        }
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        // SAFETY: every pointer is to memory of the length beside it, which lives
        // through the call and is used by nothing else; there is no time limit.
        let count = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                messages.as_mut_ptr(),
                READ_AT_ONCE as libc::c_uint,
                flags as _,
                std::ptr::null_mut(),
            )
        };
        let count = Errno::result(count)? as usize;
        for message in &messages[..count] {
            let length = message.msg_len as usize;
            let kind = if close_descriptors(&message.msg_hdr) {
                Kind::Control
            } else if length == 0 {
                Kind::End
            } else if length < header.bytes() {
                Kind::Short
            } else if length - header.bytes() + HEADER_BYTES > MAX_BYTES {
                Kind::TooLong
            } else {
                Kind::Frame
            };
            self.arrived.push((kind, length));
        }
        for slot in self.slots.chunks_exact_mut(SLOT_BYTES).take(count) {
            without_mark(&mut slot[0]);
        }
        if header == HeaderLength::Short {
            self.close_gaps();
        }
        Ok(count)
    }

    /// Closes the gaps that a short header leaves in a message's bytes.
    fn close_gaps(&mut self) {
        let gap = HEADER_BYTES - HeaderLength::Short.bytes();
        for ((kind, length), slot) in
            self.arrived.iter_mut().zip(self.slots.chunks_exact_mut(SLOT_BYTES))
        {
            match kind {
                Kind::Frame => {
                    slot[HEADER_BYTES - gap..HEADER_BYTES].fill(0);
                    *length += gap;
                }
                Kind::Control => {
                    slot.copy_within(HEADER_BYTES.., HEADER_BYTES - gap);
                }
                Kind::TooLong | Kind::Short | Kind::End => {}
            }
        }
    }

    /// Bytes of the last reading, and of what the sender's socket holds beside each message at least.
    pub fn bytes(&self) -> usize {
        self.arrived.iter().map(|(_, length)| length + BESIDE_MESSAGE).sum()
    }

    /// A message of the last reading.
    pub fn message(&self, n: usize) -> Message<'_> {
        let (kind, length) = self.arrived[n];
        let bytes = &self.slots[n * SLOT_BYTES..][..length.min(SLOT_BYTES)];
        match kind {
            Kind::Frame => Message::Frame(bytes),
            Kind::TooLong => Message::TooLong,
            Kind::Short => Message::Short,
            Kind::Control => Message::Control(bytes),
            Kind::End => Message::End,
        }
    }
}

/// Closes what came beside a message: it is a proof and has no other use. Returns
/// whether anything came.
fn close_descriptors(message: &libc::msghdr) -> bool {
    let mut any = message.msg_flags & libc::MSG_CTRUNC != 0;
    // SAFETY: the kernel has filled in the message and what lies beside it, both of
    // which are still in place; the macros stay inside of that.
    unsafe {
        let mut next = libc::CMSG_FIRSTHDR(message);
        while let Some(header) = next.as_ref() {
            if (header.cmsg_level, header.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                any = true;
                let bytes = header.cmsg_len - libc::CMSG_LEN(0) as usize;
                let descriptors = libc::CMSG_DATA(header).cast::<libc::c_int>();
                for n in 0..bytes / size_of::<libc::c_int>() {
                    // The kernel made each for us alone.
                    drop(OwnedFd::from_raw_fd(descriptors.add(n).read_unaligned()));
                }
            }
            next = libc::CMSG_NXTHDR(message, header);
        }
    }
    any
}

/// Writes frames from the given one on, without blocking; returns how many.
///
/// # Errors
/// `EAGAIN` if there is room for none; what the system says else.
pub(crate) fn write(
    socket: &OwnedFd,
    frames: &Frames,
    from: usize,
    header: HeaderLength,
) -> nix::Result<usize> {
    // SAFETY: both are plain data, for which all zeroes are valid.
    let mut parts: [[libc::iovec; 2]; WRITE_AT_ONCE] = unsafe { mem::zeroed() };
    // SAFETY: as above.
    let mut messages: [libc::mmsghdr; WRITE_AT_ONCE] = unsafe { mem::zeroed() };
    let count = (frames.len() - from).min(WRITE_AT_ONCE);
    for n in 0..count {
        let (head, frame) = frames.get(from + n).split_at(HEADER_BYTES);
        parts[n] = [read_part(&head[..header.bytes()]), read_part(frame)];
        messages[n].msg_hdr.msg_iov = parts[n].as_mut_ptr();
        messages[n].msg_hdr.msg_iovlen = parts[n].len();
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: every pointer is to memory of the length beside it, which lives through
    // the call; the kernel only reads the frames.
    let sent = unsafe {
        libc::sendmmsg(socket.as_raw_fd(), messages.as_mut_ptr(), count as libc::c_uint, flags as _)
    };
    Errno::result(sent).map(|sent| sent as usize)
}

/// Tells the agent that all frames from here on have the header's new length.
///
/// # Errors
/// `EAGAIN` if there is no room; what the system says else.
pub(crate) fn answer(socket: &OwnedFd) -> nix::Result<()> {
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    send(socket.as_raw_fd(), &ANSWER, flags).map(drop)
}

fn part(bytes: &mut [u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
}

/// A part that the kernel only reads from.
fn read_part(bytes: &[u8]) -> libc::iovec {
    libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}
