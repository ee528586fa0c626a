//! One snapshot of main memory.

use super::bitmap::{PageBitmap, WORD_PAGES, runs};
use super::trace::{FirstAccess, Trace};
use super::{Guard, NOTHING, Shared, State};
use crate::MemoryError;
use crate::fault::Told;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use understudy_protocol::{BaseId, PAGE_SIZE, PageIndex};

/// The request for a cut.
#[derive(Clone, Copy, Debug)]
pub struct CaptureRequest {
    /// The base since which what may have been written is enough; all content without one, or if another is counted
    /// from.
    pub since: Option<BaseId>,
    /// Note up to so many first accesses, reads and writes, after the cut; 0: none.
    pub trace: usize,
    /// Note repeated accesses too, between calls of [`Cut::watch_again`].
    pub every_access: bool,
    /// Number of pages of whose content copies may wait for [`Cut::copy_some`], beside the trace's.
    pub most_copies: usize,
}

/// A page as it was at the cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// The page.
    pub page: PageIndex,
    /// Its content.
    pub content: Box<[u8]>,
}

/// Copies of pages.
#[derive(Debug)]
pub struct CopiedPages {
    /// The pages.
    pub pages: Vec<PageCopy>,
    /// The guest wanted to write them: the copies cost no time of ours.
    pub by_faults: bool,
}

/// A snapshot of main memory. Dropped, it lets everything pass, and what it has taken counts as
/// not saved.
#[derive(Debug)]
pub struct Cut {
    guard: Arc<Guard>,
    request: CaptureRequest,
    is_incremental: bool,
    /// The pages that it saves.
    changed: PageBitmap,
    /// The next word of pages to copy.
    next: usize,
    /// What it is, once it is stored.
    committed: Option<BaseId>,
}

impl Cut {
    pub(super) fn arm(guard: &Arc<Guard>, request: CaptureRequest) -> Result<Cut, MemoryError> {
        let shared = &guard.shared;
        let is_incremental = {
            let mut state = shared.lock();
            if state.has_cut || state.sample.is_some() {
                return Err(MemoryError::FaultsTaken);
            }
            if let Some(error) = state.failed.take() {
                return Err(error);
            }
            (state.has_cut, state.most_copies) = (true, request.most_copies);
            request.since.is_some() && state.base == request.since
        };
        let cut = Cut {
            guard: Arc::clone(guard),
            request,
            is_incremental,
            changed: PageBitmap::new(shared.block.pages()),
            next: 0,
            committed: None,
        };
        shared.protect_written(None, &cut.changed)?;
        if !is_incremental {
            shared.add_content(&cut.changed)?;
        }
        if request.trace > 0 {
            let trace = Trace::new(shared.block.pages(), request.trace, request.every_access);
            shared.lock().trace = Some(trace);
            shared.register(Told::WritesAndAccesses)?;
            shared.mappings.drop_ranges(&[shared.range])?;
        }
        Ok(cut)
    }

    /// The guest stands still, its device state is saved: this moment is the snapshot's. What
    /// QEMU itself writes from now on is not in it.
    pub fn take(&mut self) -> Result<(), MemoryError> {
        let shared = &self.guard.shared;
        let mut state = shared.lock();
        shared.protect_written(Some(&mut state), &self.changed)?;
        if let Some(trace) = &mut state.trace {
            let mapped = trace.begin();
            let ranges: Vec<_> =
                mapped.into_iter().map(|(first, count)| shared.pages(first, count)).collect();
            shared.mappings.drop_ranges(&ranges)?;
            // It runs when the vCPUs do.
            if let Err(error) = shared.mappings.forget_code() {
                tracing::warn!("first accesses to code may be missed: {error}");
            }
        }
        (0..self.changed.words())
            .for_each(|word| shared.pending.add(word, self.changed.word(word)));
        Ok(())
    }

    /// Pages with their content at the cut, each page that this snapshot saves once, but for
    /// those that [`Cut::end_trace`] brings. None if there are no more.
    pub fn copy_some(&mut self) -> Result<Option<CopiedPages>, MemoryError> {
        let guard = Arc::clone(&self.guard);
        let shared = &guard.shared;
        if let Some(copies) = copied_by_faults(&mut shared.lock())? {
            return Ok(Some(copies));
        }
        while self.next < self.changed.words() {
            let word = self.next;
            self.next += 1;
            let pages = copy_word(shared, word)?;
            if !pages.is_empty() {
                return Ok(Some(CopiedPages { pages, by_faults: false }));
            }
        }
        // Faults that came while the last pages were copied.
        copied_by_faults(&mut shared.lock())
    }

    /// Whether the snapshot saves a page: it may differ from the one before.
    pub fn is_changed(&self, page: PageIndex) -> bool {
        self.changed.get(page.0)
    }

    /// The number of pages that it saves.
    pub fn changed(&self) -> u64 {
        self.changed.count()
    }

    /// Whether as many first accesses are noted as are wanted.
    pub fn trace_is_full(&self) -> bool {
        self.shared().lock().trace.as_ref().is_none_or(Trace::is_full)
    }

    /// Has the next access to every page noticed again.
    pub fn watch_again(&self) -> Result<(), MemoryError> {
        self.shared().mappings.drop_ranges(&[self.shared().range])
    }

    /// The accesses that were noticed since the last call, if [`CaptureRequest::every_access`].
    pub fn accesses(&self) -> Vec<PageIndex> {
        self.shared().lock().trace.as_mut().map(Trace::take_every).unwrap_or_default()
    }

    /// Ends tracing. The first accesses in their order, with the content at the cut: of pages
    /// that [`Cut::is_changed`] it may be the only copy.
    pub fn end_trace(&mut self) -> Vec<FirstAccess> {
        let trace = self.shared().lock().trace.take();
        self.shared().stop_accesses();
        trace.map(Trace::into_order).unwrap_or_default()
    }

    /// Whether it saves only what may have been written since the base that was asked for.
    pub fn is_incremental(&self) -> bool {
        self.is_incremental
    }

    /// The snapshot is stored for good: what is written after it is what the next one saves that builds on it.
    pub fn commit(mut self, base: BaseId) {
        self.committed = Some(base);
    }

    /// The request for it.
    pub fn request(&self) -> CaptureRequest {
        self.request
    }

    fn shared(&self) -> &Shared {
        &self.guard.shared
    }
}

impl Drop for Cut {
    fn drop(&mut self) {
        let shared = &self.guard.shared;
        let mut state = shared.lock();
        shared.pending.clear_all();
        state.copies.clear();
        state.has_cut = false;
        // Of this one alone: what it lacks counts as not saved, below.
        state.failed.take_if(|error| matches!(error, MemoryError::TooManyCopies));
        let was_traced = state.trace.take().is_some();
        match self.committed {
            Some(base) => state.base = Some(base),
            None => (0..self.changed.words())
                .for_each(|word| shared.written.add(word, self.changed.word(word))),
        }
        drop(state);
        if was_traced {
            shared.stop_accesses();
        }
    }
}

fn copied_by_faults(state: &mut State) -> Result<Option<CopiedPages>, MemoryError> {
    if let Some(error) = state.failed.take() {
        return Err(error);
    }
    let pages = mem::take(&mut state.copies);
    Ok((!pages.is_empty()).then_some(CopiedPages { pages, by_faults: true }))
}

/// Copies what is pending in a word.
fn copy_word(shared: &Shared, word: usize) -> Result<Vec<PageCopy>, MemoryError> {
    if shared.pending.word(word) == 0 {
        return Ok(Vec::new());
    }
    // Said before the pages are taken: a fault that finds its page taken waits for the copy.
    shared.copying.store(word, SeqCst);
    let base = word as u64 * WORD_PAGES;
    let taken = runs(shared.pending.take(word)).flat_map(|(first, count)| first..first + count);
    let copied = taken
        .map(|page| {
            let page = PageIndex(base + page);
            let mut content = vec![0; PAGE_SIZE].into_boxed_slice();
            shared.block.read(page, &mut content)?;
            Ok(PageCopy { page, content })
        })
        .collect();
    shared.copying.store(NOTHING, SeqCst);
    copied
}

impl Shared {
    /// Has only writes reported from now on.
    pub(super) fn stop_accesses(&self) {
        if let Err(error) = self.register(Told::Writes) {
            tracing::debug!("end of a trace: {error}");
        }
    }
}
