//! Stores from which chunks are to be removed that nothing needs: since a snapshot was being written, or the store failed,
//! or, until somebody sees to that, since a snapshot in them cannot be read.

use super::time_of;
use crate::containment::spawn_for_request;
use crate::host::Host;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_report::events::EventKind;
use understudy_snapshot::{Store, StoreAddress, StoreError, Swept, Writing};

/// Time after which a sweep that is owed is tried again.
const AGAIN: Duration = Duration::from_secs(60);

/// Time between two looks whether one is: a daemon that ends is not held up for long.
const LOOK: Duration = Duration::from_secs(1);

/// Time after which it is told that one is still owed.
const TOLD_AFTER: Duration = Duration::from_secs(24 * 3600);

/// Such stores, by location.
#[derive(Default)]
pub struct Unswept(BTreeMap<String, Lack>);

/// What a store lacks.
#[derive(Default)]
struct Lack {
    /// The sweep that is owed, and is tried again.
    owed: Option<Owed>,
    /// Reason why no sweep removes anything, as it was told.
    kept: Option<String>,
    /// Snapshots that are over and count as being written, since the store could not be told.
    unfinished: Vec<Writing>,
}

struct Owed {
    since: Instant,
    /// When somebody wanted it last: a sweep that had begun before may not have seen what for.
    last: Instant,
    told: bool,
}

impl Unswept {
    /// Takes what a sweep has come to that began then; what is to be told of it, once for each reason.
    fn note(
        &mut self,
        store: &str,
        swept: &Swept,
        (begun, now): (Instant, Instant),
    ) -> Option<EventKind> {
        let lack = self.0.entry(store.to_owned()).or_default();
        let told = match swept {
            Swept::Removed(_) => {
                lack.kept = None;
                lack.owed.take_if(|owed| owed.last <= begun);
                None
            }
            Swept::Later => {
                lack.owe("a snapshot is always being written, or was when its daemon ended", now)
            }
            Swept::Failed(why) => lack.owe(why, now),
            Swept::Kept(reason) => {
                lack.owed = None;
                let former = lack.kept.replace(reason.clone());
                (former.as_ref() != Some(reason)).then(|| {
                    format!(
                        "{reason}; delete a snapshot that cannot be read, or have the version that can read it see to \
                         the store"
                    )
                })
            }
        };
        if lack.owed.is_none() && lack.kept.is_none() && lack.unfinished.is_empty() {
            self.0.remove(store);
        }
        told.map(|reason| EventKind::NotSwept { store: store.to_owned(), reason })
    }

    /// A snapshot is over, and the store could not be told.
    fn note_unfinished(&mut self, store: &str, writing: Writing) {
        self.0.entry(store.to_owned()).or_default().unfinished.push(writing);
    }

    /// The stores whose sweep is owed, and what is to be ended there before.
    fn take_owed(&mut self) -> Vec<(String, Vec<Writing>)> {
        let owed = self.0.iter_mut().filter(|(_, lack)| lack.owed.is_some());
        owed.map(|(store, lack)| (store.clone(), std::mem::take(&mut lack.unfinished))).collect()
    }
}

impl Lack {
    /// The next sweep of the store is owed, for this reason now.
    fn owe(&mut self, why: &str, now: Instant) -> Option<String> {
        let owed = self.owed.get_or_insert(Owed { since: now, last: now, told: false });
        owed.last = now;
        let is_late = now.saturating_duration_since(owed.since) >= TOLD_AFTER;
        let tell = is_late && !std::mem::replace(&mut owed.told, is_late);
        tell.then(|| {
            format!(
                "for a day it could not be (see that its hosts can write and delete there, and that their snapshots \
                 end): {why}"
            )
        })
    }
}

impl Host {
    /// Notes what a sweep has come to that began then.
    pub(super) fn note_swept(&self, store: &str, swept: &Swept, begun: Instant) {
        let times = (begun, Instant::now());
        let told = self.snapshots.note(|known| known.unswept.note(store, swept, times));
        if let Some(kind) = told {
            self.tell_of_host(kind);
        }
    }

    /// Gives a snapshot up, and notes what has become of what was stored of it.
    pub(super) fn abandon_snapshot(&self, store: &Store, writing: Writing) {
        let begun = Instant::now();
        match store.abandon(&writing, time_of(store)) {
            Ok(swept) => self.note_swept(&store.location(), &swept, begun),
            Err(error) => {
                warn!("what was stored of a snapshot that was given up: {error}");
                self.note_unfinished(store, writing, &error);
            }
        }
    }

    /// Notes that a snapshot which is over still counts as being written: the store is told before the next sweep.
    pub(super) fn note_unfinished(&self, store: &Store, writing: Writing, why: &StoreError) {
        let location = store.location();
        self.snapshots.note(|known| known.unswept.note_unfinished(&location, writing));
        self.note_swept(&location, &Swept::Failed(why.to_string()), Instant::now());
    }

    fn sweep_owed(&self) {
        let owed = self.snapshots.note(|known| known.unswept.take_owed());
        for (location, unfinished) in owed {
            let begun = Instant::now();
            let swept = self.sweep_again(&location, unfinished).unwrap_or_else(Swept::Failed);
            self.note_swept(&location, &swept, begun);
        }
    }

    fn sweep_again(&self, location: &str, unfinished: Vec<Writing>) -> Result<Swept, String> {
        let address = location.parse::<StoreAddress>().map_err(|error| error.to_string());
        let opened = address.and_then(|address| {
            self.config.store_keys.open(&address).map_err(|error| error.to_string())
        });
        let mut failed = opened.as_ref().err().cloned();
        for writing in unfinished {
            let ended = opened.as_ref().is_ok_and(|store| match store.end_writing(&writing) {
                Ok(()) => true,
                Err(error) => {
                    failed = Some(error.to_string());
                    false
                }
            });
            if !ended {
                self.snapshots.note(|known| known.unswept.note_unfinished(location, writing));
            }
        }
        let store = opened?;
        match failed {
            Some(why) => Err(why),
            None => store.sweep(time_of(&store)).map_err(|error| error.to_string()),
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
    use understudy_protocol::literal;
    use understudy_snapshot::SnapshotNumber;

    /// A sweep that took no time.
    fn at(time: Instant) -> (Instant, Instant) {
        (time, time)
    }

    impl Unswept {
        fn owed(&self) -> Vec<&str> {
            let owed = self.0.iter().filter(|(_, lack)| lack.owed.is_some());
            owed.map(|(store, _)| store.as_str()).collect()
        }
    }

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
            unswept.note(&store.location(), &swept, at(Instant::now()))
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
        // Meanwhile another one writes.
        assert_eq!(unswept.note(&store.location(), &Swept::Later, at(Instant::now())), None);
        let swept = store.sweep(1_790_000_000).unwrap();
        assert_eq!(
            unswept.note(&store.location(), &swept, at(Instant::now())),
            None,
            "it is known"
        );
    }

    /// Regression: nobody did what was said to be done later.
    #[test]
    fn a_sweep_that_is_owed_is_tried_again_and_told_of_after_a_day() {
        let (mut unswept, begin) = (Unswept::default(), Instant::now());
        let after = |hours: u64| begin + Duration::from_secs(hours * 3600);
        assert_eq!(unswept.note("/srv/s", &Swept::Later, at(begin)), None);
        assert_eq!(unswept.owed(), ["/srv/s"]);
        let full = Swept::Failed("it is full".to_owned());
        assert_eq!(unswept.note("/srv/s", &full, at(after(23))), None);
        let Some(EventKind::NotSwept { reason, .. }) = unswept.note("/srv/s", &full, at(after(24)))
        else {
            panic!("nothing is told")
        };
        assert!(reason.ends_with("it is full"), "{reason}");
        assert_eq!(unswept.note("/srv/s", &Swept::Later, at(after(25))), None, "it is known");
        assert_eq!(unswept.note("/srv/s", &Swept::Removed(3), at(after(26))), None);
        assert!(unswept.owed().is_empty());
        assert_eq!(unswept.note("/srv/s", &Swept::Later, at(after(27))), None, "since now");
    }
    /// Regression: what a sweep that had read the manifests before did not see was owed no more.
    #[test]
    fn a_sweep_that_began_before_leaves_it_owed() {
        let (mut unswept, begin) = (Unswept::default(), Instant::now());
        let after = |seconds| begin + Duration::from_secs(seconds);
        unswept.note("/srv/s", &Swept::Later, at(after(9)));
        assert_eq!(unswept.note("/srv/s", &Swept::Removed(3), (begin, after(20))), None);
        assert_eq!(unswept.owed(), ["/srv/s"]);
        unswept.note("/srv/s", &Swept::Removed(3), (after(10), after(20)));
        assert!(unswept.0.is_empty());
    }

    /// Regression: a snapshot that was given up while its store was away counted as being written for a day.
    #[test]
    fn what_could_not_be_ended_is_ended_before_the_next_sweep() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::create(directory.path().to_str().unwrap()).unwrap();
        let writing = store.begin(&literal("shop"), SnapshotNumber(0), 1_790_000_000).unwrap();
        let mut unswept = Unswept::default();
        unswept.note_unfinished("/srv/s", writing.clone());
        unswept.note("/srv/s", &Swept::Failed("away".to_owned()), at(Instant::now()));
        assert_eq!(unswept.take_owed(), [("/srv/s".to_owned(), vec![writing])]);
        assert_eq!(unswept.take_owed(), [("/srv/s".to_owned(), vec![])], "it is somebody's");
    }
}
