use super::super::batch::take_first;
use super::*;
use understudy_snapshot::{ENVELOPE_BYTES, Incarnation, Member, SnapshotNumber};

fn presence() -> Presence {
    Presence { incarnation: Incarnation(1), members: Vec::new(), names: None, answer: false }
}

fn sign(number: u64) -> Envelope {
    let (from, to) = (Member(0), Member(1));
    Envelope { from, to, incarnation: Incarnation(1), number: SnapshotNumber(number) }
}

fn messages(taker: &mut Taker<'_>) -> Vec<Vec<u8>> {
    let (kind, batch) = taker.next().unwrap();
    assert_eq!(kind, Kind::Frames);
    let mut rest = &batch[..];
    let all = std::iter::from_fn(|| take_first(&mut rest).unwrap());
    all.map(<[u8]>::to_vec).collect()
}

#[test]
fn a_connection_begins_with_who_is_here_and_every_number() {
    let way = Outgoing::new();
    let mut taker = Taker::new(&way);
    way.put(b"lost: there is no connection", false);
    way.open(&presence(), &[sign(7)]);
    way.put(b"frame", true);
    assert_eq!(taker.next().unwrap().0, Kind::Presence);
    assert_eq!(messages(&mut taker), [&sign(7).encode()[..], b"frame"]);
}

#[test]
fn presence_keeps_its_place_among_the_frames() {
    let way = Outgoing::new();
    let mut taker = Taker::new(&way);
    way.open(&presence(), &[]);
    taker.next().unwrap();
    way.put(b"before", true);
    way.put_presence(&presence(), &[sign(7)]);
    way.put(b"behind", true);
    assert_eq!(messages(&mut taker), [b"before"]);
    assert_eq!(taker.next().unwrap().0, Kind::Presence);
    assert_eq!(messages(&mut taker), [&sign(7).encode()[..], b"behind"]);
}

#[test]
fn frames_are_lost_when_too_many_wait_and_signs_never() {
    let way = Outgoing::new();
    let mut taker = Taker::new(&way);
    way.open(&presence(), &[]);
    taker.next().unwrap();
    let frame = vec![0; 1 << 20];
    (0..20).for_each(|_| way.put(&frame, true));
    (0..20).for_each(|number| way.put(&sign(number).encode(), false));
    let mut sizes = Vec::new();
    while sizes.iter().filter(|size| **size == ENVELOPE_BYTES).count() < 20 {
        sizes.extend(messages(&mut taker).iter().map(Vec::len));
    }
    assert_eq!(sizes.iter().filter(|size| **size == 1 << 20).count(), QUEUE_BYTES >> 20);
}

#[test]
fn a_lost_connection_takes_nothing_from_its_successor() {
    let way = Outgoing::new();
    let mut taker = Taker::new(&way);
    let first = way.open(&presence(), &[]);
    way.put(b"lost with it", true);
    way.close(first);
    assert!(!way.is_up() && taker.next().is_none());
    way.put(b"lost", true);
    way.open(&presence(), &[]);
    way.put(b"frame", true);
    way.close(first);
    assert!(way.is_up());
    assert_eq!(taker.next().unwrap().0, Kind::Presence);
    assert_eq!(messages(&mut taker), [b"frame"]);
    way.end();
    assert!(taker.next().is_none());
}
