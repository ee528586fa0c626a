//! A private network namespace with a bridge, watchers on it, and a QEMU's end
//! of a card's socket played by the test.
#![allow(dead_code)]

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use understudy_network::*;
use understudy_protocol::CardIndex;

pub const GUEST: MacAddress = MacAddress([0x52, 0x54, 0, 0x12, 0x34, 0x56]);
pub const DEADLINE: Duration = Duration::from_secs(20);
/// IEEE's "local experimental" EtherType: nothing else sends it.
const ETHERTYPE: [u8; 2] = [0x88, 0xb5];

/// Runs a test in a network namespace of its own with a bridge `br0`. The
/// namespace has no name: it vanishes with its last thread, whatever happens.
pub fn in_namespace(body: impl FnOnce() + Send + 'static) {
    let test = thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET).expect("these tests need root");
        ip("link add br0 type bridge");
        ip("link set br0 up");
        body();
    });
    if let Err(panic) = test.join() {
        std::panic::resume_unwind(panic);
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
        live,
        output_limit_bytes: DEFAULT_LIMIT_BYTES,
    }
}

pub fn open(live: bool) -> Port {
    Port::open(config(live), Arc::new(|| {})).unwrap()
}

/// A broadcast frame of the test's own EtherType.
pub fn frame(from: MacAddress, text: &str) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend_from_slice(&from.0);
    frame.extend_from_slice(&ETHERTYPE);
    frame.extend_from_slice(text.as_bytes());
    frame
}

/// QEMU's end of the socket.
pub struct FakeQemu(UnixStream);

impl FakeQemu {
    pub fn attach(port: &Port) -> FakeQemu {
        FakeQemu(UnixStream::from(port.attach_guest().unwrap().socket))
    }

    pub fn send_bytes(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    pub fn send(&mut self, text: &str) {
        let frame = frame(GUEST, text);
        let mut bytes = (frame.len() as u32).to_be_bytes().to_vec();
        bytes.extend(frame);
        self.send_bytes(&bytes);
    }

    /// The next frame of the test's EtherType that the guest receives.
    pub fn receive(&mut self) -> String {
        self.0.set_read_timeout(Some(DEADLINE)).unwrap();
        loop {
            let mut length = [0; 4];
            self.0.read_exact(&mut length).unwrap();
            let mut frame = vec![0; u32::from_be_bytes(length) as usize];
            self.0.read_exact(&mut frame).unwrap();
            if frame[12..14] == ETHERTYPE {
                return String::from_utf8(frame[14..].to_vec()).unwrap();
            }
        }
    }
}

/// Another machine on the bridge.
pub struct Neighbour {
    tap: Tap,
    mac: MacAddress,
}

impl Neighbour {
    pub fn join(number: u8) -> Neighbour {
        let mac = MacAddress([0x52, 0x54, 0, 0, 0, number]);
        let tap = Tap::open(&format!("neighbour{number}"), "br0", mac).unwrap();
        Neighbour { tap, mac }
    }

    pub fn send(&self, text: &str) {
        self.tap.send(&frame(self.mac, text)).unwrap();
    }

    /// The next frame for which `wanted` gives something.
    pub fn next<T>(&self, wanted: impl Fn(&[u8]) -> Option<T>) -> T {
        let end = Instant::now() + DEADLINE;
        let mut frame = [0; MAX_FRAME_BYTES];
        loop {
            if let Some(length) = self.tap.receive(&mut frame).unwrap() {
                if let Some(found) = wanted(&frame[..length]) {
                    return found;
                }
                continue;
            }
            assert!(Instant::now() < end, "no such frame came");
            let mut fds = [PollFd::new(self.tap.as_fd(), PollFlags::POLLIN)];
            poll(&mut fds, PollTimeout::from(100u8)).unwrap();
        }
    }

    /// The text of the next frame of the test's EtherType.
    pub fn receive(&self) -> String {
        self.next(|frame| {
            (frame[12..14] == ETHERTYPE).then(|| String::from_utf8(frame[14..].to_vec()).unwrap())
        })
    }
}
