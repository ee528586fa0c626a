//! A value whose changes can be waited for.

use crate::locks::{Condvar, Mutex, MutexGuard};
use crate::{lock, poisoned};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// A value that threads of one owner share, and wait for changes of: a lock as [`lock`] takes it,
/// and who waits is woken by [`change`](Waitable::change). For what no queue can be: several
/// threads look at it, or wait for different things.
#[derive(Debug, Default)]
pub struct Waitable<T> {
    value: Mutex<T>,
    changed: Condvar,
    /// Number of those who wait, counted under the lock: to wake nobody would cost a system call.
    waiting: AtomicUsize,
}

impl<T> Waitable<T> {
    /// Makes one that has this value.
    pub fn new(value: T) -> Waitable<T> {
        Waitable { value: Mutex::new(value), changed: Condvar::new(), waiting: 0.into() }
    }

    /// Locks it, to be looked at, or for a change that nobody waits for.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        lock(&self.value)
    }

    /// Changes it, and wakes all that wait.
    pub fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.lock());
        self.wake();
        result
    }

    /// Wakes all that wait, after a change.
    pub fn wake(&self) {
        // Whoever began to wait before the change was counted before; all others see it.
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.changed.notify_all();
        }
    }

    /// Counts those who wait, by a call that does.
    fn counted<'a, R>(
        &'a self,
        value: MutexGuard<'a, T>,
        wait: impl FnOnce(&'a Condvar, MutexGuard<'a, T>) -> R,
    ) -> R {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let result = wait(&self.changed, value);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        result
    }

    /// Waits for a change; it may be none.
    pub fn wait<'a>(&'a self, value: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.counted(value, |changed, value| changed.wait(value)).unwrap_or_else(poisoned)
    }

    /// The same, for so long at most.
    pub fn wait_for<'a>(
        &'a self,
        value: MutexGuard<'a, T>,
        longest: Duration,
    ) -> MutexGuard<'a, T> {
        let waited = self.counted(value, |changed, value| changed.wait_timeout(value, longest));
        waited.unwrap_or_else(poisoned).0
    }

    /// Waits until `waits` says no more.
    pub fn wait_while<'a>(
        &'a self,
        value: MutexGuard<'a, T>,
        waits: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        self.counted(value, |changed, value| changed.wait_while(value, waits))
            .unwrap_or_else(poisoned)
    }

    /// The same, for so long at most.
    pub fn wait_while_for<'a>(
        &'a self,
        value: MutexGuard<'a, T>,
        longest: Duration,
        waits: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        let wait = |changed: &'a Condvar, value| changed.wait_timeout_while(value, longest, waits);
        self.counted(value, wait).unwrap_or_else(poisoned).0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::thread;

    #[test]
    fn who_waits_is_counted_and_never_missed() {
        const TURNS: u32 = 1_000;
        let turn = Arc::new(Waitable::new(0));
        let player = |own: u32| {
            let turn = turn.clone();
            // One that is not woken waits for ever.
            thread::spawn(move || {
                for n in (own..TURNS).step_by(2) {
                    drop(turn.wait_while(turn.lock(), |turn| *turn < n));
                    turn.change(|turn| *turn += 1);
                }
            })
        };
        for player in [player(0), player(1)] {
            player.join().unwrap();
        }
        assert_eq!(*turn.lock(), TURNS);
        drop(turn.wait_while_for(turn.lock(), Duration::from_millis(1), |_| true));
        drop(turn.wait_for(turn.lock(), Duration::from_millis(1)));
        assert_eq!(turn.waiting.load(Ordering::Relaxed), 0, "nobody waits");
    }
}
