//! Room for requests that are answered later, by another thread than that which has read them. Each takes memory
//! until then, and a client that has been taken over sends as many as are read.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The most of one server; a little more, for those that its connections' threads have just read.
pub(super) const PLACES: usize = super::server::MAX_CONNECTIONS * QEMU_REQUESTS;
/// QEMU has no more requests under way on one connection.
const QEMU_REQUESTS: usize = 16;

/// The room of one server. While it is full no more requests are read; who answers one never waits for room.
#[derive(Default)]
pub(super) struct Room(AtomicUsize);

impl Room {
    /// Whether the next request must not be read. Looked at with each of them: it costs one read of memory.
    pub(super) fn is_full(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= PLACES
    }

    /// The place of a request that is answered later.
    pub(super) fn place(self: &Arc<Self>) -> Place {
        self.0.fetch_add(1, Ordering::Relaxed);
        Place(self.clone())
    }
}

/// A place in a [`Room`], to be kept for as long as what the request is answered with.
pub(super) struct Place(Arc<Room>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}
