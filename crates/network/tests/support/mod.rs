//! A private network namespace with a bridge, watchers on it, and a QEMU's end
//! of a card's socket played by the test.
#![allow(dead_code)]

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use nix::sys::eventfd::EventFd;
use nix::sys::socket::{ControlMessage, MsgFlags, recv, send, sendmsg, setsockopt, sockopt};
use nix::sys::time::TimeVal;
use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use understudy_network::*;
use understudy_protocol::{CardIndex, Time};

pub const GUEST: MacAddress = MacAddress([0x52, 0x54, 0, 0x12, 0x34, 0x56]);
pub const DEADLINE: Duration = Duration::from_secs(60);
/// IEEE's "local experimental" EtherType: nothing else sends it.
const ETHERTYPE: [u8; 2] = [0x88, 0xb5];

/// Runs a test in a network namespace of its own with a bridge `br0`. The
/// namespace has no name: it vanishes with its last thread, whatever happens.
pub fn in_namespace(body: impl FnOnce() + Send + 'static) {
    let test = thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET).expect("these tests need root");
        without_ipv6();
        // Without snooping the kernel says nothing of its own on the bridge.
        ip("link add br0 type bridge mcast_snooping 0");
        ip("link set br0 up");
        body();
    });
    if let Err(panic) = test.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Disables IPv6 before any interface is there: with IPv6 the kernel looks for routers and
/// neighbours on it.
fn without_ipv6() {
    for scope in ["all", "default"] {
        let switch = format!("/proc/sys/net/ipv6/conf/{scope}/disable_ipv6");
        // Absent where the kernel has no IPv6.
        if Path::new(&switch).exists() {
            std::fs::write(&switch, "1").expect("IPv6 can be switched off");
        }
    }
}

pub fn ip(arguments: &str) -> String {
    run("ip", arguments)
}

pub fn run(program: &str, arguments: &str) -> String {
    let output = Command::new(program).args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "{program} {arguments}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Waits until the condition holds; fails with `what` if it never does.
pub fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < end, "waited in vain: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

pub fn config(live: bool) -> PortConfig {
    PortConfig {
        card: CardIndex(0),
        mac: GUEST,
        tap: "card0".into(),
        bridge: "br0".into(),
        vlans: Vlans::default(),
        live,
        output_limit_bytes: DEFAULT_LIMIT_BYTES,
    }
}

pub fn open(live: bool) -> Port {
    Port::open(config(live), Arc::new(|| {})).unwrap()
}

/// The time of a release that does not go out of date, however long a busy machine runs
/// something else before it writes the frames.
pub fn fresh() -> Time {
    boot_time() + DEADLINE
}

/// A broadcast frame of the test's own EtherType.
pub fn frame(from: MacAddress, text: &str) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend_from_slice(&from.0);
    frame.extend_from_slice(&ETHERTYPE);
    frame.extend_from_slice(text.as_bytes());
    frame
}

/// The header of a frame about which nothing is left to do.
pub const PLAIN: [u8; HEADER_BYTES] = [0; HEADER_BYTES];
/// The offloads that the driver of a Linux guest offers.
pub const ALL_OFFLOADS: u32 = 0x0f;
/// TCP payload of each frame that a long segment is cut into.
pub const CUT_BYTES: usize = 1448;

/// A TCP segment over IPv4 that is too long for the wire, and its checksum left to
/// others, as a guest sends it: with its header.
pub fn long_segment(from: MacAddress, to: MacAddress, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![1, 1, 54, 0, 0, 0, 34, 0, 16, 0, 0, 0];
    packet[4..6].copy_from_slice(&(CUT_BYTES as u16).to_le_bytes());
    packet.extend(to.0);
    packet.extend(from.0);
    packet.extend([8, 0]);
    let (tcp_bytes, addresses) = (20 + payload.len(), [10, 0, 0, 1, 10, 0, 0, 2]);
    let mut ip = vec![0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, 6, 0, 0];
    ip[2..4].copy_from_slice(&(20 + tcp_bytes as u16).to_be_bytes());
    ip.extend(addresses);
    let sum = !folded(&ip);
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend(ip);
    let mut tcp =
        vec![0x1b, 0x58, 0x1b, 0x59, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0];
    let pseudo = [&addresses[..], &[0, 6], &(tcp_bytes as u16).to_be_bytes()].concat();
    tcp[16..18].copy_from_slice(&folded(&pseudo).to_be_bytes());
    packet.extend(tcp);
    packet.extend(payload);
    packet
}

fn folded(bytes: &[u8]) -> u16 {
    let pairs =
        bytes.chunks(2).map(|pair| u64::from(pair[0]) << 8 | u64::from(*pair.get(1).unwrap_or(&0)));
    let sum: u64 = pairs.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

/// The TCP payload of a frame, if it is TCP over IPv4 and all its checksums are
/// right.
pub fn tcp_payload(frame: &[u8]) -> Option<Vec<u8>> {
    if frame.get(12..14)? != [8, 0] || *frame.get(23)? != 6 {
        return None;
    }
    let length = usize::from(u16::from_be_bytes([frame[16], frame[17]]));
    let ip = &frame[14..14 + length];
    let tcp = &ip[20..];
    let pseudo = [&ip[12..20], &[0, 6], &(tcp.len() as u16).to_be_bytes(), tcp].concat();
    assert_eq!((folded(&ip[..20]), folded(&pseudo)), (0xffff, 0xffff), "a wrong checksum");
    Some(tcp[20..].to_vec())
}

/// QEMU's end of the socket.
pub struct FakeQemu {
    socket: OwnedFd,
    /// The header's length in a QEMU that has just started.
    header_bytes: usize,
}

impl FakeQemu {
    pub fn attach(port: &Port) -> FakeQemu {
        let socket = port.attach_guest().unwrap().socket;
        let limit = TimeVal::new(DEADLINE.as_secs() as i64, 0);
        setsockopt(&socket, sockopt::ReceiveTimeout, &limit).unwrap();
        FakeQemu { socket, header_bytes: 10 }
    }

    /// The socket's descriptor.
    pub fn number(&self) -> i32 {
        self.socket.as_raw_fd()
    }

    /// Sends a message as it is.
    pub fn send_bytes(&mut self, bytes: &[u8]) {
        assert_eq!(send(self.socket.as_raw_fd(), bytes, MsgFlags::empty()), Ok(bytes.len()));
    }

    /// Sends a frame that comes with its header.
    pub fn send_packet(&mut self, packet: &[u8]) {
        let (header, frame) = packet.split_at(HEADER_BYTES);
        self.send_bytes(&[&header[..self.header_bytes], frame].concat());
    }

    pub fn send(&mut self, text: &str) {
        self.send_packet(&[&PLAIN[..], &frame(GUEST, text)].concat());
    }

    /// The next message, without the header.
    pub fn receive_frame(&mut self) -> Vec<u8> {
        self.receive_message().split_off(self.header_bytes)
    }

    fn receive_message(&mut self) -> Vec<u8> {
        let mut message = vec![0; MAX_BYTES];
        let length = recv(self.socket.as_raw_fd(), &mut message, MsgFlags::empty()).unwrap();
        message.truncate(length);
        message
    }

    /// The next frame of the test's EtherType that the guest receives.
    pub fn receive(&mut self) -> String {
        loop {
            let frame = self.receive_frame();
            if frame[12..14] == ETHERTYPE {
                return String::from_utf8(frame[14..].to_vec()).unwrap();
            }
        }
    }

    /// Says something as the agent does: with a descriptor beside it.
    pub fn control(&mut self, message: &[u8]) {
        let proof = EventFd::new().unwrap();
        let beside = [proof.as_fd().as_raw_fd()];
        let parts = [IoSlice::new(message)];
        let rights = [ControlMessage::ScmRights(&beside)];
        let socket = self.socket.as_raw_fd();
        sendmsg::<()>(socket, &parts, &rights, MsgFlags::empty(), None).unwrap();
    }

    /// Has headers of another length from now on, as the agent does it. Returns how
    /// many frames were discarded.
    pub fn change_header(&mut self, bytes: usize) -> usize {
        self.control(&control(1, bytes as u32));
        self.header_bytes = bytes;
        (0..).find(|_| self.receive_message() == b"USTDYNET").unwrap()
    }

    pub fn offer(&mut self, offloads: u32) {
        self.control(&control(2, offloads));
    }
}

pub fn control(kind: u32, value: u32) -> Vec<u8> {
    [&b"USTDYNET"[..], &kind.to_le_bytes(), &value.to_le_bytes()].concat()
}

/// Another machine on the bridge.
pub struct Neighbour {
    tap: Tap,
    mac: MacAddress,
}

impl Neighbour {
    pub fn join(number: u8) -> Neighbour {
        Neighbour::join_in(number, &Vlans::default())
    }

    /// One whose port carries these VLANs.
    pub fn join_in(number: u8, vlans: &Vlans) -> Neighbour {
        let mac = MacAddress([0x52, 0x54, 0, 0, 0, number]);
        let tap = Tap::open_in(&format!("neighbour{number}"), "br0", mac, vlans).unwrap();
        Neighbour { tap, mac }
    }

    pub fn send(&self, text: &str) {
        self.send_packet(&[&PLAIN[..], &frame(self.mac, text)].concat());
    }

    /// Sends a frame that comes with its header.
    pub fn send_packet(&self, packet: &[u8]) {
        self.tap.send(packet).unwrap();
    }

    /// The next frame for which `wanted` gives something.
    pub fn next<T>(&self, wanted: impl Fn(&[u8]) -> Option<T>) -> T {
        let end = Instant::now() + DEADLINE;
        let mut packet = vec![0; MAX_BYTES];
        loop {
            if let Some(length) = self.tap.receive(&mut packet).unwrap() {
                if let Some(found) = wanted(ethernet(&packet[..length])) {
                    return found;
                }
                continue;
            }
            assert!(Instant::now() < end, "no such frame came");
            let mut fds = [PollFd::new(self.tap.as_fd(), PollFlags::POLLIN)];
            poll(&mut fds, PollTimeout::from(100u8)).unwrap();
        }
    }

    pub fn mac(&self) -> MacAddress {
        self.mac
    }

    /// The text of the next frame of the test's EtherType.
    pub fn receive(&self) -> String {
        self.next(|frame| {
            (frame[12..14] == ETHERTYPE).then(|| String::from_utf8(frame[14..].to_vec()).unwrap())
        })
    }
}
