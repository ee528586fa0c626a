//! The operator changes the medium of a CD-ROM drive while its VM runs
//! (`understudy_replication::medium` says how both hosts keep up).

use crate::host::{Host, failed};
use crate::vm::{PrimaryVm, Vm};
use anyhow::{Context, bail, ensure};
use std::path::Path;
use std::sync::Arc;
use understudy_disk::{ImageFormat, check_format};
use understudy_machine::{Machine, Medium};
use understudy_protocol::{DiskIndex, PrimaryPhase, VmName};
use understudy_qemu::VmDefinition;
use understudy_qemu::definition::{DiskDefinition, DiskFormat};
use understudy_replication::medium::{
    Medium as Wanted, MediumFile, MediumRefused, hash_of, is_locked, placeholder,
};
use understudy_replication::moments::pass;
use understudy_replication::resync;
use understudy_report::error::{ErrorKind, HostError, cannot};
use understudy_report::events::EventKind;
use understudy_report::{MediumRequest, Mode, VmStatus};
use understudy_threads::lock;

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
        let vm = self.going_primary(name)?;
        let _protecting = lock(&vm.protecting);
        pass("change-medium");
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
        medium: &Medium,
        directory: &Path,
    ) -> Result<(), HostError> {
        let index = usize::from(medium.disk.index().0);
        let now = machine.definition_now().disks[index].clone();
        let note = || -> anyhow::Result<()> {
            // Only if the others have theirs.
            if machine.disks().iter().any(|disk| disk.changes().is_some()) {
                let map = resync::create(std::slice::from_ref(&medium.disk), directory)?;
                medium.disk.set_changes(map.into_iter().next());
            }
            Ok(self.records.note_medium(vm.name(), medium.disk.index(), now)?)
        };
        note().map_err(|error| failed("the medium is changed, but not noted", &error))
    }
}

fn medium_of(machine: &Machine, request: &MediumRequest) -> anyhow::Result<Wanted> {
    let drive = DiskIndex(request.drive);
    let Some(path) = &request.medium else { return Ok(Wanted { drive, file: None }) };
    ensure!(path.is_absolute(), "{} is not an absolute path", path.display());
    let definition = machine.definition_now();
    let others = definition.disks.iter().enumerate().filter(|(n, _)| *n != usize::from(drive.0));
    if let Some((other, _)) = others.clone().find(|(_, disk)| disk.path == *path) {
        bail!("{} is in disk{other} already", path.display());
    }
    check_format(path, ImageFormat::Raw).context("no medium")?;
    let file = MediumFile { path: path.clone(), hash: hash_of(path)? };
    Ok(Wanted { drive, file: Some(file) })
}
