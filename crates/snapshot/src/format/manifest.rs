//! The manifest of what a snapshot consists of. It is written last: without it there is none.

use super::chunk::{BLOB_CHUNK_BYTES, Compression};
use crate::graph::Crossing;
use crate::{Area, ChunkId, Incarnation, SnapshotNumber, UNIT_BYTES};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use understudy_protocol::{BlockId, GroupName, HostName, VmName};

/// QEMU's list of RAM blocks begins with the main memory.
const MAIN_MEMORY: Area = Area::Memory(BlockId(0));

/// The largest main memory that a definition can have: 16 TiB.
const MOST_MEMORY: u64 = 1 << 44;

/// A size larger than all other RAM blocks of a VM have together, video memory among them: 8 GiB.
const MOST_OTHER_BLOCKS: u64 = 8 << 30;

/// A size larger than all disks of a VM have together: 64 TiB.
const MOST_DISKS: u64 = 1 << 46;

/// A snapshot of a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The group's name.
    pub group: GroupName,
    /// The snapshot's number in the group.
    pub number: SnapshotNumber,
    /// The name that its user gave it. Labelled snapshots are never deleted by retention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// The time at which it was taken, in seconds since 1970, by the clock of the coordinator's
    /// host.
    pub taken_at: u64,
    /// The group's incarnation in which it was taken.
    #[serde(alias = "life")]
    pub incarnation: Incarnation,
    /// The packing of its own chunks; those that were there before may be packed otherwise.
    pub compression: Compression,
    /// The members, in the order of the group's definition.
    pub members: Vec<MemberEntry>,
    /// Frames in flight between members at the cut: what the order of starts is made of.
    pub crossings: Vec<Crossing>,
}

/// A member in the manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemberEntry {
    /// The VM's name.
    pub name: VmName,
    /// The host that it ran on.
    pub host: HostName,
    /// Bytes of guest memory: what its restore will need.
    pub memory: u64,
    /// Its [`MemberManifest`].
    pub part: Blob,
}

/// One member's part, written by the host that it ran on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemberManifest {
    /// The VM's name.
    pub name: VmName,
    /// The machine that it ran on.
    pub machine: Machine,
    /// The VM's definition, as the daemon sends it to other hosts.
    pub definition: serde_json::Value,
    /// The code of its firmware, for a VM that does not have the machine's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firmware: Option<Blob>,
    /// The kernel that QEMU reads when it starts, for a VM that boots one directly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<Blob>,
    /// The kernel's initial RAM disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initrd: Option<Blob>,
    /// All RAM blocks and disks.
    pub areas: Vec<AreaEntry>,
    /// QEMU's device state.
    pub device_state: Blob,
    /// Frames to be delivered after the restore.
    pub in_flight: Blob,
    /// The queue of first accesses.
    pub working_set: Blob,
    /// Pages by their last access, the last one first, and the size that sampling alone gives:
    /// for [`Mode::WorkingSet`](crate::Mode::WorkingSet), where that is compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recent: Option<Blob>,
    /// The pages that CLOCK keeps of the same accesses in as many pages as the working set has: to
    /// compare.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock: Option<Blob>,
    /// The working set in pages that sampling in normal running gave; none if nobody sampled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampled: Option<u64>,
    /// Pause of the guest in microseconds; 0 if there was none.
    #[serde(default)]
    pub pause_us: u64,
    /// The snapshot whose chunks stand for what did not change; none if everything was saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<SnapshotNumber>,
}

/// The machine, to no other than which device state fits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// QEMU's version, as its monitor says it.
    pub qemu: String,
    /// The machine type with its version.
    pub machine_type: String,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Bytes of main memory.
    pub memory: u64,
}

/// A RAM block or a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AreaEntry {
    /// The block or disk.
    pub area: Area,
    /// QEMU's name of the RAM block; the disk's path in the definition.
    pub name: String,
    /// Its length in bytes. The last unit is filled up with zeros.
    pub bytes: u64,
    /// Its [`AreaMap`](super::AreaMap).
    pub map: Blob,
}

/// Bytes that are stored in one chunk or several.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blob {
    /// Number of bytes.
    pub bytes: u64,
    /// The chunks, in order.
    pub chunks: Vec<ChunkId>,
}

impl Blob {
    /// Whether these are its bytes.
    pub fn holds(&self, bytes: &[u8]) -> bool {
        let pieces = bytes.chunks(BLOB_CHUNK_BYTES).map(ChunkId::of);
        bytes.len() as u64 == self.bytes && pieces.eq(self.chunks.iter().copied())
    }
}

/// The reason why a member cannot be restored on a host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// Another QEMU.
    #[error(
        "{member} was saved by QEMU {saved}, this host has {here}; install QEMU {saved} on it, \
         or restore on a host that has it"
    )]
    Qemu {
        /// The VM.
        member: VmName,
        /// The version that saved it.
        saved: String,
        /// The version on this host.
        here: String,
    },
    /// A machine type that this QEMU does not have.
    #[error("{member} is a machine of type {machine_type}, which this host's QEMU does not have")]
    MachineType {
        /// The VM.
        member: VmName,
        /// Its machine type.
        machine_type: String,
    },
    /// The memory is too little for all members that are to be restored there.
    #[error(
        "the members {members} need {needed} bytes of memory, this host has {free} to spare; \
         name more hosts with --onto, or stop VMs"
    )]
    Memory {
        /// The VMs.
        members: String,
        /// Bytes that they need together.
        needed: u64,
        /// Bytes that there are.
        free: u64,
    },
}

impl Unfit {
    /// Whether `members` can be restored on a host with this QEMU, these machine types, and so
    /// many bytes of memory to spare. To be asked before anything is started.
    pub fn check(
        members: &[MemberManifest],
        qemu: &str,
        machine_types: &[String],
        free: u64,
    ) -> Result<(), Unfit> {
        for MemberManifest { name, machine, .. } in members {
            let (member, saved) = (name.clone(), machine.qemu.clone());
            if saved != qemu {
                return Err(Unfit::Qemu { member, saved, here: qemu.to_owned() });
            }
            if !machine_types.contains(&machine.machine_type) {
                let machine_type = machine.machine_type.clone();
                return Err(Unfit::MachineType { member, machine_type });
            }
        }
        let memory = members.iter().map(|member| member.machine.memory);
        let needed = memory.fold(0, u64::saturating_add);
        if needed > free {
            let names: Vec<&str> = members.iter().map(|member| &member.name[..]).collect();
            return Err(Unfit::Memory { members: names.join(", "), needed, free });
        }
        Ok(())
    }
}

impl Manifest {
    /// Checks a manifest that could be read for what is wrong with it.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        let names: BTreeSet<_> = self.members.iter().map(|member| &member.name).collect();
        if names.len() != self.members.len() || self.members.len() > usize::from(u16::MAX) {
            return Err("it has a member twice, or too many");
        }
        let there = |crossing: &Crossing| {
            let (from, to) = (crossing.from.index(), crossing.to.index());
            from.max(to) < self.members.len()
        };
        match self.crossings.iter().all(there) {
            true => Ok(()),
            false => Err("it has frames of a member that it does not have"),
        }
    }
}

impl MemberManifest {
    /// Checks a part that could be read for what is wrong with it. A map of few bytes can stand for
    /// any length: what is allocated for an area is as long as it is said to be here.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        let areas: BTreeSet<Area> = self.areas.iter().map(|entry| entry.area).collect();
        if areas.len() != self.areas.len() {
            return Err("it has a RAM block or a disk twice");
        }
        let main = self.areas.iter().find(|entry| entry.area == MAIN_MEMORY);
        let main = main.ok_or("it has no main memory")?.bytes;
        if main != self.machine.memory || main > MOST_MEMORY {
            return Err("its main memory is not as long as its machine's");
        }
        if self.bytes_of(|area| matches!(area, Area::Memory(_))) - main > MOST_OTHER_BLOCKS {
            return Err("its RAM blocks are longer than any machine's");
        }
        if self.bytes_of(|area| matches!(area, Area::Disk(_))) > MOST_DISKS {
            return Err("its disks are longer than any machine's");
        }
        match self.sampled.is_some_and(|pages| pages > self.pages()) {
            true => Err("its working set is larger than its memory"),
            false => Ok(()),
        }
    }

    fn bytes_of(&self, is_meant: impl Fn(Area) -> bool) -> u64 {
        let meant = self.areas.iter().filter(|entry| is_meant(entry.area));
        meant.map(|entry| entry.bytes).fold(0, u64::saturating_add)
    }

    /// Pages of all RAM blocks.
    pub(crate) fn pages(&self) -> u64 {
        let bytes = self.bytes_of(|area| matches!(area, Area::Memory(_)));
        bytes.div_ceil(UNIT_BYTES as u64)
    }

    /// The blobs that it refers to.
    pub(crate) fn blobs(&self) -> impl Iterator<Item = &Blob> {
        let areas = self.areas.iter().map(|entry| &entry.map);
        let always = [&self.device_state, &self.in_flight, &self.working_set];
        areas
            .chain(always)
            .chain(&self.recent)
            .chain(&self.clock)
            .chain(&self.firmware)
            .chain(&self.kernel)
            .chain(&self.initrd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str, memory: u64) -> MemberManifest {
        let machine = Machine {
            qemu: "10.0.2".into(),
            machine_type: "pc-i440fx-10.0".into(),
            vcpus: 1,
            memory,
        };
        MemberManifest {
            name: name.parse().unwrap(),
            machine,
            definition: serde_json::Value::Null,
            firmware: None,
            kernel: None,
            initrd: None,
            areas: vec![],
            device_state: Blob::default(),
            in_flight: Blob::default(),
            working_set: Blob::default(),
            recent: None,
            clock: None,
            sampled: None,
            pause_us: 0,
            base: None,
        }
    }

    #[test]
    fn a_host_that_does_not_fit_is_told_why() {
        let members = [member("db", 512), member("web", 256)];
        let types = ["pc-i440fx-10.0".to_owned()];
        assert_eq!(Unfit::check(&members, "10.0.2", &types, 768), Ok(()));
        let told = |qemu, types: &[String], free| {
            Unfit::check(&members, qemu, types, free).unwrap_err().to_string()
        };
        assert!(told("9.2.0", &types, 768).starts_with("db was saved by QEMU 10.0.2, this host"));
        assert!(told("10.0.2", &[], 768).contains("type pc-i440fx-10.0"));
        assert!(told("10.0.2", &types, 767).contains("db, web need 768 bytes"));
        let immense = [member("db", u64::MAX), member("web", 256)];
        assert!(Unfit::check(&immense, "10.0.2", &types, 768).is_err());
    }
}
