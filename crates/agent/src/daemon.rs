// SPDX-License-Identifier: GPL-2.0-or-later
//! The connection to the daemon: messages with descriptors beside them.

use crate::descriptor;
use std::ffi::c_int;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use understudy_agent_protocol::{ARM, ARM_DESCRIPTORS, HELLO_DESCRIPTORS, Hello};

/// Room for the control message, in u64s because it must be aligned: more than CMSG_SPACE of
/// [`ARM_DESCRIPTORS`] descriptors (32 bytes).
type Control = [u64; 6];

/// Sends the hello and, beside it, the descriptors.
pub fn send_hello(
    link: &UnixStream,
    hello: &Hello,
    descriptors: [&OwnedFd; HELLO_DESCRIPTORS],
) -> io::Result<()> {
    descriptor::send(link.as_raw_fd(), &hello.encode(), descriptors)
}

/// Waits for [`ARM`] and takes the descriptors beside it. The end of the daemon, and whatever
/// else comes, is an error.
pub fn receive_arm(link: &UnixStream) -> io::Result<[OwnedFd; ARM_DESCRIPTORS]> {
    loop {
        match receive(link) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

fn receive(link: &UnixStream) -> io::Result<[OwnedFd; ARM_DESCRIPTORS]> {
    let mut bytes = [0u8; ARM.len()];
    let mut payload = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control::default();
    let wanted_bytes = mem::size_of::<[c_int; ARM_DESCRIPTORS]>() as u32;
    // SAFETY: `msghdr` is plain data for which all zeroes are valid; the pointers put into it
    // outlive `recvmsg`. The control message is read only if the kernel made it of
    // the expected kind and length; its descriptors are new and nobody else's.
    let (received, descriptors) = unsafe {
        let mut message: libc::msghdr = mem::zeroed();
        message.msg_iov = &mut payload;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = mem::size_of::<Control>();
        let received = libc::recvmsg(link.as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC);
        if received < 0 {
            return Err(io::Error::last_os_error());
        }
        let header = libc::CMSG_FIRSTHDR(&message);
        let expected = !header.is_null()
            && (*header).cmsg_level == libc::SOL_SOCKET
            && (*header).cmsg_type == libc::SCM_RIGHTS
            && (*header).cmsg_len == libc::CMSG_LEN(wanted_bytes) as usize;
        let descriptors = expected.then(|| {
            let numbers = libc::CMSG_DATA(header).cast::<[c_int; ARM_DESCRIPTORS]>();
            numbers.read_unaligned().map(|number| OwnedFd::from_raw_fd(number))
        });
        (received as usize, descriptors)
    };
    match descriptors {
        Some(descriptors) if received == ARM.len() && bytes == ARM => Ok(descriptors),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}
