//! A QEMU that records stands still for a moment at a place of its log.

use crate::lockstep::{LockstepError, LogChannel, Request};
use std::thread;
use std::time::{Duration, Instant};

/// Time between two looks whether the machine stands still.
const LOOK_INTERVAL: Duration = Duration::from_micros(50);

/// The point at which a machine stands still, as its agent says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Number of the hold, among those of this QEMU.
    pub number: u64,
    /// Bytes of log, since it was attached, that lead there.
    pub position: u64,
    /// Instructions executed there.
    pub instructions: u64,
    /// Requests to disks begun there, since the log was attached.
    pub disk_requests: u64,
}

/// A machine that stands still until this is dropped, or for a tenth of a second.
#[derive(Debug)]
pub struct Hold<'a> {
    log: &'a LogChannel,
    at: Held,
}

impl LogChannel {
    /// Has a machine that records, and whose log is attached, stand still between two of its
    /// instructions. None if it does not come to that in time: it may be waiting for room in
    /// the log, which somebody must read meanwhile.
    pub fn hold(&self, patience: Duration) -> Result<Option<Hold<'_>>, LockstepError> {
        let number = self.ask(Request::Hold)?;
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline {
            // An earlier one may not have ended yet.
            if let Some(at) = self.held().filter(|held| held.number == number) {
                return Ok(Some(Hold { log: self, at }));
            }
            thread::sleep(LOOK_INTERVAL);
        }
        self.ask(Request::LetGo)?;
        Ok(None)
    }
}

impl Hold<'_> {
    /// The point at which the machine stands still.
    pub fn at(&self) -> Held {
        self.at
    }

    /// Whether it has stood still all the time since.
    pub fn lasts(&self) -> bool {
        self.log.held() == Some(self.at)
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.log.ask(Request::LetGo) {
            // It goes on by itself.
            tracing::debug!("cannot let QEMU go on: {error}");
        }
    }
}
