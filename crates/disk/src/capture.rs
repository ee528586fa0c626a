//! A disk as it was at one moment, read while the guest goes on writing (HotSnap:
//! copy-before-write), and which blocks changed from one such moment to the next.
//!
//! Before a block is overwritten that was not read yet, its content goes to a file beside the
//! disk: neither memory nor the guest waits for the store. If that fails the capture has
//! failed; the guest's write goes on.

use crate::blocks::{BLOCK_BYTES, BlockSet};
use crate::disk::Disk;
use crate::error::DiskError;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use understudy_protocol::BaseId;
use understudy_threads::{Mutex, MutexGuard};

/// Most blocks that are read, or put aside, in one piece.
const PIECE_BLOCKS: u64 = 64;

/// All that takes time, done before the guest is stopped.
#[derive(Debug)]
pub struct PreparedCapture {
    disk: Arc<Disk>,
    aside: File,
    since: Option<BaseId>,
    /// What its content is called.
    next: BaseId,
    /// Every block, unless only what changed since the base is wanted.
    all: Option<BlockSet>,
    /// Sets that are empty.
    gone: BlockSet,
    moved: BlockSet,
    changed: BlockSet,
}

/// A disk as it was when the guest stood still, until it is dropped.
#[derive(Debug)]
pub struct Capture {
    disk: Arc<Disk>,
    frozen: Arc<Frozen>,
    /// All before this block has been read.
    next: u64,
    _attached: Attached,
    changes: ChangesTaken,
}

/// Changes that a capture took out of "changed since the base". Dropped, it puts that back: unless
/// the snapshot became the base.
#[derive(Debug)]
pub struct ChangesTaken {
    disk: Arc<Disk>,
    taken: Option<Taken>,
    next: BaseId,
}

/// Blocks that a capture is to read.
#[derive(Clone, Debug)]
pub(crate) enum Taken {
    /// All, since there was no base.
    All,
    /// Blocks that changed since this base.
    Changed(BaseId, Arc<BlockSet>),
}

/// State that the writers of the disk look at.
#[derive(Debug)]
pub(crate) struct Frozen {
    wanted: Arc<BlockSet>,
    aside: File,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Read already, or put aside: may be overwritten.
    gone: BlockSet,
    /// Blocks that were put aside.
    moved: BlockSet,
    failed: Option<io::Error>,
}

impl PreparedCapture {
    /// `directory` is to hold what the guest overwrites meanwhile. With a base only the blocks are read that changed
    /// since; all of them if the disk does not count from it. `next` is what may be built on this capture, once its
    /// changes are committed.
    pub fn new(
        disk: &Arc<Disk>,
        directory: &Path,
        since: Option<BaseId>,
        next: BaseId,
    ) -> Result<PreparedCapture, DiskError> {
        let bytes = disk.export_bytes();
        let aside = unnamed(directory, disk)
            .map_err(DiskError::io("make a file for overwritten blocks in", directory))?;
        let incremental = since.is_some_and(|base| disk.counts_from(base));
        Ok(PreparedCapture {
            disk: disk.clone(),
            aside,
            since,
            next,
            all: (!incremental).then(|| BlockSet::all(bytes)),
            gone: BlockSet::none(bytes),
            moved: BlockSet::none(bytes),
            changed: BlockSet::none(bytes),
        })
    }

    /// Takes the capture, while the guest stands still: it shows what the disk holds now.
    pub fn take(self) -> Capture {
        let (taken, wanted) =
            self.disk.take_changes(self.since, (self.next, self.changed), self.all);
        let state = State { gone: self.gone, moved: self.moved, failed: None };
        let frozen = Arc::new(Frozen { wanted, aside: self.aside, state: Mutex::new(state) });
        self.disk.attach_capture(frozen.clone());
        Capture {
            _attached: Attached { disk: self.disk.clone(), frozen: frozen.clone() },
            changes: ChangesTaken { disk: self.disk.clone(), taken: Some(taken), next: self.next },
            disk: self.disk,
            frozen,
            next: 0,
        }
    }
}

/// A file without a name: it goes with its descriptor.
fn unnamed(directory: &Path, disk: &Disk) -> io::Result<File> {
    let path = directory.join(format!("disk{}.aside", disk.index()));
    let mut options = OpenOptions::new();
    let file =
        options.read(true).write(true).create(true).truncate(true).mode(0o600).open(&path)?;
    fs::remove_file(path)?;
    Ok(file)
}

/// Ends the copying when it is dropped.
#[derive(Debug)]
struct Attached {
    disk: Arc<Disk>,
    frozen: Arc<Frozen>,
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.disk.detach_capture(&self.frozen);
    }
}

impl Capture {
    /// The disk.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// Whether only what changed since the base is read.
    pub fn is_incremental(&self) -> bool {
        matches!(self.changes.taken, Some(Taken::Changed(..)))
    }

    /// Blocks that there are to read, holes among them.
    pub fn blocks(&self) -> u64 {
        self.frozen.wanted.count()
    }

    /// The next run of blocks in the order of the disk, at most 256 KiB, with their content (a
    /// short last block is filled up with zeros); none at the end. Where nothing is known to be
    /// there before, runs of zeros are left out.
    pub fn read(&mut self, content: &mut Vec<u8>) -> io::Result<Option<Range<u64>>> {
        if !self.is_incremental() {
            self.skip_hole()?;
        }
        let wanted = &self.frozen.wanted;
        let Some(run) = wanted.next_run(self.next..wanted.blocks()) else {
            self.frozen.check()?;
            return Ok(None);
        };
        let run = run.start..run.end.min(run.start + PIECE_BLOCKS);
        self.frozen.read(&self.disk, run.clone(), content)?;
        self.next = run.end;
        Ok(Some(run))
    }

    /// Skips a hole: what is one now, and was not put aside, was one then.
    fn skip_hole(&mut self) -> io::Result<()> {
        let data = self.disk.next_data(self.next * BLOCK_BYTES)?;
        let blocks = self.frozen.wanted.blocks();
        let data = data.map_or(blocks, |data| data.start / BLOCK_BYTES);
        let mut state = self.frozen.lock();
        let moved = state.moved.next_run(self.next..data).map_or(data, |run| run.start);
        state.gone.insert(self.next..moved);
        self.next = moved.max(self.next);
        Ok(())
    }

    /// Ends the copying; what was taken is to be committed when the snapshot is the new base.
    pub fn finish(self) -> ChangesTaken {
        self.changes
    }
}

impl Frozen {
    /// Puts aside what is still to be read and is about to be overwritten.
    pub(crate) fn before_change(&self, disk: &Disk, offset: u64, len: u64) {
        let mut state = disk.counted(|| self.lock());
        let touched = self.wanted.touched(offset, len);
        while let Some(run) = self.unread(&state, touched.clone()) {
            if let Err(error) = self.move_aside(disk, &run) {
                tracing::warn!(disk = %disk.index(), %error, "a snapshot of the disk has failed");
                let why =
                    format!("a block that the guest overwrote could not be put aside: {error}");
                state.failed = Some(io::Error::new(error.kind(), why));
                return;
            }
            state.gone.insert(run.clone());
            state.moved.insert(run);
        }
    }

    /// Nothing is put aside any more, for another capture of the disk has begun.
    pub(crate) fn replaced(&self) {
        let why = "another snapshot of the disk has begun";
        self.lock().failed.get_or_insert_with(|| io::Error::other(why));
    }

    /// Whether a range holds something that is still to be read.
    pub(crate) fn needs(&self, offset: u64, len: u64) -> bool {
        self.unread(&self.lock(), self.wanted.touched(offset, len)).is_some()
    }

    fn unread(&self, state: &State, within: Range<u64>) -> Option<Range<u64>> {
        if state.failed.is_some() {
            return None;
        }
        for run in self.wanted.runs(within) {
            let mut at = run.start;
            while at < run.end {
                match state.gone.next_run(at..run.end) {
                    Some(gone) if gone.start == at => at = gone.end,
                    gone => {
                        let end = gone.map_or(run.end, |gone| gone.start);
                        return Some(at..end.min(at + PIECE_BLOCKS));
                    }
                }
            }
        }
        None
    }

    fn move_aside(&self, disk: &Disk, run: &Range<u64>) -> io::Result<()> {
        let (offset, len) = self.wanted.bytes(run);
        let mut content = vec![0; len];
        disk.read(offset, &mut content)?;
        match content.iter().all(|&byte| byte == 0) {
            // The file is sparse.
            true => Ok(()),
            false => disk.counted(|| self.aside.write_all_at(&content, offset)),
        }
    }

    /// Reads what a run of blocks held; they may be overwritten afterwards.
    fn read(&self, disk: &Disk, run: Range<u64>, content: &mut Vec<u8>) -> io::Result<()> {
        let (offset, len) = self.wanted.bytes(&run);
        content.clear();
        content.resize(((run.end - run.start) * BLOCK_BYTES) as usize, 0);
        // Nobody is kept from writing. Who began to, before the lock is ours, has put the old
        // content aside.
        disk.read(offset, &mut content[..len])?;
        let mut state = self.lock();
        state.check()?;
        state.gone.insert(run.clone());
        for moved in state.moved.runs(run.clone()) {
            let (at, len) = self.wanted.bytes(&moved);
            let into = &mut content[(at - offset) as usize..][..len];
            read_sparse(&self.aside, at, into)?;
        }
        Ok(())
    }

    fn check(&self) -> io::Result<()> {
        self.lock().check()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(understudy_threads::poisoned)
    }
}

impl State {
    fn check(&self) -> io::Result<()> {
        match &self.failed {
            None => Ok(()),
            Some(error) => Err(io::Error::new(error.kind(), error.to_string())),
        }
    }
}

/// Reads a file, beyond its end as zeroes.
fn read_sparse(file: &File, mut at: u64, mut into: &mut [u8]) -> io::Result<()> {
    while !into.is_empty() {
        match file.read_at(into, at) {
            Ok(0) => {
                into.fill(0);
                return Ok(());
            }
            Ok(count) => {
                at += count as u64;
                into = &mut into[count..];
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl ChangesTaken {
    /// The snapshot is the base from now on.
    pub fn commit(mut self) {
        self.taken = None;
    }
}

impl Drop for ChangesTaken {
    fn drop(&mut self) {
        if let Some(taken) = self.taken.take() {
            self.disk.give_back(taken, self.next);
        }
    }
}

#[cfg(test)]
#[path = "capture_tests.rs"]
mod tests;
