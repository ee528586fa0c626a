//! A file whose first failed sync is its last.
//!
//! Linux reports that written data were lost to one `fsync`, and forgets it: the next one
//! succeeds. Whoever asks again must not be told that all is well, for what was lost stays lost.

use nix::errno::Errno;
use std::fs::{File, Metadata};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};
use understudy_threads::Mutex;

/// A file that is brought to stable storage by [`Durable::sync`] alone.
#[derive(Debug)]
pub struct Durable {
    file: File,
    /// The first failure. Held through every sync: one that ran beside the failing one could
    /// succeed although what it should have brought over is lost.
    failed: Mutex<Option<Errno>>,
    /// The same, for whoever must not wait for a sync under way.
    has_failed: AtomicBool,
}

impl Durable {
    /// Takes a file of which no sync was tried yet through this descriptor.
    pub fn new(file: File) -> Durable {
        Durable { file, failed: Mutex::new(None), has_failed: AtomicBool::new(false) }
    }

    /// Waits until all completed writes are on stable storage.
    ///
    /// # Errors
    /// What the kernel said, and after the first failure that for ever, without asking it again.
    pub fn sync(&self) -> io::Result<()> {
        self.sync_with(File::sync_data)
    }

    /// Makes the file so long.
    pub(crate) fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.file.set_len(bytes)
    }

    pub(crate) fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }

    /// End of the file or device, in bytes.
    pub(crate) fn end(&self) -> io::Result<u64> {
        (&self.file).seek(SeekFrom::End(0))
    }

    /// Whether a sync failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    /// The same with this instead of the system call.
    pub(crate) fn sync_with(&self, sync: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(first) = *failed {
            return Err(first.into());
        }
        sync(&self.file).inspect_err(|error| {
            *failed = Some(errno_of(error));
            self.has_failed.store(true, Ordering::Release);
        })
    }
}

#[cfg(test)]
impl Durable {
    /// Result that the kernel gives, whatever it said before.
    fn sync_with_kernel(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

impl AsFd for Durable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Methods that do not sync: there is no way to the kernel's answer but through the latch.
impl FileExt for Durable {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buffer, offset)
    }

    fn write_at(&self, buffer: &[u8], offset: u64) -> io::Result<usize> {
        self.file.write_at(buffer, offset)
    }
}

/// The kernel's number of an error; EIO if it is not the kernel's.
pub(crate) fn errno_of(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

#[cfg(test)]
#[path = "durable_tests.rs"]
mod tests;
