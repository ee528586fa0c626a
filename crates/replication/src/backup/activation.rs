//! The activation of mirrors as images that the guest may run on: what is noted once they are
//! whole, and what must be on stable storage before the guest runs on them here.

use super::session::Session;
use crate::moments::pass;
use crate::records::{Activation, Record, Records};
use crate::resync;
use crate::sessions::Sessions;
use anyhow::Context;
use std::sync::Arc;
use std::time::Instant;
use tracing::info;
use understudy_disk::{ChangeMap, Synced};
use understudy_protocol::validity::ImageRole;
use understudy_protocol::{Generation, VmName};

/// The things made before a take-over, so that they cost no time then.
pub struct Readiness {
    /// Maps in which the guest's changes will be noted, for each disk.
    pub changes: Vec<Arc<ChangeMap>>,
    activation: Activation,
}

/// Gives new mirrors their names, in place of this host's former images: the record of those counts no more, before the
/// first of them goes.
pub(super) fn replace_images(
    records: &Records,
    vm: &VmName,
    generation: Generation,
    synced: Synced,
) -> anyhow::Result<()> {
    if synced.are_fresh() {
        records.note_syncing(vm, generation)?;
    }
    Ok(synced.take_names()?)
}

impl Session {
    /// The mirrors are whole: they are this host's images from now on.
    pub(super) fn make_ready(&self) -> anyhow::Result<Readiness> {
        let machine = self.machine();
        let definition = machine.definition_now();
        let record = self.records.of(ImageRole::Mirror, self.position().0, &definition);
        let (peer, sessions) = (Some(self.primary.clone()), Sessions::since(self.id.to_string()));
        let mirror_of = Some(self.id.to_string());
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;
    use understudy_disk::{FreshMirror, Mirror, mirror_path};
    use understudy_protocol::{DiskIndex, literal};
    use understudy_qemu::VmDefinition;

    // A host that failed between the two had a record that called the mixture the newest images, and a base for the next
    // resynchronisation.
    #[test]
    fn no_record_vouches_for_images_of_which_some_are_replaced() {
        let state = tempfile::tempdir().unwrap();
        let (vm, of_vm) = (literal("db"), state.path().join("db"));
        fs::create_dir(&of_vm).unwrap();
        let path = |index| mirror_path(&of_vm, DiskIndex(index));
        fs::write(path(0), b"the former mirror").unwrap();
        fs::write(path(1), b"another").unwrap();
        let disk = |index| format!("[[disk]]\npath = {:?}\nformat = 'raw'\n", path(index));
        let text = format!("name = 'db'\nmemory = '64M'\nvcpus = 1\n{}{}", disk(0), disk(1));
        let definition = VmDefinition::from_toml(&text, Path::new("/vm.toml")).unwrap();
        // Nothing can take the place of this one.
        fs::remove_file(path(1)).unwrap();
        fs::create_dir_all(path(1).join("full")).unwrap();
        let records = Records::new(state.path(), &literal("b"));
        let former = records.of(ImageRole::Active, Generation(2), &definition);
        records.write(&Record { sessions: Sessions::since("s1".to_owned()), ..former }).unwrap();
        let fresh =
            |index| Mirror::Fresh(FreshMirror::create(&of_vm, DiskIndex(index), 1 << 20).unwrap());
        let synced = Synced::of(vec![fresh(0), fresh(1)], || ()).unwrap();
        assert_eq!(records.read(&vm).unwrap().unwrap().image.role, ImageRole::Active);
        replace_images(&records, &vm, Generation(3), synced).unwrap_err();
        assert_eq!(fs::metadata(path(0)).unwrap().len(), 1 << 20, "it is a new one");
        let record = records.read(&vm).unwrap().unwrap();
        assert_eq!(record.image.role, ImageRole::Syncing);
        assert_eq!(
            (record.image.generation, record.sessions),
            (Generation(3), Sessions::default())
        );
    }
}
