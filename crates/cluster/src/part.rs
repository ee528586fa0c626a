//! A member's part of a snapshot, as it is described in the store.

use crate::messages::{SavedVm, TakeTask};
use crate::upload::Upload;
use anyhow::Context;
use std::collections::BTreeMap;
use std::path::Path;
use understudy_machine::Machine;
use understudy_memory::RamBlock;
use understudy_protocol::{BlockId, DiskIndex, PAGE_SIZE};
use understudy_snapshot::{
    Area, AreaEntry, AreaMap, Blob, InFlightFrame, MemberManifest, Part, SnapshotNumber,
};

use crate::crossing::crossings;

/// RAM blocks and disks of a machine.
pub struct Shape {
    blocks: Vec<RamBlock>,
    /// Each disk with its name and its bytes.
    disks: Vec<(DiskIndex, String, u64)>,
}

/// Content that is in the store already, and what was found.
pub struct Content {
    /// All RAM blocks and disks.
    pub areas: Vec<AreaEntry>,
    /// QEMU's device state.
    pub device_state: Blob,
    /// The queue in which memory is loaded.
    pub working_set: Blob,
    /// Pages by their last access.
    pub recent: Option<Blob>,
    /// Pages that CLOCK keeps.
    pub clock: Option<Blob>,
    /// The working set in normal running, if that was sampled.
    pub sampled: Option<u64>,
    /// Microseconds for which the guest stood still for the snapshot.
    pub pause_us: u64,
    /// Snapshot that has what was not saved again.
    pub base: Option<SnapshotNumber>,
}

impl Shape {
    /// Makes the shape of this machine.
    pub fn of(machine: &Machine) -> Shape {
        let (disks, definition) = (machine.disks(), machine.definition_now());
        let disks = disks.iter().zip(&definition.disks).map(|(disk, defined)| {
            (disk.index(), defined.path.display().to_string(), disk.export_bytes())
        });
        Shape { blocks: machine.blocks().to_vec(), disks: disks.collect() }
    }

    /// The RAM blocks.
    pub fn blocks(&self) -> &[RamBlock] {
        &self.blocks
    }

    /// Stores where all of it is.
    pub fn put_areas(
        &self,
        upload: Upload<'_>,
        memory: &BTreeMap<BlockId, AreaMap>,
        disks: &BTreeMap<DiskIndex, AreaMap>,
    ) -> anyhow::Result<Vec<AreaEntry>> {
        let put = |map: &AreaMap| upload.blob(&map.encode());
        let mut areas = Vec::new();
        for block in &self.blocks {
            let map = put(memory.get(&block.id()).context("a RAM block was not saved")?)?;
            let bytes = block.pages() * PAGE_SIZE as u64;
            let (area, name) = (Area::Memory(block.id()), block.name().to_owned());
            areas.push(AreaEntry { area, name, bytes, map });
        }
        for (index, name, bytes) in &self.disks {
            let map = put(disks.get(index).context("a disk was not saved")?)?;
            let (area, name) = (Area::Disk(*index), name.clone());
            areas.push(AreaEntry { area, name, bytes: *bytes, map });
        }
        Ok(areas)
    }
}

/// Stores the description of a member's part. `qemu` is the version that it runs in, `log` what
/// was in flight to it.
pub fn put_part(
    upload: Upload<'_>,
    task: &TakeTask,
    machine: &Machine,
    qemu: String,
    log: &[InFlightFrame],
    content: Content,
) -> anyhow::Result<Part> {
    let definition = machine.definition_now();
    let saved =
        SavedVm { definition: (*definition).clone().into(), accelerator: machine.accelerator() };
    let manifest = MemberManifest {
        name: task.vm().to_owned(),
        machine: understudy_snapshot::Machine {
            qemu,
            machine_type: machine.machine_type().to_owned(),
            vcpus: definition.vcpus,
            memory: definition.memory.bytes(),
        },
        definition: serde_json::to_value(&saved)?,
        firmware: file_blob(upload, task, definition.firmware.as_deref())?,
        kernel: file_blob(upload, task, definition.kernel.as_deref())?,
        initrd: file_blob(upload, task, definition.initrd.as_deref())?,
        areas: content.areas,
        device_state: content.device_state,
        in_flight: upload.frames(log)?,
        working_set: content.working_set,
        recent: content.recent,
        clock: content.clock,
        sampled: content.sampled,
        pause_us: content.pause_us,
        base: content.base,
    };
    let crossings = crossings(task.member, log);
    Ok(Part { manifest: upload.member(&manifest)?, crossings })
}

fn file_blob(
    upload: Upload<'_>,
    task: &TakeTask,
    path: Option<&Path>,
) -> anyhow::Result<Option<Blob>> {
    let Some(path) = path else { return Ok(None) };
    let bytes = std::fs::read(path)
        .with_context(|| format!("cannot read {}, which {} boots", path.display(), task.vm()))?;
    Ok(Some(upload.blob(&bytes)?))
}
