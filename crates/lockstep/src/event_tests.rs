use super::*;
use proptest::prelude::*;

/// An event, made from its parts as QEMU writes them.
fn event() -> impl Strategy<Value = Vec<u8>> {
    let array = |head: Vec<u8>| {
        proptest::collection::vec(any::<u8>(), 0..2000).prop_map(move |data| {
            let length = (data.len() as u32).to_be_bytes();
            [&head[..], &length, &data].concat()
        })
    };
    prop_oneof![
        any::<u32>().prop_map(|count| [&[0][..], &count.to_be_bytes()].concat()),
        prop_oneof![Just(3), Just(4), Just(8), Just(22), Just(28), Just(29)].prop_flat_map(
            |kind: u8| any::<u64>()
                .prop_map(move |number| [&[kind][..], &number.to_be_bytes()].concat())
        ),
        array(vec![7, 0]),
        array(vec![9, 0, 0, 0, 0, 0]),
        array(vec![23]),
        array(vec![27, 0, 0, 0, 0]),
        prop_oneof![Just(1), Just(2), Just(6), 10..=21u8, 30..=39u8].prop_map(|kind| vec![kind]),
        any::<u32>().prop_map(|result| [&[24][..], &result.to_be_bytes()].concat()),
    ]
}

proptest! {
    #[test]
    fn the_bounds_of_events_are_found_however_the_log_is_cut(
        events in proptest::collection::vec(event(), 1..40),
        cuts in proptest::collection::vec(1..700usize, 1..200),
    ) {
        let log = events.concat();
        let ends: Vec<usize> =
            events.iter().scan(0, |end, event| { *end += event.len(); Some(*end) }).collect();
        let mut scanner = EventScanner::new();
        let (mut rest, mut cuts) = (&log[..], cuts.into_iter().cycle());
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(cuts.next().unwrap().min(rest.len()));
            scanner.scan(piece).unwrap();
            rest = after;
            let seen = log.len() - rest.len();
            let whole = ends.iter().rev().find(|&&end| end <= seen).copied().unwrap_or(0);
            prop_assert_eq!(scanner.whole(), LogPosition(whole as u64));
            prop_assert_eq!(scanner.partial(), seen - whole);
        }
        prop_assert_eq!(scanner.events(), events.len() as u64);
        let ends = events.iter().filter(|event| event[0] == 8).count();
        prop_assert_eq!(scanner.disk_ends(), ends as u64);
        let last = events.last().map(|event| event[0]);
        prop_assert_eq!(scanner.ends_with_instructions(), last == Some(0));
    }

    #[test]
    fn any_bytes_are_taken_or_refused_without_a_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..4000),
        cut in 1..50usize,
    ) {
        let mut scanner = EventScanner::new();
        let _ = bytes.chunks(cut).try_for_each(|piece| scanner.scan(piece));
        prop_assert!(scanner.whole().0 + scanner.partial() as u64 <= bytes.len() as u64);
    }
}

#[test]
fn what_no_proven_qemu_writes_is_refused_where_it_stands() {
    let mut scanner = EventScanner::new();
    let refused = scanner.scan(&[1, 2, 5]).unwrap_err();
    assert_eq!(refused, BadEvent::Kind { kind: 5, at: LogPosition(2) });
    let mut scanner = EventScanner::new();
    let refused = scanner.scan(&[23, 0x7f, 0, 0, 0]).unwrap_err();
    assert_eq!(refused, BadEvent::Array { bytes: 0x7f00_0000, at: LogPosition(0) });
}
