//! Chunks and what is made of them.

use super::{CONCURRENT, Found, Store, StoreError};
use crate::cut::{LOGGED_BYTES, memory};
use crate::format::{
    AreaEntry, AreaMap, BLOB_CHUNK_BYTES, BadChunk, Blob, Compression, InFlightFrame, Malformed,
    MemberEntry, MemberManifest, WorkingSet, area, decode_chunk, decode_frames, encode_chunk,
    encode_frames, working_set,
};
use crate::pack::NewChunk;
use crate::{ChunkId, UNIT_BYTES};
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};
use std::collections::BTreeSet;

/// The longest blob that is read: more than a map of 16 TiB has.
const MAX_BLOB: u64 = 4 << 30;

/// The longest device state: no longer one is saved (`understudy_qemu`).
const MOST_STATE: u64 = 64 << 20;

/// The longest part: a name of a chunk for each MiB of its maps is most of it.
const MOST_PART: u64 = 64 << 20;

/// The most bytes of a chunk as it is stored: its content, or what that was packed to, with a head, and sealed.
const MOST_STORED: u64 = BLOB_CHUNK_BYTES as u64 + 4096;

impl Store {
    /// The name of a chunk in this store: in an encrypted one nobody without the key can tell
    /// what it has.
    pub(super) fn stored_name(&self, id: ChunkId) -> ChunkId {
        self.sealer.as_ref().map_or(id, |sealer| sealer.name(id))
    }

    /// The place of a chunk of this name, for [`Store::path`].
    fn place(name: ChunkId) -> String {
        let name = name.to_string();
        format!("chunks/{}/{name}", &name[..2])
    }

    pub(super) fn chunk_folder(&self, name: ChunkId) -> Path {
        self.path(&format!("chunks/{}", &name.to_string()[..2]))
    }

    #[cfg(test)]
    pub(super) fn chunk_path(&self, id: ChunkId) -> Path {
        self.path(&Store::place(self.stored_name(id)))
    }

    /// Stores chunks that are not there yet, several at once. Returns the bytes written.
    pub fn put_chunks(
        &self,
        chunks: &[NewChunk],
        compression: Compression,
    ) -> Result<u64, StoreError> {
        let written = stream::iter(chunks)
            .map(|chunk| self.put_chunk(chunk, compression))
            .buffer_unordered(CONCURRENT)
            .try_fold(0, async |sum, bytes| Ok(sum + bytes));
        self.block(written)
    }

    async fn put_chunk(
        &self,
        chunk: &NewChunk,
        compression: Compression,
    ) -> Result<u64, StoreError> {
        let place = Store::place(self.stored_name(chunk.id));
        let path = self.path(&place);
        // Read, not only looked for: what is damaged is written anew.
        match self.read_chunk(chunk.id).await {
            Ok(_) => return Ok(0),
            Err(StoreError::MissingChunk(_) | StoreError::BadChunk { .. }) => {}
            Err(error) => return Err(error),
        }
        let stored = self.seal(&place, encode_chunk(&chunk.content, compression))?;
        let bytes = stored.len() as u64;
        let put = self.objects.put(&path, PutPayload::from(stored)).await;
        put.map_err(|error| self.not_done(format!("write {path}"), error))?;
        Ok(bytes)
    }

    pub(super) async fn has_chunk(&self, name: ChunkId) -> Result<bool, StoreError> {
        let path = self.path(&Store::place(name));
        match self.objects.head(&path).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(self.not_done(format!("look for {path}"), error)),
        }
    }

    /// The names of all chunks of a folder.
    pub(super) async fn chunks_in(&self, folder: &Path) -> Result<BTreeSet<ChunkId>, StoreError> {
        let id = |path: Path| path.filename()?.parse().ok();
        Ok(self.listed(folder).await?.into_iter().filter_map(id).collect())
    }

    /// A chunk's content, checked.
    pub fn chunk(&self, id: ChunkId) -> Result<Vec<u8>, StoreError> {
        self.block(self.read_chunk(id))
    }

    pub(super) async fn read_chunk(&self, id: ChunkId) -> Result<Vec<u8>, StoreError> {
        let name = self.stored_name(id);
        let place = Store::place(name);
        let path = self.path(&place);
        let stored = match self.read(&path, MOST_STORED).await? {
            Found::Nothing => return Err(StoreError::MissingChunk(name)),
            Found::TooLong(_) => {
                return Err(StoreError::BadChunk { id: name, why: BadChunk::Unreadable });
            }
            Found::Object(stored) => stored,
        };
        super::pace::pass(stored.len()).await;
        self.open_sealed(&place, stored)
            .ok_or(BadChunk::Forged)
            .and_then(|stored| decode_chunk(id, &stored))
            .map_err(|why| StoreError::BadChunk { id: name, why })
    }

    /// Chunks' contents in this order, read ahead of the taker: `each` gets one after the
    /// other, and ends it all with an error of its own.
    pub fn read_chunks<E: From<StoreError>>(
        &self,
        ids: &[ChunkId],
        mut each: impl FnMut(ChunkId, Vec<u8>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut contents = stream::iter(ids.to_vec())
            .map(|id| async move { self.read_chunk(id).await.map(|content| (id, content)) })
            .buffered(CONCURRENT)
            .boxed();
        while let Some(read) = self.block(contents.next()) {
            let (id, content) = read?;
            each(id, content)?;
        }
        Ok(())
    }

    /// Stores bytes of any length.
    pub fn put_blob(&self, bytes: &[u8], compression: Compression) -> Result<Blob, StoreError> {
        let chunk = |content: &[u8]| NewChunk { id: ChunkId::of(content), content: content.into() };
        let chunks: Vec<NewChunk> = bytes.chunks(BLOB_CHUNK_BYTES).map(chunk).collect();
        let ids = chunks.iter().map(|chunk| chunk.id).collect();
        self.put_chunks(&chunks, compression)?;
        Ok(Blob { bytes: bytes.len() as u64, chunks: ids })
    }

    /// The bytes of a blob, checked: of a file that somebody else made, of which nobody knows how long it is.
    pub fn blob(&self, blob: &Blob) -> Result<Vec<u8>, StoreError> {
        self.blob_within(blob, MAX_BLOB)
    }

    /// The same of one that has so many bytes at most: a chunk of few bytes can be in it again and again.
    fn blob_within(&self, blob: &Blob, most: u64) -> Result<Vec<u8>, StoreError> {
        let pieces = blob.bytes.div_ceil(BLOB_CHUNK_BYTES as u64);
        if blob.bytes > most.min(MAX_BLOB) || pieces != blob.chunks.len() as u64 {
            return Err(StoreError::damaged("a list of chunks", "its length is impossible"));
        }
        let mut bytes = Vec::new();
        self.read_chunks(&blob.chunks, |_, content| {
            bytes.extend(content);
            Ok::<(), StoreError>(())
        })?;
        match bytes.len() as u64 == blob.bytes {
            true => Ok(bytes),
            false => Err(StoreError::damaged("a list of chunks", "its chunks have another length")),
        }
    }

    /// Stores a member's part; all that it refers to is stored before.
    pub fn put_member(
        &self,
        member: &MemberManifest,
        compression: Compression,
    ) -> Result<Blob, StoreError> {
        let json = serde_json::to_vec(member).map_err(|error| self.failed("write JSON", error))?;
        self.put_blob(&json, compression)
    }

    /// A member's part.
    pub fn member(&self, entry: &MemberEntry) -> Result<MemberManifest, StoreError> {
        let json = self.blob_within(&entry.part, MOST_PART)?;
        let what = || format!("the part of {}", entry.name);
        let member: MemberManifest =
            serde_json::from_slice(&json).map_err(|error| StoreError::damaged(what(), error))?;
        if member.name != entry.name {
            return Err(StoreError::damaged(what(), "it is another member's"));
        }
        member.check().map_err(|why| StoreError::damaged(what(), why))?;
        Ok(member)
    }

    /// The map of a member's area.
    pub fn area(&self, entry: &AreaEntry) -> Result<AreaMap, StoreError> {
        let what = || format!("the map of {}", entry.name);
        let units = entry.bytes.div_ceil(UNIT_BYTES as u64);
        let map = self.blob_within(&entry.map, area::most_bytes(units))?;
        let map = AreaMap::decode(&map).map_err(|error| StoreError::damaged(what(), error))?;
        match map.units() == units {
            true => Ok(map),
            false => Err(StoreError::damaged(what(), "it has another length")),
        }
    }

    /// The state of a member's devices.
    pub fn device_state(&self, member: &MemberManifest) -> Result<Vec<u8>, StoreError> {
        self.blob_within(&member.device_state, MOST_STATE)
    }

    /// Stores the frames in flight to a member, unless they are more than [`Store::frames`] reads: one that is for
    /// several cards of it is here several times.
    pub fn put_frames(
        &self,
        frames: &[InFlightFrame],
        compression: Compression,
    ) -> Result<Blob, StoreError> {
        let bytes: usize = frames.iter().map(|frame| memory(&frame.bytes)).sum();
        if bytes > LOGGED_BYTES {
            return Err(StoreError::TooManyFrames { bytes, most: LOGGED_BYTES });
        }
        self.put_blob(&encode_frames(frames), compression)
    }

    /// The frames in flight to a member.
    pub fn frames(&self, member: &MemberManifest) -> Result<Vec<InFlightFrame>, StoreError> {
        let bytes = self.blob_within(&member.in_flight, LOGGED_BYTES as u64)?;
        self.whole(member, "frames in flight", decode_frames(&bytes))
    }

    /// A member's queue of first accesses.
    pub fn working_set(&self, member: &MemberManifest) -> Result<WorkingSet, StoreError> {
        self.queue(member, &member.working_set)
    }

    /// A member's pages by their last access; none if the snapshot was taken without.
    pub fn recent(&self, member: &MemberManifest) -> Result<Option<WorkingSet>, StoreError> {
        member.recent.as_ref().map(|blob| self.queue(member, blob)).transpose()
    }

    /// The pages that [`Mode::WorkingSet`](crate::Mode::WorkingSet) loads: as many pages as
    /// sampling says (as the working set has, if nobody sampled), those that were accessed last
    /// first. Without [`Store::recent`] the queue is that of first accesses.
    pub fn by_sampling(&self, member: &MemberManifest) -> Result<WorkingSet, StoreError> {
        if let Some(recent) = self.recent(member)? {
            return Ok(recent);
        }
        let set = self.working_set(member)?;
        Ok(WorkingSet { size: member.sampled.unwrap_or(set.size), ..set })
    }

    /// The part of a member's pages that CLOCK kept; none if the snapshot was taken without.
    pub fn by_clock(&self, member: &MemberManifest) -> Result<Option<WorkingSet>, StoreError> {
        member.clock.as_ref().map(|blob| self.queue(member, blob)).transpose()
    }

    fn queue(&self, member: &MemberManifest, blob: &Blob) -> Result<WorkingSet, StoreError> {
        let bytes = self.blob_within(blob, working_set::most_bytes(member.pages()))?;
        self.whole(member, "working set", WorkingSet::decode(&bytes, member.pages()))
    }

    fn whole<T>(
        &self,
        member: &MemberManifest,
        what: &str,
        read: Result<T, Malformed>,
    ) -> Result<T, StoreError> {
        read.map_err(|why| StoreError::damaged(format!("the {what} of {}", member.name), why))
    }
}
