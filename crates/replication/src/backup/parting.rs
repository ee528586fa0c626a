//! How a backup that gives up leaves its primary: it says why, and the primary hangs up. Were it
//! to end its connections at once, the primary could see a heartbeat's end before the reason.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use understudy_machine::doorbell::Doorbell;

/// A primary that was told has so long to hang up. One that does not is lost, too, or slow: then
/// it hears what comes first.
const PATIENCE: Duration = Duration::from_secs(2);

/// How far that has come.
#[derive(Debug, Default)]
pub struct Parting {
    told: AtomicBool,
    hung_up: AtomicBool,
    closed: AtomicBool,
}

impl Parting {
    /// The primary is told why, by what is sent next.
    pub fn tell(&self) {
        self.told.store(true, Ordering::Release);
    }

    /// Nothing more comes from the primary.
    pub fn hung_up(&self) {
        self.hung_up.store(true, Ordering::Release);
    }

    /// This host has ended its connections.
    pub fn closed(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Whether this host has ended its connections.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Whether the connections of a session that is over may end.
    pub fn may_hang_up(&self) -> bool {
        !self.told.load(Ordering::Acquire) || self.closed.load(Ordering::Acquire)
    }

    /// Waits until a primary that was told has hung up, which rings `changed`.
    pub fn await_hang_up(&self, changed: &Doorbell) {
        if !self.told.load(Ordering::Acquire) {
            return;
        }
        let deadline = Instant::now() + PATIENCE;
        loop {
            let seen = changed.count();
            let left = deadline.saturating_duration_since(Instant::now());
            if self.hung_up.load(Ordering::Acquire) || left.is_zero() {
                return;
            }
            changed.wait(seen, left);
        }
    }
}
