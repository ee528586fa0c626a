//! Chunks that no snapshot refers to are removed. Nothing is counted that could be counted
//! wrongly: what is needed is read from the manifests that are there.

use super::mark::{MarkWord, begun};
use super::snapshots::DEAD_AFTER_SECONDS;
use super::{CONCURRENT, Listed, Store, StoreError};
use crate::ChunkId;
use crate::format::{Manifest, MemberEntry, MemberManifest};
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::ObjectStoreExt;
use object_store::path::Path;
use std::collections::BTreeSet;
use std::time::Instant;

/// A sweep that has said nothing for so long is dead: no snapshot begins before that.
const SWEEP_DEAD_AFTER_SECONDS: u64 = 600;

/// Chunks that are removed, or listed, before a sweep says again that it lives. A store needs seconds
/// for them.
const AT_ONCE: usize = 1000;

/// The result of a sweep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Swept {
    /// Number of chunks removed.
    Removed(u64),
    /// A snapshot is being written, or somebody else sweeps: the next sweep will do it.
    Later,
    /// The store has failed, for this reason: the next sweep will do it.
    Failed(String),
    /// A snapshot cannot be read, for this reason: what it needs is not known, so nothing is
    /// removed before that snapshot is deleted.
    Kept(String),
}

/// A sweep under way: its mark in the store.
struct Sweep<'s> {
    store: &'s Store,
    mark: Path,
    word: MarkWord,
    /// Time at which it began, in seconds since 1970, and by this process's clock.
    since: u64,
    clock: Instant,
    /// Time at which it said last that it lives.
    marked: u64,
}

/// A sweep of somebody's that may be under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OtherSweep {
    /// Seconds since it said last that it lives.
    pub said_ago: u64,
    /// Seconds until it counts as dead, if it says nothing more.
    pub dead_in: u64,
}

impl Sweep<'_> {
    fn now(&self) -> u64 {
        self.since.saturating_add(self.clock.elapsed().as_secs())
    }

    /// Whether nobody takes it for dead, who may be writing a snapshot now. To be asked before
    /// anything is removed, and while that is found out: it also says that the sweep lives.
    fn goes_on(&mut self) -> Result<bool, StoreError> {
        let now = self.now();
        if !self.store.has_mark(&self.mark, &self.word)? || is_dead(self.marked, now) {
            return Ok(false);
        }
        if now > self.marked {
            self.store.put(&self.mark, self.word.at(now).into_bytes())?;
            self.marked = now;
        }
        Ok(true)
    }

    fn end(self) -> Result<(), StoreError> {
        self.store.remove_mark(&self.mark, &self.word)
    }
}

fn is_dead(marked: u64, now: u64) -> bool {
    now >= marked.saturating_add(SWEEP_DEAD_AFTER_SECONDS)
}

impl Store {
    /// Removes chunks that nothing refers to. `now` is in seconds since 1970.
    pub fn sweep(&self, now: u64) -> Result<Swept, StoreError> {
        // Without a mark, for which snapshots that begin now would be refused.
        if self.has_writers(now)? {
            return Ok(Swept::Later);
        }
        let Some(mut sweep) = self.begin_sweep(now)? else { return Ok(Swept::Later) };
        let swept = self.sweep_alone(&mut sweep);
        sweep.end()?;
        swept
    }

    /// The same, of what has just become unneeded: that is so whatever the store says now.
    pub(super) fn sweep_freed(&self, now: u64) -> Swept {
        self.sweep(now).unwrap_or_else(|error| Swept::Failed(error.to_string()))
    }

    fn begin_sweep(&self, now: u64) -> Result<Option<Sweep<'_>>, StoreError> {
        let (mark, word) = (self.path("sweeping"), self.mark_word()?);
        if self.put_mark(&mark, &word, now)? {
            let clock = Instant::now();
            return Ok(Some(Sweep { store: self, mark, word, since: now, clock, marked: now }));
        }
        if self.other_sweep(now)?.is_none() {
            // Its owner has died. The next sweep finds no mark.
            self.delete(&mark)?;
        }
        Ok(None)
    }

    /// A sweep that is under way so far as anybody knows.
    pub(super) fn other_sweep(&self, now: u64) -> Result<Option<OtherSweep>, StoreError> {
        let mark = self.get(&self.path("sweeping"))?;
        let said = mark.map(|mark| begun(&mark)).filter(|&said| !is_dead(said, now));
        Ok(said.map(|said| OtherSweep {
            said_ago: now.saturating_sub(said),
            dead_in: said.saturating_add(SWEEP_DEAD_AFTER_SECONDS) - now,
        }))
    }

    fn sweep_alone(&self, sweep: &mut Sweep<'_>) -> Result<Swept, StoreError> {
        if self.has_writers(sweep.now())? {
            return Ok(Swept::Later);
        }
        let needed = match self.needed(sweep)? {
            Ok(needed) => needed,
            Err(instead) => return Ok(instead),
        };
        let Some(unneeded) = self.unneeded(sweep, &needed)? else { return Ok(Swept::Later) };
        for some in unneeded.chunks(AT_ONCE) {
            if !sweep.goes_on()? {
                return Ok(Swept::Later);
            }
            self.remove_chunks(some)?;
        }
        Ok(Swept::Removed(unneeded.len() as u64))
    }

    /// All chunks but those that are needed; none if the sweep does not go on.
    fn unneeded(
        &self,
        sweep: &mut Sweep<'_>,
        needed: &BTreeSet<ChunkId>,
    ) -> Result<Option<Vec<Path>>, StoreError> {
        let name = |path: &Path| path.filename()?.parse::<ChunkId>().ok();
        // What is no chunk, though it lies there, is none of our business.
        let is_unneeded = |path: &Path| name(path).is_some_and(|id| !needed.contains(&id));
        let folder = self.path("chunks");
        let mut listed = self.objects.list(Some(&folder)).chunks(AT_ONCE);
        let mut unneeded = Vec::new();
        while let Some(some) = self.block(listed.next()) {
            for one in some {
                match one {
                    Ok(meta) => unneeded.extend(Some(meta.location).filter(is_unneeded)),
                    Err(object_store::Error::NotFound { .. }) => {}
                    Err(error) => return Err(self.not_done(format!("list {folder}"), error)),
                }
            }
            if !sweep.goes_on()? {
                return Ok(None);
            }
        }
        Ok(Some(unneeded))
    }

    /// Whether a snapshot is being written. Marks of what has died go.
    fn has_writers(&self, now: u64) -> Result<bool, StoreError> {
        for mark in self.list("writing")? {
            let Some(since) = self.get(&mark)? else { continue };
            if now < begun(&since).saturating_add(DEAD_AFTER_SECONDS) {
                return Ok(true);
            }
            self.delete(&mark)?;
        }
        Ok(false)
    }

    /// The names of all chunks that some snapshot needs; what the sweep comes to if they cannot be
    /// known.
    fn needed(
        &self,
        sweep: &mut Sweep<'_>,
    ) -> Result<Result<BTreeSet<ChunkId>, Swept>, StoreError> {
        let (mut needed, mut there) = (BTreeSet::new(), BTreeSet::new());
        for group in self.groups()? {
            for Listed { number, manifest } in self.snapshots(&group)? {
                match manifest.and_then(|manifest| self.add_needed(sweep, &manifest, &mut needed)) {
                    Ok(true) => {}
                    Ok(false) => return Ok(Err(Swept::Later)),
                    Err(error @ StoreError::Failed { .. }) => return Err(error),
                    Err(error) => {
                        let which = format!("snapshot {number} of {group}");
                        return Ok(Err(Swept::Kept(format!("{which} cannot be read: {error}"))));
                    }
                }
                there.insert((group.clone(), number));
            }
        }
        Ok(match self.has_other_readers(&there, sweep.now())? {
            true => Err(Swept::Later),
            false => Ok(needed),
        })
    }

    /// Adds what a snapshot needs; false if the sweep does not go on.
    fn add_needed(
        &self,
        sweep: &mut Sweep<'_>,
        manifest: &Manifest,
        needed: &mut BTreeSet<ChunkId>,
    ) -> Result<bool, StoreError> {
        for entry in &manifest.members {
            if !sweep.goes_on()? {
                return Ok(false);
            }
            needed.extend(self.entry_references(entry)?.into_iter().map(|id| self.stored_name(id)));
        }
        Ok(true)
    }

    fn remove_chunks(&self, chunks: &[Path]) -> Result<(), StoreError> {
        let removed = stream::iter(chunks.to_vec())
            .map(async |path| match self.objects.delete(&path).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                Err(error) => Err(self.not_done(format!("remove {path}"), error)),
            })
            .buffer_unordered(CONCURRENT)
            .try_collect::<()>();
        self.block(removed)
    }

    /// All chunks that a snapshot needs.
    pub(super) fn references(&self, manifest: &Manifest) -> Result<BTreeSet<ChunkId>, StoreError> {
        let mut references = BTreeSet::new();
        for entry in &manifest.members {
            references.extend(self.entry_references(entry)?);
        }
        Ok(references)
    }

    fn entry_references(&self, entry: &MemberEntry) -> Result<BTreeSet<ChunkId>, StoreError> {
        let mut references = self.member_references(&self.member(entry)?)?;
        references.extend(&entry.part.chunks);
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const NOW: u64 = 1_790_000_000;

    // Before, others took a sweep for dead that still removed chunks, and wrote theirs meanwhile.
    #[test]
    fn a_sweep_says_that_it_lives_and_ends_once_it_was_taken_for_dead() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::create(directory.path().to_str().unwrap()).unwrap();
        let mark = directory.path().join("sweeping");
        let mut sweep = store.begin_sweep(NOW).unwrap().unwrap();
        // As if it had taken so long since.
        sweep.since += SWEEP_DEAD_AFTER_SECONDS - 60;
        assert!(sweep.goes_on().unwrap());
        let other = store.other_sweep(NOW + SWEEP_DEAD_AFTER_SECONDS).unwrap();
        assert_eq!(other.map(|other| other.said_ago), Some(60), "it lives");
        sweep.since += SWEEP_DEAD_AFTER_SECONDS;
        assert!(!sweep.goes_on().unwrap(), "nobody believed that it lives");
        sweep.end().unwrap();
        assert!(!mark.exists());

        let mut sweep = store.begin_sweep(NOW).unwrap().unwrap();
        fs::write(&mark, "another's").unwrap();
        assert!(!sweep.goes_on().unwrap());
        sweep.end().unwrap();
        assert_eq!(fs::read_to_string(mark).unwrap(), "another's");
    }
}
