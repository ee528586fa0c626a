//! Times since which a device has not answered.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use understudy_threads::{Mutex, MutexGuard};

/// One call of the system that waits for the device; the next one has a higher number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WaitId(u64);

/// The calls that wait for one device.
#[derive(Debug, Default)]
pub(crate) struct Waits(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    begun: u64,
    under_way: BTreeMap<WaitId, Instant>,
}

/// A call under way. Dropped, the device has answered.
pub(crate) struct Wait<'a>(&'a Waits, WaitId);

impl Waits {
    pub(crate) fn begin(&self) -> Wait<'_> {
        let mut state = self.lock();
        state.begun += 1;
        let id = WaitId(state.begun);
        state.under_way.insert(id, Instant::now());
        Wait(self, id)
    }

    /// The call that has waited longest, and for how long.
    pub(crate) fn longest(&self) -> Option<(WaitId, Duration)> {
        self.lock().under_way.first_key_value().map(|(id, since)| (*id, since.elapsed()))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(understudy_threads::poisoned)
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.0.lock().under_way.remove(&self.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_call_counts_until_it_is_answered() {
        let waits = Waits::default();
        assert!(waits.longest().is_none());
        let first = waits.begin();
        let second = waits.begin();
        let oldest = waits.longest().unwrap().0;
        assert_eq!(oldest, first.1);
        drop(first);
        assert_eq!(waits.longest().unwrap().0, second.1);
        drop(second);
        assert!(waits.longest().is_none());
    }
}
