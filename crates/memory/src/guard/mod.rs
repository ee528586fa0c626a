//! Main memory whose pages are protected, so that each first write to one waits until a thread
//! here has let it pass: the basis of snapshots (HotSnap, LISA '13).
//!
//! A page is protected, or in the set of written pages (or both). A snapshot is a **cut**: at a
//! moment at which the guest stands still the written pages are protected again, and a page
//! whose content of that moment is wanted becomes *pending*. Whoever comes first copies it: the
//! fault of a write, or [`Cut::copy_some`]. So:
//!
//! | what | when | cost |
//! |---|---|---|
//! | [`Guard::attach`] | guest runs | protects everything, some 10 ms per GiB |
//! | [`Guard::arm`] | guest runs | protects what was written; what is written now is few |
//! | [`Cut::take`] | guest stands still | protects these few |
//! | [`Cut::copy_some`] | guest runs | copies what is pending, faults first |
//!
//! What is written after a cut is what the next snapshot has to save, if this one succeeds
//! ([`Cut::commit`]); if not, what this one had taken is added to it again. Nothing is asked of
//! the kernel for that: who lets a write pass writes it down.

mod answer;
pub(crate) mod bitmap;
mod cut;
mod sample;
mod trace;

pub use cut::{CaptureRequest, CopiedPages, Cut, PageCopy};
pub use sample::Sample;
pub use trace::FirstAccess;

use crate::block::MAIN_MEMORY;
use crate::fault::{FaultThread, Told};
use crate::kernel::AddressRange;
use crate::{DirtySet, FaultDescriptor, Mappings, MemoryError, RamBlock};
use bitmap::{PageBitmap, WORD_PAGES, joined, runs};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, PoisonError};
use trace::Trace;
use understudy_protocol::{BaseId, PAGE_SIZE, PageIndex};
use understudy_threads::{Mutex, MutexGuard};

/// Words of pages that are protected without letting faults in between: 4096 pages, 160 µs.
const WORDS_AT_ONCE: usize = 64;

/// [`Shared::copying`] when nothing is copied.
const NOTHING: usize = usize::MAX;

/// Protection of one machine's main memory. Ends when dropped, without a page left protected or
/// a thread of QEMU left waiting.
#[derive(Debug)]
pub struct Guard {
    shared: Arc<Shared>,
    /// Ends before the range is left alone for good.
    thread: Option<FaultThread>,
}

#[derive(Debug)]
struct Shared {
    faults: Arc<FaultDescriptor>,
    mappings: Arc<Mappings>,
    block: RamBlock,
    range: AddressRange,
    /// Pages that may have been written since the last cut. All others are protected.
    written: PageBitmap,
    /// Pages whose content at the last cut is not copied yet.
    pending: PageBitmap,
    /// The word of `pending` that [`Cut::copy_some`] is copying.
    copying: AtomicUsize,
    /// State, locked while a fault is answered, and while the cut is taken.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Pages that faults have copied.
    copies: Vec<PageCopy>,
    /// Number of them that may wait.
    most_copies: usize,
    trace: Option<Trace>,
    sample: Option<sample::Watched>,
    has_cut: bool,
    /// The snapshot since which what was written is noted; none before the first.
    base: Option<BaseId>,
    /// The reason why no cut can be had any more.
    failed: Option<MemoryError>,
}

impl Guard {
    /// Protects all of `main`, QEMU's main memory, while the guest runs. All its content counts
    /// as written.
    pub fn attach(
        faults: &Arc<FaultDescriptor>,
        mappings: &Arc<Mappings>,
        main: &RamBlock,
    ) -> Result<Guard, MemoryError> {
        assert_eq!(main.id(), MAIN_MEMORY, "only main memory is a shared file");
        let shared = Arc::new(Shared {
            faults: Arc::clone(faults),
            mappings: Arc::clone(mappings),
            block: main.clone(),
            range: AddressRange {
                start: main.address_in_qemu(),
                bytes: main.pages() * PAGE_SIZE as u64,
            },
            written: PageBitmap::new(main.pages()),
            pending: PageBitmap::new(main.pages()),
            copying: AtomicUsize::new(NOTHING),
            state: Mutex::default(),
        });
        let answering = Arc::clone(&shared);
        let thread = FaultThread::start(faults, move |fault| answering.answer(fault))?;
        let guard = Guard { shared, thread: Some(thread) };
        guard.shared.register(Told::Writes)?;
        let protected = guard.shared.faults.protect(guard.shared.range);
        protected.map_err(|source| error("UFFDIO_WRITEPROTECT", source))?;
        guard.shared.add_content(&guard.shared.written)?;
        Ok(guard)
    }

    /// Gets ready for a cut while the guest runs: what was written is protected again, so that
    /// little of it is left for the pause. One at a time.
    pub fn arm(self: &Arc<Self>, request: CaptureRequest) -> Result<Cut, MemoryError> {
        Cut::arm(self, request)
    }

    /// Watches these pages until the result is dropped: which are accessed? Not together with a
    /// cut.
    pub fn sample(self: &Arc<Self>, pages: &[PageIndex]) -> Result<Sample, MemoryError> {
        Sample::begin(self, pages)
    }

    /// The number of pages that may have been written since the last cut.
    pub fn written(&self) -> u64 {
        self.shared.written.count()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let shared = &self.shared;
        if let Err(e) = shared.faults.unregister(shared.range) {
            // Most likely QEMU has ended, and its memory with it.
            tracing::debug!("end of a guard: {e}");
        }
        // It answers what came in meanwhile.
        drop(self.thread.take());
        let _ = shared.faults.wake(shared.range);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic in the midst of a fault leaves each page copied or not.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn register(&self, told: Told) -> Result<(), MemoryError> {
        self.faults.register(self.range, told).map_err(|source| match source.raw_os_error() {
            Some(libc::EBUSY) => MemoryError::FaultsTaken,
            _ => error("UFFDIO_REGISTER", source),
        })
    }

    fn add_content(&self, set: &PageBitmap) -> Result<(), MemoryError> {
        let mut content = DirtySet::new();
        self.block.add_content_to(&mut content)?;
        content.runs().iter().for_each(|run| set.set_run(run.first.0, run.count));
        Ok(())
    }

    /// Protects what was written, and moves it to `taken`. Faults are let in now and then,
    /// unless they are kept out by `state`.
    fn protect_written(
        &self,
        state: Option<&mut State>,
        taken: &PageBitmap,
    ) -> Result<(), MemoryError> {
        let words = self.written.words();
        for first in (0..words).step_by(WORDS_AT_ONCE) {
            // A fault between taking a page from the set and protecting it would get lost.
            let _faults = state.is_none().then(|| self.lock());
            let some = (first..words.min(first + WORDS_AT_ONCE)).flat_map(|word| {
                let pages = self.written.take(word);
                taken.add(word, pages);
                let base = word as u64 * WORD_PAGES;
                runs(pages).map(move |(first, count)| (base + first, count))
            });
            for (first, count) in joined(some, 0) {
                let protected = self.faults.protect(self.pages(first, count));
                protected.map_err(|source| error("UFFDIO_WRITEPROTECT", source))?;
            }
        }
        Ok(())
    }

    /// The addresses of pages in QEMU.
    fn pages(&self, first: u64, count: u64) -> AddressRange {
        let page = PAGE_SIZE as u64;
        AddressRange { start: self.range.start + first * page, bytes: count * page }
    }

    fn page_at(&self, address: u64) -> u64 {
        (address - self.range.start) / PAGE_SIZE as u64
    }
}

fn error(call: &'static str, source: std::io::Error) -> MemoryError {
    MemoryError::Faults { call, source }
}
