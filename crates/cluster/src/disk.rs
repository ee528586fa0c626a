//! A member's disks, captured for one snapshot while the guest writes on.

use crate::Stop;
use crate::upload::Upload;
use anyhow::Context;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use understudy_disk::{Capture, ChangesTaken, Disk, PreparedCapture};
use understudy_machine::Machine;
use understudy_protocol::{BaseId, DiskIndex};
use understudy_snapshot::{
    AreaMap, Compression, Lane, NewChunk, Packed, Packer, Store, UNIT_BYTES,
};

/// Chunks that are handed to the store at once.
const BATCH: usize = 32;
/// The copier leaves the device and the processors to the guest beyond this.
const BYTES_PER_SECOND: f64 = 128e6;

/// One member's disks, for one snapshot. Dropped at any time, it leaves the disks as they were.
pub struct DiskCapture {
    compression: Compression,
    prepared: Vec<PreparedCapture>,
    captures: Vec<Capture>,
}

/// Content of disks that was saved.
pub struct SavedDisks {
    /// Place of each disk's content.
    pub areas: BTreeMap<DiskIndex, AreaMap>,
    /// Counts of what became of the blocks.
    pub packed: Packed,
    /// Changes that are committed when the snapshot exists.
    pub changes: Vec<ChangesTaken>,
}

impl DiskCapture {
    /// Prepares while the guest runs. `directory` is the VM's own. With a base only what changed
    /// since then is saved, if the disks know that. `next` is what the snapshot is to the next one.
    pub fn arm(
        machine: &Machine,
        compression: Compression,
        directory: &Path,
        (since, next): (Option<BaseId>, BaseId),
    ) -> anyhow::Result<DiskCapture> {
        Self::arm_disks(&machine.disks(), compression, directory, (since, next))
    }

    fn arm_disks(
        disks: &[Arc<Disk>],
        compression: Compression,
        directory: &Path,
        (since, next): (Option<BaseId>, BaseId),
    ) -> anyhow::Result<DiskCapture> {
        let prepare = |disk| PreparedCapture::new(disk, directory, since, next);
        let prepared = disks.iter().map(prepare).collect::<Result<_, _>>()?;
        Ok(DiskCapture { compression, prepared, captures: Vec::new() })
    }

    /// The guest stands still: the snapshot's content is fixed from here on.
    pub fn take(&mut self) {
        self.captures.extend(self.prepared.drain(..).map(PreparedCapture::take));
    }

    /// The guest runs: saves all to the store. `base` is where the content of the last
    /// snapshot that exists is.
    pub fn save(
        self,
        store: &Store,
        base: Option<&BTreeMap<DiskIndex, AreaMap>>,
        stop: &Stop,
    ) -> anyhow::Result<SavedDisks> {
        let mut saved =
            SavedDisks { areas: BTreeMap::new(), packed: Packed::default(), changes: Vec::new() };
        for capture in self.captures {
            let index = capture.disk().index();
            let base = base.and_then(|base| base.get(&index));
            let upload = Upload { store, compression: self.compression, stop };
            let copier = Copier { upload, pace: Pace::new() };
            let (map, packed, changes) =
                copier.copy(capture, base).with_context(|| format!("cannot save disk {index}"))?;
            saved.areas.insert(index, map);
            saved.packed.put += packed.put;
            saved.packed.zeros += packed.zeros;
            saved.packed.duplicates += packed.duplicates;
            saved.changes.push(changes);
        }
        Ok(saved)
    }
}

/// Saves one disk.
struct Copier<'a> {
    upload: Upload<'a>,
    pace: Pace,
}

impl Copier<'_> {
    fn copy(
        mut self,
        mut capture: Capture,
        base: Option<&AreaMap>,
    ) -> anyhow::Result<(AreaMap, Packed, ChangesTaken)> {
        let units = capture.disk().export_bytes().div_ceil(UNIT_BYTES as u64);
        let base = match capture.is_incremental() {
            true => base.context("what the last snapshot has of it is not known")?,
            false => &AreaMap::zeros(units),
        };
        let (mut packer, mut full) = (Packer::new(), Vec::new());
        let mut content = Vec::new();
        while let Some(run) = capture.read(&mut content)? {
            for (unit, content) in run.zip(content.chunks(UNIT_BYTES)) {
                full.extend(packer.put(unit, content, Lane::Rest));
            }
            if full.len() >= BATCH {
                self.store(&mut full)?;
            }
            self.upload.stop.check()?;
            self.pace.wait(content.len());
        }
        let (last, map, packed) = packer.finish(base);
        full.extend(last);
        self.store(&mut full)?;
        Ok((map, packed, capture.finish()))
    }

    fn store(&self, chunks: &mut Vec<NewChunk>) -> anyhow::Result<()> {
        self.upload.chunks(&std::mem::take(chunks))
    }
}

/// Makes a thread slow enough.
struct Pace {
    /// Time before which the thread does not go on.
    next: Instant,
}

impl Pace {
    fn new() -> Pace {
        Pace { next: Instant::now() }
    }

    /// Waits as long as reading `bytes` may take.
    fn wait(&mut self, bytes: usize) {
        let now = Instant::now();
        // What a slow store has left unused is not made up for.
        self.next = self.next.max(now) + Duration::from_secs_f64(bytes as f64 / BYTES_PER_SECOND);
        thread::sleep(self.next - now);
    }
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;
