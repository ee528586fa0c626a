//! Media of CD-ROM drives, which are changed while a VM runs.
//!
//! A medium is a file that both hosts have at the same place. The backup looks at its own before
//! anything happens: it must be the same, to the last byte. Then the primary's QEMU gets the
//! medium within one epoch, and that epoch tells the backup, whose QEMU gets it when the epoch is
//! applied: so whatever epoch a take-over goes on from, the drive has what its guest saw.

use crate::error::{ErrorKind, HostError, cannot};
use crate::events::EventKind;
use crate::host::{Host, failed};
use crate::machine::{self, Machine};
use crate::report::{MediumRequest, Mode, VmStatus};
use crate::resync;
use crate::sync::lock;
use crate::vm::{PrimaryVm, Vm};
use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use understudy_disk::{Disk, ImageFormat, check_format};
use understudy_protocol::wire::Message;
use understudy_protocol::{DiskIndex, PrimaryPhase, VmName};
use understudy_qemu::VmDefinition;
use understudy_qemu::definition::{DiskDefinition, DiskFormat};
use understudy_qemu::qmp::EjectError;

/// What a drive without a medium is served, which its guest never sees.
const PLACEHOLDER_BYTES: u64 = 64 << 10;

/// What a drive has from now on, as hosts tell each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Medium {
    /// The drive.
    pub drive: DiskIndex,
    /// The file; none if it is to be empty.
    pub file: Option<MediumFile>,
}

/// A medium's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediumFile {
    /// Where it is on every host.
    pub path: PathBuf,
    /// BLAKE3 hash of what is in it.
    pub hash: String,
}

/// Whether a backup has a medium.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MediumAnswer {
    /// It can be put in.
    Ready,
    /// It cannot, and why.
    Refused(String),
}

impl Medium {
    /// Reads a message about a drive of this machine.
    pub fn read(machine: &Machine, message: &Message) -> anyhow::Result<Medium> {
        let kind = message.header.kind;
        let medium: Medium = serde_json::from_slice(&message.payload)
            .with_context(|| format!("a malformed {kind:?} message"))?;
        let drive = machine.definition().disks.get(usize::from(medium.drive.0));
        ensure!(drive.is_some_and(|disk| disk.cdrom), "disk {} is no CD-ROM drive", medium.drive);
        Ok(medium)
    }

    /// Opens it on this host, for a drive of this machine. `directory` is the VM's own.
    pub fn open(&self, machine: &Machine, directory: &Path) -> anyhow::Result<machine::Medium> {
        let index = usize::from(self.drive.0);
        let now = machine.definition_now();
        let defined = now.disks[index].clone();
        let (path, medium_hash) = match &self.file {
            Some(file) => (file.path.clone(), Some(file.hash.clone())),
            None => (placeholder(directory, index)?, Some("none".to_owned())),
        };
        let disk = Arc::new(Disk::open_medium(self.drive, &path)?);
        let ejected = self.file.is_none();
        let defined = DiskDefinition { path, ejected, medium_hash, ..defined };
        Ok(machine::Medium { disk, defined })
    }

    /// Whether the file here is the one that is meant.
    pub fn check(&self) -> anyhow::Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        check_format(&file.path, ImageFormat::Raw)?;
        ensure!(
            hash_of(&file.path)? == file.hash,
            "its {} is another one: both hosts must have the same file",
            file.path.display()
        );
        Ok(())
    }
}

/// BLAKE3 hash of a file.
fn hash_of(path: &Path) -> anyhow::Result<String> {
    let mut hasher = blake3::Hasher::new();
    let mut read = || hasher.update_reader(File::open(path)?).map(|_| ());
    read().with_context(|| format!("cannot read {}", path.display()))?;
    Ok(hasher.finalize().to_hex().to_string())
}

/// The file that stands for no medium in a drive.
fn placeholder(directory: &Path, index: usize) -> std::io::Result<PathBuf> {
    let path = directory.join(format!("disk{index}.empty"));
    if !path.exists() {
        File::create(&path)?.set_len(PLACEHOLDER_BYTES)?;
    }
    Ok(path)
}

/// Gives every drive its number among the disks: one without a medium gets a placeholder.
pub(crate) fn settle_drives(
    definition: &mut VmDefinition,
    directory: &Path,
) -> Result<(), HostError> {
    let place = |index| {
        let made = placeholder(directory, index);
        made.map_err(|error| cannot("make a placeholder in", directory, &error))
    };
    for (index, disk) in definition.disks.iter_mut().enumerate() {
        if disk.ejected {
            disk.path = place(index)?;
        }
    }
    for drive in std::mem::take(&mut definition.empty_cdroms) {
        let path = place(definition.disks.len())?;
        let drive = DiskDefinition::new(path, DiskFormat::Raw, drive.bus);
        definition.disks.push(DiskDefinition { cdrom: true, ejected: true, ..drive });
    }
    Ok(())
}

impl Host {
    /// Puts another medium into a CD-ROM drive of a VM that runs here, or takes it out. Returns
    /// when the backup has it, too, if there is one.
    pub fn change_medium(
        self: &Arc<Self>,
        name: &VmName,
        request: MediumRequest,
    ) -> Result<VmStatus, HostError> {
        let vm = self.primary(name)?;
        let _protecting = lock(&vm.protecting);
        let machine = vm.machine();
        self.check_changeable(&vm, &machine, &request)?;
        let invalid = |error: anyhow::Error| {
            HostError::new(ErrorKind::Invalid, format!("{error:#}; nothing was changed"))
        };
        let medium = medium_of(&machine, &request).map_err(invalid)?;
        let directory = self.vm_directory(name)?;
        let opened = medium.open(&machine, &directory).map_err(invalid)?;
        let changed = match vm.active_session() {
            Some(session) => session.change_medium(&medium, &opened, request.force),
            None => machine.change_medium(&mut machine.monitor(), &opened, request.force),
        };
        // Whatever became of it, an error too: the record says what the drive has.
        let drive = usize::from(medium.drive.0);
        if Arc::ptr_eq(&machine.disks()[drive], &opened.disk) {
            self.note_medium(&vm, &machine, &opened, &directory)?;
        }
        changed.map_err(|error| {
            let kind = match () {
                () if error.is::<MediumRefused>() => ErrorKind::Refused,
                () if is_locked(&error) => ErrorKind::Conflict,
                () => return failed(&format!("cannot change the medium of {name}"), &error),
            };
            HostError::new(kind, format!("{error:#}; nothing was changed"))
        })?;
        vm.events.record(EventKind::MediumChanged {
            drive: format!("disk{}", medium.drive),
            medium: medium.file.map(|file| file.path),
        });
        Ok(Vm::Primary(vm.clone()).status())
    }

    /// Everything that speaks against the change, before anything is done.
    fn check_changeable(
        &self,
        vm: &PrimaryVm,
        machine: &Machine,
        request: &MediumRequest,
    ) -> Result<(), HostError> {
        let name = vm.name();
        let refuse = |kind, message: String| Err(HostError::new(kind, message));
        let definition = machine.definition_now();
        let drives = || {
            let drives = definition.disks.iter().enumerate().filter(|(_, disk)| disk.cdrom);
            let names: Vec<String> = drives.map(|(n, _)| format!("disk{n}")).collect();
            match names.is_empty() {
                true => "it has none: a drive is defined before the VM starts".to_owned(),
                false => format!("it has {}", names.join(", ")),
            }
        };
        match definition.disks.get(usize::from(request.drive)) {
            Some(disk) if disk.cdrom => {}
            Some(_) => {
                let message =
                    format!("disk{} of {name} is no CD-ROM drive; {}", request.drive, drives());
                return refuse(ErrorKind::Invalid, message);
            }
            None => {
                let message = format!(
                    "{name} has no disk{}, so no CD-ROM drive of that name; {}",
                    request.drive,
                    drives()
                );
                return refuse(ErrorKind::NotFound, message);
            }
        }
        let lockstep = vm.active_session().is_some_and(|session| session.mode() == Mode::Lockstep);
        if lockstep || machine.lockstep().is_some() {
            let message = format!(
                "{name} is in lockstep, whose log tells nothing of a medium: `--mode checkpoint` \
                 protects it and lets media be changed"
            );
            return refuse(ErrorKind::Invalid, message);
        }
        if self.snapshots.is_taking(name) || self.snapshots.filling(name).is_some() {
            let message = format!(
                "{name} is being snapshotted, or its memory is still being loaded from a \
                 snapshot: try again when that has ended (`understudy status {name}`)"
            );
            return refuse(ErrorKind::Conflict, message);
        }
        match vm.active_session().map(|session| session.phase()) {
            None | Some(PrimaryPhase::Protected) => Ok(()),
            Some(_) => {
                let message = format!(
                    "{name} is being synchronised, or handed over: try again when it is protected"
                );
                refuse(ErrorKind::Conflict, message)
            }
        }
    }

    /// Notes what the drive has now, and that nothing of it has changed since.
    fn note_medium(
        &self,
        vm: &PrimaryVm,
        machine: &Machine,
        medium: &machine::Medium,
        directory: &Path,
    ) -> Result<(), HostError> {
        let index = usize::from(medium.disk.index().0);
        let now = machine.definition_now().disks[index].clone();
        let note = || -> anyhow::Result<()> {
            // Only if the others have theirs.
            if machine.disks().iter().any(|disk| disk.changes().is_some()) {
                let map = resync::create(&[medium.disk.clone()], directory)?;
                medium.disk.set_changes(map.into_iter().next());
            }
            Ok(self.records.change(vm.name(), |record| record.definition.disks[index] = now)?)
        };
        note().map_err(|error| failed("the medium is changed, but not noted", &error))
    }
}

/// Whether a medium could not be taken out because the guest holds it.
pub fn is_locked(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(EjectError::Locked(_)))
}

/// The backup has not got the medium.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct MediumRefused(pub String);

fn medium_of(machine: &Machine, request: &MediumRequest) -> anyhow::Result<Medium> {
    let drive = DiskIndex(request.drive);
    let Some(path) = &request.medium else { return Ok(Medium { drive, file: None }) };
    ensure!(path.is_absolute(), "{} is not an absolute path", path.display());
    let definition = machine.definition_now();
    let others = definition.disks.iter().enumerate().filter(|(n, _)| *n != usize::from(drive.0));
    if let Some((other, _)) = others.clone().find(|(_, disk)| disk.path == *path) {
        bail!("{} is in disk{other} already", path.display());
    }
    check_format(path, ImageFormat::Raw).context("no medium")?;
    let file = MediumFile { path: path.clone(), hash: hash_of(path)? };
    Ok(Medium { drive, file: Some(file) })
}
