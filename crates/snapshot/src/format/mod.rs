//! The format in which a snapshot is written down. Nothing here does I/O; [`crate::Store`] carries
//! it out.
//!
//! ```text
//! manifest ── member ─┬─ area ── page map ── chunks of 64 units
//!                     ├─ device state
//!                     ├─ frames in flight
//!                     └─ working set, in the order of first accesses
//! ```
//!
//! All but the manifest are chunks, named by the hash of their content. A chunk is written
//! once whatever refers to it, never changed, and found damaged by its name.

pub(crate) mod area;
mod bytes;
mod chunk;
mod frames;
mod header;
mod manifest;
pub(crate) mod working_set;

pub use area::{AreaMap, Builder, Extent, Place};
pub use bytes::Malformed;
pub(crate) use bytes::Reader;
pub use chunk::{BLOB_CHUNK_BYTES, BadChunk, CHUNK_UNITS, Compression};
pub use frames::InFlightFrame;
pub use manifest::{AreaEntry, Blob, Machine, Manifest, MemberEntry, MemberManifest, Unfit};
pub use working_set::{Page, WorkingSet};

pub(crate) use chunk::{decode_chunk, encode_chunk};
pub(crate) use frames::{decode_frames, encode_frames};
pub(crate) use header::{HeaderError, open_envelope, seal_envelope};
