//! QEMU's dirty log, through the agent inside it: what a guest on KVM has written.

use crate::pause::{AgentPauser, GLANCE, PauseError, has_ended};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::Instant;
use understudy_agent_protocol::{DirtyOutcome, DirtyWish, PAGES_PER_WORD};

/// A RAM block whose writes are to be logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoggedBlock {
    /// Address at which it begins in QEMU.
    pub address: u64,
    /// Its pages.
    pub pages: u64,
}

/// The reason why QEMU keeps no dirty log, or why it failed.
#[derive(Debug, thiserror::Error)]
pub enum DirtyLogError {
    /// This QEMU, or this machine, has none; nothing has changed.
    #[error("QEMU has no dirty log for this machine: {0}")]
    None(&'static str),
    /// QEMU is of no more use.
    #[error(transparent)]
    Failed(#[from] PauseError),
}

impl AgentPauser {
    /// Begins to log writes to the blocks that it was armed with.
    pub fn begin_dirty_log(&self) -> Result<(), DirtyLogError> {
        match self.ask_dirty_log(DirtyWish::Begin)? {
            DirtyOutcome::Done => Ok(()),
            DirtyOutcome::Missing => Err(DirtyLogError::None("it does not export what that takes")),
            DirtyOutcome::Refused => Err(DirtyLogError::None("it refused to begin")),
            DirtyOutcome::NotCovered => {
                Err(DirtyLogError::None("not all of the machine's memory is in it"))
            }
        }
    }

    /// Has QEMU add to the log what was written since the last time, in a pause or outside one.
    /// From then on each page's next write is noted again.
    pub fn collect_dirty_log(&self) -> Result<(), DirtyLogError> {
        match self.ask_dirty_log(DirtyWish::Collect)? {
            DirtyOutcome::Done => Ok(()),
            other => Err(PauseError::DirtyLog(other as u32).into()),
        }
    }

    /// Logs nothing any more.
    pub fn end_dirty_log(&self) -> Result<(), DirtyLogError> {
        Ok(self.ask_dirty_log(DirtyWish::End).map(drop)?)
    }

    /// Calls `found` with each run of pages in the log: block, first page, how many. They are
    /// taken out of it.
    pub fn take_dirty_log(&self, mut found: impl FnMut(usize, u64, u64)) {
        for (block, bitmap) in self.dirty_bitmaps().enumerate() {
            let pages = self.blocks()[block].pages;
            for (number, word) in bitmap.iter().enumerate() {
                // Looked at first: hardly any word has a page in it.
                if word.load(Ordering::Relaxed) != 0 {
                    let first = number as u64 * PAGES_PER_WORD;
                    let bits = word.swap(0, Ordering::Relaxed);
                    for (start, count) in runs(bits, pages.saturating_sub(first)) {
                        found(block, first + start, count);
                    }
                }
            }
        }
    }

    /// Pages in the log.
    pub fn count_dirty_log(&self) -> u64 {
        let words = self.dirty_bitmaps().flatten();
        words.map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum()
    }

    fn ask_dirty_log(&self, wish: DirtyWish) -> Result<DirtyOutcome, PauseError> {
        let _one_at_a_time = self.dirty_log_turn();
        let number = self.page().ask_dirty_log(wish);
        // In a pause the agent hears of it at once; the bell comes behind it then, and is nothing.
        self.bell().ring()?;
        let begun = Instant::now();
        loop {
            let seen = self.page().dirty_done.get();
            if seen == number {
                let outcome = self.page().dirty_outcome.load(Ordering::Relaxed);
                return DirtyOutcome::from_number(outcome).ok_or(PauseError::DirtyLog(outcome));
            }
            self.page().dirty_done.wait(seen, GLANCE);
            if has_ended(self.socket().as_fd())? {
                return Err(PauseError::Ended);
            }
            if begun.elapsed() > self.timeout() {
                let (what, after) = ("say what the guest wrote", self.timeout());
                return Err(PauseError::Silent { what, after });
            }
        }
    }
}

/// The runs of ones below bit `end`, from the lowest on.
fn runs(mut bits: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
    if end < PAGES_PER_WORD {
        bits &= (1 << end) - 1;
    }
    std::iter::from_fn(move || {
        if bits == 0 {
            return None;
        }
        let start = bits.trailing_zeros();
        let count = (bits >> start).trailing_ones();
        // Adding to the lowest one of a run clears it, and carries into the gap above it.
        bits &= bits.wrapping_add(1 << start);
        Some((u64::from(start), u64::from(count)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_a_word() {
        let all = |bits, end| runs(bits, end).collect::<Vec<_>>();
        assert_eq!(all(0, 64), []);
        assert_eq!(all(u64::MAX, 64), [(0, 64)]);
        assert_eq!(all(u64::MAX, 3), [(0, 3)]);
        assert_eq!(all(u64::MAX, 0), []);
        assert_eq!(all(0b1101_0010, 1 << 40), [(1, 1), (4, 1), (6, 2)]);
        assert_eq!(all(1 << 63 | 1, 64), [(0, 1), (63, 1)]);
    }
}
