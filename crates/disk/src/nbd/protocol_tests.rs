use super::*;
use proptest::prelude::*;

const EXPORT: u64 = 1 << 30;

fn request(flags: u16, command: u16, offset: u64, length: u32) -> [u8; REQUEST_BYTES] {
    let mut bytes = Vec::new();
    bytes.extend(REQUEST_MAGIC.to_be_bytes());
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(0xfeed_u64.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(length.to_be_bytes());
    bytes.try_into().unwrap()
}

fn command(flags: u16, command: u16, offset: u64, length: u32) -> Result<Command, Status> {
    Request::parse(&request(flags, command, offset, length)).unwrap().command(EXPORT)
}

#[test]
fn requests_are_told_apart() {
    assert_eq!(command(0, COMMAND_READ, 4096, 512), Ok(Command::Read));
    assert_eq!(command(FLAG_FUA, COMMAND_WRITE, 0, 1), Ok(Command::Write { fua: true }));
    assert_eq!(command(0, COMMAND_FLUSH, 0, 0), Ok(Command::Flush));
    assert_eq!(command(0, COMMAND_TRIM, 0, u32::MAX >> 2), Ok(Command::Trim { fua: false }));
    assert_eq!(
        command(FLAG_NO_HOLE, COMMAND_WRITE_ZEROES, 0, 4096),
        Ok(Command::WriteZeroes { fua: false, no_hole: true })
    );
    assert_eq!(command(0, COMMAND_DISCONNECT, 0, 0), Ok(Command::Disconnect));
}

#[test]
fn unknown_commands_and_flags_are_invalid() {
    assert_eq!(command(0, 77, 0, 0), Err(Status::Invalid));
    assert_eq!(command(FLAG_NO_HOLE, COMMAND_WRITE, 0, 512), Err(Status::Invalid));
    let fast_zero = 1 << 4; // never offered
    assert_eq!(command(fast_zero, COMMAND_WRITE_ZEROES, 0, 512), Err(Status::Invalid));
}

#[test]
fn ranges_outside_the_export_are_refused_without_overflow() {
    assert_eq!(command(0, COMMAND_READ, EXPORT - 512, 512), Ok(Command::Read));
    assert_eq!(command(0, COMMAND_READ, EXPORT - 511, 512), Err(Status::Invalid));
    assert_eq!(command(0, COMMAND_READ, u64::MAX, 512), Err(Status::Invalid));
    assert_eq!(command(0, COMMAND_WRITE, EXPORT, 1), Err(Status::NoSpace));
    assert_eq!(command(0, COMMAND_TRIM, u64::MAX - 1, 512), Err(Status::Invalid));
    assert_eq!(command(0, COMMAND_WRITE_ZEROES, EXPORT, 512), Err(Status::NoSpace));
}

#[test]
fn payloads_are_bounded_before_anything_is_allocated() {
    let write = |length| Request::parse(&request(0, COMMAND_WRITE, 0, length)).unwrap();
    assert_eq!(write(MAX_PAYLOAD_BYTES).payload_bytes(), Ok(MAX_PAYLOAD_BYTES as usize));
    assert_eq!(
        write(MAX_PAYLOAD_BYTES + 1).payload_bytes(),
        Err(Malformed::WriteLength(MAX_PAYLOAD_BYTES + 1))
    );
    let read = command(0, COMMAND_READ, 0, MAX_PAYLOAD_BYTES + 1);
    assert_eq!(read, Err(Status::Invalid));

    let mut header = [0; OPTION_HEADER_BYTES];
    header[..8].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
    header[12..].copy_from_slice(&u32::MAX.to_be_bytes());
    let malformed = OptionHeader::parse(&header).unwrap_err();
    assert_eq!(malformed, Malformed::OptionLength { code: 0, bytes: u32::MAX });
}

#[test]
fn wrong_magic_is_malformed() {
    let mut bytes = request(0, COMMAND_READ, 0, 512);
    bytes[0] ^= 1;
    assert!(matches!(Request::parse(&bytes), Err(Malformed::RequestMagic(_))));
    assert!(matches!(
        OptionHeader::parse(&[0; OPTION_HEADER_BYTES]),
        Err(Malformed::OptionMagic(0))
    ));
    assert!(matches!(ClientFlags::parse([0; 4]), Err(Malformed::ClientFlags(0))));
    assert!(matches!(ClientFlags::parse([0xff; 4]), Err(Malformed::ClientFlags(_))));
}

#[test]
fn the_export_offers_what_is_served_and_is_not_read_only() {
    let facts = export_facts(EXPORT);
    assert_eq!(facts[..8], EXPORT.to_be_bytes());
    let flags = u16::from_be_bytes([facts[8], facts[9]]);
    assert_eq!(flags, 0b0110_1101, "has flags, flush, fua, trim, write zeroes");
}

#[test]
fn errors_of_the_kernel_become_those_of_the_protocol() {
    use nix::errno::Errno;
    let status = |errno: Errno| Status::from(&Err(io::Error::from(errno)));
    assert_eq!(Status::from(&Ok(())), Status::Ok);
    assert_eq!(status(Errno::EPERM), Status::NotPermitted);
    assert_eq!(status(Errno::ENOSPC), Status::NoSpace);
    assert_eq!(status(Errno::EDQUOT), Status::NoSpace);
    assert_eq!(status(Errno::EFBIG), Status::NoSpace);
    assert_eq!(status(Errno::ENOMEM), Status::NoMemory);
    assert_eq!(status(Errno::EIO), Status::Io);
    assert_eq!(status(Errno::EBADF), Status::Io);
}

#[test]
fn info_requests_must_be_whole() {
    let mut data = Vec::new();
    data.extend(5_u32.to_be_bytes());
    data.extend(b"disk0");
    data.extend(2_u16.to_be_bytes());
    data.extend(INFO_EXPORT.to_be_bytes());
    data.extend(INFO_BLOCK_SIZE.to_be_bytes());
    assert_eq!(
        ClientOption::parse(OPTION_GO, &data),
        ClientOption::Info { name: b"disk0", block_size: true, go: true }
    );
    for short in 0..data.len() {
        assert_eq!(ClientOption::parse(OPTION_INFO, &data[..short]), ClientOption::Invalid);
    }
    data.push(0);
    assert_eq!(ClientOption::parse(OPTION_GO, &data), ClientOption::Invalid, "trailing byte");
}

proptest! {
    #[test]
    fn no_bytes_make_the_parsers_panic(
        header in prop::array::uniform28(any::<u8>()),
        option in prop::array::uniform16(any::<u8>()),
        flags in any::<[u8; 4]>(),
        code in 0_u32..12,
        data in prop::collection::vec(any::<u8>(), 0..64),
        sound_magic in any::<bool>(),
        command in 0_u16..9,
        export in any::<u64>(),
    ) {
        let mut header = header;
        let mut option = option;
        if sound_magic {
            header[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
            header[6..8].copy_from_slice(&command.to_be_bytes());
            option[..8].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        }
        if let Ok(request) = Request::parse(&header) {
            if let Ok(bytes) = request.payload_bytes() {
                prop_assert!(bytes <= MAX_PAYLOAD_BYTES as usize);
            }
            let command = request.command(export);
            if matches!(command, Ok(Command::Write { .. } | Command::WriteZeroes { .. })) {
                prop_assert!(request.offset.checked_add(request.length.into()).unwrap() <= export);
            }
        }
        if let Ok(option) = OptionHeader::parse(&option) {
            prop_assert!(option.data_bytes <= MAX_OPTION_BYTES as usize);
        }
        let _ = ClientFlags::parse(flags);
        let _ = ClientOption::parse(code, &data);
    }
}
