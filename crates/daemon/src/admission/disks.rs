//! The disks of a VM that is admitted: opened and locked, and refused if the guest could not use them.

use std::path::Path;
use std::sync::Arc;
use tracing::{info, warn};
use understudy_disk::{
    Disk, DiskError, ImageFormat, Tables, changes_path, export_bytes, export_bytes_as_listed,
};
use understudy_protocol::DiskIndex;
use understudy_protocol::VmName;
use understudy_protocol::validity::ImageRole;
use understudy_qemu::VmDefinition;
use understudy_qemu::definition::{DiskDefinition, DiskFormat};
use understudy_replication::records::Record;
use understudy_report::error::{ErrorKind, HostError};

/// Refuses a qcow2 image whose guest could not find its disk.
fn check_tables(path: &Path) -> Result<(), DiskError> {
    let image = path.display();
    match understudy_disk::check_tables(path)? {
        Tables::Whole => {}
        Tables::Leaks(clusters) => {
            info!(%image, "{clusters} clusters of it are nobody's: they only take room");
        }
        Tables::Unchecked(why) => warn!(
            %image,
            "its qcow2 tables were not checked: {why}; if the guest does not find its disk, stop it, and \
             `qemu-img check -r all` on a copy says whether they are damaged"
        ),
    }
    Ok(())
}

/// Opens and locks the images of a VM's disks. An image that the VM has run on before, by its
/// record, is of the format that it was then: what it begins with may be the guest's own. `directory` is the VM's,
/// which has the lists of what has changed since.
pub(crate) fn open_disks(
    definition: &VmDefinition,
    former: Option<&Record>,
    directory: &Path,
) -> Result<Vec<Arc<Disk>>, HostError> {
    hang_in_a_test(&definition.name);
    let known = |disk: &DiskDefinition| {
        let same = |other: &DiskDefinition| other.path == disk.path && other.format == disk.format;
        former.is_some_and(|record| record.definition.disks.iter().any(same))
    };
    let is_listed = |i: usize, disk: &DiskDefinition| {
        former.is_some_and(|it| !it.sessions.is_empty() && it.images().get(i) == Some(&disk.path))
    };
    let open = |(i, disk): (usize, &DiskDefinition)| {
        let index = DiskIndex(i as u16);
        let format = match disk.format {
            DiskFormat::Raw => ImageFormat::Raw,
            DiskFormat::Qcow2 => ImageFormat::Qcow2,
        };
        if !known(disk) {
            understudy_disk::check_format(&disk.path, format)?;
        }
        if disk.cdrom {
            return Disk::open_medium(index, &disk.path).map(Arc::new);
        }
        let bytes = match is_listed(i, disk) {
            true => export_bytes_as_listed(&disk.path, format, &changes_path(directory, index))?,
            false => export_bytes(&disk.path, format)?,
        };
        let stopped = former.is_some_and(|record| record.image.role == ImageRole::Stopped);
        if format == ImageFormat::Qcow2 && !(stopped && known(disk)) {
            check_tables(&disk.path)?;
        }
        Disk::open(index, &disk.path, bytes).map(Arc::new)
    };
    definition.disks.iter().enumerate().map(open).collect::<Result<_, _>>().map_err(invalid)
}

/// A test has the images of a VM hang for as long as there is a file of its name in the directory that the fail point names.
fn hang_in_a_test(_vm: &VmName) {
    fail::fail_point!("open-disks", |directory| {
        let file = Path::new(&directory.unwrap_or_default()).join(_vm.as_str());
        while file.exists() {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    });
}

/// The same of images that a QEMU has open, which are shown with so many bytes each: nothing is found out that takes
/// long, while its guest stands still.
pub(crate) fn open_disks_in_use(
    definition: &VmDefinition,
    bytes: &[u64],
) -> Result<Vec<Arc<Disk>>, HostError> {
    let open = |(i, (disk, bytes)): (usize, (&DiskDefinition, &u64))| {
        let index = DiskIndex(i as u16);
        match disk.cdrom {
            true => Disk::open_medium(index, &disk.path),
            false => Disk::open(index, &disk.path, *bytes),
        }
        .map(Arc::new)
    };
    let disks = definition.disks.iter().zip(bytes).enumerate();
    disks.map(open).collect::<Result<_, _>>().map_err(invalid)
}

fn invalid(error: DiskError) -> HostError {
    HostError::new(ErrorKind::Invalid, error.to_string())
}
