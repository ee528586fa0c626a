//! A port's tap, and the bridge that it is on.

mod support;

use support::*;
use understudy_network::*;

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

#[test]
fn bridge_learns_the_port_from_the_announcement() {
    in_namespace(|| {
        let port = open(false);
        let watcher = Neighbour::join(1);
        assert!(!mac_in_use("br0", GUEST).unwrap());
        port.announce(&[]);
        // At once and four repeats.
        for _ in 0..5 {
            let heard =
                watcher.next(|frame| (frame[12..14] == [0x80, 0x35]).then(|| frame.to_vec()));
            assert_eq!(heard, announcement(GUEST));
        }
        assert!(mac_in_use("br0", GUEST).unwrap());
        let learned = run("bridge", "fdb show br br0 dev card0");
        assert!(learned.contains(&GUEST.to_string()), "{learned}");
    });
}

/// Containers in the guest were unreachable after a take-over until they spoke.
#[test]
fn bridge_learns_who_else_is_behind_the_port() {
    in_namespace(|| {
        let port = open(false);
        let container = MacAddress([2, 0x42, 0xac, 0x11, 0, 2]);
        let mut stations = Stations::new(vec![(GUEST, Default::default())]);
        let sent = [&PLAIN[..], &frame(container, "from within")].concat();
        stations.sent(boot_time(), port.card(), &sent);
        stations.sent(boot_time(), understudy_protocol::CardIndex(9), &sent);
        port.announce(&stations.get(boot_time()));
        assert!(mac_in_use("br0", container).unwrap() && mac_in_use("br0", GUEST).unwrap());
        let learned = run("bridge", "fdb show br br0 dev card0");
        assert!(learned.contains(&container.to_string()), "{learned}");
    });
}
