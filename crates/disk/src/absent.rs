//! An image that is being restored: what it does not have yet is fetched before it is needed.

use crate::blocks::{BLOCK_BYTES, BlockSet};
use crate::image::Image;
use crate::mark::Mark;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use understudy_threads::{MutexGuard, Waitable};

/// Fetcher of the blocks of a disk that is being restored.
pub trait Fetcher: Send + Sync {
    /// Has a block come first, since somebody waits for it. Called under no lock of the disk.
    fn wanted(&self, block: u64);
}

/// The blocks of an image that are still to come.
pub(crate) struct Absent {
    fetcher: Arc<dyn Fetcher>,
    /// Flag for those who would rather not take the lock.
    any: AtomicBool,
    /// State of the blocks; woken when blocks came, or none will come.
    state: Waitable<State>,
}

struct State {
    blocks: BlockSet,
    /// The same for a daemon that goes on if this one dies.
    mark: Mark,
    /// Number of them.
    count: u64,
    given_up: bool,
}

impl Absent {
    pub(crate) fn new(blocks: BlockSet, mark: Mark, fetcher: Arc<dyn Fetcher>) -> Absent {
        let count = blocks.count();
        Absent {
            fetcher,
            any: AtomicBool::new(count > 0),
            state: Waitable::new(State { blocks, mark, count, given_up: false }),
        }
    }

    /// Whether anything is still to come.
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    pub(crate) fn count(&self) -> u64 {
        self.state.lock().count
    }

    /// Whether all of a range is there.
    pub(crate) fn has(&self, offset: u64, len: u64) -> bool {
        let state = self.state.lock();
        state.blocks.next_run(state.blocks.touched(offset, len)).is_none()
    }

    /// Waits until all of a range is there.
    pub(crate) fn wait_for(&self, offset: u64, len: u64) -> io::Result<()> {
        let touched = self.state.lock().blocks.touched(offset, len);
        self.wait(touched)
    }

    /// Waits for those blocks that a write of this range would change in part.
    pub(crate) fn wait_for_edges(&self, offset: u64, len: u64) -> io::Result<()> {
        let (touched, covered) = {
            let state = self.state.lock();
            (state.blocks.touched(offset, len), state.blocks.covered(offset, len))
        };
        if covered.is_empty() {
            return self.wait(touched);
        }
        self.wait(touched.start..covered.start)?;
        self.wait(covered.end..touched.end)
    }

    fn wait(&self, blocks: Range<u64>) -> io::Result<()> {
        let mut asked = None;
        let mut state = self.state.lock();
        while let Some(missing) = state.blocks.next_run(blocks.clone()) {
            if state.given_up {
                return Err(io::Error::other("the restore of this disk was given up"));
            }
            if asked == Some(missing.start) {
                state = self.state.wait(state);
                continue;
            }
            asked = Some(missing.start);
            drop(state);
            self.fetcher.wanted(missing.start);
            state = self.state.lock();
        }
        Ok(())
    }

    /// Writes for the guest. Blocks that are covered need not come any more.
    pub(crate) fn overwrite(
        &self,
        offset: u64,
        len: u64,
        write: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let mut state = self.state.lock();
        // Under the lock: what is brought meanwhile must not come on top of it.
        write()?;
        let covered = state.blocks.covered(offset, len);
        let marked = state.remove(covered);
        self.note(state);
        marked
    }

    /// Blocks came: those that are still absent are written to the image.
    pub(crate) fn fill(&self, image: &Image, first: u64, content: &[u8]) -> io::Result<()> {
        let mut state = self.state.lock();
        let offset = first * BLOCK_BYTES;
        let touched = state.blocks.touched(offset, content.len() as u64);
        while let Some(run) = state.blocks.next_run(touched.clone()) {
            let (at, len) = state.blocks.bytes(&run);
            image.write(at, &content[(at - offset) as usize..][..len])?;
            state.remove(run)?;
        }
        self.note(state);
        Ok(())
    }

    /// Nothing will come any more: who waits gets an error.
    pub(crate) fn give_up(&self) {
        self.state.change(|state| state.given_up = true);
    }

    fn note(&self, state: MutexGuard<'_, State>) {
        self.any.store(state.count > 0, Ordering::Release);
        drop(state);
        self.state.wake();
    }
}

impl State {
    /// Notes that these blocks are there. If the mark cannot be told they do not count: a daemon
    /// that goes on for this one would fetch them again, on top of what the guest writes later.
    fn remove(&mut self, blocks: Range<u64>) -> io::Result<()> {
        while let Some(run) = self.blocks.next_run(blocks.clone()) {
            self.blocks.remove(run.clone());
            if let Err(error) = self.mark.note(&self.blocks, run.clone()) {
                self.blocks.insert(run);
                return Err(error);
            }
            self.count -= run.end - run.start;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "absent_tests.rs"]
mod tests;
