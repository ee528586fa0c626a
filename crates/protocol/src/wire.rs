//! The messages between two hosts and their bytes (docs/WIRE.md).
//!
//! Every message is a fixed header, with a checksum over the rest of the header
//! and the payload, then the payload. A decoder never allocates more than
//! [`MAX_PAYLOAD`] and a wrong byte anywhere is an error, never a message.

mod disk;
mod kind;
mod version;

use crate::Epoch;
pub use disk::{DiskRange, DiskWrite};
pub use kind::Kind;
use std::borrow::Cow;
use std::fmt;
pub use version::{
    FIRST_NEGOTIATED, FIRST_WITH_FAILED_MIRRORS, FIRST_WITH_STATE_PARTS, LEAST_WIRE_VERSION,
    SPOKEN, WIRE_VERSION, WireVersion,
};

/// Bytes of a message header.
pub const HEADER_BYTES: usize = 24;

/// The largest payload, in bytes.
pub const MAX_PAYLOAD: usize = 4 << 20;

const MAGIC: [u8; 4] = *b"USTD";

/// The reason why bytes are not a message. The connection must be dropped.
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
        /// Checksum computed here.
        found: u32,
        /// Checksum sent along.
        expected: u32,
    },
    /// The payload is malformed although its checksum is right.
    #[error("malformed {kind:?} message: {what}")]
    Malformed {
        /// The message's kind.
        kind: Kind,
        /// The fault.
        what: Cow<'static, str>,
    },
    /// The sender has no business with this kind of message, here.
    #[error("unexpected {kind:?} message from the {from}")]
    Unexpected {
        /// The message's kind.
        kind: Kind,
        /// The side that sent it.
        from: &'static str,
    },
}

/// A message header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The kind of the message.
    pub kind: Kind,
    /// Bytes of payload.
    pub length: usize,
    /// The epoch that the message belongs to; of some kinds another number, or 0. Who sends and
    /// receives names it.
    pub epoch: Epoch,
    checksum: u32,
}

impl Header {
    /// The header for a payload made of `parts`, in order.
    ///
    /// # Errors
    /// [`WireError::TooLarge`]: nobody would take it.
    pub fn for_payload(kind: Kind, epoch: Epoch, parts: &[&[u8]]) -> Result<Header, WireError> {
        let length = parts.iter().map(|part| part.len()).sum();
        if length > MAX_PAYLOAD {
            return Err(WireError::TooLarge(length));
        }
        let mut header = Header { kind, length, epoch, checksum: 0 };
        header.checksum = header.checksum_over(parts);
        Ok(header)
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

    /// The error of a message that is not what its kind says.
    pub fn malformed(&self, what: impl Into<Cow<'static, str>>) -> WireError {
        WireError::Malformed { kind: self.kind, what: what.into() }
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
    /// The kind of the message, and its epoch.
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
    /// A message of `kind` with a payload that is known to be small; of any other
    /// [`Header::for_payload`] is asked.
    pub fn new(kind: Kind, epoch: Epoch, payload: Vec<u8>) -> Message {
        let header = Header::for_payload(kind, epoch, &[&payload]);
        Message { header: header.expect("it is small"), payload }
    }

    /// The error of a message that is not what its kind says.
    pub fn malformed(&self, what: impl Into<Cow<'static, str>>) -> WireError {
        self.header.malformed(what)
    }
}

/// The progress of a backup in lockstep: the payload of [`Kind::Progress`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogProgress {
    /// Bytes of log that it has executed.
    pub position: u64,
    /// Instructions that it has executed, as of the last event.
    pub instructions: u64,
    /// Time since the oldest batch came that it has not executed whole, in microseconds.
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

    // It was a panic of the thread that sends.
    #[test]
    fn what_is_too_large_for_a_message_is_an_error() {
        let half = vec![7; MAX_PAYLOAD / 2];
        let header = |parts: &[&[u8]]| Header::for_payload(Kind::Pages, Epoch(1), parts);
        assert_eq!(header(&[&half, &half]).unwrap().length, MAX_PAYLOAD);
        let too_large = header(&[&half, &half, &[7]]);
        assert_eq!(too_large, Err(WireError::TooLarge(MAX_PAYLOAD + 1)));
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
        }
    }
}
