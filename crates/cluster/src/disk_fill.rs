//! A restored disk, filled from the store while the guest runs on it: what the guest waits for
//! first, the rest in the background.

use crate::fill::units;
use crate::loading::READERS;
use crate::source::{Reading, Source};
use crate::{Loading, Stopped};
use anyhow::Context;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_disk::{BlockSet, Disk, Fetcher, absent_blocks};
use understudy_protocol::{BaseId, BlockId, DiskIndex, PageIndex};
use understudy_snapshot::{AreaMap, ChunkId, Fill, Loader, Page};
use understudy_threads::spawn;

/// Pause before a store that did not answer is asked again.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Time after which somebody who waits for all of it looks again whether he is to stop.
const LOOK: Duration = Duration::from_millis(100);
/// The loader's name for the one area that it has here.
const AREA: BlockId = BlockId(0);

/// Fills one disk. Dropped, it stops: who waits for a block then waits until the disk's server
/// has ended.
pub struct DiskFiller {
    all: u64,
    work: Arc<Work>,
    readers: Vec<JoinHandle<()>>,
}

/// State that the threads share.
struct Work {
    source: Source,
    disk: Arc<Disk>,
    loading: Arc<Loading>,
    /// Whether what nobody waits for is read, too.
    reads_on: AtomicBool,
    stopped: AtomicBool,
}

impl Fetcher for Loading {
    fn wanted(&self, block: u64) {
        self.lock().loader.demand(Page { block: AREA, index: PageIndex(block) });
        self.wake();
    }
}

impl DiskFiller {
    /// Makes an image of `bytes` bytes at `path`, in place of a file that is there. Until
    /// [`DiskFiller::complete`] only what is asked for is read. What the guest changes is counted from `base`.
    pub fn create(
        source: Source,
        map: AreaMap,
        index: DiskIndex,
        bytes: u64,
        path: &Path,
        base: BaseId,
    ) -> anyhow::Result<DiskFiller> {
        let mut absent = BlockSet::none(bytes);
        map.extents().iter().for_each(|extent| absent.insert(extent.first..extent.end()));
        let (all, loading) = (map.stored(), loading_of(map));
        let disk = Disk::create_restored(index, path, bytes, absent, loading.clone())?;
        // What the guest changes from now on is what the next snapshot has to save.
        disk.set_base(base);
        DiskFiller::begin(source, disk, all, loading)
    }

    /// Goes on with an image that another daemon has begun to fill, and whose guest has lived
    /// since.
    pub fn resume(
        source: Source,
        map: AreaMap,
        index: DiskIndex,
        bytes: u64,
        path: &Path,
    ) -> anyhow::Result<DiskFiller> {
        let absent = absent_blocks(path, bytes);
        let absent =
            absent.with_context(|| format!("what is there of {} is not known", path.display()))?;
        let all = map.stored();
        let loading = loading_of(map.within(absent.runs(0..absent.blocks())));
        let disk = Disk::resume_restored(index, path, bytes, absent, loading.clone())?;
        DiskFiller::begin(source, disk, all, loading)
    }

    fn begin(
        source: Source,
        disk: Disk,
        all: u64,
        loading: Arc<Loading>,
    ) -> anyhow::Result<DiskFiller> {
        let index = disk.index();
        let (reads_on, stopped) = (AtomicBool::new(false), AtomicBool::new(false));
        let work = Arc::new(Work { source, disk: Arc::new(disk), loading, reads_on, stopped });
        let mut filler = DiskFiller { all, work, readers: Vec::new() };
        for reader in 0..READERS {
            let work = filler.work.clone();
            let spawned = spawn(format!("fill-disk{index}"), move || work.read_on(reader))
                .context("cannot start a thread")?;
            filler.readers.push(spawned);
        }
        Ok(filler)
    }

    /// The disk, to be served to the guest.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.work.disk
    }

    /// Blocks that are there, and all that have content in the snapshot.
    pub fn blocks(&self) -> (u64, u64) {
        (self.all - self.work.disk.absent_blocks(), self.all)
    }

    /// Whether all is on stable storage.
    pub fn is_complete(&self) -> bool {
        self.work.loading.lock().complete
    }

    /// Reason why the guest may stand still.
    pub fn stalled(&self) -> Option<String> {
        self.work.loading.lock().stalled(&self.work.source)
    }

    /// Reads the rest; returns when all is on stable storage.
    pub fn complete(&self, stop: &AtomicBool) -> anyhow::Result<()> {
        let Work { disk, loading, reads_on, .. } = &*self.work;
        reads_on.store(true, Ordering::Release);
        loading.wake();
        while disk.absent_blocks() > 0 {
            Stopped::check(stop)?;
            drop(loading.wait_for(loading.lock(), LOOK));
        }
        disk.complete_restore()?;
        loading.lock().complete = true;
        Ok(())
    }
}

impl Drop for DiskFiller {
    fn drop(&mut self) {
        self.work.stopped.store(true, Ordering::Release);
        self.work.loading.wake();
        for reader in self.readers.drain(..) {
            if reader.join().is_err() {
                warn!("a thread that filled a disk panicked");
            }
        }
    }
}

/// Nothing of what this map has is there.
fn loading_of(map: AreaMap) -> Arc<Loading> {
    Loading::new(Loader::new(BTreeMap::from([(AREA, map)]), &[], 0))
}

impl Work {
    /// A reader's life.
    fn read_on(&self, reader: usize) {
        while let Some(reading) = self.next() {
            let chunk = reading.chunk;
            let read = self.loading.timed(reader, || reading.content());
            drop(reading);
            match read {
                Ok(content) => self.fill(chunk, &content),
                Err(error) => {
                    self.loading.lock().loader.failed(chunk);
                    self.pause(&error);
                }
            }
        }
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Waits for something to read; none when it is to end.
    fn next(&self) -> Option<Reading<'_>> {
        let mut state = self.loading.lock();
        while !self.is_stopped() {
            let reads_on = self.reads_on.load(Ordering::Acquire);
            let next = self.source.next(&mut state.loader, reads_on);
            if next.is_some() {
                return next;
            }
            state = self.loading.wait_for(state, LOOK);
        }
        None
    }

    fn fill(&self, chunk: ChunkId, content: &[u8]) {
        let fills = self.loading.lock().loader.read(chunk).to_vec();
        for fill in fills {
            while let Err(error) = self.write(&fill, content) {
                // Who waits for it goes on waiting.
                if !self.pause(&format!("{error:#}")) {
                    return;
                }
            }
        }
        self.loading.lock().failed = None;
        self.loading.wake();
    }

    fn write(&self, fill: &Fill, content: &[u8]) -> anyhow::Result<()> {
        let content = units(content, fill.slot, fill.pages.count)?;
        Ok(self.disk.fill(fill.pages.first.0, content)?)
    }

    /// Something has failed: notes it and waits a little. False if it is to end.
    fn pause(&self, why: &impl ToString) -> bool {
        let why = why.to_string();
        let former = self.loading.lock().failed.replace(why.clone());
        if former.as_ref() != Some(&why) {
            warn!(disk = %self.disk.index(), "a disk that is being restored: {why}");
        }
        let until = Instant::now() + ASK_AGAIN;
        while !self.is_stopped() && Instant::now() < until {
            thread::sleep(LOOK);
        }
        !self.is_stopped()
    }
}
