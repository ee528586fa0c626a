//! Stores from which nothing is removed any more, since a snapshot in them cannot be read: they grow until
//! somebody sees to that.

use crate::host::Host;
use std::collections::BTreeMap;
use tracing::warn;
use understudy_report::events::EventKind;
use understudy_snapshot::{StoreError, Swept};

/// Reasons of such stores, by location.
#[derive(Default)]
pub struct Unswept(BTreeMap<String, String>);

impl Unswept {
    /// Takes what a sweep has come to; what is to be told of it, once for each reason.
    fn note(&mut self, store: &str, swept: &Swept) -> Option<EventKind> {
        match swept {
            Swept::Removed(_) => {
                self.0.remove(store);
                None
            }
            Swept::Later => None,
            Swept::Kept(reason) => {
                let former = self.0.insert(store.to_owned(), reason.clone());
                let (store, told) = (store.to_owned(), former.as_ref() == Some(reason));
                (!told).then(|| EventKind::NotSwept { store, reason: reason.clone() })
            }
        }
    }
}

impl Host {
    /// Notes what a sweep has come to.
    pub(super) fn note_swept(&self, store: &str, swept: &Swept) {
        let told = self.snapshots.known.lock().unswept.note(store, swept);
        if let Some(kind) = told {
            self.events.record(kind);
        }
    }

    /// Notes what has become of what was stored of a snapshot that was given up.
    pub(super) fn note_abandoned(&self, store: &str, abandoned: Result<Swept, StoreError>) {
        match abandoned {
            Ok(swept) => self.note_swept(store, &swept),
            Err(error) => warn!("what was stored of a snapshot that was given up: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use understudy_snapshot::Store;

    /// Regression: one snapshot that cannot be read, of any group, and the store grew without a word.
    #[test]
    fn a_store_that_is_not_swept_any_more_is_told_of_once() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::create(directory.path().to_str().unwrap()).unwrap();
        let rotten = directory.path().join("snapshots/shop");
        fs::create_dir_all(&rotten).unwrap();
        fs::write(rotten.join("1.json"), "rotten").unwrap();
        let mut unswept = Unswept::default();
        let mut sweep = || unswept.note(&store.location(), &store.sweep(1_790_000_000).unwrap());
        let Some(EventKind::NotSwept { store: place, reason }) = sweep() else {
            panic!("nothing is told")
        };
        assert_eq!(place, store.location());
        assert!(reason.contains("snapshot 1 of shop cannot be read"), "{reason}");
        assert_eq!(sweep(), None, "it is known");
        fs::remove_file(rotten.join("1.json")).unwrap();
        assert_eq!(sweep(), None, "all is well");
        fs::write(rotten.join("1.json"), "rotten again").unwrap();
        assert!(sweep().is_some());
    }
}
