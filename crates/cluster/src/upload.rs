//! The way of a snapshot's content to its store, which may be away for a while: hours of work do not depend on a second.

use crate::Stop;
use anyhow::bail;
use std::thread;
use std::time::Duration;
use tracing::warn;
use understudy_snapshot::{
    Blob, Compression, InFlightFrame, MemberManifest, NewChunk, Store, StoreError,
};

/// Pause before what a store has not taken is given to it again.
const AGAIN: Duration = Duration::from_secs(1);

/// A store, for one member's part of one snapshot. What fails and may pass is tried again until the work is to end.
#[derive(Clone, Copy)]
pub struct Upload<'s> {
    /// The store.
    pub store: &'s Store,
    /// Compression of all of it.
    pub compression: Compression,
    /// Word that it is to end. Whoever waits for it sees meanwhile that it gets nowhere.
    pub stop: &'s Stop,
}

impl Upload<'_> {
    /// Stores chunks that are not there yet.
    pub fn chunks(&self, chunks: &[NewChunk]) -> anyhow::Result<()> {
        self.persist(|| self.store.put_chunks(chunks, self.compression)).map(drop)
    }

    /// Stores bytes of any length.
    pub fn blob(&self, bytes: &[u8]) -> anyhow::Result<Blob> {
        self.persist(|| self.store.put_blob(bytes, self.compression))
    }

    /// Stores the frames in flight to the member.
    pub fn frames(&self, frames: &[InFlightFrame]) -> anyhow::Result<Blob> {
        self.persist(|| self.store.put_frames(frames, self.compression))
    }

    /// Stores the description of the part.
    pub fn member(&self, member: &MemberManifest) -> anyhow::Result<Blob> {
        self.persist(|| self.store.put_member(member, self.compression))
    }

    fn persist<T>(&self, put: impl Fn() -> Result<T, StoreError>) -> anyhow::Result<T> {
        loop {
            match put() {
                Ok(done) => return Ok(done),
                Err(error) if !error.is_passing() => return Err(error.into()),
                Err(error) if self.stop.is_said() => bail!("it was stopped; before, {error}"),
                Err(error) => warn!("a snapshot waits for its store: {error}"),
            }
            thread::sleep(AGAIN);
        }
    }
}
