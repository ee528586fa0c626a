//! One thread carries a card's frames both ways, and neither way waits for the other.

mod support;

use std::fs;
use std::sync::Arc;
use support::*;
use understudy_network::*;
use understudy_protocol::CardIndex;

/// A frame that is told from others of a flood.
fn numbered(n: usize) -> String {
    format!("{n:06}{}", "x".repeat(1400))
}

/// Sends until QEMU's socket takes no more, with which frames wait in the tap; returns how many.
fn fill(port: &Port, qemu: &mut FakeQemu, neighbour: &Neighbour) -> usize {
    const AT_ONCE: usize = 100;
    let mut rounds_without_any = 0;
    for sent in (0..10_000).step_by(AT_ONCE) {
        let before = port.counters().frames_in;
        (sent..sent + AT_ONCE).for_each(|n| neighbour.send(&numbered(n)));
        // The thread looks at both ways in each of its turns, and these are some turns.
        for _ in 0..3 {
            qemu.send("a turn");
            assert_eq!(neighbour.receive(), "a turn");
        }
        rounds_without_any += usize::from(port.counters().frames_in == before);
        if rounds_without_any == 3 {
            return sent + AT_ONCE;
        }
    }
    panic!("the socket takes everything");
}

#[test]
fn a_card_has_one_thread() {
    in_namespace(|| {
        // A number that no other test's card has.
        let config = PortConfig { card: CardIndex(4321), ..config(true) };
        let port = Port::open(config, Arc::new(|| {})).unwrap();
        let mut qemu = FakeQemu::attach(&port);
        let neighbour = Neighbour::join(1);
        qemu.send("out");
        assert_eq!(neighbour.receive(), "out");
        neighbour.send("in");
        assert_eq!(qemu.receive(), "in");
        let tasks = fs::read_dir("/proc/self/task").unwrap();
        let names =
            tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
        let ours: Vec<String> = names.filter(|name| name.starts_with("net4321")).collect();
        assert_eq!(ours, ["net4321\n"]);
    });
}

#[test]
fn a_guest_that_takes_nothing_still_sends_and_gets_all_later_in_order() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        let neighbour = Neighbour::join(1);
        let sent = fill(&port, &mut qemu, &neighbour);
        for n in 0..200 {
            qemu.send(&n.to_string());
            assert_eq!(neighbour.receive(), n.to_string());
        }
        // Tap and switch drop what is too much for them, as for any card.
        let taken = port.counters().frames_in as usize;
        for n in 0..taken {
            assert_eq!(qemu.receive(), numbered(n), "the first are whole and in order");
        }
        let mut next = taken;
        while next < sent {
            neighbour.send("the last");
            match qemu.receive().as_str() {
                "the last" => break,
                text => {
                    let n: usize = text[..6].parse().unwrap();
                    assert!(n >= next, "{n} came after {next}");
                    next = n + 1;
                }
            }
        }
    });
}

#[test]
fn a_guest_that_floods_still_receives() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        let neighbour = Neighbour::join(1);
        for round in 0..20 {
            // Many full readings.
            (0..500).for_each(|n| qemu.send(&numbered(n)));
            neighbour.send(&round.to_string());
            assert_eq!(qemu.receive(), round.to_string());
        }
        wait_for("all to be sent", || port.counters().frames_out == 20 * 500);
    });
}

/// The frames that wait for room have the new header, and are not lost.
#[test]
fn the_header_changes_while_frames_wait_for_room() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        let neighbour = Neighbour::join(1);
        fill(&port, &mut qemu, &neighbour);
        let taken = port.counters().frames_in as usize;
        let discarded = qemu.change_header(12);
        assert!(discarded <= taken, "{discarded} of {taken} were before the answer");
        assert_eq!(qemu.receive(), numbered(discarded), "the next one has the new header");
    });
}

#[test]
fn what_waits_for_a_guest_that_ends_is_not_the_next_ones() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        let neighbour = Neighbour::join(1);
        fill(&port, &mut qemu, &neighbour);
        drop(qemu);
        wait_for("the end to be seen", || !port.is_connected());
        let mut qemu = FakeQemu::attach(&port);
        neighbour.send("for the next one");
        assert_eq!(qemu.receive(), "for the next one");
        qemu.send("answer");
        assert_eq!(neighbour.receive(), "answer");
    });
}
