//! The medium of a CD-ROM drive is changed while the guest runs, or the standby waits.
//!
//! QEMU's node of the drive is taken away, its server is replaced by one of the new medium on the
//! same socket, and a node of the same name connects to that: so all that starts a QEMU on the same
//! definition later finds what this one has.

use crate::Machine;
use crate::machine::Fittings;
use anyhow::Context;
use std::path::Path;
use std::sync::{Arc, PoisonError};
use understudy_disk::{Disk, NbdServer};
use understudy_qemu::Monitor;
use understudy_qemu::command::scsi_drive;
use understudy_qemu::definition::DiskDefinition;
use understudy_qemu::qmp::EjectError;
use understudy_qemu::user::{self, User};
use understudy_threads::RwLockWriteGuard;

/// The medium that a drive is to have.
pub struct Medium {
    /// The medium's image, or a placeholder.
    pub disk: Arc<Disk>,
    /// The drive's part of the definition then.
    pub defined: DiskDefinition,
}

impl Machine {
    /// Gives a drive another medium, or none. `monitor` is this machine's: whoever holds it knows
    /// that no checkpoint is taken meanwhile. After an error the drive has none, unless the guest
    /// [holds](understudy_qemu::qmp::EjectError::Locked) what it has.
    pub fn change_medium(
        &self,
        monitor: &mut Monitor,
        medium: &Medium,
        force: bool,
    ) -> anyhow::Result<()> {
        self.change(monitor, medium, (force, false))
    }

    fn change(
        &self,
        monitor: &mut Monitor,
        medium: &Medium,
        (force, standby): (bool, bool),
    ) -> anyhow::Result<()> {
        let index = usize::from(medium.disk.index().0);
        let drive = format!("disk{index}");
        let had_medium = !self.definition_now().disks[index].ejected;
        let ejected = monitor.eject(&drive, had_medium, force);
        if let Err(locked @ EjectError::Locked(_)) = ejected {
            return Err(locked.into());
        }
        let empty = DiskDefinition { ejected: true, ..medium.defined.clone() };
        self.note_medium(medium, empty);
        ejected?;
        self.serve_anew(index, &medium.disk)?;
        if !medium.defined.ejected {
            let socket = Path::new(&drive);
            let inserted =
                match standby.then(|| scsi_drive(&self.definition_now(), index)).flatten() {
                    Some(device) => {
                        monitor.insert_by_replug(&drive, socket, self.awaits_disks, &device)
                    }
                    None => monitor.insert(&drive, socket, self.awaits_disks),
                };
            inserted.context("QEMU does not take the medium")?;
            self.note_medium(medium, medium.defined.clone());
        }
        Ok(())
    }

    /// The same of a standby, whose guest has no say.
    pub fn change_medium_of_standby(&self, medium: &Medium) -> anyhow::Result<()> {
        let mut monitor = self.monitor();
        self.change(&mut monitor, medium, (true, true))?;
        // For a take-over in a hurry.
        Ok(monitor.prepare_standby(&self.device_state)?)
    }

    fn note_medium(&self, medium: &Medium, defined: DiskDefinition) {
        let index = usize::from(medium.disk.index().0);
        let mut fittings = self.fittings_to_change();
        fittings.disks[index] = medium.disk.clone();
        Arc::make_mut(&mut fittings.definition).disks[index] = defined;
    }

    fn serve_anew(&self, index: usize, disk: &Arc<Disk>) -> anyhow::Result<()> {
        let former = self.fittings_to_change().servers[index].take();
        let former = former.context("the drive has no server any more")?;
        let socket = former.socket().to_owned();
        // It removes its socket.
        drop(former);
        let owner = User::of_directory(socket.parent().context("a socket is in a directory")?)?;
        let server = NbdServer::serve(disk.clone(), &socket)?;
        user::give_socket(&socket, owner)?;
        self.fittings_to_change().servers[index] = Some(server);
        Ok(())
    }

    pub(crate) fn fittings_to_change(&self) -> RwLockWriteGuard<'_, Fittings> {
        self.fittings.write().unwrap_or_else(PoisonError::into_inner)
    }
}
