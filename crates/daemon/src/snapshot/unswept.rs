//! Stores from which chunks are to be removed that nothing needs: since a snapshot was being written, or the store failed,
//! or, until somebody sees to that, since a snapshot in them cannot be read.

use super::unix_now;
use crate::containment::spawn_for_request;
use crate::host::Host;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_report::events::EventKind;
use understudy_snapshot::{StoreAddress, StoreError, Swept};

/// Time after which a sweep that is owed is tried again.
const AGAIN: Duration = Duration::from_secs(60);

/// Time between two looks whether one is: a daemon that ends is not held up for long.
const LOOK: Duration = Duration::from_secs(1);

/// Time after which it is told that one is still owed.
const TOLD_AFTER: Duration = Duration::from_secs(24 * 3600);

/// Such stores, by location.
#[derive(Default)]
pub struct Unswept(BTreeMap<String, Lack>);

/// What there is to say of a store.
enum Lack {
    /// A sweep is owed since then, and is tried again.
    Owed { since: Instant, told: bool },
    /// No sweep removes anything, for this reason.
    Kept(String),
}

impl Unswept {
    /// Takes what a sweep has come to; what is to be told of it, once for each reason.
    fn note(&mut self, store: &str, swept: &Swept, now: Instant) -> Option<EventKind> {
        match swept {
            Swept::Removed(_) => {
                self.0.remove(store);
                None
            }
            Swept::Later => self.owe(
                store,
                "a snapshot is always being written, or was when its daemon ended",
                now,
            ),
            Swept::Failed(why) => self.owe(store, why, now),
            Swept::Kept(reason) => {
                let former = self.0.insert(store.to_owned(), Lack::Kept(reason.clone()));
                let told = matches!(former, Some(Lack::Kept(former)) if former == *reason);
                (!told).then(|| not_swept(store, reason))
            }
        }
    }

    /// The next sweep of a store is owed, for this reason now.
    fn owe(&mut self, store: &str, why: &str, now: Instant) -> Option<EventKind> {
        let owed = self.0.entry(store.to_owned()).or_insert(Lack::Owed { since: now, told: false });
        let Lack::Owed { since, told } = owed else {
            *owed = Lack::Owed { since: now, told: false };
            return None;
        };
        let is_late = now.saturating_duration_since(*since) >= TOLD_AFTER;
        let tell = is_late && !std::mem::replace(told, is_late);
        tell.then(|| not_swept(store, &format!("for a day it could not be: {why}")))
    }

    /// The stores whose sweep is owed.
    fn owed(&self) -> Vec<String> {
        let owed = |(store, lack): (&String, &Lack)| {
            matches!(lack, Lack::Owed { .. }).then(|| store.clone())
        };
        self.0.iter().filter_map(owed).collect()
    }
}

fn not_swept(store: &str, reason: &str) -> EventKind {
    EventKind::NotSwept { store: store.to_owned(), reason: reason.to_owned() }
}

impl Host {
    /// Notes what a sweep has come to.
    pub(super) fn note_swept(&self, store: &str, swept: &Swept) {
        let told = self.snapshots.known.lock().unswept.note(store, swept, Instant::now());
        if let Some(kind) = told {
            self.events.record(kind);
        }
    }

    /// Notes what has become of what was stored of a snapshot that was given up.
    pub(super) fn note_abandoned(&self, store: &str, abandoned: Result<Swept, StoreError>) {
        let swept = abandoned.unwrap_or_else(|error| {
            warn!("what was stored of a snapshot that was given up: {error}");
            Swept::Failed(error.to_string())
        });
        self.note_swept(store, &swept);
    }

    fn sweep_owed(&self) {
        let owed = self.snapshots.known.lock().unswept.owed();
        for location in owed {
            let address = location.parse::<StoreAddress>().map_err(|error| error.to_string());
            let open =
                |address| self.config.store_keys.open(&address).map_err(|error| error.to_string());
            let sweep = |store: understudy_snapshot::Store| {
                store.sweep(unix_now()).map_err(|error| error.to_string())
            };
            let swept = address.and_then(open).and_then(sweep).unwrap_or_else(Swept::Failed);
            self.note_swept(&location, &swept);
        }
    }
}

/// Tries again what is owed, until the host's daemon ends.
pub(crate) fn start(host: &Arc<Host>) {
    let host = Arc::downgrade(host);
    spawn_for_request("sweep-owed", move || {
        let mut next = Instant::now() + AGAIN;
        loop {
            thread::sleep(LOOK);
            let Some(host) = host.upgrade().filter(|host| !host.is_closing()) else { return };
            if Instant::now() >= next {
                host.sweep_owed();
                next = Instant::now() + AGAIN;
            }
        }
    });
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
        let mut sweep = || {
            let swept = store.sweep(1_790_000_000).unwrap();
            unswept.note(&store.location(), &swept, Instant::now())
        };
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
    /// Regression: nobody did what was said to be done later.
    #[test]
    fn a_sweep_that_is_owed_is_tried_again_and_told_of_after_a_day() {
        let (mut unswept, begin) = (Unswept::default(), Instant::now());
        let after = |hours: u64| begin + Duration::from_secs(hours * 3600);
        assert_eq!(unswept.note("/srv/s", &Swept::Later, begin), None);
        assert_eq!(unswept.owed(), ["/srv/s"]);
        let full = Swept::Failed("it is full".to_owned());
        assert_eq!(unswept.note("/srv/s", &full, after(23)), None);
        let Some(EventKind::NotSwept { reason, .. }) = unswept.note("/srv/s", &full, after(24))
        else {
            panic!("nothing is told")
        };
        assert!(reason.ends_with("it is full"), "{reason}");
        assert_eq!(unswept.note("/srv/s", &Swept::Later, after(25)), None, "it is known");
        assert_eq!(unswept.note("/srv/s", &Swept::Removed(3), after(26)), None);
        assert!(unswept.owed().is_empty());
        assert_eq!(unswept.note("/srv/s", &Swept::Later, after(27)), None, "since now");
    }
}
