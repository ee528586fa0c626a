//! Guest disks: an NBD server that writes through and mirrors, and the backup's mirror.
//!
//! QEMU reaches each disk of the guest as `-blockdev driver=nbd` over a unix
//! socket of its own. The way of a write:
//!
//! ```text
//! QEMU --NBD--> NbdServer --> Disk --1--> local image
//!                                  --2--> WriteSink (the stream to the backup)
//! ```
//!
//! Both steps happen under one short lock per disk, so the backup sees writes in
//! the order in which the image took them, and [`copy_out`], which mirrors what was
//! there before, can never put a stale block on top of a newer one.
//!
//! The backup's mirror is a [`Disk`] too, one without a sink: [`FreshMirror`] makes
//! it, the epochs are applied with [`Disk::write`] and [`Disk::zero`], and while it
//! is passive [`Disk::set_read_only`] keeps the warm QEMU from changing it.
//!
//! While two hosts' images of a disk differ, or may come to differ, a [`ChangeMap`] tells
//! where: [`copy_changed`] then brings the other one up to date without copying it all.
//!
//! A [`Capture`] reads a disk as it was at one moment, for a snapshot, while the guest goes on
//! writing; [`Disk::create_restored`] lets a guest run on an image whose blocks are still being fetched.
//!
//! Start reading at [`Disk`], then `nbd/connection.rs`.

mod absent;
mod blocks;
mod cached;
mod capture;
mod changes;
mod disk;
mod durable;
mod error;
mod fail_points;
mod flusher;
mod format;
mod image;
mod lent;
#[cfg(test)]
mod loop_device;
mod mark;
mod mirror;
mod nbd;
mod reads;
mod stamp;
mod tables;
mod waits;
mod withheld;

pub use absent::Fetcher;
pub use blocks::{BLOCK_BYTES, BlockSet};
pub use capture::{Capture, ChangesTaken, PreparedCapture};
pub use changes::{ChangeMap, GRANULE_BYTES, Rounds};
pub use disk::{Disk, FileId, GuestWrites, WriteSink};
pub use durable::Durable;
pub use error::DiskError;
pub use format::{ImageFormat, check_format, export_bytes, export_bytes_as_listed, image_bytes};
pub use mark::{absent_blocks, incomplete_mark};
pub use mirror::{
    COPY_CHUNK_BYTES, FreshMirror, Mirror, Synced, changes_path, copy_changed, copy_out,
    mirror_path,
};
pub use nbd::{AwaitedRead, NbdServer, Traffic};
pub use reads::{ReadFollower, ReadRecorder, ReadSink, Reads, Span};
pub use tables::{Tables, check_tables};
pub use waits::WaitId;
pub use withheld::OnError;
