//! A few threads that help the checkpointing thread with large scans and copies.

use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

/// Beyond this many threads, memory bandwidth is the limit.
const MOST_HELPERS: usize = 3;

/// Does `work` on every item, the calling thread and its helpers each taking the next one.
/// Gives the first error, after all threads have stopped.
pub(crate) fn for_each<T: Send, E: Send>(
    items: &mut [T],
    work: impl Fn(&mut T) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let Some(pool) = helpers() else {
        return items.iter_mut().try_for_each(work);
    };
    let helper_count = pool.current_num_threads().min(items.len().saturating_sub(1));
    let queue = Mutex::new(items.iter_mut());
    let first_error = Mutex::new(None);
    let drain = || {
        while let Some(item) = lock(&queue).next() {
            if let Err(e) = work(item) {
                lock(&first_error).get_or_insert(e);
                return;
            }
        }
    };
    // The caller works too, so a helper that wakes late costs nothing but its absence.
    pool.in_place_scope(|scope| {
        for _ in 0..helper_count {
            scope.spawn(|_| drain());
        }
        drain();
    });
    first_error.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // A panic of another thread is passed on by the scope; the data stays whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The helper threads, or none on a machine with one core.
fn helpers() -> Option<&'static ThreadPool> {
    static HELPERS: OnceLock<Option<ThreadPool>> = OnceLock::new();
    HELPERS
        .get_or_init(|| {
            let cores = thread::available_parallelism().map_or(1, usize::from);
            let count = (cores - 1).min(MOST_HELPERS);
            if count == 0 {
                return None; // Zero would mean "as many as cores" to rayon.
            }
            ThreadPoolBuilder::new()
                .num_threads(count)
                .thread_name(|i| format!("memory-{i}"))
                .build()
                .inspect_err(|e| tracing::warn!("scans and copies use one thread only: {e}"))
                .ok()
        })
        .as_ref()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_worked_on_once() {
        let mut items = vec![0; 1000];
        for_each(&mut items, |item| {
            *item += 1;
            Ok::<(), ()>(())
        })
        .unwrap();
        assert!(items.iter().all(|&item| item == 1));
    }

    #[test]
    fn an_error_comes_back() {
        let mut items: Vec<u32> = (0..100).collect();
        let result = for_each(&mut items, |&mut item| match item {
            42 => Err(item),
            _ => Ok(()),
        });
        assert_eq!(result, Err(42));
    }
}
