//! Stores are opened with the keys that this host's configuration names for them.

use crate::error::{ErrorKind, HostError};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use understudy_snapshot::{Store, StoreError, StoreKey};

/// The key files of encrypted stores, by location. They are read whenever a store is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreKeys(Arc<BTreeMap<String, PathBuf>>);

impl StoreKeys {
    /// These files.
    pub fn new(files: impl IntoIterator<Item = (String, PathBuf)>) -> StoreKeys {
        let files = files.into_iter().map(|(location, file)| (plain(&location).to_owned(), file));
        StoreKeys(Arc::new(files.collect()))
    }

    /// A store that is there.
    pub(crate) fn open(&self, location: &str) -> Result<Store, StoreError> {
        Store::open_with(location, self.key(location)?.as_ref())
    }

    /// A store, which is made if there is none: encrypted if it has a key.
    pub(crate) fn create(&self, location: &str) -> Result<Store, StoreError> {
        Store::create_with(location, self.key(location)?.as_ref())
    }

    fn key(&self, location: &str) -> Result<Option<StoreKey>, StoreError> {
        Ok(self.0.get(plain(location)).map(|file| StoreKey::read(file)).transpose()?)
    }
}

/// The one spelling of a location.
fn plain(location: &str) -> &str {
    let location = location.strip_prefix("file://").unwrap_or(location);
    match location.trim_end_matches('/') {
        "" => location,
        trimmed => trimmed,
    }
}

/// Makes a key in a file that is not there yet (`understudy snapshot-key`).
pub fn make_key(file: &Path) -> Result<(), HostError> {
    StoreKey::make(file).map_err(|error| HostError::new(ErrorKind::Invalid, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_is_encrypted_if_it_has_a_key_however_it_is_spelt() {
        let directory = tempfile::tempdir().unwrap();
        let key = directory.path().join("key");
        make_key(&key).unwrap();
        assert!(make_key(&key).is_err(), "it is in use");
        let place = |name: &str| directory.path().join(name).display().to_string();
        let keys = StoreKeys::new([(place("sealed") + "/", key.clone())]);
        keys.create(&place("sealed")).unwrap();
        keys.create(&place("plain")).unwrap();
        for spelling in [place("sealed"), format!("file://{}", place("sealed")), place("sealed/")] {
            keys.open(&spelling).unwrap();
            let without = StoreKeys::default().open(&spelling);
            assert!(matches!(without, Err(StoreError::Encrypted(_))), "{spelling}");
        }
        StoreKeys::default().open(&place("plain")).unwrap();
        std::fs::remove_file(&key).unwrap();
        let error = keys.open(&place("sealed")).unwrap_err().to_string();
        assert!(error.contains("cannot read the snapshot key"), "{error}");
    }
}
