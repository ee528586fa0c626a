//! Waking a thread that waits for any of many changes.

use nix::sys::eventfd::{EfdFlags, EventFd};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;
use understudy_threads::poisoned;
use understudy_threads::{Condvar, Mutex, lock};

/// Counts rings. A waiter looks at the world after it took the count, so that
/// no change is missed; whoever rings may hold any lock.
#[derive(Debug, Default)]
pub struct Doorbell {
    state: Mutex<State>,
    rung: Condvar,
}

#[derive(Debug, Default)]
struct State {
    rings: u64,
    listener: Option<Arc<EventFd>>,
}

impl Doorbell {
    /// Something changed.
    pub fn ring(&self) {
        let mut state = lock(&self.state);
        state.rings += 1;
        if let Some(listener) = &state.listener {
            // Fails only if it was rung 2^64 times.
            let _ = listener.write(1);
        }
        drop(state);
        self.rung.notify_all();
    }

    /// Rings so far.
    pub fn count(&self) -> u64 {
        lock(&self.state).rings
    }

    /// Waits until there are more rings than `seen`, or for `timeout`.
    pub fn wait(&self, seen: u64, timeout: Duration) {
        let state = lock(&self.state);
        let _unused = self
            .rung
            .wait_timeout_while(state, timeout, |state| state.rings == seen)
            .unwrap_or_else(poisoned);
    }

    /// Listens for a thread that waits for descriptors, too: one at a time.
    pub fn listen(&self) -> nix::Result<Ringing<'_>> {
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        // Rung once: what changed before is looked at.
        let rings = Arc::new(EventFd::from_value_and_flags(1, flags)?);
        lock(&self.state).listener = Some(rings.clone());
        Ok(Ringing { bell: self, rings })
    }
}

/// Readable from a ring until [`Ringing::clear`].
#[derive(Debug)]
pub struct Ringing<'a> {
    bell: &'a Doorbell,
    rings: Arc<EventFd>,
}

impl Ringing<'_> {
    /// Clears the ring; to be called before the world is looked at.
    pub fn clear(&self) {
        // Fails if nobody has rung.
        let _ = self.rings.read();
    }
}

impl AsFd for Ringing<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.rings.as_fd()
    }
}

impl Drop for Ringing<'_> {
    fn drop(&mut self) {
        lock(&self.bell.state).listener = None;
    }
}
