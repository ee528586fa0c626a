//! Tries to create a tap device.
#![allow(unsafe_code)] // One ioctl.

use nix::errno::Errno;
use nix::libc;
use std::fs::File;
use std::os::fd::AsRawFd;

/// The device that makes taps.
pub const TUN: &str = "/dev/net/tun";

/// Creates a tap through `tun`, an open [`TUN`]; it vanishes as that is closed.
pub fn try_to_create(tun: File) -> nix::Result<()> {
    // SAFETY: an ifreq is plain old data; all zero is a valid value, and as an
    // empty name it lets the kernel choose one that is free.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one ifreq, which lives through the call.
    let result = unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF as _, &mut request) };
    Errno::result(result).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_the_device_makes_no_tap() {
        assert!(try_to_create(File::open("/dev/null").unwrap()).is_err());
    }
}
