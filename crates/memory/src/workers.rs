//! A few threads that help checkpointing threads with large scans and copies.
//!
//! A thread pool of the usual kind makes its caller wait for every task that it has queued,
//! even if a busy machine has not started the task and there is nothing left to do in it.
//! In the pause that cost up to 5 ms where the caller alone needed 0.6. So help here is an
//! offer, which the caller takes back when the work is done.
#![allow(unsafe_code)] // Lends a closure to other threads for the length of a call.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{OnceLock, PoisonError};
use std::thread;
use understudy_threads::{Condvar, Mutex, MutexGuard, Scope, current, within};

/// The number of threads beyond which memory bandwidth is the limit.
const MOST_HELPERS: usize = 3;

/// Does `work` on every item, the calling thread and its helpers each taking the next one.
/// Gives the first error, after all threads have stopped. Allocates nothing.
pub(crate) fn for_each<T: Send, E: Send>(
    items: &mut [T],
    work: impl Fn(&mut T) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let queue = Mutex::new(items.iter_mut());
    let first_error = Mutex::new(None);
    let drain = || {
        loop {
            let Some(item) = lock(&queue).next() else { return };
            if let Err(e) = work(item) {
                lock(&first_error).get_or_insert(e);
                return;
            }
        }
    };
    helpers().run(&drain);
    first_error.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// The helper threads of this process; none on a machine with one core.
fn helpers() -> &'static Team {
    static HELPERS: OnceLock<&'static Team> = OnceLock::new();
    HELPERS.get_or_init(|| {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Team::start((cores - 1).min(MOST_HELPERS))
    })
}

/// Threads that wait for an offer of work.
#[derive(Default)]
struct Team {
    state: Mutex<State>,
    offered: Condvar,
    finished: Condvar,
}

#[derive(Default)]
struct State {
    offer: Option<Offer>,
    /// The scope that the lender's thread belongs to.
    scope: Option<Scope>,
    /// Counts offers, so that a helper accepts each once.
    number: u64,
    /// Helpers at work on the current or just withdrawn offer.
    working: usize,
    panicked: bool,
}

/// Work lent by [`Team::run`], valid while it is in [`State::offer`] or somebody is
/// counted in [`State::working`].
#[derive(Clone, Copy)]
struct Offer(*const (dyn Fn() + Sync));

// SAFETY: what it points to is `Sync`, so any thread may call it.
unsafe impl Send for Offer {}

impl Team {
    /// Starts helpers, which live as long as the process.
    fn start(count: usize) -> &'static Team {
        let team: &'static Team = Box::leak(Box::default());
        for i in 0..count {
            let helper = thread::Builder::new().name(format!("memory-{i}"));
            if let Err(e) = helper.spawn(|| team.help()) {
                tracing::warn!("a helper for scans and copies did not start: {e}");
            }
        }
        team
    }

    /// Calls `work` here and, meanwhile, on those helpers that come in time.
    fn run(&self, work: &(dyn Fn() + Sync)) {
        if !self.offer(work) {
            return work(); // They are busy with another machine's checkpoint.
        }
        let withdraw = Withdraw(self);
        work();
        drop(withdraw);
        let panicked = std::mem::take(&mut lock(&self.state).panicked);
        assert!(!panicked, "a helper panicked, its message is on stderr");
    }

    fn offer(&self, work: &(dyn Fn() + Sync)) -> bool {
        let mut state = lock(&self.state);
        if state.offer.is_some() || state.working > 0 {
            return false;
        }
        // SAFETY: only the lifetime changes. `run` withdraws the offer and waits until nobody
        // works on it before it returns or unwinds, so the closure outlives every use.
        let work: *const (dyn Fn() + Sync) =
            unsafe { std::mem::transmute::<&(dyn Fn() + Sync), &'static (dyn Fn() + Sync)>(work) };
        state.offer = Some(Offer(work));
        // A lender that panicked itself has not looked.
        state.panicked = false;
        state.scope = current();
        state.number += 1;
        self.offered.notify_all();
        true
    }

    /// A helper's life.
    fn help(&self) {
        let mut last = 0;
        let mut state = lock(&self.state);
        loop {
            match state.offer {
                Some(Offer(work)) if state.number != last => {
                    last = state.number;
                    state.working += 1;
                    let scope = state.scope.clone();
                    drop(state);
                    // SAFETY: we are counted in `working`, so the lender waits for us.
                    let work = || unsafe { (*work)() };
                    let result = catch_unwind(AssertUnwindSafe(|| match &scope {
                        Some(scope) => within(scope, work),
                        None => work(),
                    }));
                    state = lock(&self.state);
                    state.panicked |= result.is_err();
                    state.working -= 1;
                    self.finished.notify_all();
                }
                _ => state = self.offered.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

/// Takes an offer back when dropped, also in a panic.
struct Withdraw<'a>(&'a Team);

impl Drop for Withdraw<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.offer = None;
        while state.working > 0 {
            state = self.0.finished.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it holds a lock of this module.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn every_item_is_worked_on_once_by_whoever_comes() {
        for _ in 0..200 {
            let mut items = vec![0; 100];
            for_each(&mut items, |item| {
                *item += 1;
                Ok::<(), ()>(())
            })
            .unwrap();
            assert!(items.iter().all(|&item| item == 1));
        }
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

    #[test]
    fn helpers_do_work() {
        let meeting = Barrier::new(3);
        // Returns only if three threads meet.
        Team::start(2).run(&|| {
            meeting.wait();
        });
    }

    #[test]
    fn a_second_caller_works_alone() {
        let team = Team::start(1);
        let meeting = Barrier::new(2);
        team.run(&|| {
            meeting.wait(); // The only helper is here, and so is the first caller.
            team.run(&|| ());
            meeting.wait();
        });
    }

    #[test]
    #[should_panic(expected = "a helper panicked")]
    fn a_panic_of_a_helper_is_passed_on() {
        let caller = thread::current().id();
        let meeting = Barrier::new(2);
        Team::start(1).run(&|| {
            meeting.wait();
            assert!(thread::current().id() == caller, "on purpose");
        });
    }
}
