//! Buffers for copies of pages, reused from epoch to epoch.

use crate::MemoryError;
use crate::mapping::PrivateMapping;
use crate::workers;
use std::mem;
use std::num::NonZeroUsize;
use std::sync::{Arc, PoisonError};
use understudy_protocol::{BlockId, PAGE_SIZE, PageIndex, PageRun};
use understudy_threads::{Mutex, MutexGuard};

/// Pages in a full chunk (1 MiB of content).
pub const CHUNK_PAGES: usize = 256;

/// The usual size of a pool's warm part, of any guest that is not small.
pub const DEFAULT_WARM_BYTES: usize = 32 << 20;

/// A pool's warm part for a guest of this memory: of a small one a sixteenth, since a host may have many of
/// them, which write little.
pub fn warm_bytes(guest_bytes: u64) -> usize {
    usize::try_from(guest_bytes / 16)
        .map_or(DEFAULT_WARM_BYTES, |part| part.min(DEFAULT_WARM_BYTES))
}

const CHUNK_BYTES: NonZeroUsize = NonZeroUsize::new(CHUNK_PAGES * PAGE_SIZE).unwrap();

/// Chunk buffers for one VM. Cheap to clone: clones share the buffers.
///
/// The warm part is present from the start and stays. What an epoch needs beyond it is
/// mapped when needed and given back to the system when it comes back.
#[derive(Clone, Debug)]
pub struct StagingPool {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    free: Mutex<Vec<Chunk>>,
    warm_chunks: usize,
}

/// A buffer, and which pages are in it.
#[derive(Debug)]
struct Chunk {
    buffer: PrivateMapping,
    runs: Vec<PageRun>,
    pages: usize,
}

impl Chunk {
    fn new() -> Result<Chunk, MemoryError> {
        Ok(Chunk {
            buffer: PrivateMapping::populated(CHUNK_BYTES).map_err(MemoryError::Staging)?,
            // As many as there can be: filling it never allocates.
            runs: Vec::with_capacity(CHUNK_PAGES),
            pages: 0,
        })
    }
}

impl StagingPool {
    /// A pool with `warm_bytes` (rounded up to chunks) present.
    pub fn new(warm_bytes: usize) -> Result<StagingPool, MemoryError> {
        let pool = StagingPool {
            shared: Arc::new(Shared {
                free: Mutex::new(Vec::new()),
                warm_chunks: warm_bytes.div_ceil(CHUNK_BYTES.get()),
            }),
        };
        pool.prepare((pool.shared.warm_chunks * CHUNK_PAGES) as u64)?;
        Ok(pool)
    }

    /// Makes sure that buffers for `pages` pages are present, so that a capture of as many
    /// allocates nothing. Call it before the pause with the number expected.
    pub fn prepare(&self, pages: u64) -> Result<(), MemoryError> {
        let wanted = pages.div_ceil(CHUNK_PAGES as u64) as usize;
        while self.shared.free().len() < wanted {
            let chunk = Chunk::new()?;
            self.shared.free().push(chunk);
        }
        Ok(())
    }

    /// The number of bytes of buffers that lie unused in the pool.
    pub fn free_bytes(&self) -> usize {
        self.shared.free().len() * CHUNK_BYTES.get()
    }

    fn take(&self) -> Result<CapturedChunk, MemoryError> {
        let free = self.shared.free().pop();
        Ok(CapturedChunk {
            chunk: Some(free.map_or_else(Chunk::new, Ok)?),
            pool: Arc::clone(&self.shared),
        })
    }
}

impl Shared {
    fn free(&self) -> MutexGuard<'_, Vec<Chunk>> {
        // Pushing and popping leave the list whole even if another thread panicked.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_back(&self, mut chunk: Chunk) {
        let mut free = self.free();
        if free.len() < self.warm_chunks {
            chunk.runs.clear();
            chunk.pages = 0;
            free.push(chunk);
        } else {
            drop(free); // Unmapping takes time: not under the lock.
            drop(chunk);
        }
    }
}

/// Copies of up to [`CHUNK_PAGES`] pages. Goes back to its pool when dropped.
#[derive(Debug)]
pub struct CapturedChunk {
    /// Chunk, present until this is dropped.
    chunk: Option<Chunk>,
    pool: Arc<Shared>,
}

/// The copy of one page.
#[derive(Clone, Copy, Debug)]
pub struct CapturedPage<'a> {
    /// The block it is of.
    pub block: BlockId,
    /// Its place in the block.
    pub index: PageIndex,
    /// Its content, [`PAGE_SIZE`] bytes.
    pub bytes: &'a [u8],
}

impl CapturedChunk {
    /// The pages in the chunk, in the order of their content.
    pub fn runs(&self) -> &[PageRun] {
        &self.chunk().runs
    }

    /// The number of pages in the chunk.
    pub fn page_count(&self) -> usize {
        self.chunk().pages
    }

    /// The content of all pages, one after the other.
    pub fn bytes(&self) -> &[u8] {
        let chunk = self.chunk();
        &chunk.buffer[..chunk.pages * PAGE_SIZE]
    }

    /// The pages, one by one.
    pub fn pages(&self) -> impl Iterator<Item = CapturedPage<'_>> {
        let places = self
            .runs()
            .iter()
            .flat_map(|run| (0..run.count).map(|i| (run.block, PageIndex(run.first.0 + i))));
        places
            .zip(self.bytes().chunks_exact(PAGE_SIZE))
            .map(|((block, index), bytes)| CapturedPage { block, index, bytes })
    }

    fn chunk(&self) -> &Chunk {
        self.chunk.as_ref().expect("a chunk is present until dropped")
    }

    fn chunk_mut(&mut self) -> &mut Chunk {
        self.chunk.as_mut().expect("a chunk is present until dropped")
    }

    fn room(&self) -> usize {
        CHUNK_PAGES - self.chunk().pages
    }

    /// Adds a run, whose content is still to be filled in.
    fn add(&mut self, run: PageRun) {
        let chunk = self.chunk_mut();
        chunk.runs.push(run);
        chunk.pages += run.count as usize;
    }

    /// Fills in the content of each run with `read`.
    fn fill(
        &mut self,
        read: impl Fn(PageRun, &mut [u8]) -> Result<(), MemoryError>,
    ) -> Result<(), MemoryError> {
        let chunk = self.chunk_mut();
        let mut rest = &mut chunk.buffer[..];
        for &run in &chunk.runs {
            let (target, after) = rest.split_at_mut(run.count as usize * PAGE_SIZE);
            read(run, target)?;
            rest = after;
        }
        Ok(())
    }
}

impl Drop for CapturedChunk {
    fn drop(&mut self) {
        if let Some(chunk) = self.chunk.take() {
            self.pool.give_back(chunk);
        }
    }
}

/// The pages captured for one epoch. If a page is in it twice, the later copy is the truth:
/// apply in order.
#[derive(Debug, Default)]
pub struct CapturedPages {
    /// The chunks, in the order they were captured.
    pub chunks: Vec<CapturedChunk>,
}

impl CapturedPages {
    /// The number of page copies.
    pub fn page_count(&self) -> usize {
        self.chunks.iter().map(CapturedChunk::page_count).sum()
    }
}

/// Buffers into which [`crate::capture`] puts the pages of the current epoch.
#[derive(Debug)]
pub struct PageStaging {
    pool: StagingPool,
    filled: Vec<CapturedChunk>,
}

impl PageStaging {
    /// An empty staging that takes its buffers from `pool`.
    pub fn new(pool: StagingPool) -> PageStaging {
        let filled = Self::empty_list(&pool);
        PageStaging { pool, filled }
    }

    /// Takes out all that was captured since the last call. Call it after the pause.
    pub fn take(&mut self) -> CapturedPages {
        let empty = Self::empty_list(&self.pool);
        CapturedPages { chunks: mem::replace(&mut self.filled, empty) }
    }

    /// Room for all that is warm, twice (captures leave chunks half full), so that the list
    /// does not grow in the pause.
    fn empty_list(pool: &StagingPool) -> Vec<CapturedChunk> {
        Vec::with_capacity(2 * pool.shared.warm_chunks)
    }

    /// Adds chunks for `runs` and fills them, with helper threads if `parallel`.
    /// After an error nothing of them remains.
    pub(crate) fn add(
        &mut self,
        runs: &[PageRun],
        parallel: bool,
        read: impl Fn(PageRun, &mut [u8]) -> Result<(), MemoryError> + Sync,
    ) -> Result<(), MemoryError> {
        let before = self.filled.len();
        let result = self.lay_out(runs).and_then(|()| {
            let added = &mut self.filled[before..];
            match parallel {
                true => workers::for_each(added, |chunk| chunk.fill(&read)),
                false => added.iter_mut().try_for_each(|chunk| chunk.fill(&read)),
            }
        });
        if result.is_err() {
            self.filled.truncate(before);
        }
        result
    }

    /// Divides `runs` among new chunks.
    fn lay_out(&mut self, runs: &[PageRun]) -> Result<(), MemoryError> {
        let mut room = 0;
        for &run in runs {
            let mut rest = run;
            while rest.count > 0 {
                if room == 0 {
                    self.filled.push(self.pool.take()?);
                    room = CHUNK_PAGES;
                }
                let count = rest.count.min(room as u64);
                if let Some(chunk) = self.filled.last_mut() {
                    chunk.add(PageRun { count, ..rest });
                    room = chunk.room();
                }
                rest.first.0 += count;
                rest.count -= count;
            }
        }
        Ok(())
    }
}
