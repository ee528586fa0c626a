//! Cards of a cluster's members on a real bridge: what they say to each other is carried by
//! whoever makes envelopes, behind output commit; and nothing that a guest was given and has
//! not read is out of sight.

mod support;

use std::sync::{Arc, Mutex};
use support::*;
use understudy_network::*;
use understudy_protocol::{CardIndex, Epoch};

const ALL: MacAddress = MacAddress([0xff; 6]);
const ONE: MacAddress = MacAddress([0x52, 0x54, 0, 0, 1, 1]);
const TWO: MacAddress = MacAddress([0x52, 0x54, 0, 0, 1, 2]);

/// Carries from one to two; before each frame it puts a colour.
struct OneWay {
    colour: Mutex<u8>,
    two: Inlet,
    carried: Mutex<Vec<Vec<u8>>>,
}

impl Fabric for OneWay {
    fn sent(&self, packet: &[u8], keep: &mut dyn FnMut(&[&[u8]])) -> bool {
        let target = addresses(packet).unwrap().0;
        if target == TWO || target == ALL {
            keep(&[&[*self.colour.lock().unwrap()], packet]);
        }
        target != TWO
    }

    fn carry(&self, message: &[u8]) {
        self.carried.lock().unwrap().push(message.to_vec());
        if message.len() > 1 {
            self.two.deliver(&message[1..]);
        }
    }

    fn is_echo(&self, packet: &[u8]) -> bool {
        addresses(packet).is_some_and(|(_, source)| source == ONE)
    }
}

impl OneWay {
    fn colours(&self) -> Vec<u8> {
        self.carried.lock().unwrap().iter().map(|message| message[0]).collect()
    }
}

struct Pair {
    one: Port,
    qemu1: FakeQemu,
    two: Port,
    qemu2: FakeQemu,
    fabric: Arc<OneWay>,
}

fn pair() -> Pair {
    let member = |mac, tap: &str| {
        let config = PortConfig { card: CardIndex(0), mac, tap: tap.into(), ..config(true) };
        Port::open(config, Arc::new(|| {})).unwrap()
    };
    let (one, two) = (member(ONE, "one"), member(TWO, "two"));
    let (qemu1, qemu2) = (FakeQemu::attach(&one), FakeQemu::attach(&two));
    let fabric = OneWay { colour: Mutex::new(1), two: two.inlet(), carried: Mutex::default() };
    let fabric = Arc::new(fabric);
    one.set_fabric(Some(fabric.clone()));
    two.set_fabric(Some(fabric.clone()));
    Pair { one, qemu1, two, qemu2, fabric }
}

fn say(qemu: &mut FakeQemu, to: MacAddress, text: &str) {
    let mut frame = frame(ONE, text);
    frame[..6].copy_from_slice(&to.0);
    qemu.send_packet(&[&PLAIN[..], &frame].concat());
}

#[test]
fn frames_between_members_are_carried_and_heard_once() {
    in_namespace(|| {
        let Pair { one, mut qemu1, two, mut qemu2, fabric: _fabric } = pair();
        let outside = Neighbour::join(9);
        say(&mut qemu1, TWO, "for two");
        say(&mut qemu1, ALL, "for all");
        say(&mut qemu1, outside.mac(), "for a stranger");
        assert_eq!(qemu2.receive(), "for two");
        assert_eq!(qemu2.receive(), "for all");
        assert_eq!(outside.receive(), "for all", "and nothing that was for two alone");
        assert_eq!(outside.receive(), "for a stranger");
        outside.send("from outside");
        assert_eq!(qemu2.receive(), "from outside", "not the echo of what was for all");
        assert_eq!(two.counters().frames_inside, 2);
        wait_for("the counters", || one.counters().frames_out == 2);
    });
}

#[test]
fn what_is_for_a_member_waits_for_its_commit() {
    in_namespace(|| {
        let Pair { one, mut qemu1, two: _two, mut qemu2, fabric } = pair();
        one.hold(Epoch(1));
        say(&mut qemu1, TWO, "of epoch 1");
        one.drain_and_barrier(Epoch(2));
        *fabric.colour.lock().unwrap() = 2;
        assert_eq!(one.waits_since(), None, "epoch 2 has no output");
        let before = boot_time();
        one.push_message(&[2]);
        assert!(one.waits_since() >= Some(before), "it waits like a frame");
        say(&mut qemu1, TWO, "of epoch 2");
        one.drain();
        assert!(fabric.colours().is_empty(), "nothing is committed");
        let mut copies = 0;
        one.held_of(Epoch(1), |_| copies += 1);
        assert_eq!(copies, 0, "a backup would send them to the bridge");

        one.release_through(Epoch(1), fresh());
        assert_eq!(qemu2.receive(), "of epoch 1");
        assert_eq!(fabric.colours(), [1]);
        one.drain_and_barrier(Epoch(3));
        one.release_through(Epoch(2), fresh());
        assert_eq!(qemu2.receive(), "of epoch 2");
        assert_eq!(fabric.colours(), [1, 2, 2], "the sign before what was sent behind it");

        say(&mut qemu1, TWO, "of a fenced host");
        one.drain();
        one.shut();
        assert_eq!(fabric.colours().len(), 3);
    });
}

#[test]
fn a_drained_card_has_sent_all_before_a_message() {
    in_namespace(|| {
        let Pair { one, mut qemu1, fabric, two: _two, qemu2: _qemu2 } = pair();
        for round in 0..200 {
            let before = fabric.colours().len();
            (0..5).for_each(|_| say(&mut qemu1, TWO, "before"));
            one.drain();
            assert_eq!(fabric.colours().len(), before + 5, "round {round}");
        }
    });
}

/// Every frame is seen in one place: the socket, or one of the queues before it.
#[test]
fn what_a_guest_has_not_read_is_seen_and_stays() {
    in_namespace(|| {
        let Pair { one: _one, mut qemu1, two, mut qemu2, fabric: _fabric } = pair();
        // More than the socket takes, so that some wait before it.
        let text = |n: usize| format!("{n:04}{}", "x".repeat(1400));
        let count = 4000;
        let see = |qemu2: &FakeQemu| {
            let end = GuestsEnd::borrow(std::process::id(), qemu2.number()).unwrap();
            let seen = two.unread(end).frames().unwrap();
            let of = |packet: &Vec<u8>| String::from_utf8(ethernet(packet)[14..].to_vec()).unwrap();
            let ours = seen.iter().filter(|packet| ethernet(packet)[12..14] == [0x88, 0xb5]);
            ours.map(of).collect::<Vec<_>>()
        };
        (0..count).for_each(|n| say(&mut qemu1, TWO, &text(n)));
        let all: Vec<_> = (0..count).map(text).collect();
        // While they move, too.
        wait_for("all frames to wait", || {
            let seen = see(&qemu2);
            assert_eq!(seen, all[..seen.len()]);
            seen.len() == count
        });
        assert!(two.counters().frames_inside < count as u64, "all of them fit into the socket");
        for n in 0..count {
            assert_eq!(qemu2.receive(), text(n), "none was taken away");
        }
        assert!(see(&qemu2).is_empty());
    });
}

/// A card that takes no long segments gets it in pieces, in order with what is behind it.
#[test]
fn a_long_segment_is_cut_up_for_who_takes_none() {
    in_namespace(|| {
        let Pair { one: _one, mut qemu1, two: _two, mut qemu2, fabric: _fabric } = pair();
        let segment = long_segment(ONE, TWO, &[7; 20_000]);
        qemu1.send_packet(&segment);
        say(&mut qemu1, TWO, "behind it");
        let mut heard = 0;
        while heard < 20_000 {
            let part = tcp_payload(&qemu2.receive_frame());
            heard += part.map_or(0, |part| part.len());
        }
        assert_eq!(qemu2.receive(), "behind it");
        qemu2.offer(ALL_OFFLOADS);
        // Its word is taken when it is read, which nothing here shows.
        let whole = (0..).any(|_| {
            qemu1.send_packet(&segment);
            let tcp = |frame: &Vec<u8>| frame[12..14] == [8, 0];
            (0..).map(|_| qemu2.receive_frame()).find(tcp).unwrap() == ethernet(&segment)
        });
        assert!(whole);
    });
}

/// The log of a restored guest is there before it runs, and comes before all else.
#[test]
fn a_standby_reads_first_what_it_was_given_first() {
    in_namespace(|| {
        let config = PortConfig { mac: TWO, tap: "two".into(), ..config(false) };
        let two = Port::open(config, Arc::new(|| {})).unwrap();
        let mut qemu2 = FakeQemu::attach(&two);
        let inlet = two.inlet();
        let packet = |text: &str| [&PLAIN[..], &frame(ONE, text)].concat();
        inlet.deliver(&packet("lost: it does not run"));
        inlet.deliver_first(&packet("of the log"));
        two.go_live();
        inlet.deliver(&packet("now"));
        assert_eq!(qemu2.receive(), "of the log");
        assert_eq!(qemu2.receive(), "now");
        assert!(inlet.is_open());
        drop(two);
        assert!(!inlet.is_open());
    });
}
