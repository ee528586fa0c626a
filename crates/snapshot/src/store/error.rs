//! Errors of a store, in words for whoever runs the command.

use super::KeyError;
use crate::format::BadChunk;
use crate::{ChunkId, SnapshotNumber};
use std::error::Error;
use std::io;
use understudy_protocol::{GroupName, NameError};

/// The reason why a store did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The text is neither a path nor a URL of a kind that this build knows.
    #[error(
        "{0:?} is no store: give a directory, or a URL that begins with file:// or, if this \
         build has the feature s3, with s3://"
    )]
    Location(String),
    /// No store is there.
    #[error(
        "there is no snapshot store at {0}: check the path; the first snapshot that is taken \
         with it makes one"
    )]
    Unknown(String),
    /// The store is sealed, and no key was given.
    #[error(
        "the snapshot store at {0} is encrypted, and this host has no key for it: name the key \
         file in the host's configuration, [snapshot_keys]"
    )]
    Encrypted(String),
    /// A key was given for a store that is not sealed.
    #[error(
        "the snapshot store at {0} is not encrypted, but a key is configured for it: what is \
         there stays readable; take snapshots into a new store, or leave the key out; if that is the key of a \
         store above it, say \"plain\" for this one in [snapshot_keys]"
    )]
    NotEncrypted(String),
    /// No key can be had to open the store with.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The store is sealed with another key.
    #[error(
        "the snapshot store at {0} was encrypted with another key than the one that is configured \
         for it: use the key file that it was made with"
    )]
    WrongKey(String),
    /// The storage overwrites what it is asked not to.
    #[error(
        "the storage at {0} writes over what is there when it is told to write only where nothing is: hosts would destroy \
         each other's snapshots; use one that does conditional writes (S3: If-None-Match)"
    )]
    Overwrites(String),
    /// A file in the store was written by another version of this program.
    #[error(
        "{what} has version {found} of the format, which this version of understudy does not \
         know; use the version that wrote it"
    )]
    Version {
        /// The file.
        what: String,
        /// Its version.
        found: u32,
    },
    /// More frames are on their way to a member than a snapshot may have.
    #[error(
        "its snapshot would have {bytes} bytes of frames that are on their way to it, and {most} is the most; take it \
         when its network is less busy"
    )]
    TooManyFrames {
        /// Memory that they take.
        bytes: usize,
        /// The most that they may take.
        most: usize,
    },
    /// A file is not what was written.
    #[error("{what} is damaged ({why}); restore another snapshot, or the file from a backup")]
    Damaged {
        /// The file.
        what: String,
        /// The fault.
        why: String,
    },
    /// A chunk is not there.
    #[error(
        "chunk {0} is missing from the store; snapshots that need it cannot be restored, \
         `understudy cluster verify` says which parts it held"
    )]
    MissingChunk(ChunkId),
    /// A chunk is not what was written.
    #[error(
        "chunk {id} is damaged: {why}; snapshots that need it cannot be restored, `understudy \
         cluster verify` says which parts it held"
    )]
    BadChunk {
        /// The chunk.
        id: ChunkId,
        /// The fault.
        why: BadChunk,
    },
    /// No such snapshot exists.
    #[error("{group} has no snapshot {number} in this store; there {there}")]
    NoSnapshot {
        /// The group.
        group: GroupName,
        /// The number that was asked for.
        number: SnapshotNumber,
        /// The snapshots that there are, in words.
        there: String,
    },
    /// No snapshot of the group exists.
    #[error("{0} has no snapshots in this store; `understudy cluster snapshot {0}` takes one")]
    NoSnapshots(GroupName),
    /// A name that cannot be a group's.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A snapshot that is to be deleted is being restored.
    #[error(
        "snapshot {number} of {group} is not deleted: {readers}; try again when all of it is there. \
         If it never will be, for that host is gone for good, --force deletes it all the same"
    )]
    BeingRead {
        /// The group.
        group: GroupName,
        /// The snapshot.
        number: SnapshotNumber,
        /// The readers, in words: who restores what.
        readers: String,
    },
    /// The store is being cleaned up.
    #[error(
        "chunks that nothing refers to are being removed from the store: whoever does it said so \
         {said_ago} s ago; try again shortly, or in {dead_in} s if nobody does it any more"
    )]
    Sweeping {
        /// Seconds since whoever removes them said last that it goes on.
        said_ago: u64,
        /// Seconds until he counts as dead, if he says nothing more.
        dead_in: u64,
    },
    /// The snapshot took so long, or its store was so often out of reach, that others took it
    /// for dead and cleaned up behind it.
    #[error("snapshot {0} was given up by a clean-up of the store before it was complete")]
    Overtaken(SnapshotNumber),
    /// The store itself failed.
    #[error("the store at {location} failed to {doing}: {why}")]
    Failed {
        /// The store.
        location: String,
        /// The thing that it was asked for.
        doing: String,
        /// The words that it, or the system, said.
        why: String,
        /// Whether that may pass by itself.
        passes: bool,
    },
}

/// Errors of the system that nothing but an operator ends.
const LASTING: [io::ErrorKind; 4] = [
    io::ErrorKind::StorageFull,
    io::ErrorKind::QuotaExceeded,
    io::ErrorKind::ReadOnlyFilesystem,
    io::ErrorKind::PermissionDenied,
];

/// Whether what storage says may pass: it does not answer, or cannot do anything now.
pub(super) fn passes(error: &object_store::Error) -> bool {
    let first: &(dyn Error + 'static) = error;
    let mut causes = std::iter::successors(Some(first), |&error| error.source());
    matches!(error, object_store::Error::Generic { .. }) && !causes.any(lasts)
}

/// Answers of HTTP that say what will be so the next time: the request is wrong, or there is no room. The client has no
/// type for them.
fn is_refusal(words: &str) -> bool {
    let codes = words.split("status code: ").skip(1).filter_map(|rest| rest.get(..3));
    codes.filter_map(|code| code.parse::<u16>().ok()).any(|code| {
        let passes = matches!(code, 408 | 429);
        code == 507 || (400..500).contains(&code) && !passes
    })
}

fn lasts(error: &(dyn Error + 'static)) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| LASTING.contains(&error.kind()))
        || is_refusal(&error.to_string())
}

impl StoreError {
    /// Whether the same may be done when it is tried again a little later.
    pub fn is_passing(&self) -> bool {
        matches!(self, StoreError::Failed { passes: true, .. })
    }

    pub(super) fn damaged(what: impl Into<String>, why: impl ToString) -> StoreError {
        StoreError::Damaged { what: what.into(), why: why.to_string() }
    }
}
