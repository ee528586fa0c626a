//! Pages that the backup has on its mirror already (Remus 5, introspection).

use crate::Page;
use understudy_protocol::{DiskIndex, PAGE_SIZE};

/// Block of a disk that has the size of a page, and begins at a multiple of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiskBlock {
    /// The disk.
    pub disk: DiskIndex,
    /// Its offset divided by [`PAGE_SIZE`].
    pub number: u64,
}

impl DiskBlock {
    /// Offset where it begins, in bytes; none if no disk is that large.
    pub fn offset(self) -> Option<u64> {
        self.number.checked_mul(PAGE_SIZE as u64)
    }
}

/// 128 bits of BLAKE3. The guest chooses what is hashed, and must not be able to make two
/// pages that are taken for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageHash([u8; 16]);

impl PageHash {
    /// The hash of a page.
    pub fn of(page: &Page) -> PageHash {
        let hash = blake3::hash(page);
        PageHash(*hash.as_bytes().first_chunk().expect("it has 32 bytes"))
    }
}

/// The page is what this block of a disk holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reference {
    /// Block that has the content.
    pub block: DiskBlock,
    /// Hash that the content must have: a mirror that holds something else is found out.
    pub hash: PageHash,
}

impl Reference {
    /// Bytes in a message, beside the page's entry.
    pub const BYTES: usize = 26;

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..2].copy_from_slice(&self.block.disk.0.to_le_bytes());
        bytes[2..10].copy_from_slice(&self.block.number.to_le_bytes());
        bytes[10..].copy_from_slice(&self.hash.0);
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Reference {
        let (disk, rest) = bytes.split_first_chunk().expect("there are 26");
        let (number, hash) = rest.split_first_chunk().expect("there are 24");
        let disk = DiskIndex(u16::from_le_bytes(*disk));
        let block = DiskBlock { disk, number: u64::from_le_bytes(*number) };
        Reference { block, hash: PageHash(hash.try_into().expect("16 are left")) }
    }
}
