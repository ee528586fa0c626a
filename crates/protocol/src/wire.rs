//! The messages between two hosts and their bytes (docs/WIRE.md).
//!
//! Every message is a fixed header, with a checksum over the rest of the header
//! and the payload, then the payload. A decoder never allocates more than
//! [`MAX_PAYLOAD`] and a wrong byte anywhere is an error, never a message.

use crate::{DiskIndex, Epoch};
use std::fmt;

/// Version of the wire format; peers must have the same.
pub const WIRE_VERSION: u32 = 17;

/// Bytes of a message header.
pub const HEADER_BYTES: usize = 24;

/// The largest payload, in bytes.
pub const MAX_PAYLOAD: usize = 4 << 20;

const MAGIC: [u8; 4] = *b"USTD";

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// JSON: the primary's offer, first on every connection.
    Hello = 1,
    /// JSON: the backup accepts.
    Welcome = 2,
    /// Text: the sender refuses or gives up, and why.
    Refuse = 3,
    /// A piece of a file that the backup needs (kernel, initial RAM disk).
    File = 4,
    /// Everything that precedes the first synchronisation has been sent.
    Prepare = 5,
    /// JSON: the backup's QEMU stands ready.
    Ready = 6,
    /// Pages of guest memory (crate `understudy-encoding`).
    Pages = 10,
    /// Bytes written to a disk.
    DiskWrite = 11,
    /// A range of a disk that reads as zeroes now.
    DiskZero = 12,
    /// The device state.
    DeviceState = 13,
    /// The epoch is whole: counts and digest of its messages.
    EpochEnd = 14,
    /// The backup holds the whole epoch.
    Acknowledge = 20,
    /// A sign of life.
    Heartbeat = 21,
    /// The primary wants the backup to take over.
    TakeOver = 22,
    /// The primary ends protection.
    StandDown = 23,
    /// The backup forgot the VM.
    StoodDown = 24,
    /// The backup runs the VM; the epoch field holds its generation.
    Live = 25,
    /// The sender got as many messages of the session as the epoch field says.
    /// Only where there are several paths; not counted itself.
    Received = 26,
    /// The backup has the disk writes up to this epoch on stable storage.
    Settled = 27,
    /// Copies of frames that the primary's guest receives in this epoch
    /// ([`CardFrames`](crate::CardFrames)).
    Inbound = 28,
    /// Frames that the guest sent in this epoch, and that wait for its commit
    /// ([`CardFrames`](crate::CardFrames)).
    Outbound = 29,
    /// A batch of QEMU's log, which is an epoch of lockstep mode
    /// (crate `understudy-encoding`).
    Log = 30,
    /// How far the backup has executed the log ([`LogProgress`]). Lockstep mode.
    Progress = 31,
    /// The backup's QEMU does not follow the log any more: text, why. Lockstep mode.
    Diverged = 32,
    /// What disk reads gave that the log of this epoch, or of a later one, tells the ends of
    /// (crate `understudy-lockstep`). Lockstep mode, before the epoch's [`Kind::Log`].
    DiskReads = 33,
    /// How many writes of the guest, since its log began, each disk of the sender has; of the
    /// backup's, on stable storage (crate `understudy-lockstep`). Lockstep mode.
    Written = 34,
    /// JSON: the primary is about to turn to the other way of keeping up, or is not after all.
    Turn = 35,
    /// JSON: whether the backup is ready for it.
    TurnAnswer = 36,
    /// The log begins where this epoch, a checkpoint, ends. A part of it.
    LogBegins = 37,
    /// The last of the log, up to this epoch, which is a checkpoint again (crate
    /// `understudy-encoding`). A part of it.
    LogEnds = 38,
    /// A place of the log, and what the primary has there
    /// (crate `understudy-lockstep`). Lockstep mode, before log from behind that place.
    Compare = 40,
    /// What differed there (crate `understudy-lockstep`). Lockstep mode.
    Compared = 41,
    /// The backup has diverged, as comparisons show: text, why. Lockstep mode.
    Condemn = 42,
    /// Text: why the backup could not take over now; empty if it could.
    MayTakeOver = 43,
    /// JSON: an order about a snapshot of a group, or a report.
    Snapshot = 45,
    /// JSON: an order about the restore of a group, or a report.
    Restore = 46,
    /// JSON: the backup is to keep what it has at the end of this epoch, for a snapshot. Part of
    /// the epoch.
    Keep = 47,
    /// JSON: what became of it.
    Kept = 48,
    /// The snapshot, whose number is in the epoch field, is given up: nothing is to be kept for it.
    LetGo = 49,
    /// Frames between the members of a cluster, each with its length and its envelope before
    /// it (crate `understudy-snapshot`). On a connection of their own.
    Frames = 50,
    /// JSON: which members of a cluster run on the sender's host, with their cards.
    Presence = 51,
    /// What the guest said on its console in this epoch, and that waits for its commit. Only
    /// where that was asked for; in lockstep the backup's guest says it itself.
    Console = 52,
    /// JSON: a medium that is about to be put into a CD-ROM drive of the VM; the backup looks
    /// whether it has the same.
    MediumAsked = 53,
    /// JSON: whether it has.
    MediumAnswer = 54,
    /// JSON: the medium that a CD-ROM drive has from this epoch on. A part of it.
    Medium = 55,
    /// The backup reads nothing at present and works: the epoch field says how many bytes it has
    /// applied.
    Works = 56,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Kind> {
        use Kind::*;
        [
            Hello,
            Welcome,
            Refuse,
            File,
            Prepare,
            Ready,
            Pages,
            DiskWrite,
            DiskZero,
            DeviceState,
            EpochEnd,
            Acknowledge,
            Heartbeat,
            TakeOver,
            StandDown,
            StoodDown,
            Live,
            Received,
            Settled,
            Inbound,
            Outbound,
            Log,
            Progress,
            Diverged,
            DiskReads,
            Written,
            Turn,
            TurnAnswer,
            LogBegins,
            LogEnds,
            Compare,
            Compared,
            Condemn,
            MayTakeOver,
            Snapshot,
            Restore,
            Keep,
            Kept,
            LetGo,
            Frames,
            Presence,
            Console,
            MediumAsked,
            MediumAnswer,
            Medium,
            Works,
        ]
        .into_iter()
        .find(|kind| *kind as u8 == byte)
    }
}

/// Why bytes are not a message. The connection must be dropped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The header does not begin as every header does.
    #[error("the peer does not speak Understudy's protocol (bad magic {0:02x?})")]
    Magic([u8; 4]),
    /// The peer wants TLS, this side does not.
    #[error("the peer speaks TLS: this host's configuration needs [tls], too")]
    Tls,
    /// An unknown kind of message.
    #[error("unknown message kind {0}")]
    Kind(u8),
    /// The header's own check does not fit it.
    #[error("corrupt header of a message")]
    Header,
    /// The payload would be larger than allowed.
    #[error("message of {0} bytes is larger than the {MAX_PAYLOAD} allowed")]
    TooLarge(usize),
    /// The checksum does not fit the bytes.
    #[error("corrupt {kind:?} message: checksum {found:08x}, expected {expected:08x}")]
    Checksum {
        /// The message's kind.
        kind: Kind,
        /// Computed here.
        found: u32,
        /// Sent along.
        expected: u32,
    },
    /// The payload is malformed although its checksum is right.
    #[error("malformed {kind:?} message: {what}")]
    Malformed {
        /// The message's kind.
        kind: Kind,
        /// What is wrong.
        what: &'static str,
    },
}

/// A message header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the message is.
    pub kind: Kind,
    /// Bytes of payload.
    pub length: usize,
    /// The epoch that the message belongs to, where it belongs to one.
    pub epoch: Epoch,
    checksum: u32,
}

impl Header {
    /// The header for a payload made of `parts`, in order.
    pub fn for_payload(kind: Kind, epoch: Epoch, parts: &[&[u8]]) -> Header {
        let length = parts.iter().map(|part| part.len()).sum();
        assert!(length <= MAX_PAYLOAD, "messages are made no larger than MAX_PAYLOAD");
        let mut header = Header { kind, length, epoch, checksum: 0 };
        header.checksum = header.checksum_over(parts);
        header
    }

    /// The header's bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..20].copy_from_slice(&self.checked_fields());
        bytes[20..24].copy_from_slice(&self.checksum.to_le_bytes());
        let check = header_check(&bytes);
        bytes[6..8].copy_from_slice(&check);
        bytes
    }

    /// Reads a header; the payload is still to be checked with [`Header::check`].
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, WireError> {
        let magic = [bytes[0], bytes[1], bytes[2], bytes[3]];
        if magic != MAGIC {
            // A TLS record: an alert or a handshake.
            if matches!(magic, [0x15 | 0x16, 3, ..]) {
                return Err(WireError::Tls);
            }
            return Err(WireError::Magic(magic));
        }
        let kind = Kind::from_byte(bytes[4]).ok_or(WireError::Kind(bytes[4]))?;
        let length = u32_at(bytes, 8) as usize;
        if length > MAX_PAYLOAD {
            return Err(WireError::TooLarge(length));
        }
        // Before the payload is awaited: with a wrong length it might never come.
        if bytes[5] != 0 || bytes[6..8] != header_check(bytes) {
            return Err(WireError::Header);
        }
        let epoch = Epoch(u64_at(bytes, 12));
        Ok(Header { kind, length, epoch, checksum: u32_at(bytes, 20) })
    }

    /// Whether `payload` is what the header announced.
    pub fn check(&self, payload: &[u8]) -> Result<(), WireError> {
        let found = self.checksum_over(&[payload]);
        if found == self.checksum {
            Ok(())
        } else {
            Err(WireError::Checksum { kind: self.kind, found, expected: self.checksum })
        }
    }

    /// The checksum over the header's fields and the payload.
    pub fn checksum(&self) -> u32 {
        self.checksum
    }

    fn checked_fields(&self) -> [u8; 16] {
        let mut fields = [0; 16];
        fields[0] = self.kind as u8;
        fields[4..8].copy_from_slice(&(self.length as u32).to_le_bytes());
        fields[8..16].copy_from_slice(&self.epoch.0.to_le_bytes());
        fields
    }

    fn checksum_over(&self, parts: &[&[u8]]) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&self.checked_fields());
        for part in parts {
            hasher.update(part);
        }
        hasher.finalize()
    }
}

/// Half of a CRC-32 over the header without the check itself.
fn header_check(bytes: &[u8; HEADER_BYTES]) -> [u8; 2] {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&bytes[..6]);
    hasher.update(&bytes[8..]);
    let [low, high, ..] = hasher.finalize().to_le_bytes();
    [low, high]
}

/// A message, its payload checked.
#[derive(Clone, PartialEq, Eq)]
pub struct Message {
    /// What the message is, and for which epoch.
    pub header: Header,
    /// The payload.
    pub payload: Vec<u8>,
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?}(epoch {}, {} bytes)",
            self.header.kind,
            self.header.epoch,
            self.payload.len()
        )
    }
}

impl Message {
    /// A message of `kind` with this payload.
    pub fn new(kind: Kind, epoch: Epoch, payload: Vec<u8>) -> Message {
        Message { header: Header::for_payload(kind, epoch, &[&payload]), payload }
    }

    /// An error unless the message is of `kind`.
    pub fn malformed(&self, what: &'static str) -> WireError {
        WireError::Malformed { kind: self.header.kind, what }
    }
}

/// The fixed part of [`Kind::DiskWrite`] (the data follows) and [`Kind::DiskZero`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskRange {
    /// The disk.
    pub disk: DiskIndex,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

impl DiskRange {
    /// Bytes of the encoded range.
    pub const BYTES: usize = 24;

    /// The range's bytes.
    pub fn encode(&self) -> [u8; DiskRange::BYTES] {
        let mut bytes = [0; DiskRange::BYTES];
        bytes[0..2].copy_from_slice(&self.disk.0.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.offset.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    /// Reads a disk message: its range and, for a write, the data.
    pub fn decode(message: &Message) -> Result<(DiskRange, &[u8]), WireError> {
        let payload = &message.payload;
        if payload.len() < DiskRange::BYTES {
            return Err(message.malformed("no room for the range"));
        }
        let disk = DiskIndex(u16::from_le_bytes([payload[0], payload[1]]));
        let range = DiskRange { disk, offset: u64_at(payload, 8), length: u64_at(payload, 16) };
        if range.offset.checked_add(range.length).is_none_or(|end| end > i64::MAX as u64) {
            return Err(message.malformed("the range ends beyond any disk"));
        }
        let data = &payload[DiskRange::BYTES..];
        let expected = if message.header.kind == Kind::DiskWrite { range.length } else { 0 };
        if data.len() as u64 != expected {
            return Err(message.malformed("the data does not fit the range"));
        }
        Ok((range, data))
    }
}

/// How far a backup in lockstep is: the payload of [`Kind::Progress`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogProgress {
    /// Bytes of log that it has executed.
    pub position: u64,
    /// Instructions that it has executed, as of the last event.
    pub instructions: u64,
    /// How long ago the oldest batch came that it has not executed whole, in microseconds.
    pub lag_us: u64,
    /// Nanoseconds that it has waited for log.
    pub starved_ns: u64,
}

impl LogProgress {
    /// Bytes of the encoded progress.
    pub const BYTES: usize = 32;

    /// Its bytes.
    pub fn encode(&self) -> [u8; LogProgress::BYTES] {
        let mut bytes = [0; LogProgress::BYTES];
        let words = [self.position, self.instructions, self.lag_us, self.starved_ns];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads what [`LogProgress::encode`] made.
    pub fn decode(message: &Message) -> Result<LogProgress, WireError> {
        let payload = &message.payload;
        if payload.len() != LogProgress::BYTES {
            return Err(message.malformed("it has another length"));
        }
        let word = |n: usize| u64_at(payload, 8 * n);
        Ok(LogProgress {
            position: word(0),
            instructions: word(1),
            lag_us: word(2),
            starved_ns: word(3),
        })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_flipped_bit_is_noticed() {
        let message = Message::new(Kind::Pages, Epoch(9), vec![0xab; 5000]);
        let header = message.header.encode();
        for bit in 0..HEADER_BYTES * 8 {
            let mut bytes = header;
            bytes[bit / 8] ^= 1 << (bit % 8);
            // At once, not after a payload whose length may be wrong.
            assert!(Header::decode(&bytes).is_err(), "bit {bit} of the header");
        }
        for at in [0, 5, 9, 100, message.payload.len() - 1] {
            let mut payload = message.payload.clone();
            payload[at] ^= 1;
            assert!(message.header.check(&payload).is_err(), "byte {at} of the payload");
        }
    }

    #[test]
    fn disk_ranges_come_back_and_wrong_ones_do_not() {
        let range = DiskRange { disk: DiskIndex(1), offset: 4096, length: 3 };
        let mut payload = range.encode().to_vec();
        payload.extend_from_slice(b"abc");
        let message = Message::new(Kind::DiskWrite, Epoch(1), payload.clone());
        assert_eq!(DiskRange::decode(&message).unwrap(), (range, &b"abc"[..]));
        payload.pop();
        let short = Message::new(Kind::DiskWrite, Epoch(1), payload);
        assert!(DiskRange::decode(&short).is_err());
        let beyond = DiskRange { offset: u64::MAX - 1, ..range }.encode().to_vec();
        assert!(DiskRange::decode(&Message::new(Kind::DiskZero, Epoch(1), beyond)).is_err());
    }

    #[test]
    fn progress_comes_back_and_wrong_lengths_do_not() {
        let progress =
            LogProgress { position: 1, instructions: 2, lag_us: 3, starved_ns: u64::MAX };
        let message = |bytes: &[u8]| Message::new(Kind::Progress, Epoch(0), bytes.to_vec());
        assert_eq!(LogProgress::decode(&message(&progress.encode())).unwrap(), progress);
        assert!(LogProgress::decode(&message(&progress.encode()[1..])).is_err());
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..9000)) {
            if let Some(header) = bytes.first_chunk::<HEADER_BYTES>() {
                let _ = Header::decode(header);
            }
            for kind in [Kind::DiskWrite, Kind::DiskZero] {
                let message = Message::new(kind, Epoch(1), bytes.clone());
                let _ = DiskRange::decode(&message);
            }
        }
    }
}
