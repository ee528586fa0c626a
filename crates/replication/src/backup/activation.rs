//! The activation of mirrors as images that the guest may run on: what is noted once they are
//! whole, and what must be on stable storage before the guest runs on them here.

use super::session::Session;
use crate::moments::pass;
use crate::records::{Activation, Record};
use crate::resync;
use anyhow::Context;
use std::sync::Arc;
use std::time::Instant;
use tracing::info;
use understudy_disk::ChangeMap;
use understudy_protocol::Generation;
use understudy_protocol::validity::ImageRole;

/// The things made before a take-over, so that they cost no time then.
pub struct Readiness {
    /// Maps in which the guest's changes will be noted, for each disk.
    pub changes: Vec<Arc<ChangeMap>>,
    activation: Activation,
}

impl Session {
    /// The mirrors are whole: they are this host's images from now on.
    pub(super) fn make_ready(&self) -> anyhow::Result<Readiness> {
        let machine = self.machine();
        let definition = machine.definition_now();
        let record = self.records.of(ImageRole::Mirror, self.position().0, &definition);
        let (peer, sessions) = (Some(self.primary.clone()), vec![self.id.clone()]);
        let mirror_of = Some(self.id.clone());
        self.records.write(&Record { peer, sessions, mirror_of, ..record })?;
        let changes = resync::create(&machine.disks(), &self.directory)?;
        let activation = self.records.prepare_activation(&self.vm, &self.id)?;
        Ok(Readiness { changes, activation })
    }

    /// Notes from here on what the primary may lack: in lockstep the guest writes the mirrors
    /// before a take-over.
    pub(super) fn note_changes(&self, ready: &Readiness) {
        for (disk, changes) in self.machine().disks().iter().zip(&ready.changes) {
            disk.set_changes(Some(changes.clone()));
            disk.begin_rounds(self.rounds);
        }
    }

    /// Brings all that was applied to the mirrors to stable storage. One that failed once fails
    /// for good, so nothing that depends on it happens after that.
    pub(super) fn settle(&self) -> anyhow::Result<()> {
        let awaited = self.vitals.settling.begin();
        for disk in self.machine().disks() {
            awaited.again();
            disk.sync().context("cannot sync the mirror")?;
        }
        Ok(())
    }

    /// Writes the activation record; what is settled is on the disks before.
    pub(super) fn activate(&self, generation: Generation, ready: Readiness) -> anyhow::Result<()> {
        let began = Instant::now();
        for (disk, changes) in self.machine().disks().iter().zip(ready.changes) {
            disk.set_changes(Some(changes));
        }
        pass("activate");
        ready.activation.write(generation).context("cannot write the activation record")?;
        info!(vm = %self.vm, "activated in {:.1} ms", began.elapsed().as_secs_f64() * 1e3);
        Ok(())
    }
}
