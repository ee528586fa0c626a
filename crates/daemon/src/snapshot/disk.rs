//! A member's disks, captured for one snapshot, and made again from it.
//!
//! So far in the simplest way: all of a disk is copied into a file while the guest stands still,
//! and saved when it runs again; a restored disk is whole before the guest starts.

use super::Stopped;
use crate::machine::Machine;
use anyhow::Context;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use understudy_disk::Disk;
use understudy_protocol::DiskIndex;
use understudy_snapshot::{
    AreaMap, CHUNK_UNITS, Compression, Lane, NewChunk, Packed, Packer, Store, UNIT_BYTES,
};

/// Bytes that are read at once.
const PIECE: usize = CHUNK_UNITS * UNIT_BYTES;
/// Chunks that are handed to the store, or read from it, at once.
const BATCH: usize = 32;

/// One member's disks, for one snapshot.
pub struct DiskCapture {
    machine: Arc<Machine>,
    compression: Compression,
    /// Copies, in the order of the disks.
    copies: Vec<File>,
}

/// What was saved.
pub struct SavedDisks {
    /// Where each disk's content is.
    pub areas: BTreeMap<DiskIndex, AreaMap>,
    /// What became of the blocks.
    pub packed: Packed,
}

impl DiskCapture {
    /// Prepares while the guest runs. `directory` is the VM's own.
    pub fn arm(
        machine: &Arc<Machine>,
        compression: Compression,
        directory: &Path,
    ) -> anyhow::Result<DiskCapture> {
        let copy = |_: &Arc<Disk>| nameless(directory);
        let copies = machine.disks().iter().map(copy).collect::<anyhow::Result<_>>()?;
        Ok(DiskCapture { machine: machine.clone(), compression, copies })
    }

    /// The guest stands still: the snapshot's content is fixed from here on.
    pub fn take(&mut self) -> anyhow::Result<()> {
        for (disk, copy) in self.machine.disks().iter().zip(&self.copies) {
            let mut piece = vec![0; PIECE];
            for at in (0..disk.export_bytes()).step_by(PIECE) {
                let length = PIECE.min((disk.export_bytes() - at) as usize);
                let piece = &mut piece[..length];
                disk.read(at, piece)?;
                if piece.iter().any(|byte| *byte != 0) {
                    copy.write_all_at(piece, at)?;
                }
            }
        }
        Ok(())
    }

    /// The guest runs: saves all to the store. `base` is where the content of the last
    /// snapshot that exists is.
    pub fn save(
        self,
        store: &Store,
        _base: Option<&BTreeMap<DiskIndex, AreaMap>>,
        stop: &AtomicBool,
    ) -> anyhow::Result<SavedDisks> {
        let mut saved = SavedDisks { areas: BTreeMap::new(), packed: Packed::default() };
        for (disk, copy) in self.machine.disks().iter().zip(&self.copies) {
            let units = disk.export_bytes().div_ceil(UNIT_BYTES as u64);
            let mut packer = Packer::new();
            let mut full: Vec<NewChunk> = Vec::new();
            for unit in 0..units {
                let content = read_unit(copy, unit)?;
                full.extend(packer.put(unit, &content, Lane::Rest));
                if full.len() >= BATCH {
                    Stopped::check(stop)?;
                    store.put_chunks(std::mem::take(&mut full), self.compression)?;
                }
            }
            let (last, map, packed) = packer.finish(&AreaMap::zeros(units));
            full.extend(last);
            store.put_chunks(full, self.compression)?;
            saved.areas.insert(disk.index(), map);
            saved.packed.put += packed.put;
            saved.packed.zeros += packed.zeros;
            saved.packed.duplicates += packed.duplicates;
        }
        Ok(saved)
    }
}

/// A file without a name: gone with its descriptor.
fn nameless(directory: &Path) -> anyhow::Result<File> {
    let path = directory.join("snapshot.partial");
    let make = || -> std::io::Result<File> {
        let file =
            File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
        std::fs::remove_file(&path)?;
        Ok(file)
    };
    make().with_context(|| format!("cannot make {}", path.display()))
}

/// What lies beyond the end of the copy is zero.
fn read_unit(copy: &File, unit: u64) -> std::io::Result<Vec<u8>> {
    let mut content = vec![0; UNIT_BYTES];
    let mut read = 0;
    while read < UNIT_BYTES {
        match copy.read_at(&mut content[read..], unit * UNIT_BYTES as u64 + read as u64)? {
            0 => break,
            more => read += more,
        }
    }
    Ok(content)
}

/// Makes an image of `bytes` bytes at `path`, in place of a file that is there.
pub fn restore(
    store: &Store,
    map: &AreaMap,
    bytes: u64,
    path: &Path,
    stop: &AtomicBool,
) -> anyhow::Result<()> {
    let make = || File::options().read(true).write(true).create(true).truncate(true).open(path);
    let image = make().with_context(|| format!("cannot make {}", path.display()))?;
    image.set_len(bytes)?;
    for chunks in map.chunks().chunks(BATCH) {
        Stopped::check(stop)?;
        store.read_chunks(chunks, |chunk, content| {
            let of_chunk = map.extents().iter().filter(|extent| map.place(extent).chunk == chunk);
            for extent in of_chunk {
                let from = usize::from(map.place(extent).slot) * UNIT_BYTES;
                let at = extent.first * UNIT_BYTES as u64;
                // The last unit may reach beyond the image.
                let length = (extent.count * UNIT_BYTES as u64).min(bytes.saturating_sub(at));
                let content = content.get(from..from + length as usize);
                image.write_all_at(content.context("a chunk of the disk is too short")?, at)?;
            }
            anyhow::Ok(())
        })?;
    }
    Ok(image.sync_all()?)
}
