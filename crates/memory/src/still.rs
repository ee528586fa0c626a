//! A backup's image as it is at one moment, read while later epochs are written to it.
//!
//! No guest runs on it, so no fault is needed: whoever writes says so before. A page whose content
//! is wanted is *pending*; whoever comes first copies it, the writer ([`StillImage::before_write`])
//! or the reader ([`StillImage::copy_some`]), each for the length of a copy only.

use crate::guard::bitmap::{PageBitmap, WORD_PAGES, runs};
use crate::{DirtySet, MemoryError, RamBlock};
use std::mem;
use std::sync::PoisonError;
use understudy_protocol::{BlockId, PAGE_SIZE, PageIndex};
use understudy_threads::{Mutex, MutexGuard};

/// A page as it was at the moment of the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StillPage {
    /// Its RAM block.
    pub block: BlockId,
    /// The page.
    pub page: PageIndex,
    /// Its content.
    pub content: Box<[u8]>,
}

/// All of a standby's memory at one moment.
#[derive(Debug)]
pub struct StillImage {
    blocks: Vec<RamBlock>,
    /// First writes that are noted at most.
    traced: usize,
    /// Copies that may wait for the reader, beside those.
    most_copies: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Two sets for each block: the pages still to be copied, and those written since.
    pages: Vec<(PageBitmap, PageBitmap)>,
    /// Pages that writers have copied.
    copies: Vec<StillPage>,
    /// The pages that were written first, in that order, while they are noted.
    trace: Option<Vec<StillPage>>,
    /// The block and the word that are copied next.
    next: (usize, usize),
    failed: Option<MemoryError>,
}

impl StillImage {
    /// Takes an image of these blocks, which nobody writes at this moment. Up to `traced` first
    /// writes after it are noted; of no more than `most_copies` others do copies wait for the reader.
    pub fn take(
        blocks: &[RamBlock],
        traced: usize,
        most_copies: usize,
    ) -> Result<StillImage, MemoryError> {
        let mut pages = Vec::with_capacity(blocks.len());
        for block in blocks {
            let pending = PageBitmap::new(block.pages());
            let mut content = DirtySet::new();
            block.add_content_to(&mut content)?;
            content.runs().iter().for_each(|run| pending.set_run(run.first.0, run.count));
            pages.push((pending, PageBitmap::new(block.pages())));
        }
        let state = State {
            pages,
            copies: Vec::new(),
            trace: Some(Vec::new()),
            next: (0, 0),
            failed: None,
        };
        let (blocks, state) = (blocks.to_vec(), Mutex::new(state));
        Ok(StillImage { blocks, traced, most_copies, state })
    }

    /// A page is about to be written. What goes wrong is the reader's to know.
    pub fn before_write(&self, block: BlockId, page: PageIndex) {
        let mut state = self.lock();
        let at = usize::from(block.0);
        let Some((pending, written)) = state.pages.get(at) else { return };
        if state.failed.is_some() || !written.set(page.0) {
            return;
        }
        let is_wanted = pending.clear(page.0);
        let is_traced = state.trace.as_ref().is_some_and(|trace| trace.len() < self.traced);
        if !is_wanted && !is_traced {
            return;
        }
        // What is written goes on in any case: it is the image that is given up, before memory is.
        if !is_traced && state.copies.len() >= self.most_copies {
            state.failed = Some(MemoryError::TooManyCopies);
            return;
        }
        match (copy(&self.blocks[at], page), &mut state.trace) {
            (Ok(copied), Some(trace)) if is_traced => trace.push(copied),
            (Ok(copied), _) => state.copies.push(copied),
            (Err(error), _) => state.failed = Some(error),
        }
    }

    /// Pages of the image, each once, but for those that [`StillImage::end_trace`] brings; what
    /// writers have copied first. None if there are no more.
    pub fn copy_some(&self) -> Result<Option<Vec<StillPage>>, MemoryError> {
        let mut state = self.lock();
        if let Some(error) = state.failed.take() {
            // Not whole any more, whoever asks again.
            state.failed = Some(MemoryError::ImageGone);
            return Err(error);
        }
        if !state.copies.is_empty() {
            return Ok(Some(mem::take(&mut state.copies)));
        }
        loop {
            let (at, word) = state.next;
            let Some((pending, _)) = state.pages.get(at) else { return Ok(None) };
            if word == pending.words() {
                state.next = (at + 1, 0);
                continue;
            }
            let base = word as u64 * WORD_PAGES;
            let taken = runs(pending.take(word));
            let pages = taken.flat_map(|(first, count)| base + first..base + first + count);
            let copied: Result<Vec<_>, _> =
                pages.map(|page| copy(&self.blocks[at], PageIndex(page))).collect();
            state.next = (at, word + 1);
            match copied {
                Ok(pages) if pages.is_empty() => {}
                copied => return copied.map(Some),
            }
        }
    }

    /// The pages that were written first after the moment of the image, in that order, with
    /// their content at it. What is written from now on is no longer noted.
    pub fn end_trace(&self) -> Vec<StillPage> {
        self.lock().trace.take().unwrap_or_default()
    }

    /// The memory gets another owner, who tells of no writes: nothing more is read of it.
    pub fn end(&self) {
        let mut state = self.lock();
        state.failed = Some(MemoryError::ImageGone);
        (state.copies, state.trace) = (Vec::new(), None);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic in the midst of a copy leaves each page copied or not.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn copy(block: &RamBlock, page: PageIndex) -> Result<StillPage, MemoryError> {
    let mut content = vec![0; PAGE_SIZE].into_boxed_slice();
    block.read(page, &mut content)?;
    Ok(StillPage { block: block.id(), page, content })
}
