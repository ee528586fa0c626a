//! The payload of a `Pages` message (docs/WIRE.md).
//!
//! | bytes | field |
//! |-------|-------|
//! | 0–3   | pages, at most [`MOST_PAGES`] |
//! | 4–7   | bytes of the encoded part |
//! | 8–    | an entry a page: block (16 bits), page number (40 bits), kind (8 bits) |
//! |       | the encoded part: for every delta and general page its length (u16) and bytes, for every reference its 26 bytes |
//! |       | the raw part: every raw page |

use crate::{DiskBlock, Page, PageHash, Reference, delta};
use understudy_protocol::{BlockId, PAGE_SIZE, PageIndex};

/// Pages in one message, at most; bounds what a reader does for one.
pub const MOST_PAGES: usize = 1024;

pub(crate) const ZERO: u64 = 0;
pub(crate) const RAW: u64 = 1;
pub(crate) const DELTA: u64 = 2;
pub(crate) const GENERAL: u64 = 3;
pub(crate) const REFERENCE: u64 = 4;

const PREFIX: usize = 8;
const ENTRY: usize = 8;

/// Error in a `Pages` message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed Pages message: {0}")]
pub struct EncodingError(&'static str);

const NO_DELTA: EncodingError = EncodingError("a delta does not fit a page");

/// Form in which one page travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageData<'a> {
    /// All bytes are zero.
    Zero,
    /// The page as it is.
    Raw(&'a Page),
    /// Changes since the page was last sent.
    Delta(&'a [u8]),
    /// The page, compressed.
    General(&'a [u8]),
    /// Reference to a block of a disk, which holds the content.
    Reference(Reference),
}

impl PageData<'_> {
    /// An error where [`PageData::apply`] gives one, whatever page it is for. `scratch` is for what
    /// can be told only by doing it; `read` is that of `apply`.
    pub fn check<E: From<EncodingError>>(
        &self,
        scratch: &mut Page,
        read: impl FnOnce(DiskBlock, &mut Page) -> Result<(), E>,
    ) -> Result<(), E> {
        match self {
            PageData::Zero | PageData::Raw(_) => Ok(()),
            PageData::Delta(bytes) => match delta::each_run(bytes, |_, _| ()) {
                true => Ok(()),
                false => Err(NO_DELTA.into()),
            },
            PageData::General(_) | PageData::Reference(_) => self.apply(scratch, read),
        }
    }

    /// Makes `page`, which is in the version last sent, what it is now. An error does not
    /// depend on what the page holds. `read` reads the block that a reference means; its errors
    /// end the matter too.
    pub fn apply<E: From<EncodingError>>(
        &self,
        page: &mut Page,
        read: impl FnOnce(DiskBlock, &mut Page) -> Result<(), E>,
    ) -> Result<(), E> {
        match self {
            PageData::Zero => page.fill(0),
            PageData::Raw(bytes) => page.copy_from_slice(*bytes),
            PageData::Delta(bytes) => {
                if !delta::apply(bytes, page) {
                    return Err(NO_DELTA.into());
                }
            }
            PageData::General(bytes) => decompress(bytes, page)?,
            PageData::Reference(Reference { block, hash }) => {
                read(*block, page)?;
                if PageHash::of(page) != *hash {
                    let error = "the mirror does not hold the page that a reference means";
                    return Err(EncodingError(error).into());
                }
            }
        }
        Ok(())
    }
}

// Not generic, as `apply` is: so it is compiled, and optimised, in this crate.
fn decompress(bytes: &[u8], page: &mut Page) -> Result<(), EncodingError> {
    match lz4_flex::block::decompress_into(bytes, page) {
        Ok(PAGE_SIZE) => Ok(()),
        _ => Err(EncodingError("compressed data are not those of a page")),
    }
}

/// Builds the part of the payload before the raw pages.
#[derive(Debug, Default)]
pub(crate) struct Index {
    bytes: Vec<u8>,
    pages: u32,
}

impl Index {
    pub fn clear(&mut self) {
        self.pages = 0;
        self.bytes.clear();
        self.bytes.resize(PREFIX, 0);
    }

    pub fn push(&mut self, block: BlockId, page: PageIndex, kind: u64) {
        let entry = u64::from(block.0) << 48 | page.0 << 8 | kind;
        self.bytes.extend_from_slice(&entry.to_le_bytes());
        self.pages += 1;
    }

    pub fn finish(&mut self, encoded_bytes: usize) -> &[u8] {
        assert!(self.pages as usize <= MOST_PAGES, "messages are made no larger");
        self.bytes[0..4].copy_from_slice(&self.pages.to_le_bytes());
        self.bytes[4..8].copy_from_slice(&(encoded_bytes as u32).to_le_bytes());
        &self.bytes
    }
}

/// Reads the payload of a `Pages` message; calls `each` for every page, in order. Nothing
/// is called unless the message's parts fit; each page's data are still to be checked,
/// with [`PageData::check`].
pub fn read_pages<E: From<EncodingError>>(
    payload: &[u8],
    mut each: impl FnMut(BlockId, PageIndex, PageData<'_>) -> Result<(), E>,
) -> Result<(), E> {
    let parts = Parts::divide(payload)?;
    let (mut encoded, mut raw) = (parts.encoded, parts.raw);
    for entry in parts.entries() {
        let data = match entry & 0xff {
            ZERO => PageData::Zero,
            RAW => PageData::Raw(take_page(&mut raw)?),
            DELTA => PageData::Delta(take_piece(&mut encoded)?),
            GENERAL => PageData::General(take_piece(&mut encoded)?),
            _ => PageData::Reference(take_reference(&mut encoded)?),
        };
        each(BlockId((entry >> 48) as u16), PageIndex(entry >> 8 & 0xff_ffff_ffff), data)?;
    }
    Ok(())
}

struct Parts<'a> {
    index: &'a [u8],
    encoded: &'a [u8],
    raw: &'a [u8],
}

impl<'a> Parts<'a> {
    /// Everything but the content of the pages is right after this.
    fn divide(payload: &'a [u8]) -> Result<Parts<'a>, EncodingError> {
        let (prefix, rest) =
            payload.split_first_chunk::<PREFIX>().ok_or(EncodingError("no room for the index"))?;
        let prefix = u64::from_le_bytes(*prefix);
        let (pages, encoded_bytes) = (prefix as u32 as usize, (prefix >> 32) as usize);
        if pages > MOST_PAGES {
            return Err(EncodingError("more pages than allowed"));
        }
        let (index, rest) = rest
            .split_at_checked(pages * ENTRY)
            .ok_or(EncodingError("the index is longer than the payload"))?;
        let (encoded, raw) = rest
            .split_at_checked(encoded_bytes)
            .ok_or(EncodingError("the encoded part is longer than the payload"))?;
        let parts = Parts { index, encoded, raw };
        parts.check()?;
        Ok(parts)
    }

    fn entries(&self) -> impl Iterator<Item = u64> + 'a {
        let entry = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        self.index.chunks_exact(ENTRY).map(entry)
    }

    fn check(&self) -> Result<(), EncodingError> {
        let (mut encoded, mut raw) = (self.encoded, self.raw);
        for entry in self.entries() {
            match entry & 0xff {
                ZERO => {}
                RAW => drop(take_page(&mut raw)?),
                REFERENCE => drop(take_reference(&mut encoded)?),
                DELTA | GENERAL => drop(take_piece(&mut encoded)?),
                _ => return Err(EncodingError("unknown kind of page")),
            }
        }
        match encoded.is_empty() && raw.is_empty() {
            true => Ok(()),
            false => Err(EncodingError("more bytes than the index accounts for")),
        }
    }
}

fn take_page<'a>(raw: &mut &'a [u8]) -> Result<&'a Page, EncodingError> {
    let (page, rest) = raw.split_first_chunk().ok_or(EncodingError("a raw page is missing"))?;
    *raw = rest;
    Ok(page)
}

fn take_reference(encoded: &mut &[u8]) -> Result<Reference, EncodingError> {
    let missing = EncodingError("a reference is missing");
    let (reference, rest) = encoded.split_first_chunk().ok_or(missing)?;
    *encoded = rest;
    Ok(Reference::decode(reference))
}

fn take_piece<'a>(encoded: &mut &'a [u8]) -> Result<&'a [u8], EncodingError> {
    let missing = EncodingError("an encoded page is missing");
    let (length, rest) = encoded.split_first_chunk().ok_or(missing)?;
    let (piece, rest) = rest.split_at_checked(u16::from_le_bytes(*length).into()).ok_or(missing)?;
    *encoded = rest;
    Ok(piece)
}
