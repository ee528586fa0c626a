//! What the backup tells its primary, beside acknowledgements.

use super::session::Session;
use understudy_lockstep::{Findings, Written};
use understudy_protocol::Epoch;
use understudy_protocol::wire::{Kind, LogProgress};

impl Session {
    /// Lockstep: tells the primary how far QEMU is.
    pub fn tell_progress(&self, progress: &LogProgress) {
        // If it cannot be sent the reading thread finds out why.
        let _ = self.data.send_parts(Kind::Progress, Epoch(0), &[&progress.encode()]);
    }

    /// Lockstep: tells the primary what differs at the place that it asked for.
    pub fn tell_findings(&self, findings: &Findings) {
        // If it cannot be sent the reading thread finds out why.
        let _ = self.data.send_parts(Kind::Compared, Epoch(0), &[&findings.encode()]);
    }

    /// Lockstep: tells the primary what its mirrors have on stable storage.
    pub(super) fn tell_written(&self, written: &Written) {
        // If it cannot be sent the reading thread finds out why.
        let _ = self.data.send_parts(Kind::Written, Epoch(0), &[&written.encode()]);
    }

    /// Tells the primary that this host works, and has applied so many bytes.
    pub(super) fn tell_work(&self, bytes: u64) {
        // If it cannot be sent the reading thread finds out why.
        let _ = self.data.send_signal(Kind::Works, Epoch(bytes));
    }

    /// Tells the primary that the mirrors hold this epoch on stable storage.
    pub(super) fn tell_settled(&self, epoch: Epoch) {
        // If it cannot be sent the reading thread finds out why.
        let _ = self.data.send_signal(Kind::Settled, epoch);
    }
}
