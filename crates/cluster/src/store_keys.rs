//! Stores are opened with the keys that this host's configuration names for them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use understudy_protocol::HostName;
use understudy_report::error::{ErrorKind, HostError};
use understudy_snapshot::{Store, StoreAddress, StoreError, StoreKey};

/// The key of the stores in a directory or under a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyOfStores {
    /// That in this file, which is read whenever a store is opened.
    File(PathBuf),
    /// None: they are in the clear, below one that is not.
    Plain,
}

/// The keys of stores, by location: they are for all stores in those directories and under those prefixes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreKeys(Arc<BTreeMap<StoreAddress, KeyOfStores>>);

impl StoreKeys {
    /// These keys.
    pub fn new(keys: impl IntoIterator<Item = (StoreAddress, KeyOfStores)>) -> StoreKeys {
        StoreKeys(Arc::new(keys.into_iter().collect()))
    }

    /// The stores that are named.
    pub fn stores(&self) -> impl Iterator<Item = StoreAddress> {
        self.0.keys().cloned()
    }

    /// A store that is there.
    pub fn open(&self, location: &StoreAddress) -> Result<Store, StoreError> {
        Store::open_with(location, self.key(location)?.as_ref())
    }

    /// A store, which is made if there is none: encrypted if it has a key.
    pub fn create(&self, location: &StoreAddress) -> Result<Store, StoreError> {
        Store::create_with(location, self.key(location)?.as_ref())
    }

    /// The key of a store: its own, or that of the nearest one above it.
    fn key(&self, location: &StoreAddress) -> Result<Option<StoreKey>, StoreError> {
        let above = self.0.iter().filter(|(keyed, _)| keyed.has(location));
        let nearest = above.max_by_key(|(keyed, _)| keyed.len());
        match nearest {
            Some((_, KeyOfStores::File(file))) => Ok(Some(StoreKey::read(file)?)),
            Some((_, KeyOfStores::Plain)) | None => Ok(None),
        }
    }
}

/// The stores that other hosts may have this host use, by its configuration. What its own operator
/// asks for is not bound by it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stores {
    here: HostName,
    named: Arc<Vec<StoreAddress>>,
}

impl Stores {
    /// Stores with these addresses, and what is in a directory or under a prefix of them, of the
    /// host `here`.
    pub fn new(here: &HostName, named: impl IntoIterator<Item = StoreAddress>) -> Stores {
        Stores { here: here.clone(), named: Arc::new(named.into_iter().collect()) }
    }

    /// An error unless a peer may name this store.
    pub fn check(&self, store: &StoreAddress) -> Result<(), HostError> {
        if self.named.iter().any(|named| named.has(store)) {
            return Ok(());
        }
        let here = &self.here;
        let message = format!(
            "host {here} may not be told to use the store {store}: name it in `snapshot_stores` of \
             that host's configuration, or as a cluster's `store` there"
        );
        Err(HostError::new(ErrorKind::Refused, message))
    }
}

/// Makes a key in a file that is not there yet (`understudy snapshot-key`).
pub fn make_key(file: &Path) -> Result<(), HostError> {
    StoreKey::make(file).map_err(|error| HostError::new(ErrorKind::Invalid, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: a peer could have this host write a VM's memory to any store that it named.
    #[test]
    fn peers_name_the_stores_of_the_configuration_only() {
        let here = understudy_protocol::literal("b");
        let stores = Stores::new(&here, ["/srv/snapshots".parse().unwrap()]);
        let check = |store: &str| stores.check(&store.parse().unwrap());
        assert!(check("/srv/snapshots").is_ok() && check("/srv/snapshots/shop/").is_ok());
        let refused = check("/srv/other").unwrap_err().to_string();
        assert!(refused.contains("snapshot_stores") && refused.contains("host b"), "{refused}");
        assert!(Stores::new(&here, []).check(&"/srv".parse().unwrap()).is_err());
    }

    #[test]
    fn a_store_is_encrypted_if_it_has_a_key_however_it_is_spelt() {
        let directory = tempfile::tempdir().unwrap();
        let key = directory.path().join("key");
        make_key(&key).unwrap();
        assert!(make_key(&key).is_err(), "it is in use");
        let text = |name: &str| directory.path().join(name).display().to_string();
        let place = |name: &str| text(name).parse::<StoreAddress>().unwrap();
        let keys = StoreKeys::new([(
            (text("sealed") + "/").parse().unwrap(),
            KeyOfStores::File(key.clone()),
        )]);
        keys.create(&place("sealed")).unwrap();
        keys.create(&place("plain")).unwrap();
        for spelling in [text("sealed"), format!("file://{}", text("sealed")), text("sealed/")] {
            let spelling: StoreAddress = spelling.parse().unwrap();
            keys.open(&spelling).unwrap();
            let without = StoreKeys::default().open(&spelling);
            assert!(matches!(without, Err(StoreError::Encrypted(_))), "{spelling}");
        }
        StoreKeys::default().open(&place("plain")).unwrap();
        std::fs::remove_file(&key).unwrap();
        let error = keys.open(&place("sealed")).unwrap_err().to_string();
        assert!(error.contains("cannot read the snapshot key"), "{error}");
    }

    /// Regression: it was written in plain, without a word.
    #[test]
    fn a_store_below_an_encrypted_one_is_encrypted_with_the_nearest_key() {
        let directory = tempfile::tempdir().unwrap();
        let place = |name: &str| -> StoreAddress {
            directory.path().join(name).display().to_string().parse().unwrap()
        };
        let key = |name: &str| {
            let file = directory.path().join(name);
            make_key(&file).unwrap();
            file
        };
        let (outer, inner) = (key("outer-key"), key("inner-key"));
        let file = |key: &PathBuf| KeyOfStores::File(key.clone());
        let only = |store: &str, key: &PathBuf| StoreKeys::new([(place(store), file(key))]);
        let keys = StoreKeys::new([
            (place("sealed"), file(&outer)),
            (place("sealed/shop"), file(&inner)),
            (place("sealed/known"), KeyOfStores::Plain),
        ]);
        StoreKeys::default().create(&place("sealed/old")).unwrap();
        for (store, key) in [("sealed/db", &outer), ("sealed/shop/db", &inner)] {
            keys.create(&place(store)).unwrap();
            let without = StoreKeys::default().open(&place(store));
            assert!(matches!(without, Err(StoreError::Encrypted(_))), "{store}: {without:?}");
            only(store, key).open(&place(store)).unwrap();
        }
        keys.create(&place("sealed-not")).unwrap();
        StoreKeys::default().open(&place("sealed-not")).unwrap();
        let in_plain = keys.create(&place("sealed/old"));
        assert!(matches!(in_plain, Err(StoreError::NotEncrypted(_))), "{in_plain:?}");
        // One that was made before, and is to stay what it is.
        keys.create(&place("sealed/known")).unwrap();
        StoreKeys::default().open(&place("sealed/known")).unwrap();
    }
}
