//! Snapshots in a store: listed, deleted, verified.

use super::placement::store_error;
use super::unix_now;
use crate::host::Host;
use understudy_protocol::GroupName;
use understudy_report::cluster::{DeleteReport, SnapshotMember, SnapshotReport, VerifyReport};
use understudy_report::error::{ErrorKind, HostError};
use understudy_snapshot::{
    Listed, Manifest, NoAddress, SnapshotNumber, Store, StoreAddress, Swept,
};

impl Host {
    /// The snapshots of a group, the oldest first.
    pub fn snapshots_of(
        &self,
        group: &GroupName,
        store: Option<&str>,
    ) -> Result<Vec<SnapshotReport>, HostError> {
        let store = self.open_store(group, store)?;
        let listed = store.snapshots(group).map_err(|error| store_error("", error))?;
        Ok(listed.into_iter().map(|one| listed_report(group, &store.location(), one)).collect())
    }

    /// The snapshots of all groups in a store; without one, of this host's clusters.
    pub fn all_snapshots(&self, store: Option<&str>) -> Result<Vec<SnapshotReport>, HostError> {
        let groups = match store {
            Some(location) => {
                let store = self.config.store_keys.open(&address(location)?);
                store.map_err(|error| store_error("", error))?.groups()
            }
            None => Ok(self.config.clusters.keys().cloned().collect()),
        };
        let mut all = Vec::new();
        for group in groups.map_err(|error| store_error("", error))? {
            all.extend(self.snapshots_of(&group, store)?);
        }
        Ok(all)
    }

    /// Deletes a snapshot. With `force` even while a host restores from it, so far as its store
    /// knows.
    pub fn delete_snapshot(
        &self,
        group: &GroupName,
        number: SnapshotNumber,
        store: Option<&str>,
        force: bool,
    ) -> Result<DeleteReport, HostError> {
        let chunks = match self.remove_snapshot(group, number, store, force)? {
            Swept::Removed(chunks) => format!("{chunks} chunks were removed with it"),
            Swept::Later => {
                "its chunks are removed later: a snapshot is being written, or was when its \
                 daemon ended"
                    .to_owned()
            }
            Swept::Failed(why) => format!("its chunks are removed later: {why}"),
            Swept::Kept(why) => format!("no chunk was removed: {why}"),
        };
        Ok(DeleteReport { group: group.to_owned(), number, chunks })
    }

    /// The same; what has become of its chunks.
    pub(super) fn remove_snapshot(
        &self,
        group: &GroupName,
        number: SnapshotNumber,
        store: Option<&str>,
        force: bool,
    ) -> Result<Swept, HostError> {
        let store = self.open_store(group, store)?;
        if force {
            let forgotten = store.forget_readers(group, number);
            forgotten.map_err(|error| store_error("", error))?;
        }
        let swept = store.remove(group, number, unix_now());
        let swept = swept.map_err(|error| store_error("", error))?;
        self.note_swept(&store.location(), &swept);
        Ok(swept)
    }

    /// Reads and checks all of a snapshot, the last one without a number.
    pub fn verify_snapshot(
        &self,
        group: &GroupName,
        number: Option<SnapshotNumber>,
        store: Option<&str>,
    ) -> Result<VerifyReport, HostError> {
        let store = self.open_store(group, store)?;
        let manifest = store.snapshot(group, number).map_err(|error| store_error("", error))?;
        let verified = store.verify(&manifest).map_err(|error| store_error("", error))?;
        let problems = verified.problems.iter();
        Ok(VerifyReport {
            group: group.to_owned(),
            number: manifest.number,
            chunks: verified.chunks,
            bytes: verified.bytes,
            problems: problems.map(|one| format!("{}: {}", one.part, one.error)).collect(),
        })
    }

    /// The store that is named, or the group's own.
    pub(super) fn store_of(
        &self,
        group: &GroupName,
        named: Option<&str>,
    ) -> Result<StoreAddress, HostError> {
        let own = self.config.clusters.get(group).and_then(|cluster| cluster.store.clone());
        if let Some(named) = named {
            return address(named);
        }
        own.ok_or_else(|| {
            let message = format!(
                "where are the snapshots of {group}? Give --store, or name a store in the host's \
                 configuration under [cluster.{group}]"
            );
            HostError::new(ErrorKind::Invalid, message)
        })
    }

    pub(super) fn open_store(
        &self,
        group: &GroupName,
        named: Option<&str>,
    ) -> Result<Store, HostError> {
        let location = self.store_of(group, named)?;
        self.config.store_keys.open(&location).map_err(|error| store_error("", error))
    }
}

/// A store's address for other hosts, whose daemons may work in another directory.
fn address(location: &str) -> Result<StoreAddress, HostError> {
    let absolute = match location.contains("://") {
        true => location.to_owned(),
        false => std::path::absolute(location)
            .map_or(location.to_owned(), |path| path.display().to_string()),
    };
    absolute
        .parse()
        .map_err(|error: NoAddress| HostError::new(ErrorKind::Invalid, format!("--store: {error}")))
}

fn listed_report(group: &GroupName, store: &str, listed: Listed) -> SnapshotReport {
    match listed.manifest {
        Ok(manifest) => snapshot_report(&manifest, store),
        Err(error) => SnapshotReport {
            group: group.to_owned(),
            number: listed.number,
            label: None,
            store: store.to_owned(),
            taken_at: 0,
            members: Vec::new(),
            damage: Some(error.to_string()),
        },
    }
}

/// A snapshot as users are told of it.
pub(super) fn snapshot_report(manifest: &Manifest, store: &str) -> SnapshotReport {
    let member = |entry: &understudy_snapshot::MemberEntry| SnapshotMember {
        vm: entry.name.clone(),
        host: entry.host.clone(),
        memory: entry.memory,
    };
    SnapshotReport {
        group: manifest.group.clone(),
        number: manifest.number,
        label: manifest.label.clone(),
        store: store.to_owned(),
        taken_at: manifest.taken_at,
        members: manifest.members.iter().map(member).collect(),
        damage: None,
    }
}
