//! The bytes of the NBD protocol, without I/O.

use std::io;

/// Opens the server's greeting.
const NBD_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Says newstyle in the greeting, and opens each option of the client.
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;

/// Handshake flags of both sides: fixed newstyle, and no padding after EXPORT_NAME.
const FIXED_NEWSTYLE: u16 = 1;
const NO_ZEROES: u16 = 2;

/// Abilities of this server: HAS_FLAGS, SEND_FLUSH, SEND_FUA, SEND_TRIM,
/// SEND_WRITE_ZEROES. Never READ_ONLY: a passive mirror's connection goes live later.
const TRANSMISSION_FLAGS: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6;

const OPTION_EXPORT_NAME: u32 = 1;
const OPTION_ABORT: u32 = 2;
const OPTION_LIST: u32 = 3;
const OPTION_INFO: u32 = 6;
const OPTION_GO: u32 = 7;

const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

const COMMAND_READ: u16 = 0;
const COMMAND_WRITE: u16 = 1;
const COMMAND_DISCONNECT: u16 = 2;
const COMMAND_FLUSH: u16 = 3;
const COMMAND_TRIM: u16 = 4;
const COMMAND_WRITE_ZEROES: u16 = 6;

const FLAG_FUA: u16 = 1;
const FLAG_NO_HOLE: u16 = 2;

/// Most bytes in one READ or WRITE: the protocol's customary limit, and QEMU's.
pub(crate) const MAX_PAYLOAD_BYTES: u32 = 32 * 1024 * 1024;
/// Most bytes in one option: a name (up to 4096 bytes) and some information requests.
const MAX_OPTION_BYTES: u32 = 8 * 1024;

pub(crate) const GREETING_BYTES: usize = 18;
pub(crate) const OPTION_HEADER_BYTES: usize = 16;
pub(crate) const REQUEST_BYTES: usize = 28;
pub(crate) const REPLY_BYTES: usize = 16;

/// Bytes after which the stream makes no sense any more: the connection is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Malformed {
    #[error("client flags {0:#x} are unknown or lack fixed newstyle")]
    ClientFlags(u32),
    #[error("option magic is {0:#018x}")]
    OptionMagic(u64),
    #[error("option {code} carries {bytes} bytes, the limit is {MAX_OPTION_BYTES}")]
    OptionLength { code: u32, bytes: u32 },
    #[error("request magic is {0:#010x}")]
    RequestMagic(u32),
    #[error("a write of {0} bytes, the limit is {MAX_PAYLOAD_BYTES}")]
    WriteLength(u32),
}

/// Error numbers of the protocol; they are Linux's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Status {
    Ok = 0,
    NotPermitted = 1,
    Io = 5,
    NoMemory = 12,
    Invalid = 22,
    NoSpace = 28,
}

impl Status {
    /// Whether it tells of this host's disk, not of the request itself.
    pub(crate) fn is_fault(self) -> bool {
        matches!(self, Status::Io | Status::NoMemory | Status::NoSpace)
    }
}

impl From<&io::Result<()>> for Status {
    fn from(result: &io::Result<()>) -> Status {
        match result.as_ref().map_err(io::Error::kind) {
            Ok(()) => Status::Ok,
            Err(io::ErrorKind::PermissionDenied) => Status::NotPermitted,
            Err(io::ErrorKind::InvalidInput) => Status::Invalid,
            Err(io::ErrorKind::OutOfMemory) => Status::NoMemory,
            Err(
                io::ErrorKind::StorageFull
                | io::ErrorKind::QuotaExceeded
                | io::ErrorKind::FileTooLarge,
            ) => Status::NoSpace,
            Err(_) => Status::Io,
        }
    }
}

/// The server's first bytes.
pub(crate) fn greeting() -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[..8].copy_from_slice(&NBD_MAGIC.to_be_bytes());
    bytes[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
    bytes[16..].copy_from_slice(&(FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
    bytes
}

/// The client's answer to the greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClientFlags {
    /// Client wants no padding after EXPORT_NAME.
    pub(crate) no_zeroes: bool,
}

impl ClientFlags {
    pub(crate) fn parse(bytes: [u8; 4]) -> Result<ClientFlags, Malformed> {
        let flags = u32::from_be_bytes(bytes);
        let (fixed, no_zeroes) = (u32::from(FIXED_NEWSTYLE), u32::from(NO_ZEROES));
        if flags & fixed == 0 || flags & !(fixed | no_zeroes) != 0 {
            return Err(Malformed::ClientFlags(flags));
        }
        Ok(ClientFlags { no_zeroes: flags & no_zeroes != 0 })
    }
}

/// Header that precedes the data of each option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OptionHeader {
    pub(crate) code: u32,
    pub(crate) data_bytes: usize,
}

impl OptionHeader {
    pub(crate) fn parse(bytes: &[u8; OPTION_HEADER_BYTES]) -> Result<OptionHeader, Malformed> {
        let mut fields = Fields(bytes);
        let magic = fields.u64().expect("16 bytes");
        let code = fields.u32().expect("16 bytes");
        let length = fields.u32().expect("16 bytes");
        if magic != OPTION_MAGIC {
            return Err(Malformed::OptionMagic(magic));
        }
        if length > MAX_OPTION_BYTES {
            return Err(Malformed::OptionLength { code, bytes: length });
        }
        Ok(OptionHeader { code, data_bytes: length as usize })
    }
}

/// Option that the client asks for during the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientOption<'a> {
    /// Old way into transmission: no reply but the export's size.
    ExportName(&'a [u8]),
    Abort,
    List,
    /// Description of the export; with `go` transmission begins.
    Info {
        name: &'a [u8],
        block_size: bool,
        go: bool,
    },
    /// Option that is known, but whose data makes no sense.
    Invalid,
    Unsupported,
}

impl<'a> ClientOption<'a> {
    pub(crate) fn parse(code: u32, data: &'a [u8]) -> ClientOption<'a> {
        match code {
            OPTION_EXPORT_NAME => ClientOption::ExportName(data),
            OPTION_ABORT => ClientOption::Abort,
            OPTION_LIST if data.is_empty() => ClientOption::List,
            OPTION_LIST => ClientOption::Invalid,
            OPTION_INFO | OPTION_GO => {
                parse_info(data, code == OPTION_GO).unwrap_or(ClientOption::Invalid)
            }
            _ => ClientOption::Unsupported,
        }
    }
}

fn parse_info(data: &[u8], go: bool) -> Option<ClientOption<'_>> {
    let mut fields = Fields(data);
    let name_bytes = fields.u32()?;
    let name = fields.take(usize::try_from(name_bytes).ok()?)?;
    let count = fields.u16()?;
    let mut block_size = false;
    for _ in 0..count {
        block_size |= fields.u16()? == INFO_BLOCK_SIZE;
    }
    fields.0.is_empty().then_some(ClientOption::Info { name, block_size, go })
}

/// Reply of the server to an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OptionReply<'a> {
    Ack,
    /// An entry of the list.
    Server {
        name: &'a str,
    },
    /// Size and abilities.
    Export {
        bytes: u64,
    },
    /// Any alignment will do; pages are best.
    BlockSize,
    ErrUnsupported,
    ErrInvalid,
    ErrUnknown,
}

impl OptionReply<'_> {
    /// Appends the reply to the option with this code.
    pub(crate) fn encode(self, code: u32, out: &mut Vec<u8>) {
        let (kind, data) = self.kind_and_data();
        out.extend(OPTION_REPLY_MAGIC.to_be_bytes());
        out.extend(code.to_be_bytes());
        out.extend(kind.to_be_bytes());
        out.extend((data.len() as u32).to_be_bytes());
        out.extend(data);
    }

    fn kind_and_data(self) -> (u32, Vec<u8>) {
        const INFO: u32 = 3;
        const ERROR: u32 = 1 << 31;
        match self {
            OptionReply::Ack => (1, Vec::new()),
            OptionReply::Server { name } => {
                (2, [&(name.len() as u32).to_be_bytes(), name.as_bytes()].concat())
            }
            OptionReply::Export { bytes } => {
                (INFO, [&INFO_EXPORT.to_be_bytes()[..], &export_facts(bytes)].concat())
            }
            OptionReply::BlockSize => {
                let sizes = [1, 4096, MAX_PAYLOAD_BYTES].map(u32::to_be_bytes).concat();
                (INFO, [&INFO_BLOCK_SIZE.to_be_bytes()[..], &sizes].concat())
            }
            OptionReply::ErrUnsupported => (ERROR | 1, Vec::new()),
            OptionReply::ErrInvalid => (ERROR | 3, Vec::new()),
            OptionReply::ErrUnknown => (ERROR | 6, Vec::new()),
        }
    }
}

/// Size and transmission flags.
fn export_facts(bytes: u64) -> [u8; 10] {
    let mut facts = [0; 10];
    facts[..8].copy_from_slice(&bytes.to_be_bytes());
    facts[8..].copy_from_slice(&TRANSMISSION_FLAGS.to_be_bytes());
    facts
}

/// The answer to EXPORT_NAME, which has no header.
pub(crate) fn export_name_answer(bytes: u64, client: ClientFlags) -> Vec<u8> {
    let mut answer = export_facts(bytes).to_vec();
    if !client.no_zeroes {
        answer.resize(answer.len() + 124, 0);
    }
    answer
}

/// A request as it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    flags: u16,
    command: u16,
    /// The client's name for the request, opaque to the server.
    pub(crate) handle: u64,
    pub(crate) offset: u64,
    pub(crate) length: u32,
}

/// Command of a sound request, over its offset and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Read,
    Write { fua: bool },
    Flush,
    Trim { fua: bool },
    WriteZeroes { fua: bool, no_hole: bool },
    Disconnect,
}

impl Request {
    pub(crate) fn parse(bytes: &[u8; REQUEST_BYTES]) -> Result<Request, Malformed> {
        let mut fields = Fields(bytes);
        let magic = fields.u32().expect("28 bytes");
        if magic != REQUEST_MAGIC {
            return Err(Malformed::RequestMagic(magic));
        }
        Ok(Request {
            flags: fields.u16().expect("28 bytes"),
            command: fields.u16().expect("28 bytes"),
            handle: fields.u64().expect("28 bytes"),
            offset: fields.u64().expect("28 bytes"),
            length: fields.u32().expect("28 bytes"),
        })
    }

    /// Bytes of data that follow the header.
    pub(crate) fn payload_bytes(&self) -> Result<usize, Malformed> {
        match self.command {
            COMMAND_WRITE if self.length > MAX_PAYLOAD_BYTES => {
                Err(Malformed::WriteLength(self.length))
            }
            COMMAND_WRITE => Ok(self.length as usize),
            _ => Ok(0),
        }
    }

    /// Checks the request against an export of this size.
    pub(crate) fn command(&self, export_bytes: u64) -> Result<Command, Status> {
        let fua = self.flags & FLAG_FUA != 0;
        let no_hole = self.flags & FLAG_NO_HOLE != 0;
        let (command, known_flags) = match self.command {
            // FUA means nothing here, but clients may send it with any command.
            COMMAND_READ => (Command::Read, FLAG_FUA),
            COMMAND_WRITE => (Command::Write { fua }, FLAG_FUA),
            COMMAND_FLUSH => (Command::Flush, FLAG_FUA),
            COMMAND_TRIM => (Command::Trim { fua }, FLAG_FUA),
            COMMAND_WRITE_ZEROES => {
                (Command::WriteZeroes { fua, no_hole }, FLAG_FUA | FLAG_NO_HOLE)
            }
            COMMAND_DISCONNECT => return Ok(Command::Disconnect),
            _ => return Err(Status::Invalid),
        };
        if self.flags & !known_flags != 0 {
            return Err(Status::Invalid);
        }
        self.check_range(command, export_bytes).map(|()| command)
    }

    fn check_range(&self, command: Command, export_bytes: u64) -> Result<(), Status> {
        if command == Command::Read && self.length > MAX_PAYLOAD_BYTES {
            return Err(Status::Invalid);
        }
        let inside =
            self.offset.checked_add(u64::from(self.length)).is_some_and(|end| end <= export_bytes);
        match command {
            Command::Flush | Command::Disconnect => Ok(()),
            _ if inside => Ok(()),
            Command::Read | Command::Trim { .. } => Err(Status::Invalid),
            Command::Write { .. } | Command::WriteZeroes { .. } => Err(Status::NoSpace),
        }
    }
}

/// A simple reply's header; the data of a successful READ follows it.
pub(crate) fn reply(status: Status, handle: u64) -> [u8; REPLY_BYTES] {
    let mut bytes = [0; REPLY_BYTES];
    bytes[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&(status as u32).to_be_bytes());
    bytes[8..].copy_from_slice(&handle.to_be_bytes());
    bytes
}

/// Big-endian fields, taken from the front.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(count)?;
        self.0 = tail;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }
}

#[cfg(test)]
#[path = "protocol_tests.rs"]
mod tests;
