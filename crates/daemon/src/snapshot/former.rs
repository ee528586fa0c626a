//! Former state of a VM on this host before a restore: on record, and on its disk, until the
//! restore can come to nothing no more.

use super::decision::give_up;
use super::prepare::PREFIX;
use crate::bounded;
use crate::host::{Host, internal};
use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_cluster::messages::RestoreTask;
use understudy_disk::incomplete_mark;
use understudy_machine::custody::OF_RESTORE;
use understudy_machine::{Machine, tpm};
use understudy_protocol::validity::{ArbiterWord, ImageRole, may_start};
use understudy_protocol::{Generation, HostName, Ownership, VmName};
use understudy_replication::records::{Life, Record, Restoring};
use understudy_report::error::HostError;
use understudy_snapshot::{Decision, Incarnation};

/// Time for the arbiter to say what was decided of a restore that nobody goes on with.
const ASKED_WITHIN: Duration = Duration::from_secs(5);

impl Host {
    /// The guest may run on the images of a restore at this generation from now on; what is on record
    /// of before counts again if the restore comes to nothing. `owner` may have a copy of the VM.
    pub(super) fn note_restoring(
        &self,
        machine: &Machine,
        generation: Generation,
        task: &RestoreTask,
        owner: Option<HostName>,
    ) -> Result<(), HostError> {
        let before = self.record(task.vm())?.and_then(Record::before_restore);
        let owned = Ownership { host: owner, generation: task.newest };
        let again = |record: &Record| Box::new(newest_again(record.clone(), generation, &owned));
        let former = before.as_ref().map(again);
        let peer = owned.host.or_else(|| before.and_then(|record| record.peer));
        let (group, incarnation) = (task.group.name.clone(), task.incarnation.0);
        let life = Some(Life { group, incarnation });
        let restoring = Restoring { id: task.id.clone(), settled: false, life, former };
        let record = self.records.of(ImageRole::Active, generation, &machine.definition_now());
        let record = Record { peer, restoring: Some(restoring), ..record };
        self.records.write(&record).map_err(internal)
    }

    /// All members of the restore of that name run, and stay.
    pub(super) fn note_settled(&self, vm: &VmName, id: &str) {
        let settled = self.records.change(vm, |record| {
            let of_it = |restoring: &&mut Restoring| restoring.id == id;
            if let Some(restoring) = record.restoring.as_mut().filter(of_it) {
                restoring.settled = true;
            }
        });
        if let Err(error) = settled {
            warn!(%vm, "{error}");
        }
    }

    /// All of it is there, and it stays: what the VM was before is forgotten.
    pub(super) fn conclude_restore(&self, vm: &VmName, id: &str) -> anyhow::Result<()> {
        let Some(record) = self.records.read(vm)?.filter(|it| it.is_of_restore(id)) else {
            return Ok(());
        };
        let directory = self.vm_directory(vm)?;
        if record.definition.tpm.is_some() {
            tpm::settle(&directory)?;
        }
        self.records.change(vm, |record| drop(record.restoring.take_if(|it| it.id == id)))?;
        let others = restored_images(&directory, |name| !has_image(&record, name));
        // Nothing runs on them any more, nor is about to: whoever makes others is known before.
        if !self.snapshots.is_restoring(vm) {
            remove(&others);
        }
        Ok(())
    }

    /// The restore of that name is over here, and its guest has ended: the VM is what it was before,
    /// unless all of its disks had come.
    pub(crate) fn end_restore(&self, vm: &VmName, id: &str) {
        let ended = self.records.read(vm).map_err(anyhow::Error::from).and_then(|record| {
            let restoring = record.as_ref().and_then(|record| record.restoring.as_ref());
            match (restoring, record.as_ref().is_some_and(has_all_disks)) {
                (Some(restoring), true) if restoring.settled && restoring.id == id => {
                    self.conclude_restore(vm, id)
                }
                _ => self.undo_restore(vm, id),
            }
        });
        if let Err(error) = ended {
            warn!(%vm, "its former images are not on record again: {error:#}");
        }
    }

    fn undo_restore(&self, vm: &VmName, id: &str) -> anyhow::Result<()> {
        let Some(undone) = self.records.undo_restore(vm, id)? else { return Ok(()) };
        remove(&restored_images(&self.vm_directory(vm)?, |name| has_image(&undone, name)));
        let words = match undone.before_restore() {
            Some(_) => "its restore came to nothing: on this host it is what it was before",
            None => "its restore came to nothing: this host has no images of it, as before",
        };
        self.events.of(vm).note(words);
        Ok(())
    }

    /// Ends a restore that nobody goes on with, as its daemon or its keeper has died.
    pub(crate) fn end_dead_restore(&self, vm: &VmName) {
        let record = match self.records.read(vm) {
            Ok(record) => record,
            Err(error) => return warn!(%vm, "{error}"),
        };
        if let Some(restoring) = record.and_then(|record| record.restoring) {
            if !restoring.settled && self.was_settled(vm, restoring.life) {
                self.note_settled(vm, &restoring.id);
            }
            self.end_restore(vm, &restoring.id);
        }
    }

    /// Whether it was decided that the members of a restore stay, which this host did not come to noting. If nothing was,
    /// the restore is given up by the question.
    fn was_settled(&self, vm: &VmName, life: Option<Life>) -> bool {
        let (Some(Life { group, incarnation }), Some(arbiter)) = (life, self.arbiter.clone())
        else {
            return false;
        };
        let ask = move || give_up(&arbiter, &group, Incarnation(incarnation));
        match bounded::by(Instant::now() + ASKED_WITHIN, format!("settled-{vm}"), ask) {
            Ok(Some(Ok(decision))) => decision == Decision::Settled,
            Ok(Some(Err(error))) => {
                warn!(%vm, "whether its restore was to stay is not known: {error}");
                false
            }
            Ok(None) | Err(_) => {
                warn!(%vm, "whether its restore was to stay is not known: the arbiter does not answer");
                false
            }
        }
    }

    /// The same of all VMs, but those that live in a keeper, or that a custodian has.
    pub(crate) fn end_dead_restores(&self) {
        for record in self.records.all().iter().filter(|record| record.restoring.is_some()) {
            let vm = &record.definition.name;
            let custodian = vm.below(&self.config.state_dir).join(OF_RESTORE);
            let lives = self.keeper_of(vm).is_some() || self.orphans.why(vm).is_some();
            if !lives && !custodian.exists() {
                self.end_dead_restore(vm);
            }
        }
    }
}

/// A record as it counts after a restore that came to nothing. Images that were the VM's newest, by what the arbiter
/// said before, are so again: what ran at the generation that the restore has won is gone. Nobody but its operator
/// starts the VM on them.
fn newest_again(mut former: Record, won: Generation, before: &Ownership) -> Record {
    let before = ArbiterWord::Says(Some(before.clone()));
    if may_start(&former.image.host, Some(&former.image), &before).is_ok() {
        former.image.claimed_from = former.image.claimed_from.max(Some(won));
    }
    former.wanted = false;
    former
}

/// Whether one of a record's images has this name, wherever the VM's directory was then.
fn has_image(record: &Record, name: &OsStr) -> bool {
    record.images().iter().any(|image| image.file_name() == Some(name))
}

fn has_all_disks(record: &Record) -> bool {
    record.images().iter().all(|image| !incomplete_mark(image).exists())
}

/// Images of restores in a VM's directory, those that are meant, with their marks.
fn restored_images(directory: &Path, is_meant: impl Fn(&OsStr) -> bool) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let is_one = |path: &PathBuf| {
        let image = image_of(path);
        let name = image.file_name().unwrap_or_default();
        name.to_string_lossy().starts_with(PREFIX) && is_meant(name)
    };
    entries.map(|entry| entry.path()).filter(is_one).collect()
}

/// Removes files, those that are there.
pub(super) fn remove(paths: &[PathBuf]) {
    for path in paths {
        match fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                warn!("cannot remove {}: {error}", path.display());
            }
            _ => {}
        }
    }
}

/// The image that a file is, or that it is the mark of.
fn image_of(path: &Path) -> PathBuf {
    let image = path.with_extension("");
    if incomplete_mark(&image) == path { image } else { path.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;
    use understudy_replication::records::Records;

    // Before, `vm start` took images for the newest that another host's were newer than, which had the VM when the restore
    // was begun.
    #[test]
    fn a_restore_that_came_to_nothing_makes_no_images_newer_than_another_hosts() {
        let text = "name = 'db'\nmemory = '64M'\nvcpus = 1\n[[disk]]\npath = '/s/disk0.img'\nformat = 'raw'";
        let definition: understudy_qemu::VmDefinition = toml::from_str(text).unwrap();
        let records = Records::new("/s".as_ref(), &literal("c"));
        let may_start_after = |owner: Option<&'static str>, newest| {
            let before = Ownership { host: owner.map(literal), generation: Generation(newest) };
            let former = records.of(ImageRole::Active, Generation(3), &definition);
            let former = newest_again(former, Generation(newest + 1), &before);
            let released = Ownership { host: None, generation: Generation(newest + 2) };
            let released = ArbiterWord::Says(Some(released));
            may_start(&literal("c"), Some(&former.image), &released).is_ok()
        };
        assert!(may_start_after(None, 4), "it was stopped here");
        assert!(!may_start_after(Some("a"), 4), "host a took it over");
        assert!(!may_start_after(None, 5), "host a stopped it");
    }

    #[test]
    fn images_go_with_their_marks_and_no_other_file() {
        let directory = tempfile::tempdir().unwrap();
        let [former, own] = ["restored-1-1-7-disk0.img", "restored-5-2-9-disk0.img"];
        let own_mark = format!("{own}.incomplete");
        for name in [former, own, &own_mark, "disk0.img", "record.json"] {
            fs::write(directory.path().join(name), "").unwrap();
        }
        let left = || {
            let names = fs::read_dir(directory.path()).unwrap();
            let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        remove(&restored_images(directory.path(), |name| name == own));
        assert_eq!(left(), ["disk0.img", "record.json", former]);
        remove(&restored_images(directory.path(), |name| name != own));
        assert_eq!(left(), ["disk0.img", "record.json"]);
    }
}
