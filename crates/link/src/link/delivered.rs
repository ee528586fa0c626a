//! Count of a connection's bytes that have arrived at the peer's system.
#![allow(unsafe_code)] // Two calls: the system's structure grows from version to version, and one is an `ioctl`.

use nix::errno::Errno;
use nix::libc;
use std::mem::{MaybeUninit, offset_of, size_of};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

/// Bytes that the peer's system has acknowledged since the connection began; none where it is not
/// known.
pub(super) fn delivered(socket: &TcpStream) -> Option<u64> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the system writes at most `length` bytes to `info`, which lives through the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    Errno::result(result).ok()?;
    let end = offset_of!(libc::tcp_info, tcpi_bytes_acked) + size_of::<u64>();
    // SAFETY: all zeroes are a `tcp_info`, and the system wrote over some of them.
    let info = unsafe { info.assume_init() };
    (length as usize >= end).then_some(info.tcpi_bytes_acked)
}

/// Position where what was sent so far ends, as [`delivered`] counts; none where it is not known.
/// Never less than that: what arrives meanwhile may be counted twice.
pub(super) fn sent(socket: &TcpStream) -> Option<u64> {
    let mut waiting: libc::c_int = 0;
    // SAFETY: the system writes one `int`, which lives through the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut waiting) };
    Errno::result(result).ok()?;
    Some(delivered(socket)? + u64::try_from(waiting).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    #[test]
    fn bytes_count_once_the_peers_system_has_them() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut theirs, _) = listener.accept().unwrap();
        let before = delivered(&ours).unwrap();
        ours.write_all(&[1; 5_000]).unwrap();
        let end = sent(&ours).unwrap();
        assert!((before + 5_000..=before + 10_000).contains(&end), "{end} after {before}");
        theirs.read_exact(&mut [0; 5_000]).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while delivered(&ours).unwrap() < before + 5_000 {
            assert!(Instant::now() < deadline, "{:?} of 5000", delivered(&ours));
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(delivered(&ours).unwrap(), before + 5_000);
        assert_eq!(sent(&ours).unwrap(), before + 5_000);
    }
}
