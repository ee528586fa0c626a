//! Snapshots begin, become visible, are listed, and go.

use super::mark::MarkWord;
use super::sweep::OtherSweep;
use super::{CONCURRENT, Store, StoreError, Swept};
use crate::format::{Manifest, seal_envelope};
use crate::{ChunkId, SnapshotNumber};
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use std::collections::{BTreeMap, BTreeSet};
use understudy_protocol::{GroupName, MOST_COUNTED};

/// Time that a snapshot may take to be written before a clean-up takes it for dead. Its chunks
/// are then removed, and it cannot be published any more.
pub(super) const DEAD_AFTER_SECONDS: u64 = 24 * 3600;

/// The most chunks of a folder that are looked for one by one.
pub(super) const FEW: usize = 16;

/// A snapshot that is being written. Until it is published there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Writing {
    /// The group.
    pub group: GroupName,
    /// The number that it has.
    pub number: SnapshotNumber,
    /// Word of its mark.
    word: MarkWord,
}

/// A snapshot in the store.
#[derive(Debug)]
pub struct Listed {
    /// Its number.
    pub number: SnapshotNumber,
    /// Manifest of it, or why that cannot be read.
    pub manifest: Result<Manifest, StoreError>,
}

impl Store {
    /// Begins a snapshot of a group, with the first number behind `after` that this store does
    /// not know. `after` is the last number that the members' [`Cut`](crate::Cut)s have seen, also
    /// of a snapshot that was given up: numbers must not come twice. `now` is in seconds since
    /// 1970. To be called before anything is put.
    pub fn begin(
        &self,
        group: &GroupName,
        after: SnapshotNumber,
        now: u64,
    ) -> Result<Writing, StoreError> {
        let known = self.numbers("snapshots", group)?.into_keys();
        let begun = self.numbers("writing", group)?.into_keys();
        // A name in the store may be any number.
        let countable = known.chain(begun).filter(|number| number.0 < MOST_COUNTED);
        let mut number = countable.max().unwrap_or_default().max(after).next();
        let word = self.mark_word()?;
        while !self.put_mark(&self.writing_path(group, number), &word, now)? {
            number = number.next();
        }
        let writing = Writing { group: group.to_owned(), number, word };
        // Whoever sweeps looks for our mark after making his: one of us sees the other.
        let sweep = self.other_sweep(now).and_then(|sweep| match sweep {
            None => Ok(()),
            Some(OtherSweep { said_ago, dead_in }) => {
                Err(StoreError::Sweeping { said_ago, dead_in })
            }
        });
        match sweep {
            Ok(()) => Ok(writing),
            Err(error) => {
                self.end_writing(&writing)?;
                Err(error)
            }
        }
    }

    /// Makes the snapshot one: the manifest is written, once everything that it
    /// refers to is there.
    ///
    /// After an error it is not there, unless the store has failed in the midst of writing the
    /// manifest: then [`Store::snapshot`] tells, once the store can be reached.
    ///
    /// # Panics
    /// If the manifest is another snapshot's.
    pub fn publish(&self, writing: Writing, manifest: &Manifest) -> Result<(), StoreError> {
        assert_eq!((&writing.group, writing.number), (&manifest.group, manifest.number));
        self.check_whole(manifest)?;
        let mark = self.writing_path(&writing.group, writing.number);
        if !self.has_mark(&mark, &writing.word)? {
            return Err(StoreError::Overtaken(writing.number));
        }
        let json = serde_json::to_string_pretty(manifest)
            .map_err(|error| self.failed("write JSON", error))?;
        let sealed = seal_envelope("snapshot", &(json + "\n"));
        let place = manifest_place(&writing.group, writing.number);
        let sealed = self.seal(&place, sealed.into_bytes())?;
        let path = self.path(&place);
        // A request whose answer is lost is sent again, and finds what it has made itself.
        if !self.put_new(&path, sealed.clone())? && self.get(&path)? != Some(sealed) {
            return Err(StoreError::Overtaken(writing.number));
        }
        self.delete(&mark)
    }

    /// The snapshot is there, or given up: nothing of it is written any more.
    pub fn end_writing(&self, writing: &Writing) -> Result<(), StoreError> {
        self.remove_mark(&self.writing_path(&writing.group, writing.number), &writing.word)
    }

    /// Gives a snapshot up and removes what was written of it.
    pub fn abandon(&self, writing: Writing, now: u64) -> Result<Swept, StoreError> {
        self.end_writing(&writing)?;
        Ok(self.sweep_freed(now))
    }

    /// The groups that have snapshots here.
    pub fn groups(&self) -> Result<Vec<GroupName>, StoreError> {
        let group = |path: Path| path.parts().rev().nth(1)?.as_ref().parse().ok();
        let groups: BTreeSet<GroupName> =
            self.list("snapshots")?.into_iter().filter_map(group).collect();
        Ok(groups.into_iter().collect())
    }

    /// A group's snapshots, the oldest first.
    pub fn snapshots(&self, group: &GroupName) -> Result<Vec<Listed>, StoreError> {
        let listed = |number| {
            let manifest = self.read_manifest(group, number).transpose();
            // Deleted since it was listed.
            manifest.map(|manifest| Listed { number, manifest })
        };
        Ok(self.numbers("snapshots", group)?.into_keys().filter_map(listed).collect())
    }

    /// A group's snapshot, the last one without a number.
    pub fn snapshot(
        &self,
        group: &GroupName,
        number: Option<SnapshotNumber>,
    ) -> Result<Manifest, StoreError> {
        let there: Vec<SnapshotNumber> = self.numbers("snapshots", group)?.into_keys().collect();
        let none = || StoreError::NoSnapshots(group.to_owned());
        let last = there.last().copied().ok_or_else(none)?;
        let number = number.unwrap_or(last);
        let found = self.read_manifest(group, number)?;
        found.ok_or_else(|| {
            let there: Vec<String> = there.iter().map(SnapshotNumber::to_string).collect();
            let verb = if there.len() == 1 { "is" } else { "are" };
            let there = format!("{verb} {}", there.join(", "));
            StoreError::NoSnapshot { group: group.to_owned(), number, there }
        })
    }

    /// Deletes a snapshot, and what nothing else refers to, unless a member is being restored from
    /// it. Other snapshots that were saved as the difference from it keep what they need.
    pub fn remove(
        &self,
        group: &GroupName,
        number: SnapshotNumber,
        now: u64,
    ) -> Result<Swept, StoreError> {
        if !self.numbers("snapshots", group)?.contains_key(&number) {
            // With the error that says what there is.
            self.snapshot(group, Some(number))?;
        }
        self.check_unread(group, number, now)?;
        let path = self.snapshot_path(group, number);
        let manifest = self.get(&path)?;
        self.delete(&path)?;
        // Whoever restores looks for the manifest after making his mark: one of us sees the other.
        if let (Err(read), Some(manifest)) = (self.check_unread(group, number, now), manifest) {
            self.put_new(&path, manifest)?;
            return Err(read);
        }
        Ok(self.sweep_freed(now))
    }

    pub(super) fn snapshot_path(&self, group: &GroupName, number: SnapshotNumber) -> Path {
        self.path(&manifest_place(group, number))
    }

    fn writing_path(&self, group: &GroupName, number: SnapshotNumber) -> Path {
        self.path(&format!("writing/{group}/{number}"))
    }

    fn numbers(
        &self,
        what: &str,
        group: &GroupName,
    ) -> Result<BTreeMap<SnapshotNumber, Path>, StoreError> {
        let number = |path: Path| {
            let name = path.filename()?;
            let number = name.strip_suffix(".json").unwrap_or(name).parse().ok()?;
            Some((SnapshotNumber(number), path))
        };
        Ok(self.list(&format!("{what}/{group}"))?.into_iter().filter_map(number).collect())
    }

    fn read_manifest(
        &self,
        group: &GroupName,
        number: SnapshotNumber,
    ) -> Result<Option<Manifest>, StoreError> {
        let Some(bytes) = self.get(&self.snapshot_path(group, number))? else { return Ok(None) };
        let what = format!("snapshot {number} of {group}");
        let bytes = self.open_sealed(&manifest_place(group, number), bytes).ok_or_else(|| {
            StoreError::damaged(
                &what,
                "it was changed, or put in another's place: it is not what was sealed with the key",
            )
        })?;
        let json = self.open_file("snapshot", &what, &bytes)?;
        let manifest: Manifest =
            serde_json::from_str(json).map_err(|error| StoreError::damaged(&what, error))?;
        if (&manifest.group, manifest.number) != (group, number) {
            return Err(StoreError::damaged(&what, "it is another snapshot's"));
        }
        manifest.check().map_err(|why| StoreError::damaged(&what, why))?;
        Ok(Some(manifest))
    }

    /// Whether all that a snapshot needs is there; [`Store::verify`] reads it too.
    pub fn check_whole(&self, manifest: &Manifest) -> Result<(), StoreError> {
        self.check_there(self.references(manifest)?)
    }

    pub(super) fn check_there(&self, needed: BTreeSet<ChunkId>) -> Result<(), StoreError> {
        let mut folders: BTreeMap<Path, Vec<ChunkId>> = BTreeMap::new();
        for name in needed.into_iter().map(|id| self.stored_name(id)) {
            folders.entry(self.chunk_folder(name)).or_default().push(name);
        }
        let look = stream::iter(folders)
            .map(async |(folder, names)| self.check_folder(&folder, &names).await)
            .buffer_unordered(CONCURRENT)
            .try_collect();
        self.block(look)
    }

    /// Checks a folder: few chunks are asked for one by one; for many a list is shorter, of which
    /// S3 gives a thousand at a time.
    async fn check_folder(&self, folder: &Path, names: &[ChunkId]) -> Result<(), StoreError> {
        if names.len() > FEW {
            let there = self.chunks_in(folder).await?;
            let missing = names.iter().find(|name| !there.contains(name));
            return missing.map_or(Ok(()), |name| Err(StoreError::MissingChunk(*name)));
        }
        for name in names {
            if !self.has_chunk(*name).await? {
                return Err(StoreError::MissingChunk(*name));
            }
        }
        Ok(())
    }
}

/// The place of a manifest, for [`Store::path`].
fn manifest_place(group: &str, number: SnapshotNumber) -> String {
    format!("snapshots/{group}/{number}.json")
}
