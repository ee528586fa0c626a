//! Descriptors that go beside bytes on a unix socket.

use std::ffi::c_int;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Descriptors for which the control message has room: CMSG_SPACE of four is 32 bytes.
const MOST: usize = 4;

/// Sends bytes and, beside them, descriptors.
pub fn send<const N: usize>(
    socket: RawFd,
    bytes: &[u8],
    descriptors: [&OwnedFd; N],
) -> io::Result<()> {
    const { assert!(N > 0 && N <= MOST) };
    let mut payload =
        libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // u64s, because control messages must be aligned.
    let mut control = [0u64; 4];
    let descriptor_bytes = mem::size_of::<[c_int; N]>() as u32;
    // SAFETY: `msghdr` is plain data for which all zeroes are valid; the pointers put into it
    // outlive `sendmsg`, which only reads the payload; `control` is as large as CMSG_SPACE of
    // MOST descriptors, so CMSG_FIRSTHDR is not null and CMSG_DATA lies inside it.
    let sent = unsafe {
        let mut message: libc::msghdr = mem::zeroed();
        message.msg_iov = &mut payload;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(descriptor_bytes) as usize;
        let header = libc::CMSG_FIRSTHDR(&message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(descriptor_bytes) as usize;
        let numbers = descriptors.map(AsRawFd::as_raw_fd);
        libc::CMSG_DATA(header).cast::<[c_int; N]>().write_unaligned(numbers);
        libc::sendmsg(socket, &message, libc::MSG_NOSIGNAL)
    };
    match usize::try_from(sent) {
        Ok(count) if count == bytes.len() => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}
