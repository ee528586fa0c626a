//! Small pieces of thread plumbing.

use std::time::Duration;
use understudy_threads::{Condvar, Mutex, lock, poisoned};

/// Bounds the bytes that wait in a queue: the writer that would go over the
/// bound waits, which slows the guest instead of filling the host's memory.
#[derive(Debug)]
pub struct ByteBudget {
    limit: u64,
    state: Mutex<BudgetState>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct BudgetState {
    used: u64,
    closed: bool,
}

impl ByteBudget {
    /// A budget of `limit` bytes.
    pub fn new(limit: u64) -> ByteBudget {
        ByteBudget { limit, state: Mutex::default(), freed: Condvar::new() }
    }

    /// Takes `bytes`, waiting until they fit; one request alone always fits.
    /// False once the budget is closed.
    pub fn take(&self, bytes: u64) -> bool {
        let mut state = lock(&self.state);
        while !state.closed && state.used > 0 && state.used + bytes > self.limit {
            state = self.freed.wait(state).unwrap_or_else(poisoned);
        }
        state.used += bytes;
        !state.closed
    }

    /// Waits until there is room, for so long at most; whether there is.
    pub fn await_room(&self, timeout: Duration) -> bool {
        let is_full = |state: &mut BudgetState| !state.closed && state.used > self.limit;
        let state = lock(&self.state);
        let (mut state, _) =
            self.freed.wait_timeout_while(state, timeout, is_full).unwrap_or_else(poisoned);
        !is_full(&mut state)
    }

    /// Takes `bytes` whether they fit or not, for those who must not wait.
    pub fn force(&self, bytes: u64) {
        lock(&self.state).used += bytes;
    }

    /// Gives `bytes` back.
    pub fn give_back(&self, bytes: u64) {
        let mut state = lock(&self.state);
        state.used = state.used.saturating_sub(bytes);
        self.freed.notify_all();
    }

    /// Lets everybody pass from now on: nothing is sent any more.
    pub fn close(&self) {
        lock(&self.state).closed = true;
        self.freed.notify_all();
    }
}
