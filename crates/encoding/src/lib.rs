//! Encoding in which captured pages travel to the backup (Remus 3.4).
//!
//! | kind    | is sent as | when |
//! |---------|------------|------|
//! | zero    | nothing    | every byte is zero |
//! | delta   | the bytes that changed, run-length coded | the last version sent is in the cache |
//! | reference | a block of a disk, and its hash | the backup's mirror holds the page |
//! | general | LZ4        | it is not, or nearly all of it changed |
//! | raw     | the page   | nothing else is smaller |
//!
//! A page equal to its cached version is not sent at all.
//!
//! The primary's [`Encoder`] keeps the last version *sent* of recently written pages
//! ([`cache`]). The wire is ordered and the backup applies it in order, so that when it
//! comes to a delta its page is in that version: whether that was sent in an earlier
//! epoch, or earlier in the same one by a pre-copy round. An encoder lives and dies with
//! its connection; a new one starts with nothing.
//!
//! The backup reads messages with [`read_pages`]. What is wrong with one can be told
//! without the pages it changes, so that it is refused before it is acknowledged.
//!
//! Batches of a log (lockstep mode) have their own, simpler way: [`encode_log`].
//!
//! No I/O and no clock here: the caller lends one.

pub mod cache;
pub mod delta;

mod choice;
mod counters;
mod encoder;
mod log;
mod message;
mod reference;
mod zero;

pub use choice::{Compression, EncodingPlan, Methods};
pub use counters::Counters;
pub use encoder::{EncodedPages, Encoder};
pub use log::{LogError, MOST_LOG_BYTES, decode_log, encode_log};
pub use message::{EncodingError, MOST_PAGES, PageData, read_pages};
pub use reference::{DiskBlock, PageHash, Reference};
pub use zero::is_zero_page;

use understudy_protocol::PAGE_SIZE;

/// One page.
pub type Page = [u8; PAGE_SIZE];

/// Usual size of the cache: 8 192 pages as in the paper, 32 MiB.
pub const DEFAULT_CACHE_PAGES: u32 = 8192;

/// The largest cache that can be asked for: 4 GiB.
pub const MOST_CACHE_PAGES: u32 = 1 << 20;
