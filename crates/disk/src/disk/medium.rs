//! Media of CD-ROM drives, which nobody writes; several VMs may have one.

use super::Disk;
use crate::error::DiskError;
use crate::format::SECTOR_BYTES;
use crate::image::Image;
use crate::mark::incomplete_mark;
use std::path::Path;
use understudy_protocol::DiskIndex;

impl Disk {
    /// Opens a medium that this host's operator names.
    pub fn open_medium(index: DiskIndex, path: impl AsRef<Path>) -> Result<Disk, DiskError> {
        of_medium(index, path.as_ref(), Image::open_shared)
    }

    /// Opens one that another host names: a file that everybody on this one may read.
    pub fn open_public_medium(index: DiskIndex, path: &Path) -> Result<Disk, DiskError> {
        of_medium(index, path, Image::open_public)
    }
}

fn of_medium(
    index: DiskIndex,
    path: &Path,
    open: fn(&Path) -> Result<Image, DiskError>,
) -> Result<Disk, DiskError> {
    if incomplete_mark(path).exists() {
        return Err(DiskError::Incomplete { path: path.into() });
    }
    let image = open(path)?;
    let bytes = image.len().map_err(DiskError::io("examine", path))?;
    Disk::of_image(index, path, image, bytes.next_multiple_of(SECTOR_BYTES))
}
