//! Cards in VLANs of a real kernel's bridge. Most need a kernel whose bridges filter VLANs.

mod support;

use std::sync::Arc;
use support::*;
use understudy_network::*;

fn vlans(access: Option<u16>, trunk: &str) -> Vlans {
    let trunk = if trunk.is_empty() { VlanSet::default() } else { trunk.parse().unwrap() };
    Vlans { access, trunk }
}

#[test]
#[ignore = "needs a kernel whose bridges filter VLANs; `make test-kvm` plays it"]
fn a_port_carries_its_vlans_and_no_other() {
    in_namespace(|| {
        ip("link set br0 type bridge vlan_filtering 1");
        assert!(filters_vlans("br0").unwrap());
        let shown = |wanted: &Vlans| {
            let tap = Tap::open_in("card0", "br0", GUEST, wanted).unwrap();
            let shown = run("bridge", "vlan show dev card0");
            drop(tap);
            wait_for("the tap to vanish", || !ip("link show").contains("card0"));
            let words: Vec<&str> = shown.split_whitespace().skip(2).collect();
            words.join(" ")
        };
        assert_eq!(shown(&Vlans::default()), "card0 1 PVID Egress Untagged");
        assert_eq!(shown(&vlans(Some(20), "")), "card0 20 PVID Egress Untagged");
        assert_eq!(shown(&vlans(None, "10,20-22")), "card0 10 20 21 22");
        assert_eq!(shown(&vlans(Some(1), "1-2")), "card0 1 PVID Egress Untagged 2");
    });
}

#[test]
fn a_card_in_a_vlan_is_refused_by_a_bridge_that_filters_none() {
    in_namespace(|| {
        assert!(!filters_vlans("br0").unwrap());
        let error = Tap::open_in("card0", "br0", GUEST, &vlans(Some(20), "")).unwrap_err();
        assert!(matches!(error, NetworkError::NotFiltering { .. }), "{error}");
        assert!(error.to_string().contains("vlan_filtering 1"), "{error}");
        assert!(!ip("link show").contains("card0"));
    });
}

/// The four bytes of the next announcement that comes there behind its addresses.
fn announced(neighbour: &Neighbour) -> Vec<u8> {
    neighbour.next(|frame| {
        let (untagged, tagged) = (&frame[12..14], &frame[16..18]);
        let is_one = untagged == [0x80, 0x35] || tagged == [0x80, 0x35];
        is_one.then(|| frame[12..16].to_vec())
    })
}

#[test]
#[ignore = "needs a kernel whose bridges filter VLANs; `make test-kvm` plays it"]
fn a_card_hears_its_own_vlan_alone_and_is_announced_there() {
    in_namespace(|| {
        ip("link set br0 type bridge vlan_filtering 1");
        let config = PortConfig { vlans: vlans(Some(20), ""), ..config(true) };
        let port = Port::open(config, Arc::new(|| {})).unwrap();
        let mut qemu = FakeQemu::attach(&port);
        let own = Neighbour::join_in(1, &vlans(Some(20), ""));
        let other = Neighbour::join_in(2, &vlans(Some(30), ""));
        let nowhere = Neighbour::join(3);
        // What is not for the guest comes first, and is not among what it gets.
        other.send("of another");
        nowhere.send("of none");
        own.send("of its own");
        assert_eq!(qemu.receive(), "of its own");
        port.announce(&[]);
        qemu.send("heard");
        assert_eq!(announced(&own)[..2], [0x80, 0x35]);
        assert_eq!(own.receive(), "heard");
        // The same in the other VLAN is the first that comes there.
        let stranger = Neighbour::join_in(4, &vlans(Some(30), ""));
        stranger.send("the first");
        assert_eq!(other.next(|frame| Some(frame[14..].to_vec())), b"the first");
    });
}

/// A port that is up when it comes to a bridge is in that bridge's default VLAN at once.
#[test]
#[ignore = "needs a kernel whose bridges filter VLANs; `make test-kvm` plays it"]
fn a_card_whose_bridge_is_made_anew_is_in_no_other_vlan_meanwhile() {
    in_namespace(|| {
        ip("link set br0 type bridge vlan_filtering 1");
        let config = PortConfig { vlans: vlans(Some(20), ""), ..config(true) };
        let port = Port::open(config, Arc::new(|| {})).unwrap();
        let mut qemu = FakeQemu::attach(&port);
        for round in 0..20 {
            ip("link del br0");
            ip("link add br0 type bridge mcast_snooping 0 vlan_filtering 1");
            ip("link set br0 up");
            let stranger = Neighbour::join(2 * round + 1);
            std::thread::scope(|scope| {
                let put_back = scope.spawn(|| port.see_to_bridge().unwrap());
                while !put_back.is_finished() {
                    qemu.send("not for the default VLAN");
                }
                assert!(put_back.join().unwrap());
            });
            let marker = Neighbour::join(2 * round + 2);
            marker.send("the first");
            assert_eq!(stranger.receive(), "the first");
        }
    });
}

#[test]
#[ignore = "needs a kernel whose bridges filter VLANs; `make test-kvm` plays it"]
fn a_card_on_a_trunk_is_announced_in_each_of_its_vlans() {
    in_namespace(|| {
        ip("link set br0 type bridge vlan_filtering 1");
        let config = PortConfig { vlans: vlans(Some(20), "21-22"), ..config(true) };
        let port = Port::open(config, Arc::new(|| {})).unwrap();
        let members = [20, 21, 22].map(|id| Neighbour::join_in(id as u8, &vlans(Some(id), "")));
        let trunk = Neighbour::join_in(1, &vlans(None, "22"));
        port.announce(&[]);
        // A bridge takes the tag off where a port has that VLAN without.
        for member in &members {
            assert_eq!(announced(member)[..2], [0x80, 0x35]);
        }
        assert_eq!(announced(&trunk), [0x81, 0, 0, 22]);
    });
}

#[test]
#[ignore = "needs a kernel whose bridges filter VLANs; `make test-kvm` plays it"]
fn members_of_a_group_in_different_vlans_do_not_reach_each_other() {
    in_namespace(|| {
        ip("link set br0 type bridge vlan_filtering 1");
        let open = |name: &str, mac, id| {
            let (tap, vlans) = (name.to_owned(), vlans(Some(id), ""));
            let config = PortConfig { tap, mac, vlans, ..config(true) };
            Port::open(config, Arc::new(|| {})).unwrap()
        };
        let macs = [1, 2, 3].map(|last| MacAddress([0x52, 0x54, 0, 0, 1, last]));
        let ports =
            [open("one", macs[0], 20), open("two", macs[1], 20), open("three", macs[2], 30)];
        let mut qemus = ports.each_ref().map(FakeQemu::attach);
        Switch::connect(&ports);
        let packet = |text: &str| [&PLAIN[..], &frame(macs[0], text)].concat();
        qemus[0].send_packet(&packet("for everybody"));
        assert_eq!(qemus[1].receive(), "for everybody");
        let own = Neighbour::join_in(4, &vlans(Some(30), ""));
        own.send("of its own");
        assert_eq!(qemus[2].receive(), "of its own", "and nothing before");
    });
}
