//! Small pieces of thread plumbing.

use crate::clock;
use std::time::Duration;
use understudy_protocol::{QueueRoom, Time};
use understudy_threads::Waitable;

/// Bounds the bytes that wait in a queue: the writer that would go over the
/// bound waits, which slows the guest instead of filling the host's memory. With it there may be room of
/// another kind, for which the same writers wait.
#[derive(Debug)]
pub struct ByteBudget<R = ()> {
    pub(crate) state: Waitable<BudgetState<R>>,
}

#[derive(Debug)]
pub(crate) struct BudgetState<R> {
    room: QueueRoom,
    pub other: R,
    pub closed: bool,
}

impl ByteBudget {
    /// A budget of `limit` bytes.
    pub fn new(limit: u64) -> ByteBudget {
        ByteBudget::with(limit, ())
    }
}

impl<R> ByteBudget<R> {
    /// A budget of `limit` bytes, and other room.
    pub fn with(limit: u64, other: R) -> ByteBudget<R> {
        let room = QueueRoom::new(limit);
        ByteBudget { state: Waitable::new(BudgetState { room, other, closed: false }) }
    }

    /// Takes `bytes`, waiting until they fit; one request alone always fits.
    /// False once the budget is closed.
    pub fn take(&self, bytes: u64) -> bool {
        let mut state = self.state.lock();
        if !state.closed && !state.room.has(bytes) {
            let turn = state.room.wait(clock::now());
            let waits =
                |state: &mut BudgetState<R>| !state.closed && !state.room.is_for(turn, bytes);
            state = self.state.wait_while(state, waits);
            state.room.waited(clock::now());
            // There may be room for the next one, too.
            self.state.wake();
        }
        state.room.take(bytes);
        !state.closed
    }

    /// The time since which somebody has waited for room, and nobody who did has got any.
    pub fn waits_since(&self) -> Option<Time> {
        self.state.lock().room.waits_since()
    }

    /// Waits until there is room, for so long at most; whether there is.
    pub fn await_room(&self, timeout: Duration) -> bool {
        let is_full = |state: &mut BudgetState<R>| !state.closed && state.room.is_over();
        let mut state = self.state.wait_while_for(self.state.lock(), timeout, is_full);
        !is_full(&mut state)
    }

    /// Takes `bytes` whether they fit or not, for those who must not wait.
    pub fn force(&self, bytes: u64) {
        self.state.lock().room.take(bytes);
    }

    /// Gives `bytes` back.
    pub fn give_back(&self, bytes: u64) {
        let mut state = self.state.lock();
        let was_over = state.room.is_over();
        state.room.give_back(bytes);
        // Whoever waits for other room has none of this.
        let is_waited_for = state.room.waits_since().is_some() || was_over && !state.room.is_over();
        drop(state);
        if is_waited_for {
            self.state.wake();
        }
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

    #[test]
    fn small_writes_keep_nobody_from_room_who_wants_much() {
        let budget = Arc::new(ByteBudget::new(10));
        assert!(budget.take(10));
        let (took, who_took) = crossbeam_channel::unbounded();
        let taker = |bytes| {
            let (budget, took) = (budget.clone(), took.clone());
            thread::spawn(move || budget.take(bytes) && took.send(bytes).is_ok())
        };
        let much = taker(8);
        let first = await_since(&budget, |since| since.is_some());
        let little = [taker(1), taker(1)];
        for _ in 0..7 {
            budget.give_back(1);
            assert!(who_took.recv_timeout(Duration::from_millis(20)).is_err());
        }
        let next = || who_took.recv_timeout(Duration::from_secs(20)).unwrap();
        budget.give_back(1);
        assert_eq!(next(), 8);
        // Each finds its room without another word.
        budget.give_back(2);
        assert_eq!([next(), next()], [1, 1]);
        assert!(first.is_some() && budget.waits_since().is_none());
        assert!(much.join().unwrap() && little.into_iter().all(|taker| taker.join().unwrap()));
    }
}
