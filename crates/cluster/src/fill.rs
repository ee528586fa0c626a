//! A restored member's memory, filled from the store while the guest runs, but for what the
//! start waits for ([`early`](crate::early)). What the guest touches comes first.

use crate::loading::READERS;
use crate::source::{Reading, Source};
use crate::{Loading, Stopped};
use anyhow::Context;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};
use understudy_machine::Machine;
use understudy_memory::{MAIN_MEMORY, Missing, RamBlock};
use understudy_protocol::{BlockId, PageIndex, PageRun};
use understudy_report::FillState;
use understudy_snapshot::{AreaMap, ChunkId, Demand, Loader, Page, UNIT_BYTES};
use understudy_threads::spawn;

/// Pause before a chunk that could not be read is tried again.
const PAUSE: Duration = Duration::from_secs(1);

/// Time after which who waits looks again whether the machine is still there.
const LOOK: Duration = Duration::from_millis(100);

/// Fills one member's memory.
pub struct Filler {
    machine: Arc<Machine>,
    /// Areas of the blocks that are not main memory.
    auxiliary: BTreeMap<BlockId, AreaMap>,
    work: Arc<Work>,
}

/// State that the threads share. They do not keep the machine alive.
struct Work {
    source: Source,
    machine: Weak<Machine>,
    loading: Arc<Loading>,
    /// Whether what nobody waits for is loaded, too.
    reads_on: AtomicBool,
    all: u64,
    /// Pages that another daemon has loaded.
    had: u64,
    /// Number of times that the guest waited for a page.
    waits: AtomicU64,
}

impl Filler {
    /// Makes the filler of a machine that waits for its device state. `loading` is its main
    /// memory's, which may be read already, `auxiliary` are the other blocks.
    pub fn new(
        source: Source,
        machine: Arc<Machine>,
        auxiliary: BTreeMap<BlockId, AreaMap>,
        loading: Arc<Loading>,
    ) -> Filler {
        let work = Work::new(source, &machine, loading, 0);
        Filler { machine, auxiliary, work: Arc::new(work) }
    }

    /// Makes the filler of a machine that another daemon has begun to fill, and that stands still.
    /// What has content is there; QEMU waits for what it asked that daemon for.
    pub fn resume(
        source: Source,
        machine: Arc<Machine>,
        map: AreaMap,
        queue: &[Page],
    ) -> anyhow::Result<Filler> {
        let there: Vec<PageRun> = machine.ram().data_runs().collect::<Result<_, _>>()?;
        let rest = map.within(gaps(&there, map.units()));
        let had = map.stored() - rest.stored();
        let loader = Loader::new(BTreeMap::from([(MAIN_MEMORY, rest)]), queue, 0);
        let work = Arc::new(Work::new(source, &machine, Loading::new(loader), had));
        let filler = Filler { machine, auxiliary: BTreeMap::new(), work };
        filler.begin_paging()?;
        let is_complete = filler.work.loading.lock().loader.is_complete();
        match is_complete {
            // That daemon died before it had said so.
            true => filler.work.end(),
            false => filler.begin_reading()?,
        }
        Ok(filler)
    }

    /// Attaches the guest, which from here on asks for pages that are missing: to be called before
    /// the device state is loaded.
    pub fn attach(&self) -> anyhow::Result<()> {
        {
            let mut state = self.work.loading.lock();
            if state.loader.is_complete() {
                state.complete = true;
                return Ok(());
            }
        }
        self.begin_paging()?;
        self.begin_reading()
    }

    fn begin_paging(&self) -> anyhow::Result<()> {
        let work = self.work.clone();
        let pager = self.machine.page_in(move |page| work.demand(page))?;
        self.work.loading.begin_paging(pager);
        Ok(())
    }

    fn begin_reading(&self) -> anyhow::Result<()> {
        for reader in 0..READERS {
            let work = self.work.clone();
            spawn(format!("loader-{reader}"), move || work.read_on(reader))
                .context("cannot start a loader")?;
        }
        Ok(())
    }

    /// The guest runs, so the rest is loaded, too: until then other members of its group may
    /// still load what their starts wait for. Returns true when all is there, and false when the guest has
    /// powered off: it needs no memory any more.
    pub fn complete(&self, stop: &AtomicBool) -> anyhow::Result<bool> {
        self.work.reads_on.store(true, Ordering::Release);
        self.work.loading.wake();
        while !self.work.loading.lock().complete {
            Stopped::check(stop)?;
            if self.machine.is_powered_off() {
                return Ok(false);
            }
            if !self.machine.is_alive() {
                anyhow::bail!("QEMU ended before its memory was loaded");
            }
            thread::sleep(LOOK);
        }
        Ok(true)
    }

    /// State of the filling: how far it is.
    pub fn state(&self) -> FillState {
        let state = self.work.loading.lock();
        let pages = self.work.had + state.loader.pages();
        let stalled = state.stalled(&self.work.source);
        FillState { pages, all: self.work.all, stalled, complete: state.complete }
    }

    /// Number of times that the guest has waited for a page until now.
    pub fn waits(&self) -> u64 {
        self.work.waits.load(Ordering::Relaxed)
    }

    /// Loads all blocks but the main memory: QEMU has content of its own in them.
    pub fn load_auxiliary(&self, stop: &AtomicBool) -> anyhow::Result<()> {
        for (id, map) in &self.auxiliary {
            Stopped::check(stop)?;
            let block = self.block(*id)?;
            block.clear(PageIndex(0), block.pages())?;
            self.work.source.store.read_chunks(
                map.chunks(),
                |chunk, content| -> anyhow::Result<()> {
                    let extents = map.extents().iter().filter(|e| map.place(e).chunk == chunk);
                    for extent in extents {
                        let bytes = units(&content, map.place(extent).slot, extent.count)?;
                        block.write(PageIndex(extent.first), bytes)?;
                    }
                    Ok(())
                },
            )?;
        }
        Ok(())
    }

    fn block(&self, id: BlockId) -> anyhow::Result<&RamBlock> {
        let found = self.machine.blocks().iter().find(|block| block.id() == id);
        found.with_context(|| format!("QEMU has no RAM block {id}"))
    }
}

impl Work {
    fn new(source: Source, machine: &Arc<Machine>, loading: Arc<Loading>, had: u64) -> Work {
        let all = had + loading.lock().loader.all();
        Work {
            source,
            machine: Arc::downgrade(machine),
            loading,
            reads_on: AtomicBool::new(false),
            all,
            had,
            waits: AtomicU64::new(0),
        }
    }

    /// The guest waits for a page.
    fn demand(&self, index: PageIndex) -> Missing {
        let demand = self.loading.lock().loader.demand(Page { block: MAIN_MEMORY, index });
        match demand {
            Demand::Zero => Missing::Zero,
            Demand::Filled => Missing::Filled,
            Demand::Coming => {
                self.waits.fetch_add(1, Ordering::Relaxed);
                self.source.wanted();
                self.loading.wake();
                Missing::Coming
            }
        }
    }

    /// A reader's life.
    fn read_on(&self, reader: usize) {
        while let Some(reading) = self.next() {
            let chunk = reading.chunk;
            let read = self.loading.timed(reader, || reading.content());
            drop(reading);
            match read {
                Ok(content) => self.fill(chunk, &content),
                Err(error) => {
                    self.failed(&error.into());
                    // Whoever waits for it goes on waiting: stalled, and not without its memory.
                    self.loading.lock().loader.failed(chunk);
                    self.wait_to_try_again();
                }
            }
        }
        // All is there, whoever filled in the last of it; or the machine is gone.
        match self.is_machine_alive() {
            true => self.end(),
            false => drop(self.loading.take_pager()),
        }
    }

    fn failed(&self, error: &anyhow::Error) {
        let former = self.loading.lock().failed.replace(format!("{error:#}"));
        if former.is_none() {
            warn!("a guest may have to wait for its memory: {error:#}");
        }
    }

    fn is_machine_alive(&self) -> bool {
        self.machine.upgrade().is_some_and(|machine| machine.is_alive())
    }

    /// The next chunk; none if there is nothing left to do, or nobody to do it for.
    fn next(&self) -> Option<Reading<'_>> {
        let mut state = self.loading.lock();
        loop {
            if state.loader.is_complete() || !self.is_machine_alive() {
                return None;
            }
            let reads_on = self.reads_on.load(Ordering::Acquire);
            if let Some(reading) = self.source.next(&mut state.loader, reads_on) {
                return Some(reading);
            }
            // Others read the last ones, or what a guest waits for.
            state = self.loading.wait_for(state, LOOK);
        }
    }

    /// Fills a chunk in, however long that takes: it counts as there from the beginning on.
    fn fill(&self, chunk: ChunkId, content: &[u8]) {
        let Some((filling, fills)) = self.loading.fill(chunk) else { return };
        let pager = filling.pager();
        let fill_all = || -> anyhow::Result<()> {
            fills.iter().try_for_each(|fill| {
                let bytes = units(content, fill.slot, fill.pages.count)?;
                Ok(pager.fill(fill.pages.first, bytes)?)
            })
        };
        while let Err(error) = fill_all() {
            if !self.is_machine_alive() {
                return;
            }
            self.failed(&error);
            self.wait_to_try_again();
        }
        drop(filling);
        self.loading.lock().failed = None;
        fail::fail_point!("all-filled", self.loading.lock().loader.is_complete(), |_| ());
    }

    /// All that has content is there, once those who still fill in have let go of the pager.
    fn end(&self) {
        let Some(pager) = self.loading.take_pager() else { return };
        match pager.finish() {
            Ok(()) => info!("all {} pages of a restored memory are there", self.all),
            // Most likely QEMU has ended.
            Err(error) => warn!("the end of loading: {error}"),
        }
        self.loading.lock().complete = true;
        self.loading.wake();
    }

    fn wait_to_try_again(&self) {
        let until = Instant::now() + PAUSE;
        while Instant::now() < until && self.machine.strong_count() > 0 {
            thread::sleep(LOOK);
        }
    }
}

/// Ranges between these runs, which are in order, of so many pages.
fn gaps(runs: &[PageRun], pages: u64) -> impl Iterator<Item = Range<u64>> {
    let ends = std::iter::once(0).chain(runs.iter().map(|run| run.first.0 + run.count));
    let starts = runs.iter().map(|run| run.first.0).chain([pages]);
    ends.zip(starts).map(|(end, start)| end..start).filter(|gap| !gap.is_empty())
}

/// Some units of a chunk.
pub fn units(chunk: &[u8], slot: u16, count: u64) -> anyhow::Result<&[u8]> {
    let from = usize::from(slot) * UNIT_BYTES;
    let units = chunk.get(from..from + count as usize * UNIT_BYTES);
    units.context("a chunk is too short")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_content_is_still_to_come() {
        let run = |first, count| PageRun { block: MAIN_MEMORY, first: PageIndex(first), count };
        let of = |runs: &[PageRun]| -> Vec<u64> { gaps(runs, 6).flatten().collect() };
        assert_eq!(of(&[]), [0, 1, 2, 3, 4, 5]);
        assert_eq!(of(&[run(0, 1), run(1, 1), run(4, 1)]), [2, 3, 5]);
        assert_eq!(of(&[run(1, 5)]), [0]);
        assert!(of(&[run(0, 6)]).is_empty());
    }
}
