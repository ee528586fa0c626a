//! Descriptors that come through a unix socket.
#![allow(unsafe_code)] // Takes ownership of them.

use nix::sys::socket::{ControlMessageOwned, MsgFlags, UnixAddr, recvmsg};
use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Receives one message: how many of its bytes are in `buffer`, and the descriptors beside them.
/// `control` has room for as many as may come.
pub fn receive_with_descriptors(
    stream: &UnixStream,
    buffer: &mut [u8],
    control: &mut [u8],
    flags: MsgFlags,
) -> nix::Result<(usize, Vec<OwnedFd>)> {
    let mut payload = [IoSliceMut::new(buffer)];
    let flags = flags | MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<UnixAddr>(stream.as_raw_fd(), &mut payload, Some(control), flags)?;
    let numbers = message.cmsgs()?.filter_map(|message| match message {
        ControlMessageOwned::ScmRights(numbers) => Some(numbers),
        _ => None,
    });
    // SAFETY: the kernel made these descriptors for us in `recvmsg`; nobody else owns them.
    let owned = numbers.flatten().map(|number| unsafe { OwnedFd::from_raw_fd(number) }).collect();
    Ok((message.bytes, owned))
}
