//! Cards of a group on a real bridge: what members say to each other does not
//! wait, what leaves the group does, and nothing arrives twice.

mod support;

use std::sync::Arc;
use support::*;
use understudy_network::*;
use understudy_protocol::{CardIndex, Epoch};

const ALL: MacAddress = MacAddress([0xff; 6]);

fn member(number: u8) -> (Port, FakeQemu) {
    let config = PortConfig {
        card: CardIndex(0),
        mac: mac(number),
        tap: format!("member{number}"),
        ..config(true)
    };
    let port = Port::open(config, Arc::new(|| {})).unwrap();
    let qemu = FakeQemu::attach(&port);
    (port, qemu)
}

fn mac(number: u8) -> MacAddress {
    MacAddress([0x52, 0x54, 0, 0, 1, number])
}

fn say(qemu: &mut FakeQemu, from: MacAddress, to: MacAddress, text: &str) {
    let mut frame = frame(from, text);
    frame[..6].copy_from_slice(&to.0);
    qemu.send_packet(&[&PLAIN[..], &frame].concat());
}

#[test]
fn members_hear_each_other_at_once_and_only_once() {
    in_namespace(|| {
        let ((one, mut qemu1), (two, mut qemu2)) = (member(1), member(2));
        let outside = Neighbour::join(9);
        for port in [&one, &two] {
            port.hold(Epoch(1));
        }
        Switch::connect([&one, &two]);

        say(&mut qemu1, mac(1), mac(2), "for two");
        assert_eq!(qemu2.receive(), "for two");
        say(&mut qemu1, mac(1), ALL, "for all");
        assert_eq!(qemu2.receive(), "for all");
        say(&mut qemu2, mac(2), mac(1), "answer");
        assert_eq!(qemu1.receive(), "answer");
        say(&mut qemu1, mac(1), MacAddress([0x52, 0x54, 0, 0, 0, 9]), "for a stranger");
        wait_for("what leaves the group to be held", || one.held_frames() == 2);
        assert_eq!(two.held_frames(), 0);

        one.drain_and_barrier(Epoch(2));
        two.drain_and_barrier(Epoch(2));
        one.release_through(Epoch(1), fresh());
        two.release_through(Epoch(1), fresh());
        assert_eq!(outside.receive(), "for all", "and nothing that was for members alone");
        assert_eq!(outside.receive(), "for a stranger");
        // The broadcast is on the bridge now: the next thing that two hears must
        // not be its echo.
        outside.send("from outside");
        assert_eq!(qemu2.receive(), "from outside");
        assert_eq!(qemu1.receive(), "from outside");
        assert_eq!((two.counters().frames_inside, one.counters().frames_inside), (2, 1));
    });
}

#[test]
fn an_open_gate_leaves_the_group_and_a_shut_one_is_silent() {
    in_namespace(|| {
        let ((one, mut qemu1), (two, mut qemu2)) = (member(1), member(2));
        let outside = Neighbour::join(9);
        for port in [&one, &two] {
            port.hold(Epoch(1));
        }
        Switch::connect([&one, &two]);
        for port in [&one, &two] {
            port.open_gate();
        }
        say(&mut qemu1, mac(1), mac(2), "over the bridge");
        assert_eq!(qemu2.receive(), "over the bridge");
        assert_eq!(two.counters().frames_inside, 0);

        for port in [&one, &two] {
            port.hold(Epoch(1));
        }
        Switch::connect([&one, &two]);
        one.shut();
        say(&mut qemu1, mac(1), mac(2), "from a fenced host");
        say(&mut qemu1, mac(1), ALL, "from a fenced host");
        wait_for("both frames to be dropped", || one.counters().dropped_by_buffer == 2);
        say(&mut qemu2, mac(2), mac(1), "to a fenced host");
        outside.send("the bridge lives");
        assert_eq!(qemu2.receive(), "the bridge lives");
    });
}

/// A frame that a member cannot take goes out, where the kernel cuts it up, and comes back.
#[test]
fn a_long_segment_goes_the_way_that_its_taker_can_take() {
    in_namespace(|| {
        let ((one, mut qemu1), (two, mut qemu2)) = (member(1), member(2));
        for port in [&one, &two] {
            port.hold(Epoch(1));
        }
        Switch::connect([&one, &two]);
        let segment = long_segment(mac(1), mac(2), &[7; 20_000]);

        qemu1.send_packet(&segment);
        wait_for("the segment to be held", || one.held_frames() == 1);
        say(&mut qemu1, mac(1), mac(2), "short ones stay inside");
        assert_eq!(qemu2.receive(), "short ones stay inside");
        one.drain_and_barrier(Epoch(2));
        one.release_through(Epoch(1), fresh());
        let mut heard = 0;
        while heard < 20_000 {
            let part = tcp_payload(&qemu2.receive_frame());
            heard += part.map_or(0, |part| part.len());
        }

        qemu2.offer(ALL_OFFLOADS);
        say(&mut qemu2, mac(2), mac(1), "offered");
        assert_eq!(qemu1.receive(), "offered");
        qemu1.send_packet(&segment);
        let frame =
            (0..).map(|_| qemu2.receive_frame()).find(|f| f[26..30] == segment[38..42]).unwrap();
        assert_eq!(frame, ethernet(&segment), "at once, and in one piece");
        assert_eq!(one.held_frames(), 0);
    });
}
