//! A port's tap, and the bridge that it is on.

mod support;

use support::*;

/// The tap was left on no bridge, and nobody noticed.
#[test]
fn a_port_is_put_back_on_a_bridge_that_was_made_anew() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        assert!(!port.see_to_bridge().unwrap(), "it is there");
        ip("link del br0");
        let gone = port.see_to_bridge().unwrap_err().to_string();
        assert!(gone.contains("bridge br0 does not exist"), "{gone}");
        ip("link add br0 type bridge mcast_snooping 0");
        let down = port.see_to_bridge().unwrap_err().to_string();
        assert!(down.contains("bridge br0 is down"), "{down}");
        ip("link set br0 up");
        assert!(!port.see_to_bridge().unwrap(), "it was put there when the bridge was down");
        let watcher = Neighbour::join(1);
        qemu.send("again");
        assert_eq!(watcher.receive(), "again");
    });
}

/// An attempt that came to no end leaves the port down, and nobody noticed: it was on its bridge.
#[test]
fn a_port_that_was_left_down_is_set_up() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        ip("link set card0 down");
        assert!(port.see_to_bridge().unwrap());
        assert!(!port.see_to_bridge().unwrap(), "it is there");
        let watcher = Neighbour::join(1);
        qemu.send("again");
        assert_eq!(watcher.receive(), "again");
    });
}

/// It was taken for that of a VM which ends: its backup was called one, and nothing would have been heard of the guest.
#[test]
fn a_tap_that_somebody_removed_is_told_of() {
    in_namespace(|| {
        let port = open(true);
        ip("link del card0");
        let gone = port.see_to_bridge().unwrap_err().to_string();
        assert!(gone.starts_with("tap card0 was removed from this host"), "{gone}");
    });
}
