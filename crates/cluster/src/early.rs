//! Pages that a restored member's start waits for, read while its QEMU starts: what that is is
//! known from the snapshot alone, and it goes into the memory that the QEMU will have.

use crate::fill::units;
use crate::source::{KeptClear, Reading, Source};
use crate::{Loading, Stopped};
use anyhow::{Context, bail, ensure};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};
use understudy_memory::{GuestRam, MAIN_MEMORY};
use understudy_snapshot::{AreaMap, ChunkId, Loader, Page};
use understudy_threads::spawn;

/// Threads that read chunks: a store that answers after 20 ms gives 200 MB/s.
const READERS: usize = 16;

/// Time after which a way that is kept clear is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(10);

/// Time after which who waits looks again whether he is to stop.
const LOOK: Duration = Duration::from_millis(100);

/// The beginning of a memory, being read until all of it is there, or the restore is stopped.
pub struct Early {
    shared: Arc<Shared>,
    /// Outcome of each reader: how long it took all in all.
    ends: Receiver<anyhow::Result<Duration>>,
}

struct Shared {
    source: Source,
    ram: Arc<GuestRam>,
    loading: Arc<Loading>,
    began: Instant,
    stop: Arc<AtomicBool>,
}

impl Early {
    /// Begins to read the first `before_start` pages of the queue, which `map` tells where to
    /// find, into `ram`.
    pub fn begin(
        source: Source,
        ram: Arc<GuestRam>,
        map: AreaMap,
        queue: &[Page],
        before_start: u64,
        stop: Arc<AtomicBool>,
    ) -> anyhow::Result<Early> {
        ensure!(
            map.units() == ram.pages(),
            "the snapshot is damaged: it has {} pages of a main memory of {}",
            map.units(),
            ram.pages()
        );
        let loader = Loader::new(BTreeMap::from([(MAIN_MEMORY, map)]), queue, before_start);
        let loading = Loading::new(loader);
        let shared = Arc::new(Shared { source, ram, loading, began: Instant::now(), stop });
        let (sender, ends) = mpsc::channel();
        for reader in 0..READERS {
            let (shared, sender) = (shared.clone(), sender.clone());
            // Nobody listens if the start has failed meanwhile.
            let read = move || drop(sender.send(shared.read()));
            spawn(format!("early-{reader}"), read).context("cannot start a thread")?;
        }
        Ok(Early { shared, ends })
    }

    /// Loading that knows what was read, and what is left.
    pub fn loading(&self) -> &Arc<Loading> {
        &self.shared.loading
    }

    /// Waits until all of it is there; returns how long that took since its beginning.
    pub fn finish(self) -> anyhow::Result<Duration> {
        let mut took = Duration::ZERO;
        for _ in 0..READERS {
            took = took.max(self.end_of_one()?);
        }
        Ok(took)
    }

    fn end_of_one(&self) -> anyhow::Result<Duration> {
        loop {
            Stopped::check(&self.shared.stop)?;
            match self.ends.recv_timeout(LOOK) {
                Ok(end) => return end,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => bail!("a thread that reads memory panicked"),
            }
        }
    }
}

impl Shared {
    /// A reader's life.
    fn read(&self) -> anyhow::Result<Duration> {
        while let Some(reading) = self.next()? {
            let content = reading.content()?;
            self.fill(reading.chunk, &content)?;
        }
        Ok(self.began.elapsed())
    }

    /// The next chunk; none if all are asked for.
    fn next(&self) -> anyhow::Result<Option<Reading<'_>>> {
        loop {
            Stopped::check(&self.stop)?;
            match self.source.planned(|| self.loading.lock().loader.next_before_start()) {
                Ok(next) => return Ok(next),
                Err(KeptClear) => thread::sleep(ASK_AGAIN),
            }
        }
    }

    fn fill(&self, chunk: ChunkId, content: &[u8]) -> anyhow::Result<()> {
        let fills = self.loading.lock().loader.read(chunk).to_vec();
        for fill in fills {
            self.ram.write(fill.pages.first, units(content, fill.slot, fill.pages.count)?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Way;
    use std::fs;
    use std::path::PathBuf;
    use std::sync::atomic::Ordering;
    use tempfile::TempDir;
    use understudy_protocol::PageIndex;
    use understudy_snapshot::{Compression, Lane, Packer, Store, UNIT_BYTES};

    const PAGES: u64 = 400;
    const LIMIT: Duration = Duration::from_secs(20);

    /// A memory in a store; the queue is its second half, from the end.
    struct Bench {
        directory: TempDir,
        way: Arc<Way>,
        ram: Arc<GuestRam>,
        map: AreaMap,
        stop: Arc<AtomicBool>,
    }

    fn queue() -> impl Iterator<Item = u64> {
        (PAGES / 2..PAGES).rev()
    }

    fn content(page: u64) -> Vec<u8> {
        (page + 1).to_le_bytes().repeat(UNIT_BYTES / 8)
    }

    impl Bench {
        fn new() -> Bench {
            let directory = tempfile::tempdir().unwrap();
            let store = Store::create(directory.path().to_str().unwrap()).unwrap();
            let mut packer = Packer::new();
            let mut chunks = Vec::new();
            let set = queue().map(|page| (page, Lane::WorkingSet));
            for (page, lane) in set.chain((0..PAGES / 2).map(|page| (page, Lane::Rest))) {
                chunks.extend(packer.put(page, &content(page), lane));
            }
            let (last, map, _) = packer.finish(&AreaMap::zeros(PAGES));
            chunks.extend(last);
            store.put_chunks(&chunks, Compression::None).unwrap();
            let ram = Arc::new(GuestRam::create(PAGES * UNIT_BYTES as u64).unwrap());
            Bench { directory, way: Arc::default(), ram, map, stop: Arc::default() }
        }

        fn begin(&self, pages: u64) -> Early {
            let store = Arc::new(Store::open(self.directory.path().to_str().unwrap()).unwrap());
            let source = Source::new(store, self.way.clone());
            let queue: Vec<Page> =
                queue().map(|page| Page { block: MAIN_MEMORY, index: PageIndex(page) }).collect();
            let (ram, map, stop) = (self.ram.clone(), self.map.clone(), self.stop.clone());
            Early::begin(source, ram, map, &queue, pages, stop).unwrap()
        }

        fn chunk_of(&self, page: u64) -> PathBuf {
            let name = self.map.find(page).unwrap().chunk.to_string();
            self.directory.path().join("chunks").join(&name[..2]).join(name)
        }

        /// A guest waits all the time, and the place beside it is taken.
        fn keep_way_clear(&self) {
            let later = Instant::now() + LIMIT;
            self.way.note_wanted(later);
            assert!(self.way.enter(later));
        }

        fn pages_there(&self) -> Vec<u64> {
            let runs = self.ram.data_runs().map(Result::unwrap);
            runs.flat_map(|run| run.first.0..run.first.0 + run.count).collect()
        }
    }

    #[test]
    fn the_beginning_of_the_queue_is_there_and_nothing_else() {
        let bench = Bench::new();
        let early = bench.begin(100);
        let loading = early.loading().clone();
        early.finish().unwrap();
        // Two chunks hold the first 100 pages.
        let there: Vec<u64> = (PAGES - 128..PAGES).collect();
        assert_eq!(bench.pages_there(), there);
        let block = understudy_memory::RamBlock::main("ram", 0, bench.ram.clone());
        for page in there {
            let mut bytes = vec![0; UNIT_BYTES];
            block.read(PageIndex(page), &mut bytes).unwrap();
            assert_eq!(bytes, content(page), "page {page}");
        }
        let loader = &mut loading.lock().loader;
        assert!(loader.may_start() && loader.pages() == 128);
        let rest: Vec<ChunkId> = std::iter::from_fn(|| loader.next_chunk()).collect();
        let twice = |page| rest.contains(&bench.map.find(page).unwrap().chunk);
        assert!(!twice(PAGES - 1) && !twice(PAGES - 128) && twice(PAGES - 129) && twice(0));
    }

    #[test]
    fn a_lazy_start_reads_nothing_and_an_eager_one_all() {
        let bench = Bench::new();
        bench.begin(0).finish().unwrap();
        assert!(bench.pages_there().is_empty());
        bench.begin(PAGES).finish().unwrap();
        assert_eq!(bench.pages_there(), (0..PAGES).collect::<Vec<_>>());
    }

    #[test]
    fn a_chunk_that_cannot_be_read_fails_the_start_that_needs_it() {
        let bench = Bench::new();
        fs::remove_file(bench.chunk_of(PAGES - 70)).unwrap();
        bench.begin(60).finish().unwrap();
        let error = bench.begin(100).finish().unwrap_err().to_string();
        assert!(error.contains("is missing"), "{error}");
    }

    #[test]
    fn guests_that_wait_go_first() {
        let bench = Bench::new();
        bench.keep_way_clear();
        // Who reads now ends with an error.
        let [chunks, away] = ["chunks", "away"].map(|name| bench.directory.path().join(name));
        fs::rename(&chunks, &away).unwrap();
        let early = bench.begin(PAGES);
        let end = early.ends.recv_timeout(10 * ASK_AGAIN);
        assert!(matches!(end, Err(RecvTimeoutError::Timeout)), "{end:?}");
        fs::rename(&away, &chunks).unwrap();
        bench.way.leave();
        early.finish().unwrap();
        assert_eq!(bench.pages_there().len() as u64, PAGES);
    }

    #[test]
    fn a_restore_that_is_stopped_ends_the_readers() {
        let bench = Bench::new();
        bench.keep_way_clear();
        let early = bench.begin(PAGES);
        bench.stop.store(true, Ordering::Release);
        let error = early.finish().unwrap_err();
        assert!(error.is::<Stopped>(), "{error}");
        let deadline = Instant::now() + LIMIT;
        while Arc::strong_count(&bench.ram) > 1 {
            assert!(Instant::now() < deadline, "the readers have not ended");
            thread::yield_now();
        }
        assert!(bench.pages_there().is_empty());
    }

    #[test]
    fn a_map_of_another_memory_is_refused() {
        let bench = Bench { map: AreaMap::zeros(PAGES + 1), ..Bench::new() };
        let store = Arc::new(Store::open(bench.directory.path().to_str().unwrap()).unwrap());
        let source = Source::new(store, bench.way);
        let begun = Early::begin(source, bench.ram, bench.map, &[], 0, bench.stop);
        let error = begun.err().unwrap().to_string();
        assert!(error.contains("401 pages of a main memory of 400"), "{error}");
    }
}
