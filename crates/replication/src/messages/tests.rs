use super::{Encoded, PageBatch, Payload, Piece, ToBackup, ToPrimary};
use crate::medium::{Medium, MediumAnswer, MediumFile};
use crate::turn::{Answer, Order, Wanted};
use proptest::prelude::*;
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::time::Duration;
use understudy_cluster::messages::{KeepOrder, Kept};
use understudy_lockstep::{
    Comparison, Finding, Findings, LogPosition, Place, Reading, Spot, Written,
};
use understudy_protocol::wire::{DiskRange, DiskWrite, Kind, LogProgress, Message, WireError};
use understudy_protocol::{
    CardFrames, CardIndex, DiskIndex, Epoch, EpochEnd, EpochSums, Generation, MOST_COUNTED, literal,
};
use understudy_qemu::ClockBase;
use understudy_report::{DiskReads, Mode, ProtectRequest};
use understudy_snapshot::SnapshotNumber;

/// The stuff that the variants are made of.
#[derive(Clone, Debug)]
struct Stuff {
    number: u64,
    index: u16,
    bytes: Vec<u8>,
    words: String,
    flag: bool,
}

fn stuff() -> impl Strategy<Value = Stuff> {
    let bytes = prop::collection::vec(any::<u8>(), 0..2000);
    let words = prop::collection::vec(any::<char>(), 0..40).prop_map(|it| it.into_iter().collect());
    (0..MOST_COUNTED, any::<u16>(), bytes, words, any::<bool>())
        .prop_map(|(number, index, bytes, words, flag)| Stuff { number, index, bytes, words, flag })
}

fn medium(stuff: &Stuff) -> Medium {
    let file = || MediumFile { path: stuff.words.clone().into(), hash: stuff.words.clone() };
    Medium { drive: DiskIndex(stuff.index), file: stuff.flag.then(file) }
}

fn pieces<'a>(stuff: &Stuff, parts: &'a [&'a [u8]]) -> Vec<Piece<'a>> {
    let Stuff { number, index, bytes, flag, .. } = stuff.clone();
    let (disk, offset) = (DiskIndex(index), number >> 2);
    let mut frames = CardFrames::outbound(Epoch(number), CardIndex(index));
    frames.push(&bytes);
    frames.push(&[7]);
    let keep = KeepOrder {
        group: literal("web"),
        number: SnapshotNumber(number),
        store: "/srv/snapshots".parse().unwrap(),
        compression: Default::default(),
        trace_ms: u64::from(index % 60_000).try_into().unwrap(),
    };
    vec![
        Piece::Pages(PageBatch::encoded(parts)),
        Piece::DiskWrite(DiskWrite::new(disk, offset, &bytes)),
        Piece::DiskZero(DiskRange { disk, offset, length: if flag { 0 } else { offset } }),
        Piece::DeviceState(bytes.clone()),
        Piece::DeviceStatePart(bytes.clone()),
        Piece::Outbound(frames),
        Piece::Console(bytes.clone()),
        Piece::Medium(medium(stuff)),
        Piece::Keep(keep),
        Piece::LogBegins,
        Piece::LogEnds(bytes),
    ]
}

/// One of each variant.
fn to_backup<'a>(stuff: &Stuff, parts: &'a [&'a [u8]]) -> Vec<ToBackup<'a>> {
    let Stuff { number, index, bytes, words, flag } = stuff.clone();
    let epoch = Epoch(number);
    let sums = EpochSums { messages: number, bytes: index.into(), checksum: index.into() };
    let place = Place {
        number,
        position: LogPosition(number >> 1),
        instructions: number >> 2,
        disk_requests: number >> 3,
    };
    let spot = Spot::Page { block: index, index: number };
    let reading = Reading { spot, checksum: [index as u8; 16], is_steady: flag };
    let readings = vec![reading; usize::from(index % 5)];
    let wanted = Wanted {
        mode: if flag { Mode::Lockstep } else { Mode::Checkpoint },
        disk_reads: if flag { DiskReads::Log } else { DiskReads::Backup },
        clock: ClockBase::try_from("2026-11-21T00:00:00".to_owned()).unwrap(),
        qemu_build: flag.then(|| words.clone()),
        wish: ProtectRequest { to: words.clone(), repair: flag, ..Default::default() },
    };
    let turn = if index % 3 == 0 { Order::Cancel } else { Order::Prepare(Box::new(wanted)) };
    let mut all = vec![
        ToBackup::EpochEnd(EpochEnd { epoch, sums, age: Duration::from_nanos(number) }),
        ToBackup::TakeOver { planned: flag },
        ToBackup::StandDown,
        ToBackup::Refuse(words.clone()),
        ToBackup::Log { epoch, log: Cow::Owned(bytes.clone()) },
        ToBackup::DiskReads { epoch, stream: Cow::Owned(bytes) },
        ToBackup::Written(Written(vec![number; usize::from(index % 7)])),
        ToBackup::Compare { epoch, comparison: Comparison { place, readings } },
        ToBackup::Condemn(words),
        ToBackup::Turn(turn),
        ToBackup::MediumAsked(medium(stuff)),
        ToBackup::LetGo(SnapshotNumber(number)),
    ];
    all.extend(pieces(stuff, parts).into_iter().map(|piece| ToBackup::Piece(epoch, piece)));
    all
}

/// One of each variant.
fn to_primary(stuff: &Stuff) -> Vec<ToPrimary> {
    let Stuff { number, index, words, flag, .. } = stuff.clone();
    let progress = LogProgress {
        position: number,
        instructions: number >> 1,
        lag_us: number >> 2,
        starved_ns: index.into(),
    };
    let finding = Finding { spot: Spot::Extent { disk: index, index: number }, is_certain: flag };
    let differences = vec![finding; usize::from(index % 5)];
    let kept =
        Kept { group: literal("web"), number: SnapshotNumber(number), image: Err(words.clone()) };
    let obstacle = Some(words.clone()).filter(|words| !words.is_empty());
    let refused = |words: &str| words.to_owned();
    vec![
        ToPrimary::Acknowledge(Epoch(number)),
        ToPrimary::Settled(Epoch(number)),
        ToPrimary::Works(number),
        ToPrimary::MayTakeOver(obstacle),
        ToPrimary::StoodDown,
        ToPrimary::Live(Generation(number)),
        ToPrimary::Refuse { reason: words.clone(), mirrors_failed: flag },
        ToPrimary::Diverged(words.clone()),
        ToPrimary::Progress(progress),
        ToPrimary::Written(Written(vec![number; usize::from(index % 7)])),
        ToPrimary::Compared(Findings { number, was_compared: flag, differences }),
        ToPrimary::TurnAnswer(if flag { Answer::Ready } else { Answer::Refused(refused(&words)) }),
        ToPrimary::MediumAnswer(match flag {
            true => MediumAnswer::Ready,
            false => MediumAnswer::Refused(refused(&words)),
        }),
        ToPrimary::Kept(kept),
    ]
}

/// The message that arrives.
fn arrived(encoded: &Encoded<'_>) -> Message {
    let payload = match &encoded.payload {
        Payload::Owned(bytes) => bytes.clone(),
        Payload::Borrowed(bytes) => bytes.to_vec(),
        Payload::Parts(parts) => parts.concat(),
    };
    Message::new(encoded.kind, Epoch(encoded.number), payload)
}

fn wire_of_primary(message: &ToBackup<'_>) -> Message {
    arrived(&message.encode().unwrap())
}

fn wire_of_backup(message: &ToPrimary) -> Message {
    arrived(&message.encode().unwrap())
}

/// Checks that what is taken says the same whenever it is sent on.
fn taken_or_refused<T: Debug>(
    message: Message,
    decode: impl Fn(Message) -> Result<T, WireError>,
    encode: impl Fn(&T) -> Message,
) {
    let kind = message.header.kind;
    if let Ok(taken) = decode(message) {
        let again = encode(&taken);
        assert_eq!(again.header.kind, kind);
        assert_eq!(format!("{:?}", decode(again).unwrap()), format!("{taken:?}"));
    }
}

fn try_both(message: Message) {
    taken_or_refused(message.clone(), ToBackup::decode, wire_of_primary);
    taken_or_refused(message, ToPrimary::decode, wire_of_backup);
}

fn some_stuff() -> Stuff {
    let words = "for this reason".to_owned();
    Stuff { number: 9, index: 4, bytes: b"some bytes".to_vec(), words, flag: true }
}

/// One of each variant of both directions.
fn each(stuff: &Stuff) -> (Vec<Message>, Vec<Message>) {
    let bytes = stuff.bytes.clone();
    let parts = [&bytes[..], &bytes[bytes.len() / 2..]];
    let to_backup = to_backup(stuff, &parts).iter().map(wire_of_primary).collect();
    (to_backup, to_primary(stuff).iter().map(wire_of_backup).collect())
}

#[test]
fn each_variant_has_a_kind_of_its_own_and_all_others_are_refused() {
    let (from_primary, from_backup) = each(&some_stuff());
    let check = |all: &[Message], refuses: &dyn Fn(Message) -> Option<WireError>| {
        let kinds: BTreeSet<u8> = all.iter().map(|message| message.header.kind as u8).collect();
        assert_eq!(kinds.len(), all.len(), "two variants of one kind");
        for kind in Kind::ALL {
            let error = refuses(Message::new(kind, Epoch(3), vec![0xff; 3]));
            let unexpected = matches!(error, Some(WireError::Unexpected { .. }));
            assert_eq!(unexpected, !kinds.contains(&(kind as u8)), "{kind:?}");
        }
    };
    check(&from_primary, &|message| ToBackup::decode(message).err());
    check(&from_backup, &|message| ToPrimary::decode(message).err());
}

#[test]
fn numbers_and_payloads_that_mean_nothing_are_refused() {
    let wrong = [
        (Kind::TakeOver, 2, &b""[..]),
        (Kind::TakeOver, 0, b"now"),
        (Kind::StandDown, 1, b""),
        (Kind::Condemn, 1, b"words"),
        (Kind::Condemn, 0, b"\xff"),
        (Kind::Written, 0, b"seven b"),
        (Kind::LogBegins, 4, b"log"),
        (Kind::Turn, 0, b"{}"),
        (Kind::EpochEnd, 1, b"short"),
    ];
    are_malformed(&wrong, ToBackup::decode);
    let wrong = [
        (Kind::Acknowledge, 1, &b"x"[..]),
        (Kind::StoodDown, 1, b""),
        (Kind::MayTakeOver, 0, b"\xc0"),
        (Kind::Progress, 0, b"short"),
        (Kind::Compared, 1, b""),
        (Kind::Refuse, 2, b"words"),
        (Kind::Refuse, 1, b"\xff"),
    ];
    are_malformed(&wrong, ToPrimary::decode);
}

// A primary that knows no number there would take the refusal for a broken connection, and not say why.
#[test]
fn a_refusal_has_no_number_for_a_primary_of_the_version_before() {
    let refusal = |version| ToPrimary::refusal("it is full".to_owned(), true, version);
    let number = |version| wire_of_backup(&refusal(version)).header.epoch;
    assert_eq!((number(17), number(18)), (Epoch(0), Epoch(1)));
}

fn are_malformed<T: Debug>(
    wrong: &[(Kind, u64, &[u8])],
    decode: impl Fn(Message) -> Result<T, WireError>,
) {
    for &(kind, number, payload) in wrong {
        let refused = decode(Message::new(kind, Epoch(number), payload.to_vec()));
        assert!(matches!(refused, Err(WireError::Malformed { .. })), "{refused:?}");
    }
}

#[test]
fn pages_leave_in_the_parts_that_they_are_in() {
    let parts = [&b"ab"[..], b"c"];
    let message = ToBackup::Piece(Epoch(1), Piece::Pages(PageBatch::encoded(&parts)));
    let encoded = message.encode().unwrap();
    assert!(matches!(encoded.payload, Payload::Parts(sent) if std::ptr::eq(sent, &parts[..])));
    match ToBackup::decode(arrived(&encoded)).unwrap() {
        ToBackup::Piece(Epoch(1), Piece::Pages(pages)) => assert_eq!(&*pages.bytes(), b"abc"),
        other => panic!("{other:?}"),
    }
}

proptest! {
    #[test]
    fn every_variant_comes_back(stuff in stuff()) {
        let parts = [&stuff.bytes[..], stuff.words.as_bytes()];
        for message in to_backup(&stuff, &parts) {
            let wire = wire_of_primary(&message);
            let back = ToBackup::decode(wire.clone()).unwrap();
            prop_assert_eq!(format!("{back:?}"), format!("{message:?}"));
            prop_assert!(wire_of_primary(&back) == wire);
        }
        for message in to_primary(&stuff) {
            let wire = wire_of_backup(&message);
            let back = ToPrimary::decode(wire.clone()).unwrap();
            prop_assert_eq!(format!("{back:?}"), format!("{message:?}"));
            prop_assert!(wire_of_backup(&back) == wire);
        }
    }

    #[test]
    fn what_is_cut_short_or_spoilt_never_panics(
        stuff in stuff(), at in any::<prop::sample::Index>(), bit in 0..8u8,
    ) {
        let (from_primary, from_backup) = each(&stuff);
        for Message { header, mut payload } in from_primary.into_iter().chain(from_backup) {
            if payload.is_empty() {
                continue;
            }
            let at = at.index(payload.len());
            try_both(Message::new(header.kind, header.epoch, payload[..at].to_vec()));
            payload[at] ^= 1 << bit;
            try_both(Message::new(header.kind, header.epoch, payload));
        }
    }

    #[test]
    fn random_bytes_never_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..300), number in any::<u64>(),
    ) {
        for kind in Kind::ALL {
            try_both(Message::new(kind, Epoch(number), bytes.clone()));
            try_both(Message::new(kind, Epoch(0), bytes.clone()));
        }
    }
}
