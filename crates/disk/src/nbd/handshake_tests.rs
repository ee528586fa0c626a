use super::*;
use proptest::prelude::*;

const FLAGS: [u8; 4] = [0, 0, 0, 3];
const REPLY_HEADER_BYTES: usize = 20;

fn export() -> Export {
    Export { name: "disk0".into(), bytes: 1 << 30 }
}

fn option(code: u32, data: &[u8]) -> Vec<u8> {
    let magic = 0x4948_4156_454f_5054_u64.to_be_bytes();
    [&magic[..], &code.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data].concat()
}

fn info(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data.extend((wanted.len() as u16).to_be_bytes());
    data.extend(wanted.iter().flat_map(|info| info.to_be_bytes()));
    data
}

/// Lets a client say all this; returns how it ended and what the server sent after its
/// greeting.
fn talk(flags: [u8; 4], options: &[Vec<u8>]) -> (Result<Outcome, ConnectionError>, Vec<u8>) {
    let input = [&flags[..], &options.concat()].concat();
    let mut output = Vec::new();
    let outcome = negotiate(&mut &input[..], &mut output, &export());
    (outcome, output.split_off(super::super::protocol::GREETING_BYTES))
}

/// The reply types in what the server sent.
fn reply_types(mut bytes: &[u8]) -> Vec<u32> {
    let mut types = Vec::new();
    while !bytes.is_empty() {
        let field = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
        types.push(field(12));
        bytes = &bytes[REPLY_HEADER_BYTES + field(16) as usize..];
    }
    types
}

#[test]
fn go_describes_the_export_and_enters_transmission() {
    for name in ["", "disk0"] {
        let (outcome, sent) = talk(FLAGS, &[option(7, &info(name, &[3]))]);
        assert_eq!(outcome.unwrap(), Outcome::Transmission);
        assert_eq!(reply_types(&sent), [3, 3, 1], "export, block size, ack");
        assert_eq!(sent[22..30], (1_u64 << 30).to_be_bytes());
    }
}

#[test]
fn export_name_is_padded_unless_the_client_wants_none() {
    let (outcome, sent) = talk([0, 0, 0, 1], &[option(1, b"disk0")]);
    assert_eq!(outcome.unwrap(), Outcome::Transmission);
    assert_eq!(sent.len(), 134);
    let (outcome, sent) = talk(FLAGS, &[option(1, b"")]);
    assert_eq!(outcome.unwrap(), Outcome::Transmission);
    assert_eq!(sent.len(), 10);
}

#[test]
fn other_exports_are_unknown() {
    let (outcome, _) = talk(FLAGS, &[option(1, b"disk1")]);
    assert!(matches!(outcome, Err(ConnectionError::UnknownExport)));
    let (outcome, sent) = talk(FLAGS, &[option(7, &info("disk1", &[])), option(2, b"")]);
    assert_eq!(outcome.unwrap(), Outcome::Abort);
    assert_eq!(reply_types(&sent), [(1 << 31) + 6, 1]);
}

#[test]
fn unknown_and_senseless_options_are_refused_and_the_client_may_go_on() {
    let tls = option(5, b"");
    let structured = option(8, b"");
    let list_with_data = option(3, b"x");
    let list = option(3, b"");
    let bad_info = option(6, b"\xff\xff\xff\xff");
    let go = option(7, &info("", &[]));
    let (outcome, sent) = talk(FLAGS, &[tls, structured, list_with_data, list, bad_info, go]);
    assert_eq!(outcome.unwrap(), Outcome::Transmission);
    let (unsupported, invalid) = ((1 << 31) + 1, (1 << 31) + 3);
    assert_eq!(reply_types(&sent), [unsupported, unsupported, invalid, 2, 1, invalid, 3, 1],);
}

#[test]
fn endless_options_come_to_an_end() {
    let lists = vec![option(3, b""); MAX_OPTIONS + 1];
    let (outcome, _) = talk(FLAGS, &lists);
    assert!(matches!(outcome, Err(ConnectionError::TooManyOptions)));
}

proptest! {
    #[test]
    fn no_client_makes_the_handshake_panic(
        flags in prop_oneof![Just(FLAGS), any::<[u8; 4]>()],
        options in prop::collection::vec(
            (0_u32..12, prop::collection::vec(any::<u8>(), 0..40)), 0..6),
        tail in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let mut said: Vec<_> = options.iter().map(|(code, data)| option(*code, data)).collect();
        said.push(tail);
        let _ = talk(flags, &said);
    }
}
