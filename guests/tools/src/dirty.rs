//! A known number of written pages per interval.

use std::iter;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const WORDS_PER_PAGE: usize = 4096 / size_of::<u64>();

/// Writes a new value to each of `pages` pages once per `interval_ms`, for
/// ever; 0 writes without rest. Prints nothing, to dirty nothing else.
pub fn rewrite_forever(pages: usize, interval_ms: u64) -> Result<(), String> {
    let words = pages
        .checked_mul(WORDS_PER_PAGE)
        .filter(|&words| words > 0)
        .ok_or("PAGES must be at least 1 and fit in memory")?;
    // One word in each stride of a page's length is one word in each page,
    // wherever the allocation begins. Atomic stores are never optimised out.
    let memory: Vec<AtomicU64> = iter::repeat_with(AtomicU64::default).take(words).collect();
    let interval = Duration::from_millis(interval_ms);
    let mut due = Instant::now();
    for value in 1.. {
        for word in memory.iter().step_by(WORDS_PER_PAGE) {
            word.store(value, Ordering::Relaxed);
        }
        due = (due + interval).max(Instant::now() - interval);
        thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    Ok(())
}
