//! Actions that are done about the guest's reads beside answering them.

use crate::nbd::AwaitedRead;
use std::io;
use std::sync::Arc;
use understudy_protocol::DiskIndex;

/// Receiver of what the guest reads. Called under no lock of the disk.
pub trait ReadSink: Send + Sync {
    /// A read begins; what this returns goes to [`ReadSink::read`], which without it is not
    /// called.
    fn begin(&self) -> Option<u64>;
    /// `data` were read at `offset` bytes.
    fn read(&self, began: u64, disk: DiskIndex, offset: u64, data: &[u8]);
}

/// Recorder of the primary in lockstep: what the guest's reads give goes to the backup (VMware FT,
/// 4.2).
pub trait ReadRecorder: Send + Sync {
    /// The disk's next read came; gives its number. May wait, which slows the guest down, until
    /// [`ReadRecorder::let_pass`].
    fn came(&self, disk: DiskIndex) -> u64;
    /// Tells what the read gave, its data or the number of its error. QEMU does not have it yet.
    /// Nothing is said of one that this host's disk could not serve.
    fn gave(&self, disk: DiskIndex, number: u64, at: Span, outcome: Result<&[u8], u32>);
    /// Lets reads pass: from now on none waits: a QEMU that stops waits for its reads.
    fn let_pass(&self);
}

/// Follower of the backup in lockstep, which knows what the primary's reads gave.
pub trait ReadFollower: Send + Sync {
    /// The next read of a disk came. Given back, it is to be read from this image.
    fn came(&self, read: AwaitedRead) -> Option<AwaitedRead>;
    /// Tells that this image could not be read, again and again. The read is not answered: the
    /// guest would see an error that the primary's does not.
    fn failed(&self, disk: DiskIndex, at: Span, error: &io::Error);
}

/// A part of a disk, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub length: u32,
}

impl Span {
    /// Whether they have a byte in common.
    pub(crate) fn overlaps(self, other: Span) -> bool {
        let end = |span: Span| span.offset.saturating_add(span.length.into());
        self.offset < end(other) && other.offset < end(self)
    }
}

/// Choice of what is done about the guest's reads.
#[derive(Clone, Default)]
pub enum Reads {
    /// Nothing beside the answer.
    #[default]
    Plain,
    /// Nothing, but a read gives what the image has at its turn: a page that is lent to the socket
    /// shows a later write, which in lockstep only one of both guests may see.
    Copied,
    /// A sink learns of them afterwards.
    Watched(Arc<dyn ReadSink>),
    /// A recorder learns of them before QEMU.
    Recorded(Arc<dyn ReadRecorder>),
    /// A follower may know what they gave elsewhere.
    Followed(Arc<dyn ReadFollower>),
}

impl Reads {
    /// Whether the guest runs on two hosts, in lockstep, and must read the same on both.
    pub(crate) fn must_agree(&self) -> bool {
        matches!(self, Reads::Copied | Reads::Recorded(_) | Reads::Followed(_))
    }
}
