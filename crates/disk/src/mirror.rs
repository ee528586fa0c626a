//! The backup's mirror and the background copy that fills it.

use crate::changes::GRANULE_BYTES;
use crate::disk::{Disk, WriteSink};
use crate::error::DiskError;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use understudy_protocol::DiskIndex;

/// Most bytes that [`copy_out`] reads and sends while it holds up the guest's writes.
pub const COPY_CHUNK_BYTES: usize = 256 * 1024;

/// Path of a disk's mirror in the VM's directory on the backup.
pub fn mirror_path(dir: &Path, index: DiskIndex) -> PathBuf {
    dir.join(format!("disk{index}.img"))
}

/// A mirror that is being filled for the first time.
///
/// Its file bears another name (`disk0.img.partial`) until [`FreshMirror::complete`], so
/// that no crash leaves a half-filled image that looks like a whole one, and the former
/// mirror stays until there is a better one. Dropped before, it removes its file.
#[derive(Debug)]
pub struct FreshMirror {
    disk: Arc<Disk>,
    target: PathBuf,
    completed: bool,
}

impl FreshMirror {
    /// Makes an empty sparse image in `dir`, which must exist and belong to one VM only.
    pub fn create(
        dir: &Path,
        index: DiskIndex,
        export_bytes: u64,
    ) -> Result<FreshMirror, DiskError> {
        let target = mirror_path(dir, index);
        let mut partial = target.clone().into_os_string();
        partial.push(".partial");
        let disk = Disk::create(index, Path::new(&partial), export_bytes)?;
        Ok(FreshMirror { disk: Arc::new(disk), target, completed: false })
    }

    /// The disk, to be written, and to be served to the warm QEMU.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// Declares the mirror whole: syncs it (which may take seconds) and gives it its name,
    /// in place of a former mirror. The disk stays open; its path changes.
    pub fn complete(self) -> Result<Arc<Disk>, DiskError> {
        sync(&self.disk)?;
        self.take_name()
    }

    fn take_name(mut self) -> Result<Arc<Disk>, DiskError> {
        self.disk.move_to(&self.target).map_err(DiskError::io("rename", self.disk.path()))?;
        self.completed = true;
        let dir = self.target.parent().expect("the name was joined to a directory");
        File::open(dir)
            .and_then(|dir| dir.sync_all())
            .map_err(DiskError::io("sync the directory", dir))?;
        Ok(self.disk.clone())
    }
}

impl Drop for FreshMirror {
    fn drop(&mut self) {
        if self.completed {
            return;
        }
        let path = self.disk.path();
        if let Err(error) = fs::remove_file(&path) {
            tracing::warn!(path = %path.display(), %error, "cannot remove an unfinished mirror");
        }
    }
}

fn sync(disk: &Disk) -> Result<(), DiskError> {
    disk.sync().map_err(DiskError::io("sync", disk.path()))
}

/// Path where a host keeps what it changed of a disk since its last full copy.
pub fn changes_path(dir: &Path, index: DiskIndex) -> PathBuf {
    dir.join(format!("disk{index}.changes"))
}

/// A mirror during its first synchronisation.
#[derive(Debug)]
pub enum Mirror {
    /// A new image, filled from nothing.
    Fresh(FreshMirror),
    /// An older image, brought up to date in place. Until it is complete it is neither
    /// what it was nor what it will be.
    Resynced(Arc<Disk>),
}

impl Mirror {
    /// The disk, to be written, and to be served to the warm QEMU.
    pub fn disk(&self) -> &Arc<Disk> {
        match self {
            Mirror::Fresh(mirror) => mirror.disk(),
            Mirror::Resynced(disk) => disk,
        }
    }

    /// Path where the image lies, or will lie once it is whole.
    pub fn target(&self) -> PathBuf {
        match self {
            Mirror::Fresh(mirror) => mirror.target.clone(),
            Mirror::Resynced(disk) => disk.path(),
        }
    }
}

/// The mirrors of all disks of a VM, whole and on stable storage; former ones still bear the names of those that are new.
#[derive(Debug)]
pub struct Synced(Vec<Mirror>);

impl Synced {
    /// Declares the mirrors whole, and syncs one after the other; `next` is called before each.
    ///
    /// # Errors
    /// One cannot be synced: all former mirrors stay.
    pub fn of(mirrors: Vec<Mirror>, mut next: impl FnMut()) -> Result<Synced, DiskError> {
        for mirror in &mirrors {
            next();
            sync(mirror.disk())?;
        }
        Ok(Synced(mirrors))
    }

    /// Whether some take the place of former ones.
    pub fn are_fresh(&self) -> bool {
        self.0.iter().any(|mirror| matches!(mirror, Mirror::Fresh(_)))
    }

    /// Gives the new ones their names, one after the other: what was said of the former ones must not count any more.
    pub fn take_names(self) -> Result<(), DiskError> {
        for mirror in self.0 {
            if let Mirror::Fresh(mirror) = mirror {
                mirror.take_name()?;
            }
        }
        Ok(())
    }
}

/// Copies the granules that `changes` tells to `sink`, in the background of the guest's
/// own writes: brings an older image up to date. Otherwise like [`copy_out`]; what reads
/// as zeroes is sent as such. The runs are to be read after the disk's sink was set.
pub fn copy_changed(
    disk: &Disk,
    changes: &[Range<u64>],
    sink: &dyn WriteSink,
    progress: &mut dyn FnMut(u64),
    cancel: &AtomicBool,
) -> io::Result<u64> {
    let mut buffer = vec![0; COPY_CHUNK_BYTES];
    let mut done = 0;
    for run in changes {
        let mut at = run.start * GRANULE_BYTES;
        let end = (run.end * GRANULE_BYTES).min(disk.export_bytes());
        while at < end {
            check(cancel)?;
            let chunk = &mut buffer[..COPY_CHUNK_BYTES.min((end - at) as usize)];
            copy_chunk(disk, sink, at, chunk, Zeroes::Send)?;
            at += chunk.len() as u64;
            done += chunk.len() as u64;
            progress(done);
        }
    }
    Ok(done)
}

/// Copies what the image holds to `sink`, in the background of the guest's own writes:
/// the first synchronisation of a fresh mirror.
///
/// The disk's sink must have been set before (to the same stream): what the guest writes
/// during the copy reaches the mirror that way, and each chunk is read and sent under the
/// lock that orders the two. Holes and chunks of zeroes are skipped, since the mirror is
/// fresh. `progress` is told the bytes looked at so far, in the measure of
/// [`Disk::data_bytes`]. Returns the bytes sent.
///
/// # Errors
/// Reading the image fails; `Interrupted` if `cancel` was set; `NotConnected` if the disk
/// has no sink (any more). In each case the mirror is not whole.
pub fn copy_out(
    disk: &Disk,
    sink: &dyn WriteSink,
    progress: &mut dyn FnMut(u64),
    cancel: &AtomicBool,
) -> io::Result<u64> {
    let mut buffer = vec![0; COPY_CHUNK_BYTES];
    let (mut looked_at, mut sent, mut at) = (0, 0, 0);
    // A run of data is found without the lock. It is no harm if the guest changes it
    // meanwhile: what it wrote or zeroed has gone, or will go, to the sink in order.
    while let Some(data) = disk.next_data(at)? {
        at = data.start;
        let end = data.end.min(disk.export_bytes());
        while at < end {
            check(cancel)?;
            let chunk = &mut buffer[..COPY_CHUNK_BYTES.min((end - at) as usize)];
            if copy_chunk(disk, sink, at, chunk, Zeroes::Skip)? {
                sent += chunk.len() as u64;
            }
            at += chunk.len() as u64;
            looked_at += chunk.len() as u64;
            progress(looked_at);
        }
    }
    Ok(sent)
}

fn check(cancel: &AtomicBool) -> io::Result<()> {
    if cancel.load(Ordering::Relaxed) {
        return Err(io::Error::new(io::ErrorKind::Interrupted, "the copy was cancelled"));
    }
    Ok(())
}

/// Handling of a chunk of zeroes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Zeroes {
    /// Skips it: the mirror is fresh.
    Skip,
    /// Sends that they are zeroes.
    Send,
}

/// Reads and sends one chunk with all writers locked out; false if it was skipped.
fn copy_chunk(
    disk: &Disk,
    sink: &dyn WriteSink,
    offset: u64,
    chunk: &mut [u8],
    zeroes: Zeroes,
) -> io::Result<bool> {
    disk.await_range(offset, chunk.len() as u64)?;
    let ordered = disk.ordered();
    if !ordered.has_sink() {
        return Err(io::Error::new(
            io::ErrorKind::NotConnected,
            "the disk's writes are not mirrored, so a copy of it would be torn",
        ));
    }
    disk.read(offset, chunk)?;
    if is_zero(chunk) {
        if zeroes == Zeroes::Send {
            sink.zero(disk.index(), offset, chunk.len() as u64);
        }
        return Ok(zeroes == Zeroes::Send);
    }
    sink.write(disk.index(), offset, chunk);
    Ok(true)
}

/// Compares the bytes with themselves shifted by one, which is a vectorised memcmp.
fn is_zero(bytes: &[u8]) -> bool {
    match bytes {
        [] => true,
        [first, rest @ ..] => *first == 0 && rest == &bytes[..bytes.len() - 1],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_zero_only_if_every_byte_is() {
        assert!(is_zero(&[]));
        assert!(is_zero(&[0; 4097]));
        for at in [0, 1, 4095, 4096] {
            let mut bytes = [0; 4097];
            bytes[at] = 1;
            assert!(!is_zero(&bytes), "byte {at}");
        }
    }

    #[test]
    fn a_mirror_bears_its_name_only_when_complete() {
        let dir = tempfile::tempdir().unwrap();
        let target = mirror_path(dir.path(), DiskIndex(0));
        fs::write(&target, b"the former mirror").unwrap();

        let given_up = FreshMirror::create(dir.path(), DiskIndex(0), 1 << 20).unwrap();
        given_up.disk().write(0, b"half").unwrap();
        drop(given_up);
        assert_eq!(fs::read(&target).unwrap(), b"the former mirror");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the partial file is gone");

        let fresh = FreshMirror::create(dir.path(), DiskIndex(0), 1 << 20).unwrap();
        fresh.disk().write(4096, b"whole").unwrap();
        let disk = fresh.complete().unwrap();
        assert_eq!(disk.path(), target);
        let bytes = fs::read(&target).unwrap();
        assert_eq!(bytes.len(), 1 << 20);
        assert_eq!(&bytes[4096..4101], b"whole");
        assert!(is_zero(&bytes[..4096]) && is_zero(&bytes[4101..]));
    }

    #[test]
    fn a_mirror_being_filled_is_not_emptied_by_a_second_one() {
        let dir = tempfile::tempdir().unwrap();
        let fresh = FreshMirror::create(dir.path(), DiskIndex(0), 8192).unwrap();
        fresh.disk().write(0, b"kept").unwrap();
        let second = FreshMirror::create(dir.path(), DiskIndex(0), 8192);
        assert!(matches!(second, Err(DiskError::InUse { .. })), "{second:?}");
        let mut kept = [0; 4];
        fresh.disk().read(0, &mut kept).unwrap();
        assert_eq!(&kept, b"kept");
    }
}
