//! Tap devices and bridges of a real kernel.

mod support;

use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;
use support::*;
use understudy_network::*;

#[test]
fn tap_is_a_silent_port_of_the_bridge_and_vanishes_when_dropped() {
    in_namespace(|| {
        ip("link set br0 mtu 1400");
        let tap = Tap::open("card0", "br0", GUEST).unwrap();
        let shown = ip("-details link show card0");
        for expected in ["master br0", "mtu 1400", "link/ether fe:ff:", "tun type tap", ",UP"] {
            assert!(shown.contains(expected), "{expected}: {shown}");
        }
        assert!(!shown.contains("persist on"), "{shown}");
        assert_eq!(ip("-6 address show dev card0"), "");
        drop(tap);
        wait_for("the tap to vanish", || !ip("link show").contains("card0"));
    });
}

#[test]
fn a_name_is_free_again_once_nothing_has_a_copy_of_the_tap() {
    in_namespace(|| {
        let first = Tap::open("card0", "br0", GUEST).unwrap();
        // As a program has that another thread starts.
        let copy = first.as_fd().try_clone_to_owned().unwrap();
        drop(first);
        assert!(ip("link show").contains("card0"));
        thread::scope(|scope| {
            // Well within the second for which the name is waited for.
            scope.spawn(move || {
                thread::sleep(Duration::from_millis(50));
                drop(copy);
            });
            Tap::open("card0", "br0", GUEST).unwrap();
        });
    });
}

#[test]
fn a_bridge_keeps_its_address_when_taps_come_and_go() {
    in_namespace(|| {
        let before = address_of("br0");
        let neighbours: Vec<_> = (1..4)
            .map(|n| {
                let neighbour = Neighbour::join(n);
                assert_eq!(address_of("br0"), before, "with {n} taps");
                neighbour
            })
            .collect();
        // It does not follow other ports either, whose addresses are lower than any tap's.
        ip("link add low address 00:00:00:00:00:01 type veth peer name peer");
        ip("link set low master br0");
        assert_eq!(address_of("br0"), before);
        drop(neighbours);
        wait_for("the taps to vanish", || !ip("link show").contains("neighbour"));
        assert_eq!(address_of("br0"), before);
    });
}

fn address_of(interface: &str) -> String {
    let shown = ip(&format!("-oneline link show {interface}"));
    shown.split("link/ether ").nth(1).unwrap().split(' ').next().unwrap().to_owned()
}

#[test]
fn missing_bridge_is_named_and_leaves_no_tap() {
    in_namespace(|| {
        assert!(bridge_exists("br0").unwrap());
        assert!(!bridge_exists("br7").unwrap());
        let error = Tap::open("card0", "br7", GUEST).unwrap_err();
        assert!(matches!(error, NetworkError::NoBridge { .. }), "{error}");
        assert!(
            error.to_string().starts_with("bridge br7 does not exist on this host: create it with"),
            "{error}"
        );
        assert!(!ip("link show").contains("card0"));
    });
}

#[test]
fn interface_that_is_no_bridge_is_refused() {
    in_namespace(|| {
        let error = Tap::open("card0", "lo", GUEST).unwrap_err();
        assert!(matches!(error, NetworkError::NotABridge { .. }), "{error}");
        let error = mac_in_use("br7", GUEST).unwrap_err();
        assert!(matches!(error, NetworkError::NoBridge { .. }), "{error}");
    });
}

#[test]
fn taken_name_is_refused() {
    in_namespace(|| {
        let _first = Tap::open("card0", "br0", GUEST).unwrap();
        for name in ["card0", "br0", "lo"] {
            let error = Tap::open(name, "br0", GUEST).unwrap_err();
            assert!(matches!(error, NetworkError::TapInUse { .. }), "{name}: {error}");
        }
    });
}
