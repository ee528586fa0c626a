//! A store that is slower than it is: for trials of restores from far away.

use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Bytes a second that this process reads from all its stores; as fast as they are without.
const VARIABLE: &str = "UNDERSTUDY_STORE_SPEED";

/// The line that all reads of this process share.
struct Line {
    bytes_per_second: f64,
    /// Time by which what was read so far has come through.
    free: Mutex<Instant>,
}

static LINE: OnceLock<Option<Line>> = OnceLock::new();

/// Waits for as long as so many bytes take that were read.
pub(super) async fn pass(bytes: usize) {
    let line = LINE.get_or_init(|| {
        let bytes_per_second: f64 = std::env::var(VARIABLE).ok()?.parse().ok()?;
        let free = Mutex::new(Instant::now());
        (bytes_per_second >= 1.0).then_some(Line { bytes_per_second, free })
    });
    let Some(line) = line else { return };
    let through = {
        let mut free = line.free.lock().unwrap_or_else(PoisonError::into_inner);
        let takes = Duration::from_secs_f64(bytes as f64 / line.bytes_per_second);
        *free = (*free).max(Instant::now()) + takes;
        *free
    };
    tokio::time::sleep_until(through.into()).await;
}
