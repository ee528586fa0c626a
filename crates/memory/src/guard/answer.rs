//! The answer to a fault.

use super::bitmap::WORD_PAGES;
use super::{PageCopy, Shared, State, error};
use crate::MemoryError;
use crate::fault::{Access, Fault};
use std::io;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use understudy_protocol::{PAGE_SIZE, PageIndex};

impl Shared {
    /// Lets whoever waits go on. Whatever goes wrong, nobody is left waiting: then it is the
    /// snapshot that fails.
    pub(super) fn answer(&self, fault: Fault) {
        let mut state = self.lock();
        let page = self.page_at(fault.address);
        let range = self.pages(page, 1);
        let answered = match fault.access {
            Access::Protected => {
                self.touched(&mut state, page, true);
                self.written.set(page);
                self.faults.unprotect(range)
            }
            Access::Unmapped { write } => {
                self.touched(&mut state, page, write);
                if write {
                    self.written.set(page);
                }
                self.faults.map(range, !self.written.get(page))
            }
            Access::Missing => self.faults.wake(range),
        };
        if let Err(source) = answered {
            self.explain(&mut state, source);
            let _ = self.faults.wake(range);
        }
    }

    /// Some failures belong to it: somebody else has mapped the page meanwhile, its file has no
    /// such page any more, or the range is not registered any more.
    fn explain(&self, state: &mut State, source: io::Error) {
        let harmless = [libc::EEXIST, libc::EFAULT, libc::ENOENT, libc::EINVAL, libc::ESRCH];
        if !source.raw_os_error().is_some_and(|number| harmless.contains(&number)) {
            tracing::warn!("answering a fault of the guest: {source}");
            state.failed.get_or_insert(error("answering a page fault", source));
        }
    }

    /// A page is accessed, for which whoever does so still waits.
    fn touched(&self, state: &mut State, page: u64, write: bool) {
        if let Some(sample) = &mut state.sample {
            sample.access(PageIndex(page));
        }
        // Not written since the cut: what is in the page is what was in it then.
        let is_old = !self.written.get(page);
        let traced = state.trace.as_mut().is_some_and(|trace| trace.access(page));
        let wanted = (write || traced) && self.claim(page);
        let kept = wanted || (traced && is_old);
        if !kept {
            return;
        }
        // The guest goes on in any case: it is the snapshot that is given up, before memory is.
        if !traced && state.copies.len() >= state.most_copies {
            state.failed.get_or_insert(MemoryError::TooManyCopies);
            return;
        }
        let mut content = vec![0; PAGE_SIZE].into_boxed_slice();
        if let Err(error) = self.block.read(PageIndex(page), &mut content) {
            state.failed.get_or_insert(error);
            return;
        }
        match &mut state.trace {
            Some(trace) if traced => trace.keep(content),
            _ => state.copies.push(PageCopy { page: PageIndex(page), content }),
        }
    }

    /// Whether it is the caller who has to copy a pending page. If the copier does it at this
    /// moment, waits until it has.
    fn claim(&self, page: u64) -> bool {
        if self.pending.clear(page) {
            return true;
        }
        while self.copying.load(SeqCst) == (page / WORD_PAGES) as usize {
            thread::yield_now();
        }
        false
    }
}
