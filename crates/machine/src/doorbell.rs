//! Waking a thread that waits for any of many changes.

use nix::sys::eventfd::{EfdFlags, EventFd};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;
use understudy_threads::Waitable;

/// Counts rings. A waiter looks at the world after it took the count, so that
/// no change is missed; whoever rings may hold any lock.
#[derive(Debug, Default)]
pub struct Doorbell(Waitable<State>);

#[derive(Debug, Default)]
struct State {
    rings: u64,
    listener: Option<Arc<EventFd>>,
}

impl Doorbell {
    /// Tells that something changed.
    pub fn ring(&self) {
        self.0.change(|state| {
            state.rings += 1;
            if let Some(listener) = &state.listener {
                // Fails only if it was rung 2^64 times.
                let _ = listener.write(1);
            }
        });
    }

    /// Rings so far.
    pub fn count(&self) -> u64 {
        self.0.lock().rings
    }

    /// Waits until there are more rings than `seen`, or for `timeout`.
    pub fn wait(&self, seen: u64, timeout: Duration) {
        drop(self.0.wait_while_for(self.0.lock(), timeout, |state| state.rings == seen));
    }

    /// Listens for a thread that waits for descriptors, too: one at a time.
    pub fn listen(&self) -> nix::Result<Ringing<'_>> {
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        // Rung once: what changed before is looked at.
        let rings = Arc::new(EventFd::from_value_and_flags(1, flags)?);
        self.0.lock().listener = Some(rings.clone());
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
        self.bell.0.lock().listener = None;
    }
}
