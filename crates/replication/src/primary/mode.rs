//! The mode in which the backup keeps up, and since when: by checkpoints, or by the log of
//! lockstep.

use super::inbound;
use super::session::Session;
use crate::lockstep::primary::{PIPELINE, Recording};
use std::sync::Arc;
use understudy_protocol::{Epoch, PIPELINE_DEPTH};
use understudy_report::{DiskReads, Mode};
use understudy_threads::lock;

impl Session {
    /// Its log, in lockstep.
    pub fn recording(&self) -> Option<Arc<Recording>> {
        lock(&self.present).recording.clone()
    }

    /// The mode in which the backup keeps up.
    pub fn mode(&self) -> Mode {
        match self.recording() {
            Some(_) => Mode::Lockstep,
            None => Mode::Checkpoint,
        }
    }

    /// The epoch since which the backup keeps up as it does.
    pub(super) fn turned(&self) -> Epoch {
        lock(&self.present).turned
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
        core.set_pipeline(PIPELINE);
        let mut present = lock(&self.present);
        (present.turned, present.recording) = (recording.machine(), Some(recording.clone()));
        recording
    }

    /// The log has ended with the last epoch that was closed, a checkpoint; others follow.
    pub(super) fn end_log(&self) {
        let mut core = self.group.core();
        core.set_pipeline(PIPELINE_DEPTH);
        let mut present = lock(&self.present);
        (present.turned, present.recording) = (Epoch(core.running().0 - 1), None);
    }

    /// Whether this epoch, which is on its way, is no batch of a log.
    pub(super) fn is_checkpoint(&self, epoch: Epoch) -> bool {
        let present = lock(&self.present);
        match &present.recording {
            Some(recording) => epoch <= recording.machine(),
            None => epoch >= present.turned,
        }
    }
}
