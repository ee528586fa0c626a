// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-or-later
//! Requests that the agent change QEMU's mappings, which the daemon makes on the socket of the
//! hello: one packet, answered by eight bytes, 0 or the number of the system's error.

/// Ranges in one [`MemoryRequest::Drop`].
pub const MOST_RANGES: usize = 512;

/// A piece of QEMU's address space, on page borders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropRange {
    /// Its first address.
    pub start: u64,
    /// Its length.
    pub bytes: u64,
}

/// Request for a change of mappings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryRequest {
    /// Forgets where these pages are, so that the next access to each is noticed. Their content
    /// stays: only for memory that is a shared file. At most [`MOST_RANGES`].
    Drop(Vec<DropRange>),
    /// Makes QEMU translate the guest's code anew, so that it is read again.
    ForgetCode,
}

const DROP: u64 = 1;
const FORGET_CODE: u64 = 2;

impl MemoryRequest {
    /// Length of the longest request.
    pub const MOST_BYTES: usize = 8 + MOST_RANGES * 16;

    /// The packet.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            MemoryRequest::ForgetCode => FORGET_CODE.to_le_bytes().to_vec(),
            MemoryRequest::Drop(ranges) => {
                let mut bytes = DROP.to_le_bytes().to_vec();
                for range in ranges {
                    bytes.extend(range.start.to_le_bytes());
                    bytes.extend(range.bytes.to_le_bytes());
                }
                bytes
            }
        }
    }

    /// Understands what [`MemoryRequest::encode`] made.
    pub fn decode(bytes: &[u8]) -> Option<MemoryRequest> {
        let (kind, rest) = bytes.split_first_chunk::<8>()?;
        let number = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
        match (u64::from_le_bytes(*kind), rest.len()) {
            (FORGET_CODE, 0) => Some(MemoryRequest::ForgetCode),
            (DROP, length) if length % 16 == 0 && length / 16 <= MOST_RANGES => {
                let range = |bytes: &[u8]| DropRange {
                    start: number(&bytes[..8]),
                    bytes: number(&bytes[8..]),
                };
                Some(MemoryRequest::Drop(rest.chunks_exact(16).map(range).collect()))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_is_understood() {
        let range = DropRange { start: 0x7f00_0000_0000, bytes: 8192 };
        for request in [
            MemoryRequest::ForgetCode,
            MemoryRequest::Drop(vec![]),
            MemoryRequest::Drop(vec![range; MOST_RANGES]),
        ] {
            let bytes = request.encode();
            assert!(bytes.len() <= MemoryRequest::MOST_BYTES);
            assert_eq!(MemoryRequest::decode(&bytes), Some(request));
        }
        let too_many = MemoryRequest::Drop(vec![range; MOST_RANGES + 1]).encode();
        for bytes in [&too_many[..], b"", b"1234567", &[1; 8], &[2; 24], &too_many[..20]] {
            assert_eq!(MemoryRequest::decode(bytes), None);
        }
    }
}
