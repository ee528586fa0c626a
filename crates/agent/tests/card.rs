//! The agent's answers for a card: asked directly, and by a real QEMU.
#![allow(unsafe_code)] // `ioctl`, in whose place the agent stands.

#[path = "../src/card.rs"]
mod card;
#[path = "../src/descriptor.rs"]
mod descriptor;
#[allow(dead_code)] // It has what the other tests need.
mod machine;
#[path = "../../network/tests/support/mod.rs"]
mod support;

use machine::{Machine, Start};
use nix::errno::Errno;
use serde_json::json;
use std::ffi::{c_int, c_ulong, c_void};
use std::os::fd::{AsRawFd, RawFd};
use support::{ALL_OFFLOADS, GUEST, Neighbour, fresh, in_namespace, open, wait_for};
use understudy_network::{CARDS_VARIABLE, announcement};
use understudy_protocol::Epoch;

fn ask(fd: RawFd, request: c_ulong, argument: *mut c_int) -> Result<(), Errno> {
    Errno::result(card::ioctl(fd, request, argument.cast())).map(drop)
}

fn set(fd: RawFd, request: c_ulong, mut value: c_int) -> Result<(), Errno> {
    ask(fd, request, &mut value)
}

fn set_offloads(fd: RawFd, offloads: u32) -> Result<(), Errno> {
    ask(fd, libc::TUNSETOFFLOAD, offloads as usize as *mut c_int)
}

#[test]
fn questions_to_a_tap_are_answered_for_cards_alone() {
    in_namespace(|| {
        assert_eq!(card::VARIABLE, CARDS_VARIABLE);
        let port = open(true);
        let socket = port.attach_guest().unwrap().socket;
        let fd = socket.as_raw_fd();
        let (other, _others_end) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(set(fd, libc::TUNSETSNDBUF, 1), Err(Errno::ENOTTY), "not known yet");
        card::register(&fd.to_string()).unwrap();

        // SAFETY: an ifreq is plain data, for which all zeroes are valid.
        let mut interface: libc::ifreq = unsafe { std::mem::zeroed() };
        ask(fd, libc::TUNGETIFF, (&raw mut interface).cast()).unwrap();
        // SAFETY: this field has just been filled in.
        let flags = c_int::from(unsafe { interface.ifr_ifru.ifru_flags });
        assert_eq!(flags, libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR);
        let refused = Err(Errno::EINVAL);
        for (request, value, expected) in [
            (libc::TUNSETSNDBUF, c_int::MAX, Ok(())),
            (libc::TUNSETVNETLE, 1, Ok(())),
            (libc::TUNSETVNETLE, 0, refused),
            (libc::TUNSETVNETBE, 1, refused),
            (libc::TUNSETVNETHDRSZ, 10, Ok(())),
            (libc::TUNSETVNETHDRSZ, 20, refused),
            (libc::TUNSETIFF, 0, refused),
        ] {
            assert_eq!(set(fd, request, value), expected, "{request:x} {value}");
        }
        // The port answers: this returns.
        let mut length = 0;
        set(fd, libc::TUNSETVNETHDRSZ, 12).unwrap();
        ask(fd, libc::TUNGETVNETHDRSZ, &mut length).unwrap();
        assert_eq!(length, 12);
        for udp in [libc::TUN_F_UFO, libc::TUN_F_USO4 | libc::TUN_F_USO6] {
            assert_eq!(set_offloads(fd, libc::TUN_F_CSUM | udp), refused);
        }
        set_offloads(fd, ALL_OFFLOADS).unwrap();

        // What is no question to a tap, or to another descriptor, is the kernel's.
        let mut waiting = -1;
        ask(fd, libc::FIONREAD, &mut waiting).unwrap();
        assert!(waiting >= 0, "the bridge may have sent something: {waiting}");
        assert_eq!(ask(fd, libc::TCGETS, std::ptr::null_mut()), Err(Errno::ENOTTY));
        assert_eq!(set(other.as_raw_fd(), libc::TUNSETSNDBUF, 1), Err(Errno::ENOTTY));
        assert_eq!(set(-1, libc::TUNSETSNDBUF, 1), Err(Errno::EBADF));
        let nothing: *mut c_void = std::ptr::null_mut();
        assert_eq!(card::ioctl(fd, libc::FIOCLEX, nothing), 0, "without an argument");

        set(fd, libc::TUNSETVNETHDRSZ, 10).unwrap();
        drop(port);
        // Its thread may let go of the socket a moment later, with the question unread.
        let error = set(fd, libc::TUNSETVNETHDRSZ, 12).unwrap_err();
        assert!([Errno::EPIPE, Errno::ECONNRESET].contains(&error), "no daemon: {error}");
        // The number will be another descriptor's.
        card::register("-1").unwrap();
    });
}

#[test]
fn a_wrong_list_of_cards_is_refused() {
    for wrong in ["", "x", "1,,2", "1,2 "] {
        let error = card::register(wrong).unwrap_err();
        assert!(error.starts_with("UNDERSTUDY_CARDS is no list"), "{error}");
    }
}

#[test]
fn stock_qemu_takes_the_socket_for_a_tap() {
    in_namespace(|| {
        let port = open(true);
        let watcher = Neighbour::join(1);
        port.hold(Epoch(1));
        let card = Some(port.attach_guest().unwrap().socket);
        let mut qemu = Machine::start(Start { card, ..Start::default() });
        assert!(port.is_connected());
        qemu.qmp("cont");
        let once = json!({ "initial": 50, "max": 50, "rounds": 1, "step": 0 });
        qemu.qmp_with("announce-self", once);
        wait_for("QEMU's frame to be held", || port.held_frames() == 1);
        port.drain_and_barrier(Epoch(2));
        port.release_through(Epoch(1), fresh());
        let heard = watcher.next(|frame| (frame[12..14] == [0x80, 0x35]).then(|| frame.to_vec()));
        assert_eq!(heard, announcement(GUEST), "QEMU announces just as this crate does");

        assert_eq!(qemu.quit(), Some(0));
        wait_for("the end of QEMU to be seen", || !port.is_connected());
    });
}
