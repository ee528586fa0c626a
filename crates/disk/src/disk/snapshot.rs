//! Parts of a disk that snapshots and restores want.

use super::Disk;
use crate::absent::{Absent, Fetcher};
use crate::blocks::BlockSet;
use crate::capture::{Frozen, Taken};
use crate::error::DiskError;
use crate::image::Image;
use crate::mark::{self, Mark, incomplete_mark};
use std::io;
use std::path::Path;
use std::sync::Arc;
use understudy_protocol::{BaseId, DiskIndex};

impl Disk {
    /// A new image of zeroes at `path` that is being restored: whoever reads one of these blocks
    /// waits until [`Disk::fill`] has brought it. Should the daemon end before
    /// [`Disk::complete_restore`], nobody can open it but with [`Disk::resume_restored`].
    pub fn create_restored(
        index: DiskIndex,
        path: &Path,
        export_bytes: u64,
        absent: BlockSet,
        fetcher: Arc<dyn Fetcher>,
    ) -> Result<Disk, DiskError> {
        let mark = Mark::create(path, &absent);
        let mark = mark.map_err(DiskError::io("write", &incomplete_mark(path)))?;
        let mut disk = Disk::create(index, path, export_bytes)?;
        disk.absent = Some(Absent::new(absent, mark, fetcher));
        Ok(disk)
    }

    /// An image whose restore another daemon has begun, for the same guest, which has lived since;
    /// `absent` is what [`absent_blocks`](crate::absent_blocks) gives.
    pub fn resume_restored(
        index: DiskIndex,
        path: &Path,
        export_bytes: u64,
        absent: BlockSet,
        fetcher: Arc<dyn Fetcher>,
    ) -> Result<Disk, DiskError> {
        let mut disk = Self::of_image(index, path, Image::open(path)?, export_bytes)?;
        if absent.count() > 0 {
            let mark = Mark::open(path);
            let mark = mark.map_err(DiskError::io("open", &incomplete_mark(path)))?;
            disk.absent = Some(Absent::new(absent, mark, fetcher));
        }
        Ok(disk)
    }

    /// All blocks are there: the image is one like any other, on stable storage.
    ///
    /// # Errors
    /// A system call failed; the image stays one that nobody can open.
    pub fn complete_restore(&self) -> Result<(), DiskError> {
        let path = self.path();
        let complete = || -> io::Result<()> {
            if self.absent_blocks() > 0 {
                return Err(io::Error::other("not all of it is there"));
            }
            self.sync()?;
            mark::remove(&path)
        };
        complete().map_err(DiskError::io("complete", &path))
    }

    /// Blocks from `first` on were fetched. What the guest overwrote meanwhile stays.
    pub fn fill(&self, first: u64, content: &[u8]) -> io::Result<()> {
        match &self.absent {
            Some(absent) => absent.fill(&self.image, first, content),
            None => Ok(()),
        }
    }

    /// Blocks that are still to be fetched.
    pub fn absent_blocks(&self) -> u64 {
        self.absent.as_ref().map_or(0, Absent::count)
    }

    /// Nothing more will be fetched: whoever waits gets an error. The guest has ended.
    pub(crate) fn give_up_restore(&self) {
        if let Some(absent) = &self.absent {
            absent.give_up();
        }
    }

    pub(super) fn absent(&self) -> Option<&Absent> {
        self.absent.as_ref().filter(|absent| absent.any())
    }

    pub(super) fn is_there(&self, offset: u64, len: u64) -> bool {
        self.absent().is_none_or(|absent| absent.has(offset, len))
    }

    /// Waits, without any lock held, before a change, for the blocks that it changes in part.
    pub(crate) fn await_edges(&self, offset: u64, len: u64) -> io::Result<()> {
        self.absent().map_or(Ok(()), |absent| absent.wait_for_edges(offset, len))
    }

    /// Waits, without any lock held, for all of a range.
    pub(crate) fn await_range(&self, offset: u64, len: u64) -> io::Result<()> {
        self.absent().map_or(Ok(()), |absent| absent.wait_for(offset, len))
    }

    /// Sets the base: from now on changes are noted for the next snapshot; the disk is as the last
    /// one has it.
    pub fn set_base(&self, base: BaseId) {
        self.lock_order().since_base = Some((base, BlockSet::none(self.export_bytes)));
    }

    /// Whether what changed since that base is known.
    pub(crate) fn counts_from(&self, base: BaseId) -> bool {
        self.lock_order().since_base.as_ref().is_some_and(|(from, _)| *from == base)
    }

    /// The next base is taken: what it has to read, all of it if changes are not counted from `since` or `all` is
    /// given. What changes from now on goes to the `fresh` set.
    pub(crate) fn take_changes(
        &self,
        since: Option<BaseId>,
        (next, fresh): (BaseId, BlockSet),
        all: Option<BlockSet>,
    ) -> (Taken, Arc<BlockSet>) {
        let former = self.lock_order().since_base.replace((next, fresh));
        let counted = former.filter(|(from, _)| since == Some(*from));
        match (all, counted) {
            (None, Some((base, changed))) => {
                let changed = Arc::new(changed);
                (Taken::Changed(base, changed.clone()), changed)
            }
            (all, _) => {
                let all = all.unwrap_or_else(|| BlockSet::all(self.export_bytes));
                (Taken::All, Arc::new(all))
            }
        }
    }

    /// The snapshot that took them came to nothing.
    pub(crate) fn give_back(&self, taken: Taken, next: BaseId) {
        let mut order = self.lock_order();
        // Another was taken since, which built on no such base: it has read all of it.
        let Some((from, changed)) = order.since_base.as_mut().filter(|(from, _)| *from == next)
        else {
            return;
        };
        match taken {
            Taken::Changed(base, blocks) => {
                *from = base;
                changed.merge(&blocks);
            }
            Taken::All => order.since_base = None,
        }
    }

    /// Attaches a capture: before a block is overwritten that it has not read, that is put aside.
    /// One that was still at it has failed.
    pub(crate) fn attach_capture(&self, capture: Arc<Frozen>) {
        let mut order = self.lock_order();
        let former = order.capture.replace(capture);
        if let Some(former) = &former {
            former.replaced();
        }
        drop(order);
    }

    /// Ends this capture, if it is not over already.
    pub(crate) fn detach_capture(&self, capture: &Arc<Frozen>) {
        let mut order = self.lock_order();
        let ended = order.capture.take_if(|current| Arc::ptr_eq(current, capture));
        drop(order);
        // Outside the lock: dropping it may take long.
        drop(ended);
    }
}
