//! Stores that this host has taken snapshots into. One of them that is not there is on a mount that is
//! missing: it is not made anew, on the root disk.

use super::placement::store_error;
use crate::host::{Host, internal};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use tracing::warn;
use understudy_cluster::messages::GroupPlaces;
use understudy_cluster::store_keys::StoreKeys;
use understudy_report::error::{ErrorKind, HostError};
use understudy_snapshot::{Store, StoreAddress, StoreError};

/// No VM's name has a dot.
const FILE: &str = "snapshot.stores";

/// The list of them, an address a line.
pub struct UsedStores(PathBuf);

impl Host {
    /// Those that this process takes snapshots of a group into. A keeper writes into its VMs' directories only.
    pub(super) fn used_stores(&self, group: &GroupPlaces) -> Result<UsedStores, HostError> {
        Ok(UsedStores(match (&self.keeps, group.vms.first()) {
            (Some(_), Some(vm)) => self.vm_directory(vm)?.join(FILE),
            _ => self.config.state_dir.join(FILE),
        }))
    }
}

impl UsedStores {
    /// A store that a snapshot goes to; made if none is there, and this host has not used it before.
    pub fn open_or_make(&self, keys: &StoreKeys, store: &StoreAddress) -> Result<Store, HostError> {
        if self.has(store).map_err(internal)? {
            return keys.open(store).map_err(|error| match error {
                StoreError::Unknown(_) => self.gone(store),
                other => store_error("", other),
            });
        }
        let made = keys.create(store).map_err(|error| store_error("", error))?;
        if let Err(error) = self.add(store) {
            warn!("should the snapshot store {store} be gone one day, it is made anew: {error}");
        }
        Ok(made)
    }

    fn gone(&self, store: &StoreAddress) -> HostError {
        let message = format!(
            "the snapshot store at {store}, which this host has used before, is not there: is it mounted? If it \
             is gone for good, remove its line from {}, and the next snapshot makes a new one",
            self.0.display()
        );
        HostError::new(ErrorKind::NotFound, message)
    }

    fn has(&self, store: &StoreAddress) -> io::Result<bool> {
        match fs::read_to_string(&self.0) {
            Ok(text) => Ok(text.lines().any(|line| line == &**store)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => {
                let message = format!("cannot read {}: {error}", self.0.display());
                Err(io::Error::new(error.kind(), message))
            }
        }
    }

    fn add(&self, store: &StoreAddress) -> io::Result<()> {
        let mut file = File::options().append(true).create(true).mode(0o600).open(&self.0)?;
        file.write_all(format!("{store}\n").as_bytes())?;
        file.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: it was made anew below the mount's place, and the snapshot counted as taken.
    #[test]
    fn a_store_that_is_not_mounted_is_not_made_anew() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("store");
        let store: StoreAddress = place.display().to_string().parse().unwrap();
        let used = UsedStores(directory.path().join(FILE));
        let open = || used.open_or_make(&StoreKeys::default(), &store);
        open().unwrap();
        open().unwrap();
        let elsewhere = directory.path().join("elsewhere");
        fs::rename(&place, &elsewhere).unwrap();
        let error = open().unwrap_err();
        assert_eq!(error.kind, ErrorKind::NotFound);
        for words in ["is it mounted?", FILE, &*store] {
            assert!(error.message.contains(words), "{error}");
        }
        assert!(!place.exists());
        // The mount's place is there, and nothing is mounted.
        fs::create_dir(&place).unwrap();
        assert!(open().is_err() && fs::read_dir(&place).unwrap().next().is_none());
        fs::remove_dir(&place).unwrap();
        fs::rename(&elsewhere, &place).unwrap();
        open().unwrap();
        // Its operator wants a new one.
        fs::remove_dir_all(&place).unwrap();
        fs::remove_file(&used.0).unwrap();
        open().unwrap();
    }
}
