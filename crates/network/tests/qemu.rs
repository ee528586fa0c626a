//! A stock QEMU at the other end of a port.

mod support;

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::time::Instant;
use support::*;
use understudy_network::*;
use understudy_protocol::Epoch;

/// A machine without an operating system, driven by QMP over its standard
/// streams. Ends with the test.
struct Qemu(Child);

impl Qemu {
    fn start(guest: GuestEnd) -> Qemu {
        let fd = nix::unistd::dup(&guest.socket).unwrap(); // without close-on-exec
        let inherited = GuestEnd { socket: fd };
        let child = Command::new("qemu-system-x86_64")
            .args("-machine q35,accel=tcg -nodefaults -display none -m 32 -qmp stdio".split(' '))
            .args(["-netdev", &inherited.netdev("card0")])
            .args(["-device", &format!("virtio-net-pci,netdev=card0,romfile=,mac={GUEST}")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("these tests need qemu-system-x86_64");
        drop::<[OwnedFd; 2]>([inherited.socket, guest.socket]);
        let mut qemu = Qemu(child);
        qemu.execute("qmp_capabilities");
        qemu
    }

    fn execute(&mut self, command: &str) {
        let request = self.0.stdin.as_mut().unwrap();
        writeln!(request, "{{\"execute\":\"{command}\",\"arguments\":{{}}}}").unwrap();
    }

    fn announce_self(&mut self) {
        let request = self.0.stdin.as_mut().unwrap();
        let arguments = r#"{"initial":50,"max":50,"rounds":1,"step":0}"#;
        writeln!(request, "{{\"execute\":\"announce-self\",\"arguments\":{arguments}}}").unwrap();
    }

    fn wait_for_event(&mut self, event: &str) {
        let lines = BufReader::new(self.0.stdout.as_mut().unwrap()).lines();
        assert!(lines.map(Result::unwrap).any(|line| line.contains(event)));
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn stock_qemu_takes_the_inherited_socket() {
    in_namespace(|| {
        let port = open(true);
        let watcher = Neighbour::join(1);
        port.hold(Epoch(1));
        let mut qemu = Qemu::start(port.attach_guest().unwrap());
        qemu.wait_for_event("NETDEV_STREAM_CONNECTED");
        assert!(port.is_connected());

        qemu.announce_self();
        wait_for("QEMU's frame to be held", || port.held_frames() == 1);
        port.drain_and_barrier(Epoch(2));
        port.release_through(Epoch(1), Instant::now());
        let heard = watcher.next(|frame| (frame[12..14] == [0x80, 0x35]).then(|| frame.to_vec()));
        assert_eq!(heard, announcement(GUEST), "QEMU announces just as this crate does");

        drop(qemu);
        wait_for("the end of QEMU to be seen", || !port.is_connected());
    });
}
