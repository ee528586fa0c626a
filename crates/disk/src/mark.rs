//! The mark of an image that is being restored: which of its blocks are still to come.
//!
//! It lies beside the image, with a bit for each block, and is changed after the image is. So it
//! can be believed by a daemon that goes on where one has died: a block that came just before
//! that is fetched once more. After a power failure it says only that the image is not whole.

use crate::blocks::BlockSet;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The file that lies beside an image while not all of it is there.
pub fn incomplete_mark(image: &Path) -> PathBuf {
    let mut path = image.to_owned().into_os_string();
    path.push(".incomplete");
    path.into()
}

/// The blocks that are still to come of an image whose restore another daemon has begun; none if
/// all had come.
pub fn absent_blocks(image: &Path, disk_bytes: u64) -> io::Result<BlockSet> {
    let bytes = match std::fs::read(incomplete_mark(image)) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Ok(BlockSet::none(disk_bytes));
        }
        Err(error) => return Err(error),
    };
    let damaged = || io::Error::other("it does not have a bit for each block of the image");
    BlockSet::from_bytes(disk_bytes, &bytes).ok_or_else(damaged)
}

/// An image's mark.
pub(crate) struct Mark(File);

impl Mark {
    /// Creates a mark, which is on stable storage when this returns.
    pub fn create(image: &Path, absent: &BlockSet) -> io::Result<Mark> {
        let mut file = File::create(incomplete_mark(image))?;
        file.write_all(&absent.to_bytes(0..absent.blocks()).1)?;
        file.sync_all()?;
        sync_directory_of(image)?;
        Ok(Mark(file))
    }

    /// One that is there.
    pub fn open(image: &Path) -> io::Result<Mark> {
        File::options().write(true).open(incomplete_mark(image)).map(Mark)
    }

    /// Notes that of `absent` these blocks have changed.
    pub fn note(&self, absent: &BlockSet, changed: Range<u64>) -> io::Result<()> {
        let (offset, bytes) = absent.to_bytes(changed);
        self.0.write_all_at(&bytes, offset)
    }
}

/// The image is whole, and has no mark any more when this returns.
pub(crate) fn remove(image: &Path) -> io::Result<()> {
    match std::fs::remove_file(incomplete_mark(image)) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => sync_directory_of(image),
    }
}

fn sync_directory_of(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |directory| File::open(directory)?.sync_all())
}
