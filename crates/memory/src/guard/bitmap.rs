//! A bit for each page, which several threads change.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// Pages in a word.
pub(crate) const WORD_PAGES: u64 = u64::BITS as u64;

/// A set of the pages of a block.
#[derive(Debug)]
pub(crate) struct PageBitmap(Box<[AtomicU64]>);

impl PageBitmap {
    /// The empty set, of so many pages.
    pub fn new(pages: u64) -> PageBitmap {
        PageBitmap((0..pages.div_ceil(WORD_PAGES)).map(|_| AtomicU64::new(0)).collect())
    }

    /// The number of words.
    pub fn words(&self) -> usize {
        self.0.len()
    }

    /// Adds a page; false if it was there.
    pub fn set(&self, page: u64) -> bool {
        let (word, bit) = place(page);
        self.0[word].fetch_or(bit, SeqCst) & bit == 0
    }

    /// Takes a page out; false if it was not there.
    pub fn clear(&self, page: u64) -> bool {
        let (word, bit) = place(page);
        self.0[word].fetch_and(!bit, SeqCst) & bit != 0
    }

    /// Whether a page is there.
    pub fn get(&self, page: u64) -> bool {
        let (word, bit) = place(page);
        self.0[word].load(SeqCst) & bit != 0
    }

    /// Takes out all pages of a word.
    pub fn take(&self, word: usize) -> u64 {
        match self.0[word].load(SeqCst) {
            0 => 0,
            _ => self.0[word].swap(0, SeqCst),
        }
    }

    /// Adds pages of a word.
    pub fn add(&self, word: usize, bits: u64) {
        if bits != 0 {
            self.0[word].fetch_or(bits, SeqCst);
        }
    }

    /// The pages of a word.
    pub fn word(&self, word: usize) -> u64 {
        self.0[word].load(SeqCst)
    }

    /// Empties the set.
    pub fn clear_all(&self) {
        self.0.iter().for_each(|word| word.store(0, SeqCst));
    }

    /// Adds the pages of a run.
    pub fn set_run(&self, first: u64, count: u64) {
        let mut page = first;
        while page < first + count {
            let (word, _) = place(page);
            let end = (first + count).min((page / WORD_PAGES + 1) * WORD_PAGES);
            self.add(word, bits(page % WORD_PAGES, end - page));
            page = end;
        }
    }

    /// The number of pages in it.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.load(SeqCst).count_ones())).sum()
    }
}

fn place(page: u64) -> (usize, u64) {
    ((page / WORD_PAGES) as usize, 1 << (page % WORD_PAGES))
}

fn bits(first: u64, count: u64) -> u64 {
    let ones = if count == WORD_PAGES { u64::MAX } else { (1 << count) - 1 };
    ones << first
}

/// The runs in a word: first page of the word, and how many.
pub(crate) fn runs(mut word: u64) -> impl Iterator<Item = (u64, u64)> {
    std::iter::from_fn(move || {
        if word == 0 {
            return None;
        }
        let first = u64::from(word.trailing_zeros());
        let count = u64::from((word >> first).trailing_ones());
        word &= !bits(first, count);
        Some((first, count))
    })
}

/// Joins runs that adjoin, or have at most `gap` pages between them.
pub(crate) fn joined(
    runs: impl Iterator<Item = (u64, u64)>,
    gap: u64,
) -> impl Iterator<Item = (u64, u64)> {
    let mut runs = runs.peekable();
    std::iter::from_fn(move || {
        let (first, mut count) = runs.next()?;
        while let Some((next, more)) = runs.next_if(|(next, _)| *next <= first + count + gap) {
            count = next + more - first;
        }
        Some((first, count))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_set_found_and_joined() {
        let set = PageBitmap::new(300);
        for (first, count) in [(3, 1), (60, 140), (205, 2), (299, 1)] {
            set.set_run(first, count);
        }
        assert_eq!(set.count(), 144);
        assert!(set.get(199) && !set.get(200) && !set.set(60) && set.clear(60) && !set.clear(60));
        let all = |gap| -> Vec<_> {
            let words = (0..set.words()).flat_map(|word| {
                let base = word as u64 * WORD_PAGES;
                runs(set.word(word)).map(move |(first, count)| (base + first, count))
            });
            joined(words, gap).collect()
        };
        assert_eq!(all(0), [(3, 1), (61, 139), (205, 2), (299, 1)]);
        assert_eq!(all(5), [(3, 1), (61, 146), (299, 1)]);
        assert_eq!(runs(u64::MAX).collect::<Vec<_>>(), [(0, 64)]);
        set.clear_all();
        assert_eq!(set.count(), 0);
    }
}
