//! A chunk as it lies in the store: how it is packed, how long it is, its content.

use super::bytes::Reader;
use crate::ChunkId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// Units in a full chunk of an area: 256 KiB. A demand fault waits for one chunk, 5 ms at
/// 50 MB/s, and gets its neighbours with it.
pub const CHUNK_UNITS: usize = 64;

/// The size of the pieces in which what is not an area (maps, device state, frames) is stored.
pub const BLOB_CHUNK_BYTES: usize = 1 << 20;

/// The most that a chunk may say it unpacks to.
const MAX_CONTENT: usize = BLOB_CHUNK_BYTES;

const PLAIN: u8 = 0;
const LZ4: u8 = 1;

/// The packing of chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Compression {
    /// Chunks as they are.
    None,
    /// Chunks packed with LZ4, where that makes them smaller.
    #[default]
    Lz4,
}

impl FromStr for Compression {
    type Err = String;

    fn from_str(text: &str) -> Result<Compression, String> {
        match text {
            "none" => Ok(Compression::None),
            "lz4" => Ok(Compression::Lz4),
            _ => Err(format!("{text:?} is no compression; there are none and lz4")),
        }
    }
}

/// Bytes that are not the chunk that they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadChunk {
    /// Bytes that cannot be unpacked.
    #[error("it cannot be unpacked")]
    Unreadable,
    /// Bytes that say that they unpack to more than a chunk has.
    #[error("it says that it unpacks to {0} bytes, more than any chunk")]
    TooLong(u32),
    /// Bytes that unpack to something else.
    #[error("its content has the checksum {0}")]
    Checksum(ChunkId),
    /// Bytes that were not sealed as this chunk with the store's key.
    #[error("it was changed, or put in another's place: it is not what was sealed with the key")]
    Forged,
}

/// The chunk with this content, as it is stored.
pub(crate) fn encode_chunk(content: &[u8], compression: Compression) -> Vec<u8> {
    assert!(content.len() <= MAX_CONTENT, "a chunk of {} bytes", content.len());
    let packed = match compression {
        Compression::None => None,
        Compression::Lz4 => {
            Some(lz4_flex::block::compress(content)).filter(|packed| packed.len() < content.len())
        }
    };
    let (kind, payload) = match &packed {
        Some(packed) => (LZ4, &packed[..]),
        None => (PLAIN, content),
    };
    let length = (content.len() as u32).to_le_bytes();
    [&[kind][..], &length, payload].concat()
}

/// The content of chunk `id`, checked.
pub(crate) fn decode_chunk(id: ChunkId, stored: &[u8]) -> Result<Vec<u8>, BadChunk> {
    let mut reader = Reader(stored);
    let header = reader.u8().and_then(|kind| Ok((kind, reader.u32()?)));
    let (kind, length) = header.map_err(|_| BadChunk::Unreadable)?;
    if length as usize > MAX_CONTENT {
        return Err(BadChunk::TooLong(length));
    }
    let content = match kind {
        PLAIN => reader.0.to_vec(),
        LZ4 => lz4_flex::block::decompress(reader.0, length as usize)
            .map_err(|_| BadChunk::Unreadable)?,
        _ => return Err(BadChunk::Unreadable),
    };
    match ChunkId::of(&content) {
        found if found == id => Ok(content),
        found => Err(BadChunk::Checksum(found)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_was_stored_comes_back_and_damage_is_found(
            content in proptest::collection::vec(0..4u8, 1..3000),
            plain in any::<bool>(), at in any::<prop::sample::Index>(), bit in 0..8u32,
        ) {
            let packing = if plain { Compression::None } else { Compression::Lz4 };
            let id = ChunkId::of(&content);
            let mut stored = encode_chunk(&content, packing);
            prop_assert_eq!(decode_chunk(id, &stored), Ok(content.clone()));
            let at = at.index(stored.len());
            stored[at] ^= 1u8 << bit;
            // Damage that leaves the content whole is none: a plain chunk's length, say.
            prop_assert!(decode_chunk(id, &stored).map_or(true, |read| read == content));
            prop_assert!(decode_chunk(id, &stored[..at]).is_err());
        }

        #[test]
        fn any_bytes_are_refused_without_a_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0..3u8, length in 0..5000u32,
        ) {
            let id = ChunkId::of(b"another");
            prop_assert!(decode_chunk(id, &bytes).is_err());
            let bytes = [&[kind][..], &length.to_le_bytes(), &bytes].concat();
            prop_assert!(decode_chunk(id, &bytes).is_err());
        }
    }

    #[test]
    fn a_chunk_that_claims_too_much_is_not_unpacked() {
        let stored = [&[LZ4][..], &u32::MAX.to_le_bytes(), &[0; 9]].concat();
        assert_eq!(decode_chunk(ChunkId::of(b""), &stored), Err(BadChunk::TooLong(u32::MAX)));
    }

    #[test]
    fn what_does_not_shrink_is_stored_as_it_is() {
        let noise: Vec<u8> = (0..40u8).flat_map(|n| *blake3::hash(&[n]).as_bytes()).collect();
        let stored = encode_chunk(&noise, Compression::Lz4);
        assert_eq!((stored[0], stored.len()), (PLAIN, noise.len() + 5));
        assert!(encode_chunk(&[7; 4096], Compression::Lz4).len() < 100);
    }
}
