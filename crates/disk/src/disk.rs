//! One guest disk: its image on this host, and where its writes are mirrored to.

mod medium;
mod ordered;
mod outcomes;
mod place;
mod settings;
mod snapshot;

use crate::absent::Absent;
use crate::blocks::BlockSet;
use crate::capture::Frozen;
use crate::changes::{ChangeMap, Rounds};
use crate::error::DiskError;
use crate::fail_points::fail_in_a_test;
use crate::flusher::{Done, Flusher};
use crate::image::{Image, Space};
use crate::lent::Loan;
use crate::mark::incomplete_mark;
use crate::reads::Reads;
use crate::waits::WaitId;
use crate::withheld::{OnError, Withheld};
use nix::errno::Errno;
use nix::unistd::gettid;
pub(crate) use ordered::Ordered;
pub use outcomes::GuestWrites;
pub use place::FileId;
use settings::Settings;
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use understudy_protocol::{BaseId, DiskIndex};
use understudy_threads::{Mutex, MutexGuard};

/// Receiver of a disk's writes after the local image: the stream to the backup.
///
/// Called under the disk's ordering lock, in the order in which the image took the
/// writes. It may block to slow the guest down; it must then come free without the help
/// of the guest (a QEMU that stops waits for its writes).
pub trait WriteSink: Send + Sync {
    /// `len` bytes from `offset` are about to change. Unless this fails, or the file system
    /// cannot punch holes, one of the other calls follows.
    fn begin(&self, disk: DiskIndex, offset: u64, len: u64);
    /// `data` was written at `offset` bytes.
    fn write(&self, disk: DiskIndex, offset: u64, data: &[u8]);
    /// `len` bytes from `offset` read as zeroes now.
    fn zero(&self, disk: DiskIndex, offset: u64, len: u64);
    /// Whether it drops all that it is given, for good.
    fn is_closed(&self) -> bool {
        false
    }
}

/// A guest disk on this host: the primary's image or the backup's mirror.
///
/// The export, which the guest sees, may be larger than the image (a qcow2 image grows
/// in it): what lies beyond the end reads as zeroes, and writes extend the file. All
/// offsets and lengths are in bytes. Writes are ordered by a lock; reads and flushes
/// take no lock and wait for nobody.
pub struct Disk {
    index: DiskIndex,
    export_bytes: u64,
    image: Arc<Image>,
    order: Mutex<Order>,
    settings: Arc<Settings>,
    flusher: Flusher,
    /// Blocks that a disk lacks that is being restored.
    absent: Option<Absent>,
    pub(crate) withheld: Withheld,
    /// Thread id of [`Disk::server_thread`]; 0 is none.
    server_thread: AtomicI32,
    /// Requests of the guest that are not answered.
    requests: AtomicUsize,
    /// Changes and flushes that failed.
    failures: AtomicU64,
}

/// State that a writer must look at, and what must not change during its write.
#[derive(Default)]
struct Order {
    sink: Option<Arc<dyn WriteSink>>,
    /// Blocks that are still to be read of the disk as it was at a snapshot.
    capture: Option<Arc<Frozen>>,
    /// The snapshot that the next one may build on, and the blocks that changed since; none if there is no such.
    since_base: Option<(BaseId, BlockSet)>,
    read_only: bool,
    guest_writes: GuestWrites,
}

impl Disk {
    /// Opens and locks an existing image, to be shown as a disk of `export_bytes` bytes
    /// (see [`crate::export_bytes`]).
    pub fn open(
        index: DiskIndex,
        path: impl AsRef<Path>,
        export_bytes: u64,
    ) -> Result<Disk, DiskError> {
        let path = path.as_ref();
        if incomplete_mark(path).exists() {
            return Err(DiskError::Incomplete { path: path.into() });
        }
        let image = Image::open(path)?;
        let image_bytes = image.len().map_err(DiskError::io("examine", path))?;
        if image_bytes > export_bytes {
            return Err(DiskError::ExportTooSmall { path: path.into(), image_bytes, export_bytes });
        }
        Self::of_image(index, path, image, export_bytes)
    }

    /// A disk on a new, empty image.
    pub(crate) fn create(
        index: DiskIndex,
        path: &Path,
        export_bytes: u64,
    ) -> Result<Disk, DiskError> {
        Self::of_image(index, path, Image::create(path, export_bytes)?, export_bytes)
    }

    fn of_image(
        index: DiskIndex,
        path: &Path,
        image: Image,
        export_bytes: u64,
    ) -> Result<Disk, DiskError> {
        // With this, no offset inside the export overflows the kernel's off_t.
        if i64::try_from(export_bytes).is_err() {
            return Err(DiskError::ExportTooLarge { export_bytes });
        }
        let image = Arc::new(image);
        let settings = Arc::new(Settings::new(path));
        let flusher = Flusher::new(&format!("disk{index}"), {
            let (image, settings) = (image.clone(), settings.clone());
            Box::new(move || sync_image(&image, &settings))
        });
        Ok(Disk {
            index,
            export_bytes,
            image,
            order: Mutex::default(),
            settings,
            flusher,
            absent: None,
            withheld: Withheld::default(),
            server_thread: AtomicI32::new(0),
            requests: AtomicUsize::new(0),
            failures: AtomicU64::new(0),
        })
    }

    /// The same disk with another way to sync its image.
    #[cfg(test)]
    pub(crate) fn with_sync(mut self, sync: crate::flusher::SyncImage) -> Disk {
        self.flusher = Flusher::new("test", sync);
        self
    }

    /// Index of this disk in the VM.
    pub fn index(&self) -> DiskIndex {
        self.index
    }

    /// Thread id of the thread that answers QEMU, if it is connected: QEMU's `stop` waits
    /// for it.
    pub fn server_thread(&self) -> Option<i32> {
        Some(self.server_thread.load(Ordering::Relaxed)).filter(|&thread| thread != 0)
    }

    /// The calling thread answers QEMU from now on.
    pub(crate) fn set_server_thread(&self) {
        self.server_thread.store(gettid().as_raw(), Ordering::Relaxed);
    }

    /// The call that has waited longest for this disk's device, or for that where its changes are noted and put aside,
    /// and for how long.
    pub fn longest_wait(&self) -> Option<(WaitId, Duration)> {
        self.image.longest_wait()
    }

    /// Makes a call that may wait for the VM's directory, which the guest's writes wait for then.
    pub(crate) fn counted<T>(&self, call: impl FnOnce() -> T) -> T {
        self.image.counted(call)
    }

    /// Whether the guest waits for this disk.
    pub fn has_requests(&self) -> bool {
        self.requests.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn request_begins(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn request_ends(&self) {
        self.requests.fetch_sub(1, Ordering::Relaxed);
    }

    /// Size that the guest (or QEMU's format layer) sees.
    pub fn export_bytes(&self) -> u64 {
        self.export_bytes
    }

    /// Path of the image.
    pub fn path(&self) -> PathBuf {
        self.settings.path()
    }

    /// Sets what is done about the guest's reads that come from now on.
    pub fn set_reads(&self, reads: Reads) {
        self.settings.set_reads(reads);
    }

    pub(crate) fn reads(&self) -> Reads {
        self.settings.reads()
    }

    /// QEMU does not learn of requests that fail from now on, until [`Disk::let_pass`]: the
    /// guest waits for them. `told` is.
    pub fn withhold_errors(&self, told: OnError) {
        self.withheld.begin(told);
    }

    /// Whether a sync of the image has failed: what was written before it may be lost.
    pub fn has_lost_writes(&self) -> bool {
        self.image.has_failed()
    }

    /// Whether a write that failed with this will fail for ever: the image, which grows in its export,
    /// has come to the end of its device.
    pub fn is_outgrown(&self, error: &io::Error) -> bool {
        self.image.is_outgrown(error)
    }

    /// First error of a request, if there was any; QEMU may keep it from the guest.
    pub fn first_error(&self) -> Option<String> {
        self.withheld.first()
    }

    /// Whether the guest waits for requests that failed.
    pub fn withholds_errors(&self) -> bool {
        self.withheld.is_any()
    }

    /// Lets requests pass, before QEMU is told to wait for them: none waits for anything but the
    /// device from now on.
    pub fn let_pass(&self) {
        if let Reads::Recorded(recorder) = self.reads() {
            recorder.let_pass();
        }
        self.withheld.end();
    }

    /// Notes every change in `changes` from now on, before it is made.
    pub fn set_changes(&self, changes: Option<Arc<ChangeMap>>) {
        let _order = self.lock_order();
        if let Some(changes) = &changes
            && self.image.has_failed()
        {
            note_any(changes, &self.path());
        }
        self.settings.set_changes(changes);
    }

    /// Map where changes are noted, if anywhere. Waits for no write.
    pub fn changes(&self) -> Option<Arc<ChangeMap>> {
        self.settings.changes()
    }

    /// A session begins: from here on its rounds count, and none of an earlier one.
    pub fn begin_rounds(&self, rounds: Rounds) {
        if let Some(changes) = self.changes() {
            changes.begin_rounds(rounds);
        }
    }

    /// [`ChangeMap::end_round`] will forget the changes that went to the sink before this: the
    /// guest's are those that this gives.
    pub fn begin_round(&self, rounds: Rounds) -> GuestWrites {
        // Under the lock, nobody is between mark and sink.
        let order = self.lock_order();
        if let Some(changes) = self.changes() {
            self.counted(|| changes.begin_round(rounds));
        }
        order.guest_writes
    }

    /// Refuses (EPERM) or admits the guest's writes that come through the NBD server. On
    /// return no write of the guest is under way that the new rule would refuse. The
    /// methods of this type are the daemon's own and always admitted.
    ///
    /// The export is never announced as read-only: the warm QEMU's connection is the one
    /// that goes live.
    pub fn set_read_only(&self, read_only: bool) {
        self.lock_order().read_only = read_only;
    }

    /// Fills `buffer` from `offset`.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.check_range(offset, buffer.len() as u64)?;
        fail_in_a_test("read-disk")?;
        if let Some(absent) = self.absent() {
            absent.wait_for(offset, buffer.len() as u64)?;
        }
        self.image.read(offset, buffer)
    }

    /// Reads, or says `false` if that would mean waiting for the device.
    pub(crate) fn read_if_cached(&self, offset: u64, buffer: &mut [u8]) -> io::Result<bool> {
        self.check_range(offset, buffer.len() as u64)?;
        fail_in_a_test("read-disk")?;
        Ok(self.is_there(offset, buffer.len() as u64)
            && self.image.read_if_cached(offset, buffer)?)
    }

    /// Lends a range of the export, behind a header, if that needs no copy and no waiting.
    pub(crate) fn lend(&self, loan: &mut Loan, header: &[u8], offset: u64, len: u32) -> bool {
        self.check_range(offset, len.into()).is_ok()
            && self.is_there(offset, len.into())
            && self.image.lend(loan, header, offset, len as usize)
    }

    /// Writes to the image, then to the sink.
    pub fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.ordered().write(offset, data)
    }

    /// Zeroes a range and gives its space back to the file system.
    pub fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        self.ordered().zero(offset, len, Space::Release)
    }

    /// Zeroes a range and keeps or gets space for it.
    pub fn zero_reserved(&self, offset: u64, len: u64) -> io::Result<()> {
        self.ordered().zero(offset, len, Space::Reserve)
    }

    /// Gives the space of a range back; it then reads as zeroes, unless the file system
    /// cannot punch holes, where it is left as it was. In lockstep it reads as zeroes in any case.
    pub fn trim(&self, offset: u64, len: u64) -> io::Result<()> {
        self.ordered().trim(offset, len)
    }

    /// Waits for all completed writes to be on stable storage, whatever the checkpoints. After
    /// one failure it fails for as long as the disk is open: what was lost stays lost.
    pub fn sync(&self) -> io::Result<()> {
        sync_image(&self.image, &self.settings)
    }

    /// Nobody writes any more: the list of changes, if there is one, can outlive the host's kernel, and tells whether
    /// somebody has changed the image by other means.
    pub fn seal_changes(&self) {
        let Some(changes) = self.changes() else { return };
        let path = self.path();
        if let Err(error) = self.sync().and_then(|()| changes.seal(&path)) {
            tracing::warn!(path = %path.display(), %error, "cannot seal the list of changed blocks");
        }
    }

    #[cfg(test)]
    pub(crate) fn image(&self) -> &Image {
        &self.image
    }

    /// The guest's flush: `done` is called from the flusher thread, or from this one at
    /// once during a checkpoint if a backup has it, too.
    pub(crate) fn flush(&self, done: Done) {
        self.flusher.flush(done);
    }

    /// Begins a checkpoint, before QEMU is told to stop: until [`Disk::end_checkpoint`] flushes
    /// cost no fsync if [there is a backup](Disk::set_backup), since crash consistency comes from
    /// that then. A flush whose fsync is under way is answered too.
    pub fn begin_checkpoint(&self) {
        self.flusher.begin_checkpoint();
    }

    /// Ends a checkpoint, after QEMU continues: carries out, in the background, the flush that
    /// was left out. Should it fail, the guest's flushes from then on report it.
    pub fn end_checkpoint(&self) {
        self.flusher.end_checkpoint();
    }

    /// Whether what the guest says waits for its backup, from here on. To be called where output
    /// begins to be held, and before it goes out again.
    pub fn set_backup(&self, has_backup: bool) {
        self.flusher.set_backup(has_backup);
    }

    /// Bytes that a first synchronisation has to look at: the image without its holes.
    /// An estimate, since the guest goes on writing.
    pub fn data_bytes(&self) -> io::Result<u64> {
        let mut total = 0;
        let mut at = 0;
        while let Some(data) = self.next_data(at)? {
            total += data.end - data.start;
            at = data.end;
        }
        Ok(total)
    }

    /// The first run of data at or after `from`, within the export.
    pub(crate) fn next_data(&self, from: u64) -> io::Result<Option<Range<u64>>> {
        if self.absent().is_some() && from < self.export_bytes {
            // Its holes are none.
            return Ok(Some(from..self.export_bytes));
        }
        Ok(self.image.next_data(from)?.filter(|data| data.start < self.export_bytes))
    }

    /// Renames the image in the file system.
    pub(crate) fn move_to(&self, to: &Path) -> io::Result<()> {
        std::fs::rename(self.path(), to)?;
        self.settings.set_path(to);
        Ok(())
    }

    /// Access in order, for the daemon itself.
    pub(crate) fn ordered(&self) -> Ordered<'_> {
        Ordered { disk: self, order: self.lock_order() }
    }

    /// Access in order, for the guest: EPERM while the disk is read-only.
    pub(crate) fn ordered_for_guest(&self) -> io::Result<Ordered<'_>> {
        let mut order = self.lock_order();
        if order.read_only {
            return Err(Errno::EPERM.into());
        }
        order.guest_writes.count += 1;
        Ok(Ordered { disk: self, order })
    }

    fn lock_order(&self) -> MutexGuard<'_, Order> {
        // After a panic inside the sink image and mirror may differ: better stop writing.
        self.order.lock().unwrap_or_else(understudy_threads::poisoned)
    }

    fn check_range(&self, offset: u64, len: u64) -> io::Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= self.export_bytes => Ok(()),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{len} bytes at {offset} are beyond the disk's {}", self.export_bytes),
            )),
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if self.order.is_poisoned() {
            return;
        }
        self.seal_changes();
    }
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk")
            .field("index", &self.index)
            .field("path", &self.path())
            .field("export_bytes", &self.export_bytes)
            .finish_non_exhaustive()
    }
}

/// Syncs the image. If that fails what was written may be lost in any block: so this image may
/// differ from any other host's anywhere, and the list of changes says so from then on.
fn sync_image(image: &Image, settings: &Settings) -> io::Result<()> {
    image.sync().inspect_err(|_| {
        settings.changes().inspect(|changes| note_any(changes, &settings.path()));
    })
}

fn note_any(changes: &ChangeMap, path: &Path) {
    if let Err(error) = changes.mark_all() {
        tracing::error!(path = %path.display(), %error, "cannot note that any block may differ");
    }
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;
