//! A member's memory, captured for one snapshot: protected while the guest stands still, copied
//! when it runs again. What it touches first meanwhile is the working set.

use crate::Stop;
use crate::trial::write_accesses;
use crate::upload::Upload;
use anyhow::Context;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::info;
use understudy_machine::Machine;
use understudy_memory::{
    CaptureRequest, Cut, DirtySet, FirstAccess, MAIN_MEMORY, RamBlock, field_bytes,
};
use understudy_protocol::{BaseId, BlockId, PAGE_SIZE, PageIndex};
use understudy_snapshot::{
    AreaMap, Clock, Compression, Lane, NewChunk, Packed, Packer, Page, Recency, Store, WorkingSet,
    scattered, working_set_size,
};

/// Chunks that are handed to the store at once.
const BATCH: usize = 64;

/// Pages that are copied in a second at most, for the guest's sake: 256 MiB.
const PAGES_PER_SECOND: u64 = 1 << 16;

/// Time between two looks for the end of a trace.
const LOOK: Duration = Duration::from_millis(20);

/// Time after which each page's next access counts again, where repeated ones are wanted.
const PERIOD: Duration = Duration::from_millis(100);

/// Share of the memory that is kept of a trace at most, with its content: a half.
const TRACED_SHARE: u64 = 2;

/// Most pages that are traced: 256 MiB.
const MOST_TRACED: u64 = 1 << 16;

/// Most repeated accesses that are kept, where they are wanted: 128 MiB.
const MOST_ACCESSES: usize = 1 << 24;

/// Options for how a capture is made.
#[derive(Clone, Copy, Debug)]
pub struct CaptureOptions {
    /// Compression with which chunks are packed.
    pub compression: Compression,
    /// Base: only what changed since is saved, if that is known.
    pub since: Option<BaseId>,
    /// What the snapshot is to the next one.
    pub next: BaseId,
    /// Time for which first accesses are traced after the pause.
    pub trace: Duration,
    /// Trace repeated accesses too, to compare with queues by recency.
    pub recency: bool,
    /// The working set in pages that sampling gave, if anybody sampled.
    pub sampled: Option<u64>,
}

/// One member's memory, for one snapshot. Dropped at any time, it leaves no page protected and
/// nobody waiting.
pub struct MemoryCapture {
    taken: Taken,
    options: CaptureOptions,
    /// Content of the blocks that are not main memory: read while the guest runs, and again in
    /// the pause what was written meanwhile.
    auxiliary: BTreeMap<BlockId, Vec<u8>>,
    written: DirtySet,
    since: Instant,
}

/// Content of memory that was saved.
pub struct SavedMemory {
    /// Place of each RAM block's content.
    pub areas: BTreeMap<BlockId, AreaMap>,
    /// The queue of first accesses.
    pub working_set: WorkingSet,
    /// Pages by their last access, if that was traced.
    pub recent: Option<WorkingSet>,
    /// Pages that CLOCK keeps of the same accesses.
    pub by_clock: Option<WorkingSet>,
    /// Changes that were taken, kept until the snapshot exists.
    pub taken: Taken,
}

/// Changes that a snapshot took out of "changed since the last one". Dropped, that is given back;
/// if there is none before it, nothing is watched any more.
pub struct Taken {
    machine: Arc<Machine>,
    cut: Option<Cut>,
    is_incremental: bool,
    next: BaseId,
}

impl Taken {
    /// The snapshot exists: the next one saves what changed since.
    pub fn commit(mut self) {
        if let Some(cut) = self.cut.take() {
            cut.commit(self.next);
        }
    }

    fn cut(&mut self) -> &mut Cut {
        self.cut.as_mut().expect("there is one until it is committed")
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.machine.forget_auxiliary();
        if self.cut.take().is_some() && !self.is_incremental {
            self.machine.drop_guard();
        }
    }
}

impl MemoryCapture {
    /// Prepares while the guest runs.
    pub fn arm(machine: &Arc<Machine>, options: CaptureOptions) -> anyhow::Result<MemoryCapture> {
        let trace = most_traced(machine.ram().pages(), options.trace);
        let (since, every_access, most_copies) = (options.since, options.recency, most_copies()?);
        let request = CaptureRequest { since, trace, every_access, most_copies };
        let cut = machine.arm_cut(request).inspect_err(|_| machine.drop_guard())?;
        let (is_incremental, next) = (cut.is_incremental(), options.next);
        let taken = Taken { machine: machine.clone(), cut: Some(cut), is_incremental, next };
        machine.track_auxiliary()?;
        let mut auxiliary = BTreeMap::new();
        for block in machine.blocks().iter().filter(|block| block.id() != MAIN_MEMORY) {
            auxiliary.insert(block.id(), content(block)?);
        }
        let (written, since) = (DirtySet::new(), Instant::now());
        Ok(MemoryCapture { taken, options, auxiliary, written, since })
    }

    /// The guest stands still and its device state is saved: the snapshot's content is fixed
    /// from here on.
    pub fn take(&mut self) -> anyhow::Result<()> {
        self.taken.cut().take()?;
        let machine = self.taken.machine.clone();
        machine.scan_auxiliary(&mut self.written)?;
        for run in self.written.runs() {
            let block = machine.blocks().get(usize::from(run.block.0));
            let content = self.auxiliary.get_mut(&run.block);
            let (block, content) = block.zip(content).context("a RAM block that is not there")?;
            let from = run.first.0 as usize * PAGE_SIZE;
            block.read(run.first, &mut content[from..from + run.count as usize * PAGE_SIZE])?;
        }
        self.since = Instant::now();
        Ok(())
    }

    /// The guest runs: saves all to the store. `base` is where the content of the base is; it counts
    /// only if what changed since is known.
    pub fn save(
        mut self,
        store: &Store,
        base: Option<&BTreeMap<BlockId, AreaMap>>,
        stop: &Stop,
    ) -> anyhow::Result<SavedMemory> {
        self.taken.machine.forget_auxiliary();
        let base = base.filter(|_| self.taken.is_incremental);
        let compression = self.options.compression;
        let mut saving = Saving::new(Upload { store, compression, stop });
        for (id, content) in std::mem::take(&mut self.auxiliary) {
            let mut packer = Packer::new();
            for (unit, page) in (0..).zip(content.chunks(PAGE_SIZE)) {
                saving.store(packer.put(unit, page, Lane::Rest))?;
            }
            saving.finish(id, packer, &AreaMap::zeros((content.len() / PAGE_SIZE) as u64))?;
        }
        let zeros = AreaMap::zeros(self.taken.machine.ram().pages());
        let base = base.and_then(|base| base.get(&MAIN_MEMORY)).unwrap_or(&zeros);
        let mut packer = Packer::new();
        let mut accesses = self.options.recency.then(Vec::new);
        self.copy(&mut saving, &mut packer, accesses.as_mut(), stop)?;
        let queue = self.end_trace(&mut saving, &mut packer, base)?;
        self.copy_rest(&mut saving, &mut packer, stop)?;
        saving.finish(MAIN_MEMORY, packer, base)?;
        let packed = saving.end()?;
        let changed = self.taken.cut().changed();
        info!(
            vm = %self.taken.machine.definition().name,
            changed,
            zeros = packed.zeros,
            duplicates = packed.duplicates,
            traced = queue.len(),
            "memory is saved after {:.1} s",
            self.since.elapsed().as_secs_f64()
        );
        let traced = queue.len() as u64;
        // Where nobody has sampled, the trace is all that is known.
        let sampled = self.options.sampled.unwrap_or(traced);
        let size = working_set_size(sampled, traced);
        let recent = accesses.as_ref().map(|all| by_recency(all, sampled));
        let by_clock = accesses.as_ref().map(|all| by_clock(all, size));
        if let Some(accesses) = &accesses {
            write_accesses(&self.taken.machine.definition().name, accesses);
        }
        let working_set = WorkingSet { queue, size };
        Ok(SavedMemory { areas: saving.areas, working_set, recent, by_clock, taken: self.taken })
    }

    /// Copies, and traces for as long as is wanted.
    fn copy(
        &mut self,
        saving: &mut Saving,
        packer: &mut Packer,
        mut accesses: Option<&mut Vec<PageIndex>>,
        stop: &Stop,
    ) -> anyhow::Result<()> {
        let mut period = Instant::now();
        let mut pace = Pace::from_now();
        loop {
            stop.check()?;
            let wants_more = match &accesses {
                Some(accesses) => accesses.len() < MOST_ACCESSES,
                None => !self.taken.cut().trace_is_full(),
            };
            let is_traced = self.since.elapsed() < self.options.trace && wants_more;
            if let Some(accesses) = &mut accesses {
                accesses.append(&mut self.taken.cut().accesses());
                if is_traced && period.elapsed() > PERIOD {
                    self.taken.cut().watch_again()?;
                    period = Instant::now();
                }
            }
            match self.taken.cut().copy_some()? {
                Some(copies) => {
                    for copy in &copies.pages {
                        saving.store(packer.put(copy.page.0, &copy.content, Lane::Rest))?;
                    }
                    if !copies.by_faults {
                        pace.copied(copies.pages.len() as u64);
                    }
                }
                None if is_traced => thread::sleep(LOOK),
                None => return Ok(()),
            }
        }
    }

    /// Returns what was touched first, in its order; packs it so where it lies otherwise.
    fn end_trace(
        &mut self,
        saving: &mut Saving,
        packer: &mut Packer,
        base: &AreaMap,
    ) -> anyhow::Result<Vec<Page>> {
        let first = self.taken.cut().end_trace();
        let units: Vec<u64> = first.iter().map(|access| access.page.0).collect();
        let unpacked: HashSet<u64> = scattered(base, &units).into_iter().collect();
        for FirstAccess { page, content } in &first {
            let wanted = self.taken.cut().is_changed(*page) || unpacked.contains(&page.0);
            if let (true, Some(content)) = (wanted, content) {
                saving.store(packer.put(page.0, content, Lane::WorkingSet))?;
            }
        }
        Ok(first.into_iter().map(|access| main_page(access.page)).collect())
    }

    /// Saves what faults copied at the very end.
    fn copy_rest(
        &mut self,
        saving: &mut Saving,
        packer: &mut Packer,
        stop: &Stop,
    ) -> anyhow::Result<()> {
        while let Some(copies) = self.taken.cut().copy_some()? {
            stop.check()?;
            for copy in &copies.pages {
                saving.store(packer.put(copy.page.0, &copy.content, Lane::Rest))?;
            }
        }
        Ok(())
    }
}

/// All pages that were accessed, those accessed last first.
fn by_recency(accesses: &[PageIndex], size: u64) -> WorkingSet {
    let mut recency = Recency::new(accesses.len().max(1));
    accesses.iter().copied().map(main_page).for_each(|page| recency.access(page));
    WorkingSet { queue: recency.pages(), size }
}

/// Pages that CLOCK keeps in `size` pages.
fn by_clock(accesses: &[PageIndex], size: u64) -> WorkingSet {
    let mut clock = Clock::new(size.max(1) as usize);
    accesses.iter().copied().map(main_page).for_each(|page| clock.access(page));
    WorkingSet { queue: clock.pages(), size }
}

fn main_page(index: PageIndex) -> Page {
    Page { block: MAIN_MEMORY, index }
}

fn content(block: &RamBlock) -> anyhow::Result<Vec<u8>> {
    let mut content = vec![0; block.pages() as usize * PAGE_SIZE];
    block.read(PageIndex(0), &mut content)?;
    Ok(content)
}

/// Number of first accesses that are noted of so many pages.
pub fn most_traced(pages: u64, trace: Duration) -> usize {
    match trace.is_zero() {
        true => 0,
        false => (pages / TRACED_SHARE).min(MOST_TRACED) as usize,
    }
}

/// Number of pages whose copies may wait while the store is slow: a quarter of the memory that this host has left, since
/// as many again may be on their way to it, and another image may be taken beside.
pub fn most_copies() -> anyhow::Result<usize> {
    let left = field_bytes(Path::new("/proc/meminfo"), "MemAvailable:")?;
    Ok(usize::try_from(left / 4 / PAGE_SIZE as u64)?)
}

/// Hands chunks to the store, many at once.
pub struct Saving<'s> {
    upload: Upload<'s>,
    full: Vec<NewChunk>,
    /// Areas that were saved of each block.
    pub areas: BTreeMap<BlockId, AreaMap>,
    packed: Packed,
}

impl Saving<'_> {
    /// Nothing is saved yet.
    pub fn new(upload: Upload<'_>) -> Saving<'_> {
        let (full, areas, packed) = (Vec::new(), BTreeMap::new(), Packed::default());
        Saving { upload, full, areas, packed }
    }

    /// Takes a chunk that is full, if there is one.
    pub fn store(&mut self, chunk: Option<NewChunk>) -> anyhow::Result<()> {
        self.full.extend(chunk);
        if self.full.len() >= BATCH {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> anyhow::Result<()> {
        self.upload.chunks(&std::mem::take(&mut self.full))
    }

    /// Ends a block.
    pub fn finish(&mut self, id: BlockId, packer: Packer, base: &AreaMap) -> anyhow::Result<()> {
        let (last, map, packed) = packer.finish(base);
        self.areas.insert(id, map);
        self.packed.put += packed.put;
        self.packed.zeros += packed.zeros;
        self.packed.duplicates += packed.duplicates;
        last.into_iter().try_for_each(|chunk| self.store(Some(chunk)))
    }

    /// Stores the rest; how much it was in all.
    pub fn end(&mut self) -> anyhow::Result<Packed> {
        self.flush()?;
        Ok(self.packed)
    }
}

/// Keeps the copier from taking the processor away from the guest.
pub struct Pace {
    since: Instant,
    pages: u64,
}

impl Pace {
    /// Pace from now on.
    pub fn from_now() -> Pace {
        Pace { since: Instant::now(), pages: 0 }
    }

    /// Notes that so many pages more were copied; waits if that was too fast.
    pub fn copied(&mut self, pages: u64) {
        self.pages += pages;
        let due = Duration::from_micros(self.pages * 1_000_000 / PAGES_PER_SECOND);
        thread::sleep(due.saturating_sub(self.since.elapsed()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_made_of_one_list_of_accesses() {
        let accesses = [1, 2, 3, 1, 4, 1].map(PageIndex);
        let pages = |indices: &[u64]| indices.iter().map(|&i| main_page(PageIndex(i))).collect();
        let recent = by_recency(&accesses, 7);
        assert_eq!((recent.queue, recent.size), (pages(&[1, 4, 3, 2]), 7));
        let mut kept = by_clock(&accesses, 2).queue;
        kept.sort();
        assert_eq!(kept, pages(&[1, 4]) as Vec<Page>);
        assert_eq!(by_clock(&[], 0).queue, []);
    }
}
