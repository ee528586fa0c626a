//! The writes of a guest to its disks, on the wire.

use super::{Message, WireError, u64_at};
use crate::DiskIndex;

/// Some bytes of a disk: all of a [`DiskZero`](super::Kind::DiskZero), the beginning of a
/// [`DiskWrite`].
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

    /// Reads a message that has a range and nothing else.
    pub fn decode(message: &Message) -> Result<DiskRange, WireError> {
        let (range, data) = DiskRange::first(message)?;
        if !data.is_empty() {
            return Err(message.malformed("something follows the range"));
        }
        Ok(range)
    }

    /// Reads the range that a message begins with; gives what follows, too.
    fn first(message: &Message) -> Result<(DiskRange, &[u8]), WireError> {
        let Some((range, rest)) = message.payload.split_first_chunk::<{ DiskRange::BYTES }>()
        else {
            return Err(message.malformed("no room for the range"));
        };
        if range[2..8] != [0; 6] {
            return Err(message.malformed("bytes of the range that must be zero are not"));
        }
        let disk = DiskIndex(u16::from_le_bytes([range[0], range[1]]));
        let range = DiskRange { disk, offset: u64_at(range, 8), length: u64_at(range, 16) };
        if range.offset.checked_add(range.length).is_none_or(|end| end > i64::MAX as u64) {
            return Err(message.malformed("the range ends beyond any disk"));
        }
        Ok((range, rest))
    }
}

/// Bytes written to a disk, as they travel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskWrite {
    range: DiskRange,
    /// The range, then the data.
    payload: Vec<u8>,
}

impl DiskWrite {
    /// Data from this offset on.
    pub fn new(disk: DiskIndex, offset: u64, data: &[u8]) -> DiskWrite {
        let range = DiskRange { disk, offset, length: data.len() as u64 };
        let mut payload = Vec::with_capacity(DiskRange::BYTES + data.len());
        payload.extend_from_slice(&range.encode());
        payload.extend_from_slice(data);
        DiskWrite { range, payload }
    }

    /// The range where the data belong.
    pub fn range(&self) -> DiskRange {
        self.range
    }

    /// The data.
    pub fn data(&self) -> &[u8] {
        &self.payload[DiskRange::BYTES..]
    }

    /// The message's payload.
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// Takes the message's payload.
    pub fn into_payload(self) -> Vec<u8> {
        self.payload
    }

    /// Reads a message.
    pub fn decode(message: Message) -> Result<DiskWrite, WireError> {
        let (range, data) = DiskRange::first(&message)?;
        if data.len() as u64 != range.length {
            return Err(message.malformed("the data do not fit the range"));
        }
        Ok(DiskWrite { range, payload: message.payload })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Epoch;
    use crate::wire::Kind;
    use proptest::prelude::*;

    fn write(payload: &[u8]) -> Result<DiskWrite, WireError> {
        DiskWrite::decode(Message::new(Kind::DiskWrite, Epoch(1), payload.to_vec()))
    }

    fn zero(payload: &[u8]) -> Result<DiskRange, WireError> {
        DiskRange::decode(&Message::new(Kind::DiskZero, Epoch(1), payload.to_vec()))
    }

    #[test]
    fn writes_come_back_and_wrong_ones_do_not() {
        let abc = DiskWrite::new(DiskIndex(1), 4096, b"abc");
        assert_eq!(write(abc.payload()), Ok(abc.clone()));
        assert_eq!(abc.data(), b"abc");
        assert!(write(&abc.payload()[..DiskRange::BYTES + 2]).is_err());
        assert!(zero(abc.payload()).is_err(), "data of a zeroed range");
        let range = abc.range();
        assert_eq!(zero(&range.encode()), Ok(range));
        let beyond = DiskRange { offset: u64::MAX - 1, ..range };
        assert!(zero(&beyond.encode()).is_err());
        let mut odd = range.encode();
        odd[7] = 1;
        assert!(zero(&odd).is_err());
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = (write(&bytes), zero(&bytes));
        }
    }
}
