//! The marks in its store of those who restore from a snapshot, so that it is not deleted
//! meanwhile.

use super::mark::begun;
use super::snapshots::DEAD_AFTER_SECONDS;
use super::{Store, StoreError};
use crate::SnapshotNumber;
use object_store::path::Path;
use std::collections::BTreeSet;
use understudy_protocol::{GroupName, HostName, VmName};

/// A restore of one member, until [`Store::end_reading`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// The group.
    pub group: GroupName,
    /// The snapshot.
    pub number: SnapshotNumber,
    /// The member.
    pub vm: VmName,
    /// Tells it from other restores of the member.
    pub id: String,
}

impl Store {
    /// Notes that a host restores a member. To be called before the snapshot is read; what is there
    /// then stays there. `now` is in seconds since 1970.
    pub fn begin_reading(
        &self,
        reading: &Reading,
        host: &HostName,
        now: u64,
    ) -> Result<(), StoreError> {
        self.put(&self.reading_path(reading), format!("{now} {host}").into_bytes())
    }

    /// The member needs the snapshot no more.
    pub fn end_reading(&self, reading: &Reading) -> Result<(), StoreError> {
        self.delete(&self.reading_path(reading))
    }

    /// Forgets those who restored from a snapshot and will not go on with it.
    pub fn forget_readers(
        &self,
        group: &GroupName,
        number: SnapshotNumber,
    ) -> Result<(), StoreError> {
        self.readers(group, number)?.iter().try_for_each(|mark| self.delete(mark))
    }

    /// An error while somebody restores from a snapshot.
    pub(super) fn check_unread(
        &self,
        group: &GroupName,
        number: SnapshotNumber,
        now: u64,
    ) -> Result<(), StoreError> {
        let mut readers = Vec::new();
        for path in self.readers(group, number)? {
            // Else it has just ended.
            if let Some(mark) = self.get(&path)? {
                readers.push(words(&path, &mark, now));
            }
        }
        match readers.is_empty() {
            true => Ok(()),
            false => {
                let (group, readers) = (group.to_owned(), readers.join(", "));
                Err(StoreError::BeingRead { group, number, readers })
            }
        }
    }

    /// Whether somebody restores from a snapshot that is not among these: one that is just coming
    /// back, since it was to be deleted when the restore began.
    pub(super) fn has_other_readers(
        &self,
        there: &BTreeSet<(GroupName, SnapshotNumber)>,
        now: u64,
    ) -> Result<bool, StoreError> {
        for path in self.list("reading")? {
            if read_by(&path).is_some_and(|read| there.contains(&read)) {
                continue;
            }
            let Some(mark) = self.get(&path)? else { continue };
            if now < begun(&mark).saturating_add(DEAD_AFTER_SECONDS) {
                return Ok(true);
            }
            self.delete(&path)?;
        }
        Ok(false)
    }

    fn readers(&self, group: &GroupName, number: SnapshotNumber) -> Result<Vec<Path>, StoreError> {
        let mut marks = self.list(&format!("reading/{group}/{number}"))?;
        marks.sort();
        Ok(marks)
    }

    fn reading_path(&self, reading: &Reading) -> Path {
        let Reading { group, number, vm, id } = reading;
        self.path(&format!("reading/{group}/{number}/{vm}/{id}"))
    }
}

/// The snapshot that a mark is about.
fn read_by(path: &Path) -> Option<(GroupName, SnapshotNumber)> {
    let mut parts = path.parts().rev().skip(2);
    let number = parts.next()?.as_ref().parse().ok()?;
    Some((parts.next()?.as_ref().parse().ok()?, SnapshotNumber(number)))
}

fn words(path: &Path, mark: &[u8], now: u64) -> String {
    let vm = path.parts().rev().nth(1);
    let vm = vm.as_ref().map_or("a member", |vm| vm.as_ref());
    let text = String::from_utf8_lossy(mark);
    let host = text.split_once(' ').map_or("of an unknown name", |(_, host)| host);
    let seconds = now.saturating_sub(begun(mark));
    format!("host {host} began {seconds} s ago to restore {vm} from it")
}
