//! Small pieces of thread plumbing.

use crate::clock;
use std::time::Duration;
use understudy_protocol::Time;
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
    /// Number of those who wait for room.
    waiting: usize,
    /// Time since which there are any, and none of them got some.
    waits_since: Option<Time>,
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
        let mut state = self.state.lock();
        if is_full(&mut state) {
            state.waiting += 1;
            state.waits_since.get_or_insert_with(clock::now);
            state = self.state.wait_while(state, is_full);
            state.waiting -= 1;
            state.waits_since = (state.waiting > 0).then(clock::now);
        }
        state.used += bytes;
        !state.closed
    }

    /// The time since which somebody has waited for room, and nobody who did has got any.
    pub fn waits_since(&self) -> Option<Time> {
        self.state.lock().waits_since
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::thread;

    /// Waits until it waits since a time that `is` so.
    fn await_since(budget: &ByteBudget, is: impl Fn(Option<Time>) -> bool) -> Option<Time> {
        let deadline = clock::now() + Duration::from_secs(20);
        loop {
            let since = budget.waits_since();
            if is(since) {
                return since;
            }
            assert!(clock::now() < deadline, "it waits since {since:?}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn it_is_known_since_when_somebody_waits_for_room_in_vain() {
        let budget = Arc::new(ByteBudget::new(10));
        let begun = clock::now();
        assert!(budget.take(10));
        assert_eq!(budget.waits_since(), None, "there was room");
        let taker = || {
            let budget = budget.clone();
            thread::spawn(move || budget.take(10))
        };
        let takers = [taker(), taker()];
        let first = await_since(&budget, |since| since >= Some(begun));
        budget.give_back(10);
        // One has got room, the other waits on.
        await_since(&budget, |since| since > first);
        budget.give_back(10);
        await_since(&budget, |since| since.is_none());
        assert!(takers.into_iter().all(|taker| taker.join().unwrap()));
    }
}
