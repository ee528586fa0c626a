//! The quantities that cross module borders, each with a type of its own.

use schemars::JsonSchema;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use std::str::FromStr;
use understudy_protocol::{BlockId, DiskIndex, countable};

/// Bytes of the unit in which areas are stored: a page of memory, a block of a disk.
pub const UNIT_BYTES: usize = understudy_protocol::PAGE_SIZE;

/// The number of a snapshot of a group: 1 for the first that was ever begun, whether it
/// became one or was given up. Frames between members carry it as their colour.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
)]
#[serde(transparent)]
pub struct SnapshotNumber(#[serde(deserialize_with = "countable")] pub u64);

impl SnapshotNumber {
    /// The number of the snapshot after this one.
    pub fn next(self) -> SnapshotNumber {
        SnapshotNumber(self.0 + 1)
    }
}

impl fmt::Display for SnapshotNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of times that the group was restored. What a member sent before a restore must not
/// reach a member after it: it comes from a future that has not happened.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
)]
#[serde(transparent)]
pub struct Incarnation(#[serde(deserialize_with = "incarnation")] pub u32);

impl Incarnation {
    /// More than any group has; an `Incarnation` that others name is less.
    const MOST: u32 = 0xf000_0000;

    /// That of this number, if it is one with which it can be counted.
    pub fn of(number: u64) -> Option<Incarnation> {
        u32::try_from(number).ok().filter(|number| *number < Self::MOST).map(Incarnation)
    }

    /// The one after this, if there is one.
    pub fn next(self) -> Option<Incarnation> {
        Incarnation::of(u64::from(self.0) + 1)
    }
}

fn incarnation<'a, D: Deserializer<'a>>(from: D) -> Result<u32, D::Error> {
    let number = u64::deserialize(from)?;
    let countable = Incarnation::of(number).map(|Incarnation(number)| number);
    countable.ok_or_else(|| D::Error::custom(format!("{number} is more lives than a group has")))
}

/// A member of a group, in the order of the group's definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Member(pub u16);

impl Member {
    /// Its place in a list of all members.
    pub fn index(self) -> usize {
        self.0.into()
    }
}

/// A thing that is stored as units: a RAM block or a disk of one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Area {
    /// A RAM block.
    Memory(BlockId),
    /// A disk.
    Disk(DiskIndex),
}

/// The name of a chunk in a store: the hash of its content, which is its checksum too.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId(pub [u8; 32]);

impl ChunkId {
    /// The name of a chunk with this content.
    pub fn of(content: &[u8]) -> ChunkId {
        ChunkId(*blake3::hash(content).as_bytes())
    }
}

impl fmt::Display for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChunkId({self})")
    }
}

/// Text that is no name of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a chunk's name is 64 hexadecimal digits in lower case")]
pub struct BadChunkId;

impl FromStr for ChunkId {
    type Err = BadChunkId;

    fn from_str(text: &str) -> Result<ChunkId, BadChunkId> {
        // One spelling only: a name is a key in the store.
        if text.len() != 64 || !text.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(BadChunkId);
        }
        let hash = blake3::Hash::from_hex(text).map_err(|_| BadChunkId)?;
        Ok(ChunkId(*hash.as_bytes()))
    }
}

impl Serialize for ChunkId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ChunkId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<ChunkId, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunks_name_is_written_in_one_way_only() {
        let id = ChunkId::of(b"content");
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!(id.to_string().to_uppercase().parse::<ChunkId>(), Err(BadChunkId));
        assert_eq!("ab".parse::<ChunkId>(), Err(BadChunkId));
        assert_eq!("../../../../etc".parse::<ChunkId>(), Err(BadChunkId));
    }

    // Before, the next restore was the group's first by its number, and none was possible any more.
    #[test]
    fn no_incarnation_is_named_that_has_none_after_it() {
        let read = |number: u64| serde_json::from_value::<Incarnation>(number.into());
        for number in [0, 7, 1_800_000_000] {
            let next = read(number).unwrap().next().unwrap();
            assert_eq!(read(u64::from(next.0)).unwrap().0, number as u32 + 1);
        }
        for number in [u32::MAX.into(), u64::from(u32::MAX) + 1, 0xf000_0000] {
            assert!(read(number).unwrap_err().to_string().contains("more lives"), "{number}");
        }
        assert_eq!(read(0xefff_ffff).unwrap().next(), None);
        assert_eq!(Incarnation::of(u64::from(u32::MAX) + 2), None);
    }
}
