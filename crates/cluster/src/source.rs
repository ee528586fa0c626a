//! Stores that restored VMs are read from. A host's guests share the way to the store: what one of
//! them waits for must not stand behind what nobody waits for yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use understudy_snapshot::{ChunkId, Loader, Store, StoreError};

/// Time for which the way is kept clear after a guest has waited: it is likely to wait again.
const QUIET: Duration = Duration::from_millis(50);

/// Chunks that are read meanwhile though nobody waits for them, so that it goes on at all.
const BEHIND: usize = 1;

/// A host's way to its stores.
#[derive(Debug)]
pub struct Way {
    /// Chunks under way that nobody waited for when they were asked for.
    behind: AtomicUsize,
    /// Time at which a guest waited last, in nanoseconds since the beginning; 0 before.
    wanted: AtomicU64,
    began: Instant,
}

impl Default for Way {
    fn default() -> Way {
        Way { behind: AtomicUsize::new(0), wanted: AtomicU64::new(0), began: Instant::now() }
    }
}

impl Way {
    /// A guest waits for a chunk.
    pub fn note_wanted(&self, now: Instant) {
        let since = now.duration_since(self.began).as_nanos() as u64;
        self.wanted.store(since.max(1), Ordering::Release);
    }

    /// Takes a place for a chunk that nobody waits for, if there is one.
    pub fn enter(&self, now: Instant) -> bool {
        let may = |behind: usize| (!self.is_quiet(now) || behind < BEHIND).then_some(behind + 1);
        self.behind.fetch_update(Ordering::AcqRel, Ordering::Acquire, may).is_ok()
    }

    /// Whether a guest has waited a moment ago.
    fn is_quiet(&self, now: Instant) -> bool {
        match self.wanted.load(Ordering::Acquire) {
            0 => false,
            wanted => now.duration_since(self.began + Duration::from_nanos(wanted)) < QUIET,
        }
    }

    /// Gives a place back.
    pub fn leave(&self) {
        self.behind.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A store, and the way there.
#[derive(Clone)]
pub struct Source {
    /// The store.
    pub store: Arc<Store>,
    way: Arc<Way>,
}

/// The way is kept clear for those who wait: ask again a moment later.
#[derive(Debug)]
pub struct KeptClear;

/// A chunk that is being read.
pub struct Reading<'s> {
    /// Chunk that is being read.
    pub chunk: ChunkId,
    source: &'s Source,
    behind: bool,
}

impl Source {
    /// The store behind this way.
    pub fn new(store: Arc<Store>, way: Arc<Way>) -> Source {
        Source { store, way }
    }

    /// A guest has begun to wait for something.
    pub fn wanted(&self) {
        self.way.note_wanted(Instant::now());
    }

    /// Chunk that is to be read next: what a guest waits for; and else, if `read_on`, what the
    /// loader has planned, unless the way is kept clear: then ask again a moment later.
    pub fn next(&self, loader: &mut Loader, read_on: bool) -> Option<Reading<'_>> {
        let now = Instant::now();
        if let Some(chunk) = loader.next_demanded() {
            self.way.note_wanted(now);
            return Some(Reading { chunk, source: self, behind: false });
        }
        if !read_on || a_test_has_only_waiters_served() {
            return None;
        }
        self.planned(|| loader.next_chunk()).ok().flatten()
    }

    /// Chunk that `plan` says is to be read, though no guest waits for it; none if that is nothing.
    pub fn planned(
        &self,
        plan: impl FnOnce() -> Option<ChunkId>,
    ) -> Result<Option<Reading<'_>>, KeptClear> {
        if !self.way.enter(Instant::now()) {
            return Err(KeptClear);
        }
        let planned = plan().map(|chunk| Reading { chunk, source: self, behind: true });
        if planned.is_none() {
            self.way.leave();
        }
        Ok(planned)
    }
}

impl Reading<'_> {
    /// Its content, checked.
    pub fn content(&self) -> Result<Vec<u8>, StoreError> {
        be_silent_in_a_test();
        self.source.store.chunk(self.chunk)
    }
}

/// A test has nothing read but what a guest waits for, for as long as there is the file that the
/// fail point names: loading does not end before the test has done with it, whatever the machine.
fn a_test_has_only_waiters_served() -> bool {
    fail::fail_point!("only-waiters", is_there);
    false
}

/// A test has the store silent for as long as there is the file that the fail point names.
fn be_silent_in_a_test() {
    fail::fail_point!("store-silent", |file| {
        while is_there(file.clone()) {
            std::thread::sleep(QUIET);
        }
    });
}

/// Whether there is the file that a fail point names.
#[cfg(feature = "fail-points")]
fn is_there(file: Option<String>) -> bool {
    file.is_some_and(|file| std::path::Path::new(&file).exists())
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        if self.behind {
            self.source.way.leave();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_is_kept_clear_for_a_while_after_a_guest_has_waited() {
        let (way, start) = (Way::default(), Instant::now());
        assert!((0..8).all(|_| way.enter(start)), "nobody has waited");
        way.note_wanted(start);
        assert!(!way.enter(start + QUIET / 2), "eight are under way already");
        (0..8).for_each(|_| way.leave());
        assert!(way.enter(start + QUIET / 2), "it goes on, slowly");
        assert!(!way.enter(start + QUIET / 2));
        assert!(way.enter(start + QUIET), "nobody has waited since");
    }
}
