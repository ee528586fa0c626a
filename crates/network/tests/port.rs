//! A port between a socket that speaks QEMU's framing and a real bridge.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use support::*;
use understudy_network::*;
use understudy_protocol::Epoch;

#[test]
fn output_waits_for_the_commit_of_its_epoch() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        let (watcher, marker) = (Neighbour::join(1), Neighbour::join(2));

        qemu.send("unprotected");
        assert_eq!(watcher.receive(), "unprotected");

        port.hold(Epoch(1));
        qemu.send("1a");
        qemu.send("1b");
        assert_eq!(port.drain_and_barrier(Epoch(2)), 2);
        qemu.send("2a");
        wait_for("the frame of epoch 2 to be held", || port.held_frames() == 3);
        // Writes to a bridge are synchronous: what had leaked would come first.
        marker.send("nothing was released");
        assert_eq!(watcher.receive(), "nothing was released");

        port.release_through(Epoch(1), Instant::now());
        assert_eq!(watcher.receive(), "1a");
        assert_eq!(watcher.receive(), "1b");
        assert_eq!(port.held_frames(), 1);
        marker.send("epoch 1 only");
        assert_eq!(watcher.receive(), "epoch 1 only");

        assert_eq!(port.drain_and_barrier(Epoch(3)), 1);
        port.release_through(Epoch(2), Instant::now());
        assert_eq!(watcher.receive(), "2a");
    });
}

#[test]
fn a_release_that_is_out_of_date_waits_once_more() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        let (watcher, marker) = (Neighbour::join(1), Neighbour::join(2));
        port.hold(Epoch(1));
        qemu.send("1");
        assert_eq!(port.drain_and_barrier(Epoch(2)), 1);
        let long_ago = Instant::now() - 2 * understudy_protocol::STALL;
        port.release_through(Epoch(1), long_ago);
        assert_eq!(port.held_frames(), 1);
        marker.send("nothing was released");
        assert_eq!(watcher.receive(), "nothing was released");
        assert_eq!(port.drain_and_barrier(Epoch(3)), 1);
        port.release_through(Epoch(2), Instant::now());
        assert_eq!(watcher.receive(), "1");
        // A sole owner's output is never out of date.
        qemu.send("2");
        assert_eq!(port.drain_and_barrier(Epoch(4)), 1);
        port.release_through(Epoch(3), long_ago);
        port.open_gate();
        assert_eq!(watcher.receive(), "2");
    });
}

#[test]
fn drain_takes_all_that_was_sent_before_it() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        let watcher = Neighbour::join(1);
        port.hold(Epoch(1));
        for epoch in 1..200u64 {
            for number in 0..epoch % 7 {
                qemu.send(&format!("{epoch}.{number}"));
            }
            assert_eq!(port.drain_and_barrier(Epoch(epoch + 1)), (epoch % 7) as usize);
            port.release_through(Epoch(epoch), Instant::now());
            for number in 0..epoch % 7 {
                assert_eq!(watcher.receive(), format!("{epoch}.{number}"));
            }
        }
    });
}

#[test]
fn partial_frame_counts_to_the_next_epoch() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        let (watcher, marker) = (Neighbour::join(1), Neighbour::join(2));
        port.hold(Epoch(1));
        let frame = frame(GUEST, "in two parts");
        qemu.send_bytes(&(frame.len() as u32).to_be_bytes());
        qemu.send_bytes(&frame[..9]);
        assert_eq!(port.drain_and_barrier(Epoch(2)), 0);
        qemu.send_bytes(&frame[9..]);
        wait_for("the whole frame", || port.held_frames() == 1);
        port.release_through(Epoch(1), Instant::now());
        marker.send("still held");
        assert_eq!(watcher.receive(), "still held");
        port.drain_and_barrier(Epoch(3));
        port.release_through(Epoch(2), Instant::now());
        assert_eq!(watcher.receive(), "in two parts");
    });
}

#[test]
fn nothing_leaves_a_fenced_port() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        let (watcher, marker) = (Neighbour::join(1), Neighbour::join(2));
        port.hold(Epoch(1));
        qemu.send("held");
        assert_eq!(port.drain_and_barrier(Epoch(2)), 1);
        port.shut();
        port.release_through(Epoch(1), Instant::now());
        port.open_gate();
        qemu.send("after");
        wait_for("both frames to be dropped", || port.counters().dropped_by_buffer == 2);
        port.announce().unwrap();
        marker.send("silence");
        assert_eq!(
            watcher.next(|frame| match frame[12..14] {
                [0x80, 0x35] => Some("announced".to_owned()),
                [0x88, 0xb5] => Some(String::from_utf8(frame[14..].to_vec()).unwrap()),
                _ => None,
            }),
            "silence"
        );
    });
}

#[test]
fn sole_owner_sends_what_was_held_and_then_at_once() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        let watcher = Neighbour::join(1);
        port.hold(Epoch(1));
        qemu.send("held");
        wait_for("the frame", || port.held_frames() == 1);
        port.open_gate();
        qemu.send("passes");
        assert_eq!(watcher.receive(), "held");
        assert_eq!(watcher.receive(), "passes");
        wait_for("the counters", || port.counters().frames_out == 2);
        assert_eq!(port.counters().bytes_out, 18 + 20);
    });
}

#[test]
fn inbound_passes_at_once_whatever_is_held() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        let neighbour = Neighbour::join(1);
        port.hold(Epoch(1));
        qemu.send("request");
        neighbour.send("first");
        assert_eq!(qemu.receive(), "first");
        neighbour.send("second");
        assert_eq!(qemu.receive(), "second");
        wait_for("the frame", || port.held_frames() == 1);
    });
}

#[test]
fn standby_takes_nothing_until_it_goes_live_and_then_only_what_is_new() {
    in_namespace(|| {
        let port = open(false);
        let mut qemu = FakeQemu::attach(&port);
        let neighbour = Neighbour::join(1);
        for _ in 0..50 {
            neighbour.send("for the primary");
        }
        assert_eq!(port.counters().frames_in, 0);
        port.go_live();
        neighbour.send("for the survivor");
        assert_eq!(qemu.receive(), "for the survivor");
        // Its output waits until the arbiter's word.
        qemu.send("answer");
        wait_for("the answer to be held", || port.held_frames() == 1);
        port.open_gate();
        assert_eq!(neighbour.receive(), "answer");
    });
}

#[test]
fn waiting_output_is_reported_once_an_epoch() {
    in_namespace(|| {
        let calls = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&calls);
        let notify: OutputWaiting = Arc::new(move || {
            counter.fetch_add(1, Ordering::SeqCst);
        });
        let port = Port::open(config(true), notify).unwrap();
        let mut qemu = FakeQemu::attach(&port);
        qemu.send("unprotected");
        wait_for("the frame to pass", || port.counters().frames_out == 1);
        port.hold(Epoch(1));
        qemu.send("one");
        wait_for("the first call", || calls.load(Ordering::SeqCst) == 1);
        qemu.send("two");
        wait_for("the second frame", || port.held_frames() == 2);
        port.drain_and_barrier(Epoch(2));
        qemu.send("three");
        wait_for("the call for epoch 2", || calls.load(Ordering::SeqCst) == 2);
    });
}

#[test]
fn end_of_qemu_is_reported_and_another_can_be_attached() {
    in_namespace(|| {
        let port = open(true);
        assert!(!port.is_connected());
        let qemu = FakeQemu::attach(&port);
        assert!(port.is_connected());
        drop(qemu);
        wait_for("the end to be seen", || !port.is_connected());
        assert_eq!(port.disconnect_reason().unwrap(), "QEMU closed the socket");

        let mut qemu = FakeQemu::attach(&port);
        let watcher = Neighbour::join(1);
        qemu.send("again");
        assert_eq!(watcher.receive(), "again");
        watcher.send("inbound too");
        assert_eq!(qemu.receive(), "inbound too");
    });
}

#[test]
fn impossible_length_ends_the_connection_with_its_reason() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        qemu.send_bytes(&[0xff; 100]);
        wait_for("the connection to end", || !port.is_connected());
        let reason = port.disconnect_reason().unwrap();
        assert!(reason.contains("a frame of 4294967295 bytes"), "{reason}");
    });
}

#[test]
fn frames_that_the_tap_refuses_are_counted() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        let watcher = Neighbour::join(1);
        qemu.send_bytes(&[0, 0, 0, 3, 1, 2, 3]); // no Ethernet header
        qemu.send("good");
        assert_eq!(watcher.receive(), "good");
        wait_for("the counters", || port.counters().frames_out == 1);
        assert_eq!(port.counters().dropped_by_tap, 1);
    });
}

#[test]
fn bridge_learns_the_port_from_the_announcement() {
    in_namespace(|| {
        let port = open(false);
        let watcher = Neighbour::join(1);
        assert!(!mac_in_use("br0", GUEST).unwrap());
        port.announce().unwrap();
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
