//! Which file a disk's image is, and whether it is the one at its path: another may have been put there while QEMU has it
//! open, and whoever opens the path then has a disk that is not the guest's.

use crate::{Disk, DiskError};
use serde::{Deserialize, Serialize};
use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};

/// A file, whatever its name is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileId {
    /// Its file system; of a block device, that.
    device: u64,
    /// 0 of a block device, whose node may be made anew.
    inode: u64,
}

impl FileId {
    fn of(metadata: &Metadata) -> FileId {
        match metadata.file_type().is_block_device() {
            true => FileId { device: metadata.rdev(), inode: 0 },
            false => FileId { device: metadata.dev(), inode: metadata.ino() },
        }
    }
}

impl Disk {
    /// The file that is its image.
    pub fn file_id(&self) -> Result<FileId, DiskError> {
        let metadata = self.image.metadata();
        Ok(FileId::of(&metadata.map_err(DiskError::io("examine", &self.path()))?))
    }

    /// Refuses a disk whose image is not the one at its path any more.
    pub fn check_place(&self) -> Result<(), DiskError> {
        let path = self.path();
        let there = fs::metadata(&path).map_err(DiskError::io("examine", &path))?;
        self.check_file(FileId::of(&there))
    }

    /// Refuses a disk whose image is not this file.
    pub fn check_file(&self, file: FileId) -> Result<(), DiskError> {
        match self.file_id()? == file {
            true => Ok(()),
            false => Err(DiskError::Replaced { path: self.path() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::DiskIndex;

    #[test]
    fn another_file_at_the_path_of_an_image_is_seen() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("db.img");
        let other = directory.path().join("other.img");
        for path in [&path, &other] {
            fs::File::create(path).unwrap().set_len(1 << 20).unwrap();
        }
        let disk = Disk::open(DiskIndex(0), &path, 1 << 20).unwrap();
        disk.check_place().unwrap();
        let file = disk.file_id().unwrap();
        fs::rename(&other, &path).unwrap();
        let words = disk.check_place().unwrap_err().to_string();
        assert!(words.contains("db.img") && words.contains("another file"), "{words}");
        let next = Disk::open(DiskIndex(0), &path, 1 << 20).unwrap();
        assert!(next.check_file(file).is_err(), "an older copy");
        fs::remove_file(&path).unwrap();
        assert!(disk.check_place().is_err(), "there is none");
    }
}
