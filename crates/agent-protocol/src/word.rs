// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-or-later
//! A number in memory that two processes share, on whose change one of them can wait.

use std::hint;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Longest time to watch instead of sleeping, which spares a wake-up of some 20 µs; for longer than
/// this it would keep a processor from others.
const SPIN: Duration = Duration::from_micros(150);

/// Looks between two looks at the clock.
const LOOKS: u32 = 64;

/// One process writes it, the other waits for a change.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Word(AtomicU32);

impl Word {
    /// Value that it has now. What was written before it was set is seen by who reads it.
    pub fn get(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    /// Changes it while nobody waits.
    pub fn put(&self, value: u32) {
        self.0.store(value, Ordering::Release);
    }

    /// Changes it and wakes who waits.
    pub fn set(&self, value: u32) {
        self.0.store(value, Ordering::Release);
        self.wake();
    }

    /// Changes it to what `change` makes of it, and wakes who waits; gives what it is then.
    pub fn update(&self, change: impl Fn(u32) -> u32) -> u32 {
        let set = |value| Some(change(value));
        let before = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, set);
        let now = change(before.unwrap_or_else(|value| value));
        self.wake();
        now
    }

    fn wake(&self) {
        // SAFETY: the call reads the number of sleepers on the address of a living word.
        unsafe { libc::syscall(libc::SYS_futex, self.0.as_ptr(), libc::FUTEX_WAKE, 1) };
    }

    /// Waits until it is no longer `seen`, at most `limit`, and returns what it is. Watches
    /// it for a moment before it sleeps, where there is a second processor.
    pub fn wait(&self, seen: u32, limit: Duration) -> u32 {
        let begun = Instant::now();
        while several_processors() && begun.elapsed() < SPIN.min(limit) {
            for _ in 0..LOOKS {
                if self.get() != seen {
                    return self.get();
                }
                hint::spin_loop();
            }
        }
        while self.get() == seen {
            let left = limit.saturating_sub(begun.elapsed());
            if left.is_zero() {
                break;
            }
            self.sleep(seen, left);
        }
        self.get()
    }

    /// Returns after a change, after `limit`, or without any reason.
    fn sleep(&self, seen: u32, limit: Duration) {
        let limit = libc::timespec {
            tv_sec: limit.as_secs() as libc::time_t,
            tv_nsec: limit.subsec_nanos().into(),
        };
        // SAFETY: the call reads the word and `limit`, both of which outlive it. Without
        // FUTEX_PRIVATE_FLAG: the other one is in another process.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.0.as_ptr(),
                libc::FUTEX_WAIT,
                seen,
                &limit,
                ptr::null::<u32>(),
                0,
            )
        };
    }
}

fn several_processors() -> bool {
    static SEVERAL: OnceLock<bool> = OnceLock::new();
    *SEVERAL.get_or_init(|| thread::available_parallelism().is_ok_and(|cores| cores.get() > 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_ends_the_wait_early_and_late() {
        for delay in [0, 20] {
            let word = Word::default();
            thread::scope(|scope| {
                scope.spawn(|| {
                    thread::sleep(Duration::from_millis(delay));
                    word.set(7);
                });
                assert_eq!(word.wait(0, Duration::from_secs(60)), 7);
            });
        }
    }

    #[test]
    fn without_a_change_the_wait_ends_at_the_limit() {
        assert_eq!(Word::default().wait(0, Duration::from_millis(2)), 0);
    }
}
