//! Chunks that no snapshot refers to are removed. Nothing is counted that could be counted
//! wrongly: what is needed is read from the manifests that are there.

use super::snapshots::DEAD_AFTER_SECONDS;
use super::{CONCURRENT, Store, StoreError};
use crate::ChunkId;
use crate::format::{Manifest, MemberManifest};
use futures_util::{StreamExt, TryStreamExt, stream};
use std::collections::BTreeSet;

/// A sweep that took so long is dead.
const SWEEP_DEAD_AFTER_SECONDS: u64 = 3600;

/// What became of a sweep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Swept {
    /// Number of chunks removed.
    Removed(u64),
    /// A snapshot is being written, or somebody else sweeps: the next sweep will do it.
    Later,
    /// A snapshot cannot be read, for this reason: what it needs is not known, so nothing is
    /// removed before that snapshot is deleted.
    Kept(String),
}

impl Store {
    /// Removes chunks that nothing refers to. `now` is in seconds since 1970.
    pub fn sweep(&self, now: u64) -> Result<Swept, StoreError> {
        let mark = self.path("sweeping");
        if !self.put_new(&mark, now.to_string().into_bytes())? {
            if self.is_sweeping(now)? {
                return Ok(Swept::Later);
            }
            // Its owner has died. The next sweep finds no mark.
            self.delete(&mark)?;
            return Ok(Swept::Later);
        }
        let swept = self.sweep_alone(now);
        self.delete(&mark)?;
        swept
    }

    pub(super) fn is_sweeping(&self, now: u64) -> Result<bool, StoreError> {
        let mark = self.get(&self.path("sweeping"))?;
        Ok(mark.is_some_and(|mark| now < begun(&mark).saturating_add(SWEEP_DEAD_AFTER_SECONDS)))
    }

    fn sweep_alone(&self, now: u64) -> Result<Swept, StoreError> {
        for mark in self.list("writing")? {
            let Some(since) = self.get(&mark)? else { continue };
            if now < begun(&since).saturating_add(DEAD_AFTER_SECONDS) {
                return Ok(Swept::Later);
            }
            self.delete(&mark)?;
        }
        let mut needed = BTreeSet::new();
        for group in self.groups()? {
            for snapshot in self.snapshots(&group)? {
                let number = snapshot.number;
                let manifest = snapshot.manifest.and_then(|manifest| self.references(&manifest));
                match manifest {
                    Ok(references) => {
                        needed.extend(references.into_iter().map(|id| self.stored_name(id)));
                    }
                    Err(StoreError::Failed { location, doing, why }) => {
                        return Err(StoreError::Failed { location, doing, why });
                    }
                    Err(error) => {
                        let which = format!("snapshot {number} of {group}");
                        return Ok(Swept::Kept(format!("{which} cannot be read: {error}")));
                    }
                }
            }
        }
        let name = |path: &object_store::path::Path| path.filename()?.parse::<ChunkId>().ok();
        let stored = self.list("chunks")?;
        // What is no chunk, though it lies there, is none of our business.
        let unneeded =
            stored.into_iter().filter(|path| name(path).is_some_and(|id| !needed.contains(&id)));
        let unneeded: Vec<_> = unneeded.collect();
        let count = unneeded.len() as u64;
        let removed = stream::iter(unneeded)
            .map(async |path| {
                match object_store::ObjectStoreExt::delete(&*self.objects, &path).await {
                    Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                    Err(error) => Err(self.failed(format!("remove {path}"), error)),
                }
            })
            .buffer_unordered(CONCURRENT)
            .try_collect::<()>();
        self.block(removed)?;
        Ok(Swept::Removed(count))
    }

    /// All chunks that a snapshot needs.
    pub(super) fn references(&self, manifest: &Manifest) -> Result<BTreeSet<ChunkId>, StoreError> {
        let mut references = BTreeSet::new();
        for entry in &manifest.members {
            references.extend(&entry.part.chunks);
            references.extend(self.member_references(&self.member(entry)?)?);
        }
        Ok(references)
    }

    fn member_references(&self, member: &MemberManifest) -> Result<BTreeSet<ChunkId>, StoreError> {
        let mut references: BTreeSet<ChunkId> =
            member.blobs().flat_map(|blob| &blob.chunks).copied().collect();
        for entry in &member.areas {
            references.extend(self.area(entry)?.chunks());
        }
        Ok(references)
    }
}

/// When a mark was made; one that cannot be read was made just now, so far as anybody knows.
fn begun(mark: &[u8]) -> u64 {
    std::str::from_utf8(mark).ok().and_then(|text| text.parse().ok()).unwrap_or(u64::MAX)
}
