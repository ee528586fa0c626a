//! Small pieces of thread plumbing.

use std::time::Duration;
use understudy_threads::Waitable;

/// Bounds the bytes that wait in a queue: the writer that would go over the
/// bound waits, which slows the guest instead of filling the host's memory.
#[derive(Debug)]
pub struct ByteBudget {
    limit: u64,
    state: Waitable<BudgetState>,
}

#[derive(Debug, Default)]
struct BudgetState {
    used: u64,
    closed: bool,
}

impl ByteBudget {
    /// A budget of `limit` bytes.
    pub fn new(limit: u64) -> ByteBudget {
        ByteBudget { limit, state: Waitable::default() }
    }

    /// Takes `bytes`, waiting until they fit; one request alone always fits.
    /// False once the budget is closed.
    pub fn take(&self, bytes: u64) -> bool {
        let is_full = |state: &mut BudgetState| {
            !state.closed && state.used > 0 && state.used + bytes > self.limit
        };
        let mut state = self.state.wait_while(self.state.lock(), is_full);
        state.used += bytes;
        !state.closed
    }

    /// Waits until there is room, for so long at most; whether there is.
    pub fn await_room(&self, timeout: Duration) -> bool {
        let is_full = |state: &mut BudgetState| !state.closed && state.used > self.limit;
        let mut state = self.state.wait_while_for(self.state.lock(), timeout, is_full);
        !is_full(&mut state)
    }

    /// Takes `bytes` whether they fit or not, for those who must not wait.
    pub fn force(&self, bytes: u64) {
        self.state.lock().used += bytes;
    }

    /// Gives `bytes` back.
    pub fn give_back(&self, bytes: u64) {
        self.state.change(|state| state.used = state.used.saturating_sub(bytes));
    }

    /// Lets everybody pass from now on: nothing is sent any more.
    pub fn close(&self) {
        self.state.change(|state| state.closed = true);
    }

    /// Whether it is.
    pub fn is_closed(&self) -> bool {
        self.state.lock().closed
    }
}
