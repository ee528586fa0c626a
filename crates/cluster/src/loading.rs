//! The loading of a member's main memory, or of a disk: what is there, what is to be read next, and how the guest
//! gets it. One for those who read before its start and those who go on while it runs.

use crate::source::Source;
use std::sync::Arc;
use std::time::{Duration, Instant};
use understudy_memory::DemandPager;
use understudy_snapshot::{ChunkId, Fill, Loader};
use understudy_threads::{MutexGuard, Waitable};

/// Threads that read chunks once the guest runs: a store that answers after 20 ms gives 50 MB/s.
pub(crate) const READERS: usize = 4;

/// A store that takes longer for a chunk is said not to answer.
const SLOW: Duration = Duration::from_secs(2);

/// State that the threads share; woken when there is something to read, or nothing left to do.
pub struct Loading(Waitable<State>);

/// See [`Loading`].
pub(crate) struct State {
    pub loader: Loader,
    /// Pager of the guest, once that exists, and until all is there; a disk has none.
    pager: Option<Arc<DemandPager>>,
    /// Threads that fill something in just now.
    filling: usize,
    pub complete: bool,
    /// Why a chunk is not there yet.
    pub failed: Option<String>,
    /// Time since which each reader waits for the store.
    reading: [Option<Instant>; READERS],
}

impl State {
    /// Reason why the guest may stand still.
    pub fn stalled(&self, source: &Source) -> Option<String> {
        let longest = self.reading.iter().flatten().map(Instant::elapsed).max();
        match (&self.failed, longest.filter(|&longest| longest > SLOW)) {
            (Some(why), _) => Some(why.clone()),
            (None, Some(since)) => Some(format!(
                "the store {} has not answered for {} s",
                source.store.location(),
                since.as_secs()
            )),
            (None, None) => None,
        }
    }
}

impl Loading {
    /// Nothing but what this loader knows of is there.
    pub fn new(loader: Loader) -> Arc<Loading> {
        let (reading, complete, failed) = Default::default();
        let state = State { loader, pager: None, filling: 0, complete, failed, reading };
        Arc::new(Loading(Waitable::new(state)))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// Wakes all that wait for something to do.
    pub(crate) fn wake(&self) {
        self.0.wake();
    }

    pub(crate) fn wait_for<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        longest: Duration,
    ) -> MutexGuard<'a, State> {
        self.0.wait_for(state, longest)
    }

    /// Has a reader read: for how long is known.
    pub(crate) fn timed<T>(&self, reader: usize, read: impl FnOnce() -> T) -> T {
        self.lock().reading[reader] = Some(Instant::now());
        let result = read();
        self.lock().reading[reader] = None;
        result
    }

    /// The guest asks this pager from now on.
    pub(crate) fn begin_paging(&self, pager: DemandPager) {
        self.lock().pager = Some(Arc::new(pager));
    }

    /// Counts a chunk as there, which the caller is about to fill in; none if paging is at its end. Who
    /// finds all there waits for that before he ends it.
    pub(crate) fn fill(&self, chunk: ChunkId) -> Option<(Filling<'_>, Vec<Fill>)> {
        let mut state = self.lock();
        let pager = state.pager.clone()?;
        state.filling += 1;
        let fills = state.loader.read(chunk).to_vec();
        Some((Filling { loading: self, pager: Some(pager) }, fills))
    }

    /// The pager, once those who still fill in have let go of it; none if somebody else has ended it.
    pub(crate) fn take_pager(&self) -> Option<DemandPager> {
        let mut state = self.0.wait_while(self.lock(), |state| state.filling > 0);
        let pager = state.pager.take();
        drop(state);
        pager.and_then(Arc::into_inner)
    }
}

/// A thread fills something in, until this is dropped.
pub(crate) struct Filling<'a> {
    loading: &'a Loading,
    pager: Option<Arc<DemandPager>>,
}

impl Filling<'_> {
    pub(crate) fn pager(&self) -> &DemandPager {
        self.pager.as_ref().expect("it is there until this is dropped")
    }
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        // First: whoever takes the pager then is the only one that has it.
        self.pager = None;
        self.loading.0.change(|state| state.filling -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use understudy_snapshot::Store;

    #[test]
    fn a_store_that_does_not_answer_is_named_until_it_does() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::create(directory.path().to_str().unwrap()).unwrap();
        let source = Source::new(Arc::new(store), Default::default());
        let loading = Loading::new(Loader::new(BTreeMap::new(), &[], 0));
        let stalled = || loading.lock().stalled(&source);
        loading.timed(1, || {
            assert_eq!(stalled(), None);
            loading.lock().reading[1] = Some(Instant::now() - SLOW - Duration::from_millis(1));
            let why = stalled().unwrap();
            assert!(why.ends_with("has not answered for 2 s"), "{why}");
            loading.lock().failed = Some("it is gone".to_owned());
            assert_eq!(stalled().as_deref(), Some("it is gone"), "what is known for sure");
            loading.lock().failed = None;
        });
        assert_eq!(stalled(), None);
    }
}
