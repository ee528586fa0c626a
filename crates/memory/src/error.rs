use std::io;
use std::path::PathBuf;
use std::time::Duration;
use understudy_protocol::{BlockId, PageIndex};

/// An error of guest memory, its tracking and the agent inside QEMU.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The size asked for is not one that a guest can have.
    #[error("guest memory must be a positive multiple of 4096 bytes, not {0} bytes")]
    RamSize(u64),

    /// A system call on the guest's main memory failed.
    #[error("{action} {bytes} bytes of guest memory: {source}")]
    Ram {
        /// The operation that was tried, as the start of a sentence.
        action: &'static str,
        /// Number of bytes that it was about.
        bytes: u64,
        /// The system's answer.
        source: io::Error,
    },

    /// Pages were named that the block does not have.
    #[error("pages {first} to {last} are outside RAM block {block}, which has {pages} pages")]
    OutsideBlock {
        /// The block.
        block: BlockId,
        /// First page asked for.
        first: PageIndex,
        /// Last page asked for.
        last: PageIndex,
        /// Pages that the block has.
        pages: u64,
    },

    /// No memory is left for copies of pages.
    #[error("cannot get memory for copies of written pages: {0}")]
    Staging(#[source] io::Error),

    /// A page is named in a block that is not among those given.
    #[error("there is no RAM block {0} in this machine")]
    UnknownBlock(BlockId),

    /// QEMU's own memory could not be read or written, most likely because it has ended.
    #[error("cannot {action} {bytes} bytes at {address:#x} of QEMU (process {pid}): {source}")]
    Process {
        /// "open", "read" or "write".
        action: &'static str,
        /// QEMU's process.
        pid: i32,
        /// Address in QEMU.
        address: u64,
        /// Bytes asked for.
        bytes: usize,
        /// The system's answer.
        source: io::Error,
    },

    /// QEMU ended while its memory was being scanned.
    #[error("QEMU (process {pid}) has ended: {source}")]
    QemuGone {
        /// QEMU's process.
        pid: i32,
        /// The system's answer.
        source: io::Error,
    },

    /// The daemon's socket for agents could not be made.
    #[error("cannot listen for QEMU's agent at {}: {source}", path.display())]
    Listen {
        /// Path of the socket.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },

    /// QEMU's agent did not connect in time.
    #[error(
        "QEMU's agent did not connect to {} within {waited:?}; see QEMU's own messages, and \
         check that LD_PRELOAD names the agent library",
        path.display()
    )]
    AgentSilent {
        /// Path of the socket.
        path: PathBuf,
        /// Time that the daemon waited.
        waited: Duration,
    },

    /// The peer that connected to the agent's socket does not speak the agent's language.
    #[error("what connected to the agent's socket is not this version's agent: {0}")]
    AgentHello(String),

    /// The connection to the agent failed.
    #[error("connection to QEMU's agent: {0}")]
    AgentLink(#[source] io::Error),

    /// The kernel lacks what tracking needs.
    #[error("this kernel cannot track guest memory (Linux 6.7 or later is needed): {0}")]
    Kernel(String),

    /// A block is neither trackable nor small enough to compare at each checkpoint.
    #[error(
        "RAM block {name} ({bytes} bytes) cannot be tracked: {source}; it is too large to \
         compare at each checkpoint. Remove the device that it belongs to"
    )]
    NotTrackable {
        /// QEMU's name of the block.
        name: String,
        /// Its size.
        bytes: u64,
        /// The system's answer to registering it.
        source: io::Error,
    },

    /// A tracking call failed on a block that had been registered.
    #[error("{call} on RAM block {name}: {source}")]
    Tracking {
        /// Name of the kernel's call.
        call: &'static str,
        /// QEMU's name of the block.
        name: String,
        /// The system's answer.
        source: io::Error,
    },

    /// Memory that has one kind of userfaultfd cannot have the other.
    #[error(
        "the memory of this VM is watched already: it is protected by checkpoints, or another \
         snapshot or restore of it is under way"
    )]
    FaultsTaken,

    /// As many pages wait for the reader of an image as may.
    #[error(
        "more was written since the moment of the image than this host has memory for: its store is too slow, or does \
         not answer"
    )]
    TooManyCopies,

    /// The image of a standby cannot be read any more.
    #[error("the image is gone: the VM runs on this memory now, or is not followed any more")]
    ImageGone,

    /// The thread that answers faults could not be started.
    #[error("cannot start the thread that answers page faults: {0}")]
    FaultThread(#[source] io::Error),

    /// A call about faults failed.
    #[error("{call} on the guest's main memory: {source}")]
    Faults {
        /// Name of the kernel's call.
        call: &'static str,
        /// The system's answer.
        source: io::Error,
    },

    /// The agent inside QEMU could not do something to QEMU's mappings.
    #[error("QEMU's agent could not {what}: {source}")]
    Mappings {
        /// The thing that it was asked for.
        what: &'static str,
        /// The system's answer.
        source: io::Error,
    },
}
