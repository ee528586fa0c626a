//! A restored disk, filled from the store while the guest runs on it: what the guest waits for
//! first, the rest in the background.

use crate::Stopped;
use crate::source::{Reading, Source};
use anyhow::Context;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;
use std::time::Duration;
use tracing::warn;
use understudy_disk::{BlockSet, Disk, Fetcher, absent_blocks};
use understudy_protocol::{BaseId, BlockId, DiskIndex, PageIndex};
use understudy_snapshot::{AreaMap, ChunkId, Fill, Loader, Page, UNIT_BYTES};
use understudy_threads::Waitable;
use understudy_threads::spawn;

/// Threads that read chunks: a store that answers after 20 ms gives 50 MB/s.
const READERS: usize = 4;
/// Pause before a store that did not answer is asked again.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Time after which somebody who waits for all of it looks again whether he is to stop.
const LOOK: Duration = Duration::from_millis(100);
/// The loader's name for the one area that it has here.
const AREA: BlockId = BlockId(0);

/// Fills one disk. Dropped, it stops: who waits for a block then waits until the disk's server
/// has ended.
pub struct DiskFiller {
    disk: Arc<Disk>,
    all: u64,
    shared: Arc<Shared>,
    readers: Vec<JoinHandle<()>>,
}

/// State of the loading; woken when there is more to read, or less to wait for.
struct Shared(Waitable<State>);

struct State {
    loader: Loader,
    /// Whether to read what nobody waits for.
    background: bool,
    stopped: bool,
    complete: bool,
    /// Reason why a chunk is not there yet.
    stalled: Option<String>,
}

impl Fetcher for Shared {
    fn wanted(&self, block: u64) {
        let page = Page { block: AREA, index: PageIndex(block) };
        self.0.change(|state| state.loader.demand(page));
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
        let (all, shared) = (map.stored(), Shared::new(map));
        let disk = Disk::create_restored(index, path, bytes, absent, shared.clone())?;
        // What the guest changes from now on is what the next snapshot has to save.
        disk.set_base(base);
        DiskFiller::begin(source, disk, all, shared)
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
        let shared = Shared::new(map.within(absent.runs(0..absent.blocks())));
        let disk = Disk::resume_restored(index, path, bytes, absent, shared.clone())?;
        DiskFiller::begin(source, disk, all, shared)
    }

    fn begin(
        source: Source,
        disk: Disk,
        all: u64,
        shared: Arc<Shared>,
    ) -> anyhow::Result<DiskFiller> {
        let index = disk.index();
        let mut filler = DiskFiller { disk: Arc::new(disk), all, shared, readers: Vec::new() };
        for _ in 0..READERS {
            let reader = Reader {
                source: source.clone(),
                disk: filler.disk.clone(),
                shared: filler.shared.clone(),
            };
            let spawned = spawn(format!("fill-disk{index}"), move || reader.run())
                .context("cannot start a thread")?;
            filler.readers.push(spawned);
        }
        Ok(filler)
    }

    /// The disk, to be served to the guest.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// Blocks that are there, and all that have content in the snapshot.
    pub fn blocks(&self) -> (u64, u64) {
        (self.all - self.disk.absent_blocks(), self.all)
    }

    /// Whether all is on stable storage.
    pub fn is_complete(&self) -> bool {
        self.shared.0.lock().complete
    }

    /// Reason why the guest may stand still.
    pub fn stalled(&self) -> Option<String> {
        self.shared.0.lock().stalled.clone()
    }

    /// Reads the rest; returns when all is on stable storage.
    pub fn complete(&self, stop: &AtomicBool) -> anyhow::Result<()> {
        self.shared.0.change(|state| state.background = true);
        while self.disk.absent_blocks() > 0 {
            Stopped::check(stop)?;
            drop(self.shared.0.wait_for(self.shared.0.lock(), LOOK));
        }
        self.disk.complete_restore()?;
        self.shared.0.lock().complete = true;
        Ok(())
    }
}

impl Drop for DiskFiller {
    fn drop(&mut self) {
        self.shared.0.change(|state| state.stopped = true);
        for reader in self.readers.drain(..) {
            if reader.join().is_err() {
                warn!("a thread that filled a disk panicked");
            }
        }
    }
}

impl Shared {
    /// Shared state for what this map has.
    fn new(map: AreaMap) -> Arc<Shared> {
        let loader = Loader::new(BTreeMap::from([(AREA, map)]), &[], 0);
        let state =
            State { loader, background: false, stopped: false, complete: false, stalled: None };
        Arc::new(Shared(Waitable::new(state)))
    }
}

struct Reader {
    source: Source,
    disk: Arc<Disk>,
    shared: Arc<Shared>,
}

impl Reader {
    fn run(&self) {
        while let Some(reading) = self.next() {
            let (chunk, content) = (reading.chunk, reading.content());
            drop(reading);
            match content {
                Ok(content) => self.fill(chunk, &content),
                Err(error) => {
                    self.shared.0.lock().loader.failed(chunk);
                    self.pause(&error);
                }
            }
        }
    }

    /// Waits for something to read; none when it is to end.
    fn next(&self) -> Option<Reading<'_>> {
        let mut state = self.shared.0.lock();
        loop {
            if state.stopped {
                return None;
            }
            let read_on = state.background;
            let next = self.source.next(&mut state.loader, read_on);
            if next.is_some() {
                return next;
            }
            state = self.shared.0.wait_for(state, LOOK);
        }
    }

    fn fill(&self, chunk: ChunkId, content: &[u8]) {
        let fills = self.shared.0.lock().loader.read(chunk).to_vec();
        for fill in fills {
            while let Err(error) = self.write(&fill, content) {
                // Who waits for it goes on waiting.
                if !self.pause(&format!("{error:#}")) {
                    return;
                }
            }
        }
        self.shared.0.change(|state| state.stalled = None);
    }

    fn write(&self, fill: &Fill, content: &[u8]) -> anyhow::Result<()> {
        let from = usize::from(fill.slot) * UNIT_BYTES;
        let to = from + fill.pages.count as usize * UNIT_BYTES;
        let content = content.get(from..to).context("a chunk of the disk is too short")?;
        Ok(self.disk.fill(fill.pages.first.0, content)?)
    }

    /// Something has failed: notes it and waits a little. False if it is to end.
    fn pause(&self, why: &impl ToString) -> bool {
        let mut state = self.shared.0.lock();
        let why = why.to_string();
        if state.stalled.as_ref() != Some(&why) {
            warn!(disk = %self.disk.index(), "a disk that is being restored: {why}");
        }
        state.stalled = Some(why);
        let until = std::time::Instant::now() + ASK_AGAIN;
        while !state.stopped {
            let left = until.saturating_duration_since(std::time::Instant::now());
            if left.is_zero() {
                return true;
            }
            state = self.shared.0.wait_for(state, left);
        }
        false
    }
}
