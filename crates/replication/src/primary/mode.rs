//! The mode in which the backup keeps up, and since when: by checkpoints, or by the log of
//! lockstep.

use super::inbound;
use super::session::Session;
use crate::clock;
use crate::lockstep::primary::{PIPELINE, Recording};
use std::sync::Arc;
use understudy_protocol::Epoch;
use understudy_report::{DiskReads, Mode};
use understudy_session::primary::Way;

impl Session {
    /// Its log, in lockstep.
    pub fn recording(&self) -> Option<Arc<Recording>> {
        self.present.lock().recording.clone()
    }

    /// The mode in which the backup keeps up.
    pub fn mode(&self) -> Mode {
        match self.recording() {
            Some(_) => Mode::Lockstep,
            None => Mode::Checkpoint,
        }
    }

    /// The way in which the backup keeps up.
    pub fn way(&self) -> Way {
        self.present.lock().way
    }

    /// The epoch since which the backup keeps up as it does.
    pub(super) fn turned(&self) -> Epoch {
        self.way().since()
    }

    /// Whether batches of its log may go.
    pub fn may_send_log(&self) -> bool {
        let core = self.group.core();
        self.way().may_send_log(&core)
    }

    /// A turn is captured: it is the last epoch that was closed as a checkpoint.
    pub(super) fn turn_captured(&self) {
        let epoch = self.turned();
        self.present.change(|present| present.turning.captured(clock::now(), epoch));
    }

    /// The log begins with the pause at the end of the epoch that runs, which is the next thing
    /// to be done; checkpoints go before.
    pub(super) fn begin_log(&self, disk_reads: DiskReads) -> Arc<Recording> {
        if let Some(references) = &self.references {
            references.stop();
        }
        inbound::end(self);
        let mut core = self.group.core();
        let recording = Recording::new(&self.machine(), disk_reads, core.running());
        let recording = Arc::new(recording);
        let mut present = self.present.lock();
        present.way.begin_log(&mut core, PIPELINE);
        present.recording = Some(recording.clone());
        recording
    }

    /// The log has ended with the last epoch that was closed, a checkpoint; others follow.
    pub(super) fn end_log(&self) {
        let mut core = self.group.core();
        let mut present = self.present.lock();
        present.way.end_log(&mut core);
        present.recording = None;
    }

    /// Whether this epoch, which is on its way, is no batch of a log.
    pub(super) fn is_checkpoint(&self, epoch: Epoch) -> bool {
        self.way().is_checkpoint(epoch)
    }
}
