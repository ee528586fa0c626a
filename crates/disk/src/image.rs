//! The image file: locked, read with zeroes beyond its end, sparse.

use crate::cached::{Cached, read_cached};
use crate::durable::Durable;
use crate::error::DiskError;
use crate::fail_points::{fail_in_a_test, hang_in_a_test};
use crate::lent::Loan;
use crate::waits::{WaitId, Waits};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, fallocate, fcntl};
use nix::libc;
use nix::unistd::{Whence, lseek};
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Permission of everybody to read.
const OTHERS_READ: u32 = 0o004;
/// A block of most file systems, and of all devices.
const PROOF_BYTES: usize = 4096;

/// The longest that a program which is being started has what this process had open.
const INHERITED: Duration = Duration::from_millis(500);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

static ZEROES: [u8; 64 * 1024] = [0; 64 * 1024];

/// Whether zeroed space keeps, or gets, its place on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    /// Gives it back to the file system.
    Release,
    /// Reserves it, so that a later write cannot fail for want of space.
    Reserve,
}

/// An image open for reading and writing, and locked against other users.
#[derive(Debug)]
pub(crate) struct Image {
    file: Durable,
    is_device: bool,
    is_shared: bool,
    waits: Waits,
}

impl Image {
    /// Opens an existing image.
    pub(crate) fn open(path: &Path) -> Result<Image, DiskError> {
        Self::open_with(path, OpenOptions::new().read(true).write(true))
    }

    /// Makes an empty sparse image of `bytes` bytes, in place of any file at the path.
    pub(crate) fn create(path: &Path, bytes: u64) -> Result<Image, DiskError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        // Not truncated by open(): the lock must be held before anything is destroyed.
        let image = Self::open_with(path, &options)?;
        image.file.set_len(0).map_err(DiskError::io("empty", path))?;
        image.file.set_len(bytes).map_err(DiskError::io("size", path))?;
        Ok(image)
    }

    /// Opens an image that nobody writes, which others may read, too.
    pub(crate) fn open_shared(path: &Path) -> Result<Image, DiskError> {
        let image = Self::open_locked(path, OpenOptions::new().read(true), lock_against_writers)?;
        Ok(Image { is_shared: true, ..image })
    }

    /// The same of a file that everybody may read. Nothing else is opened: that alone starts a
    /// watchdog, and waits for whoever writes to a FIFO.
    pub(crate) fn open_public(path: &Path) -> Result<Image, DiskError> {
        check_public(path, &std::fs::metadata(path).map_err(DiskError::cannot_open(path))?)?;
        let mut options = OpenOptions::new();
        // It may be another one by now.
        options.read(true).custom_flags(libc::O_NONBLOCK);
        let image = Self::open_locked(path, &options, lock_against_writers)?;
        check_public(path, &image.file.metadata().map_err(DiskError::io("examine", path))?)?;
        Ok(Image { is_shared: true, ..image })
    }

    fn open_with(path: &Path, options: &OpenOptions) -> Result<Image, DiskError> {
        let mut options = options.clone();
        if std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device()) {
            // Of a device: not while it is mounted, or a part of another one.
            options.custom_flags(libc::O_EXCL);
        }
        Self::open_locked(path, &options, lock)
    }

    /// Waits for a moment until nobody has it: a program that another thread starts has what this process has
    /// just closed until it is executed.
    fn open_locked(
        path: &Path,
        options: &OpenOptions,
        lock: fn(&File) -> Result<(), Errno>,
    ) -> Result<Image, DiskError> {
        let deadline = Instant::now() + INHERITED;
        loop {
            match Self::open_locked_now(path, options, lock) {
                Err(DiskError::DeviceBusy { .. } | DiskError::InUse { .. })
                    if Instant::now() < deadline =>
                {
                    thread::sleep(LOOK_AGAIN);
                }
                opened => return opened,
            }
        }
    }

    fn open_locked_now(
        path: &Path,
        options: &OpenOptions,
        lock: fn(&File) -> Result<(), Errno>,
    ) -> Result<Image, DiskError> {
        let file = options.open(path).map_err(DiskError::cannot_open(path))?;
        let kind = file.metadata().map_err(DiskError::io("examine", path))?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(DiskError::NotAnImage { path: path.into() });
        }
        lock(&file).map_err(|error| match error {
            Errno::EAGAIN | Errno::EACCES => DiskError::InUse { path: path.into() },
            other => DiskError::Io { action: "lock", path: path.into(), source: other.into() },
        })?;
        let is_device = kind.is_block_device();
        let file = Durable::new(file);
        Ok(Image { file, is_device, is_shared: false, waits: Waits::default() })
    }

    /// What the file system says of it.
    pub(crate) fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }

    /// Present length in bytes.
    pub(crate) fn len(&self) -> io::Result<u64> {
        if self.is_device {
            return self.file.end();
        }
        Ok(self.file.metadata()?.len())
    }

    /// Whether a write failed with this as the image lies on a device that has no room for it.
    pub(crate) fn is_outgrown(&self, error: &io::Error) -> bool {
        self.is_device && error.kind() == io::ErrorKind::StorageFull
    }

    /// Fills the buffer; what lies beyond the end of the file is zero.
    pub(crate) fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let _wait = self.waits.begin();
        let mut done = 0;
        while done < buffer.len() {
            match self.file.read_at(&mut buffer[done..], offset + done as u64) {
                Ok(0) => {
                    buffer[done..].fill(0);
                    return Ok(());
                }
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads as [`Image::read`] does, but gives up (`false`) where it would wait for the device.
    pub(crate) fn read_if_cached(&self, offset: u64, buffer: &mut [u8]) -> io::Result<bool> {
        let mut done = 0;
        while done < buffer.len() {
            match read_cached(&self.file, &mut buffer[done..], offset + done as u64)? {
                Cached::Bytes(count) => done += count,
                Cached::EndOfFile => {
                    buffer[done..].fill(0);
                    return Ok(true);
                }
                Cached::Absent => return Ok(false),
                // Memory file systems mostly: nothing to wait for there.
                Cached::Unknown => {
                    self.read(offset + done as u64, &mut buffer[done..])?;
                    return Ok(true);
                }
            }
        }
        Ok(true)
    }

    /// Lends a range, behind a header, if the page cache has all of it.
    pub(crate) fn lend(&self, loan: &mut Loan, header: &[u8], offset: u64, len: usize) -> bool {
        loan.take(header, &self.file, offset, len)
    }

    /// Writes all of the data, growing the file as needed.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let _wait = self.waits.begin();
        hang_in_a_test("hang-disk");
        self.file.write_all_at(data, offset)
    }

    /// Writes what is there once more, so that it is found out whether the image takes writes; to
    /// be called in order with other writes. One that nobody writes takes none.
    pub(crate) fn write_again(&self) -> io::Result<()> {
        let mut bytes = [0; PROOF_BYTES];
        let count = self.len()?.min(PROOF_BYTES as u64) as usize;
        if self.is_shared || count == 0 {
            return Ok(());
        }
        self.read(0, &mut bytes[..count])?;
        self.write(0, &bytes[..count])
    }

    /// Makes the range read as zeroes.
    pub(crate) fn zero(&self, offset: u64, len: u64, space: Space) -> io::Result<()> {
        let zeroed = match space {
            Space::Release => self.punch(offset, len)?,
            Space::Reserve => {
                self.try_fallocate(FallocateFlags::FALLOC_FL_ZERO_RANGE, offset, len)?
            }
        };
        if zeroed {
            return Ok(());
        }
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let count = (end - at).min(ZEROES.len() as u64);
            self.write(at, &ZEROES[..count as usize])?;
            at += count;
        }
        Ok(())
    }

    /// Makes the range a hole, which reads as zeroes. False, and nothing changed, where
    /// the file system or device cannot.
    pub(crate) fn punch(&self, offset: u64, len: u64) -> io::Result<bool> {
        // Beyond the end there is nothing to release, and it reads as zeroes already.
        let len = len.min(self.len()?.saturating_sub(offset));
        if len == 0 {
            return Ok(true);
        }
        if self.cannot_punch_in_a_test() {
            return Ok(false);
        }
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        self.try_fallocate(hole, offset, len)
    }

    /// A test names an image whose file system cannot punch holes.
    fn cannot_punch_in_a_test(&self) -> bool {
        fail::fail_point!("punch-disk", |image| {
            use std::os::unix::fs::MetadataExt;
            let (named, own) = (std::fs::metadata(image.unwrap_or_default()), self.file.metadata());
            named.is_ok_and(|named| own.is_ok_and(|own| named.ino() == own.ino()))
        });
        false
    }

    fn try_fallocate(&self, mode: FallocateFlags, offset: u64, len: u64) -> io::Result<bool> {
        let (Ok(offset), Ok(len)) = (libc::off_t::try_from(offset), libc::off_t::try_from(len))
        else {
            return Err(Errno::EINVAL.into());
        };
        let _wait = self.waits.begin();
        loop {
            return match fallocate(&self.file, mode, offset, len) {
                Ok(()) => Ok(true),
                Err(Errno::EINTR) => continue,
                // EINVAL: a device that wants whole blocks.
                Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL) => Ok(false),
                Err(error) => Err(error.into()),
            };
        }
    }

    /// The first run of data at or after `from`, skipping holes.
    pub(crate) fn next_data(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        if self.is_device {
            // Nobody knows what of it is in use.
            let end = self.len()?;
            return Ok((from < end).then_some(from..end));
        }
        let from = libc::off_t::try_from(from).map_err(|_| Errno::EINVAL)?;
        let start = match lseek(&self.file, from, Whence::SeekData) {
            Ok(start) => start,
            Err(Errno::ENXIO) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let end = match lseek(&self.file, start, Whence::SeekHole) {
            Ok(end) => end,
            // Truncated meanwhile.
            Err(Errno::ENXIO) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        Ok(Some(start as u64..end as u64))
    }

    #[cfg(test)]
    pub(crate) fn file(&self) -> &Durable {
        &self.file
    }

    /// Makes a call that a change of the image waits for, though not for its own device; it counts as if it did.
    pub(crate) fn counted<T>(&self, call: impl FnOnce() -> T) -> T {
        let _wait = self.waits.begin();
        call()
    }

    /// The call that has waited longest for the device, and for how long.
    pub(crate) fn longest_wait(&self) -> Option<(WaitId, Duration)> {
        self.waits.longest()
    }

    /// Whether a sync of it failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.file.has_failed()
    }

    /// Waits until all completed writes are on stable storage. Fails for ever after it failed once.
    pub(crate) fn sync(&self) -> io::Result<()> {
        let _wait = self.waits.begin();
        self.file.sync_with(|file| {
            hang_in_a_test("hang-disk");
            hang_in_a_test("hang-sync");
            fail_in_a_test("sync-disk")?;
            file.sync_data()
        })
    }
}

/// Refuses what is no file that everybody may read.
fn check_public(path: &Path, found: &Metadata) -> Result<(), DiskError> {
    match found.is_file() && found.mode() & OTHERS_READ != 0 {
        true => Ok(()),
        false => Err(DiskError::NotPublic { path: path.into() }),
    }
}

/// Says to QEMU, and to other daemons, that nobody may write; fails if somebody may.
fn lock_against_writers(file: &File) -> Result<(), Errno> {
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock_range(libc::F_RDLCK, 201)))?;
    let mut writers = lock_range(libc::F_WRLCK, 101);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut writers))?;
    if writers.l_type == libc::F_UNLCK as libc::c_short { Ok(()) } else { Err(Errno::EAGAIN) }
}

/// Takes the locks that QEMU knows of (its `block/file-posix.c`): byte 100 + n says
/// "I use permission n", byte 200 + n "nobody else may". We take all of both ranges
/// exclusively, save permission 0 (consistent read), so that another daemon and every
/// QEMU or qemu-img are kept out, except those told to look on (`qemu-img … -U`).
/// They are open-file-description locks: they end with the descriptor.
fn lock(file: &File) -> Result<(), Errno> {
    for first in [101, 201] {
        fcntl(file, FcntlArg::F_OFD_SETLK(&lock_range(libc::F_WRLCK, first)))?;
    }
    Ok(())
}

/// Whether anybody has an image that this process has opened without a lock.
pub(crate) fn is_in_use(image: &File) -> Result<bool, Errno> {
    for first in [101, 201] {
        let mut others = lock_range(libc::F_WRLCK, first);
        fcntl(image, FcntlArg::F_OFD_GETLK(&mut others))?;
        if others.l_type != libc::F_UNLCK as libc::c_short {
            return Ok(true);
        }
    }
    Ok(false)
}

fn lock_range(kind: i32, first: libc::off_t) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: first,
        l_len: 99,
        l_pid: 0,
    }
}
