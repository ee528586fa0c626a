//! A port between a socket that speaks as QEMU and the agent do, and a real bridge.

mod support;

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, send, setsockopt, socketpair, sockopt,
};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use support::*;
use understudy_network::*;
use understudy_protocol::{Epoch, Time};

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

        port.release_through(Epoch(1), fresh());
        assert_eq!(watcher.receive(), "1a");
        assert_eq!(watcher.receive(), "1b");
        assert_eq!(port.held_frames(), 1);
        marker.send("epoch 1 only");
        assert_eq!(watcher.receive(), "epoch 1 only");

        assert_eq!(port.drain_and_barrier(Epoch(3)), 1);
        port.release_through(Epoch(2), fresh());
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
        let long_ago = Time(boot_time().0 - 2 * understudy_protocol::STALL);
        port.release_through(Epoch(1), long_ago);
        assert_eq!(port.held_frames(), 1);
        marker.send("nothing was released");
        assert_eq!(watcher.receive(), "nothing was released");
        assert_eq!(port.drain_and_barrier(Epoch(3)), 1);
        port.release_through(Epoch(2), fresh());
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
            port.release_through(Epoch(epoch), fresh());
            for number in 0..epoch % 7 {
                assert_eq!(watcher.receive(), format!("{epoch}.{number}"));
            }
        }
    });
}

#[test]
fn what_qemu_wrote_before_it_ended_still_leaves() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        let watcher = Neighbour::join(1);
        watcher.send("never read");
        wait_for("a frame that QEMU leaves unread", || port.counters().frames_in > 0);
        port.hold(Epoch(1));
        for number in 0..20 {
            qemu.send(&number.to_string());
        }
        drop(qemu);
        wait_for("the end to be seen", || !port.is_connected());
        assert_eq!(port.disconnect_reason().unwrap(), "QEMU closed the socket");
        port.drain_and_barrier(Epoch(2));
        port.release_through(Epoch(1), fresh());
        for number in 0..20 {
            assert_eq!(watcher.receive(), number.to_string());
        }
    });
}

/// A burst of more than the socket takes at once: QEMU waits, and nothing is lost.
#[test]
fn a_burst_is_held_whole() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        port.hold(Epoch(1));
        let long = long_segment(GUEST, MacAddress([0x52, 0x54, 0, 0, 0, 1]), &[7; 60_000]);
        for _ in 0..900 {
            qemu.send_packet(&long);
        }
        assert_eq!(port.drain_and_barrier(Epoch(2)), 900);
        assert_eq!(port.counters().dropped_by_buffer, 0);
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
        port.release_through(Epoch(1), fresh());
        port.open_gate();
        qemu.send("after");
        wait_for("both frames to be dropped", || port.counters().dropped_by_buffer == 2);
        port.announce(&[]);
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
fn nothing_leaves_after_the_limit_and_all_with_the_next_one() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        let (watcher, marker) = (Neighbour::join(1), Neighbour::join(2));
        port.limit_output(Some(boot_time() + Duration::from_secs(600)));
        qemu.send("within");
        assert_eq!(watcher.receive(), "within");
        port.limit_output(Some(boot_time()));
        let before = port.carried_bytes();
        qemu.send("late");
        wait_for("the frame to be taken", || port.carried_bytes() > before);
        // The announcements' echo of a host that slept is output, too.
        port.announce(&[]);
        port.open_gate();
        marker.send("silence");
        assert_eq!(watcher.receive(), "silence");
        port.limit_output(None);
        assert_eq!(watcher.receive(), "late");
        // A backup's word is no better than the limit.
        port.hold(Epoch(1));
        qemu.send("1");
        assert_eq!(port.drain_and_barrier(Epoch(2)), 1);
        port.limit_output(Some(boot_time()));
        port.release_through(Epoch(1), fresh());
        marker.send("silence again");
        assert_eq!(watcher.receive(), "silence again");
        port.limit_output(None);
        assert_eq!(watcher.receive(), "1");
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
        port.discard_inbound();
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
fn what_makes_no_sense_ends_the_connection_with_its_reason() {
    let no_header: fn(&mut FakeQemu) = |qemu| qemu.send_bytes(&[0xff; 9]);
    let unknown: fn(&mut FakeQemu) = |qemu| qemu.control(&control(7, 0));
    for (say, expected) in [(no_header, "without a whole header"), (unknown, "of one version?")] {
        in_namespace(move || {
            let port = open(true);
            let mut qemu = FakeQemu::attach(&port);
            say(&mut qemu);
            wait_for("the connection to end", || !port.is_connected());
            let reason = port.disconnect_reason().unwrap();
            assert!(reason.contains(expected), "{reason}");
        });
    }
}

#[test]
fn frames_that_the_tap_refuses_are_counted() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        let watcher = Neighbour::join(1);
        qemu.send_packet(&[&PLAIN[..], &[1, 2, 3]].concat()); // no Ethernet header
        qemu.send_packet(&vec![0; MAX_BYTES + 1]);
        qemu.send("good");
        assert_eq!(watcher.receive(), "good");
        wait_for("the counters", || port.counters().frames_out == 1);
        assert_eq!(port.counters().dropped_by_tap, 2);
    });
}

/// A guest decides what its frames hold, but not what comes beside them.
#[test]
fn a_guest_cannot_speak_as_the_agent() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        let watcher = Neighbour::join(1);
        qemu.send_bytes(&control(1, 12));
        qemu.send_bytes(&control(2, ALL_OFFLOADS));
        qemu.send("still the same header");
        assert_eq!(watcher.receive(), "still the same header");
        wait_for("the counters", || port.counters().dropped_by_tap == 2);
        watcher.send("and no answer");
        assert_eq!(qemu.receive(), "and no answer");
    });
}

#[test]
fn the_header_changes_between_frames_both_ways() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        let neighbour = Neighbour::join(1);
        for (round, bytes) in [12, 10, 12].into_iter().enumerate() {
            qemu.send(&format!("before {round}"));
            let before = port.counters().frames_in;
            neighbour.send("on its way");
            wait_for("a frame on its way", || port.counters().frames_in > before);
            assert!(qemu.change_header(bytes) > 0, "what was on its way is discarded");
            qemu.send(&format!("after {round}"));
            assert_eq!(neighbour.receive(), format!("before {round}"));
            assert_eq!(neighbour.receive(), format!("after {round}"));
            neighbour.send("answer");
            assert_eq!(qemu.receive(), "answer");
        }
        // A standby is answered too.
        drop(port);
        let port = open(false);
        FakeQemu::attach(&port).change_header(12);
    });
}

#[test]
fn a_long_segment_leaves_as_frames_that_others_understand() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        let neighbour = Neighbour::join(1);
        qemu.change_header(12);
        let payload: Vec<u8> = (0..40_000u32).map(|n| (n % 251) as u8).collect();
        qemu.send_packet(&long_segment(GUEST, neighbour.mac(), &payload));
        let mut heard = Vec::new();
        while heard.len() < payload.len() {
            let part = neighbour.next(tcp_payload);
            assert!(part.len() <= CUT_BYTES, "{}", part.len());
            heard.extend(part);
        }
        assert!(heard == payload);
        wait_for("the counters", || port.counters().frames_out == 1);
        assert_eq!(port.counters().bytes_out, 40_054, "it left this port in one piece");
    });
}

#[test]
fn a_long_segment_arrives_whole_where_the_driver_takes_it() {
    in_namespace(|| {
        let port = open(true);
        let mut qemu = FakeQemu::attach(&port);
        let neighbour = Neighbour::join(1);
        let payload: Vec<u8> = (0..40_000u32).map(|n| (n % 251) as u8).collect();
        let segment = long_segment(neighbour.mac(), GUEST, &payload);
        let next = |qemu: &mut FakeQemu, read: fn(&[u8]) -> Option<Vec<u8>>| {
            (0..).find_map(|_| read(&qemu.receive_frame())).unwrap()
        };

        neighbour.send_packet(&segment);
        let mut heard = Vec::new();
        while heard.len() < payload.len() {
            let part = next(&mut qemu, tcp_payload);
            assert!(part.len() <= CUT_BYTES, "{}", part.len());
            heard.extend(part);
        }
        assert!(heard == payload, "a driver without offloads gets what the wire carries");

        qemu.change_header(12);
        qemu.offer(ALL_OFFLOADS);
        qemu.send("offered");
        assert_eq!(neighbour.receive(), "offered");
        neighbour.send_packet(&segment);
        // TCP over IPv4: whatever else is on a bridge is not meant.
        let whole: fn(&[u8]) -> Option<Vec<u8>> =
            |frame| (frame[12..14] == [8, 0] && frame[23] == 6).then(|| frame[54..].to_vec());
        let heard = next(&mut qemu, whole);
        assert!(heard == payload, "{} bytes came of {}", heard.len(), payload.len());

        // Another QEMU begins without.
        let mut qemu = FakeQemu::attach(&port);
        neighbour.send_packet(&segment);
        assert_eq!(next(&mut qemu, tcp_payload).len(), CUT_BYTES);
    });
}

/// It may be another host's guest by then: nothing leaves before the next one opens the port.
#[test]
fn what_comes_and_goes_while_nobody_has_a_port_waits_for_whoever_adopts_it() {
    in_namespace(|| {
        let last = open(true);
        let mut qemu = FakeQemu::attach(&last);
        let neighbour = Neighbour::join(1);
        neighbour.send("to the last");
        assert_eq!(qemu.receive(), "to the last");
        assert!(last.hold_inbound(DEADLINE), "QEMU has not taken what it was given");
        let guest = last.duplicate_guest().unwrap().expect("QEMU is there");
        let tap = last.duplicate_tap().unwrap();
        drop(last);
        neighbour.send("to nobody");
        qemu.send("by nobody");

        let next = Port::adopt(config(false), guest, tap, Arc::new(|| {})).unwrap();
        let deadline = Instant::now() + DEADLINE;
        while next.held_frames() == 0 {
            assert!(Instant::now() < deadline, "the frame is not held");
            thread::sleep(Duration::from_millis(1));
        }
        next.go_live();
        assert_eq!(qemu.receive(), "to nobody");
        next.open_gate();
        assert_eq!(neighbour.receive(), "by nobody");
        neighbour.send("to the next");
        assert_eq!(qemu.receive(), "to the next");
    });
}

/// Regression: a pause did not end while a QEMU that had been taken over sent frames.
#[test]
fn a_pause_takes_what_a_socket_holds_and_does_not_wait_for_more() {
    for (socket_bytes, frame_bytes, is_endless) in
        [(32 << 20, 60, false), (32 << 20, 60_000, false), (96 << 20, 60_000, true)]
    {
        in_namespace(move || {
            let port = open(true);
            let qemu = FakeQemu::attach(&port);
            let [_, note] = port.duplicate_guest().unwrap().unwrap();
            let (ours, guests) =
                socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
                    .unwrap();
            setsockopt(&guests, sockopt::SndBufForce, &socket_bytes).unwrap();
            let packet = [&PLAIN[..10], &frame(GUEST, &"x".repeat(frame_bytes))].concat();
            let fill = || send(guests.as_raw_fd(), &packet, MsgFlags::MSG_DONTWAIT);
            let full = std::iter::from_fn(|| fill().ok()).count();
            assert!(full * frame_bytes > 1 << 20, "{full} frames");
            port.hold(Epoch(1));
            port.adopt_guest([ours, note]).unwrap();
            port.drain_and_barrier(Epoch(2));
            assert_eq!(!port.is_connected(), is_endless, "{full} frames");
            if is_endless {
                let reason = port.disconnect_reason().unwrap();
                assert!(reason.contains("goes on sending"), "{reason}");
            }
            drop(qemu);
        });
    }
}
