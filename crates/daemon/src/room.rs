//! Whether this host has room for one more VM, or backup of one.
//!
//! Disks are counted as they are: images are sparse, and nobody knows what a guest will write.
//! Memory that a VM was promised counts before it is used: a standby fills up only
//! while it is synchronised, and a guest takes its memory when it first writes it.

use crate::host::Host;
use crate::vm::Vm;
use nix::sys::statvfs::statvfs;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use understudy_machine::Machine;
use understudy_memory::{GuestRam, field_bytes};
use understudy_protocol::VmName;
use understudy_qemu::process::children_of;
use understudy_replication::handshake::{FileOffer, FileRole, Offer};
use understudy_replication::primary::EPOCH_DISK_BYTES;
use understudy_report::error::{ErrorKind, HostError};

/// Bytes that a VM takes beside the guest's memory: QEMU, the daemon's queues (32 MiB), and what
/// the guest writes to its disks in one epoch, which a backup keeps until that is whole.
const BESIDE_BYTES: u64 = (96 << 20) + EPOCH_DISK_BYTES;

/// Bytes that a backup keeps beside a VM's mirrors, roughly: records, logs, lists of changes.
const BESIDE_DISKS_BYTES: u64 = 16 * MIB;

const MIB: u64 = 1 << 20;

/// Memory that the VMs on a host take, and what is left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Room {
    /// VMs and backups.
    vms: usize,
    /// Bytes that they may take.
    promised: u64,
    /// Bytes of these that they have not taken yet.
    untaken: u64,
    /// Bytes that the system has left.
    available: u64,
    /// The most that VMs may take, by the host's configuration.
    limit: Option<u64>,
}

impl Host {
    /// Refuses a VM for whose memory this host has no room. To be called under the
    /// lock `adding`, so that no two VMs are given the same room.
    pub(crate) fn check_memory(&self, bytes: u64) -> Result<(), HostError> {
        let internal =
            |error| HostError::new(ErrorKind::Internal, format!("cannot count memory: {error:#}"));
        let room = self.room().map_err(internal)?;
        room.refusal(bytes, &self.config.name)
            .map_or(Ok(()), |message| Err(HostError::new(ErrorKind::Invalid, message)))
    }

    /// Refuses a VM for whose disks, as they are now, there is no room in the directory of their
    /// mirrors. Returns what is to be said if they could outgrow it.
    pub(crate) fn check_disk_room(
        &self,
        offer: &Offer,
        directory: &Path,
    ) -> Result<Option<String>, HostError> {
        fail::fail_point!("room-for-any-disk", |_| Ok(None));
        let space = DiskSpace {
            used: used_by(offer),
            full: sum(offer.disk_bytes.iter().map(|&bytes| bytes.into())),
            free: free_in(directory)?,
        };
        self.check_space(&space, directory)?;
        Ok(space.warning(&self.config.name, directory))
    }

    /// Refuses a VM's disks, of which images are to be made that take so much now, for which there is no room.
    pub(crate) fn check_room_for_disks(&self, vm: &VmName, used: u64) -> Result<(), HostError> {
        fail::fail_point!("room-for-any-disk", |_| Ok(()));
        // Its directory may be on a file system of its own.
        let own = vm.below(&self.config.state_dir);
        let directory = if own.exists() { &own } else { &self.config.state_dir };
        self.check_space(&DiskSpace { used, full: used, free: free_in(directory)? }, directory)
    }

    fn check_space(&self, space: &DiskSpace, directory: &Path) -> Result<(), HostError> {
        let refusal = space.refusal(&self.config.name, directory);
        refusal.map_or(Ok(()), |message| Err(HostError::new(ErrorKind::Invalid, message)))
    }

    /// Bytes of memory that this host could promise to further VMs.
    pub(crate) fn free_memory(&self) -> u64 {
        self.room().map_or(0, |room| room.free())
    }

    fn room(&self) -> anyhow::Result<Room> {
        let mut room = Room {
            available: field_bytes(Path::new("/proc/meminfo"), "MemAvailable:")?,
            limit: self.config.memory_limit,
            ..Room::default()
        };
        for machine in self.machines() {
            let ram = machine.ram();
            // A QEMU that has just ended takes nothing, and will not.
            let status = format!("/proc/{}/status", machine.qemu_pid());
            let beside = field_bytes(Path::new(&status), "RssAnon:").unwrap_or(BESIDE_BYTES);
            room.vms += 1;
            room.promised += ram.bytes() + BESIDE_BYTES;
            room.untaken += ram.bytes().saturating_sub(ram.resident_bytes()?);
            room.untaken += BESIDE_BYTES.saturating_sub(beside);
        }
        let mut by_keeper: BTreeMap<Option<u32>, Bytes> = BTreeMap::new();
        let mut kept = BTreeSet::new();
        for keeper in self.keepers() {
            let Some(definition) = self.kept_definition(&keeper) else { continue };
            kept.insert(keeper.vm.clone());
            room.vms += 1;
            let promised = by_keeper.entry(keeper.pid).or_default();
            promised.guests += definition.memory.bytes();
            promised.beside += BESIDE_BYTES;
        }
        for (keeper, promised) in by_keeper {
            let taken = keeper.map(taken_by).unwrap_or_default();
            room.promised += promised.guests + promised.beside;
            room.untaken += promised.guests.saturating_sub(taken.guests);
            room.untaken += promised.beside.saturating_sub(taken.beside);
        }
        for expected in self.arrivals.all() {
            let name = &expected.definition.name;
            let there = kept.contains(name) || self.vms.has(name);
            let bytes = expected.definition.memory.bytes() + BESIDE_BYTES;
            if !there {
                room.vms += 1;
                room.promised += bytes;
                room.untaken += bytes;
            }
        }
        Ok(room)
    }

    fn machines(&self) -> Vec<Arc<Machine>> {
        let machine = |vm: Vm| match vm {
            Vm::Primary(vm) => Some(vm.machine()),
            Vm::Backup(session) => Some(session.machine()),
            Vm::Fenced(_) => None,
        };
        self.vms.all().into_values().filter_map(machine).collect()
    }
}

/// Memory of a keeper's VMs.
#[derive(Clone, Copy, Debug, Default)]
struct Bytes {
    guests: u64,
    beside: u64,
}

/// Bytes that a keeper's VMs have taken; what cannot be read is not taken yet. A backup's memory is written by its keeper,
/// so that its QEMU has mapped next to nothing of it.
fn taken_by(keeper: u32) -> Bytes {
    let of_one = |child: u32| {
        let status = PathBuf::from(format!("/proc/{child}/status"));
        field_bytes(&status, "RssAnon:").unwrap_or(0)
    };
    let beside = children_of(keeper).into_iter().map(of_one).sum();
    Bytes { guests: GuestRam::bytes_held_by(keeper), beside }
}

/// Bytes that a mirror of the offered VM begins with.
fn used_by(offer: &Offer) -> u64 {
    let boots = |file: &&FileOffer| !matches!(file.role, FileRole::DiskHead(_));
    let boot_files = offer.files.iter().filter(boots).map(|file| file.bytes);
    sum(offer.disk_used.iter().copied().chain(boot_files))
}

/// Sum of sizes that a peer names.
fn sum(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

/// Space that the disks of a VM take, and what is left for them.
#[derive(Clone, Copy, Debug)]
struct DiskSpace {
    /// Bytes that they take now, with the files to boot from.
    used: u64,
    /// Bytes that they can grow to.
    full: u64,
    /// Bytes that the file system has left.
    free: u64,
}

impl DiskSpace {
    /// Reason why they do not fit, for people.
    fn refusal(&self, host: &str, directory: &Path) -> Option<String> {
        let needed = self.used.saturating_add(BESIDE_DISKS_BYTES);
        (needed > self.free).then(|| {
            format!(
                "there is no space for the VM's disks: they take {} MiB now, and {} MiB beside them \
                 are needed; host {host} has {} MiB left in {}",
                self.used.div_ceil(MIB),
                BESIDE_DISKS_BYTES / MIB,
                self.free / MIB,
                directory.display()
            )
        })
    }

    /// Whether they fit now, but not for good.
    fn warning(&self, host: &str, directory: &Path) -> Option<String> {
        let needed = self.full.saturating_add(BESIDE_DISKS_BYTES);
        (needed > self.free).then(|| {
            format!(
                "the disks can grow to {} MiB, and host {host} has {} MiB left in {}: protection \
                 will end if they outgrow that",
                self.full.div_ceil(MIB),
                self.free / MIB,
                directory.display()
            )
        })
    }
}

impl Room {
    fn free(&self) -> u64 {
        let free = self.available.saturating_sub(self.untaken);
        self.limit.map_or(free, |limit| free.min(limit.saturating_sub(self.promised)))
    }

    /// Reason why a guest of so many bytes does not fit, for people.
    fn refusal(&self, bytes: u64, host: &str) -> Option<String> {
        let Room { vms, promised, untaken, available, limit } = *self;
        let needed = bytes.saturating_add(BESIDE_BYTES);
        let mib = |bytes: u64| bytes >> 20;
        let wish = format!(
            "the VM needs {} MiB of memory ({} for the guest, {} beside it)",
            mib(needed),
            mib(bytes),
            mib(BESIDE_BYTES)
        );
        if let Some(limit) = limit.filter(|limit| promised.saturating_add(needed) > *limit) {
            return Some(format!(
                "{wish}; host {host} gives its VMs {} MiB by its configuration (`memory`), of which \
                 {vms} have {} MiB",
                mib(limit),
                mib(promised)
            ));
        }
        (untaken.saturating_add(needed) > available).then(|| {
            format!(
                "{wish}; host {host} has {} MiB available, of which {} MiB are promised to the {vms} VMs \
                 and backups there",
                mib(available),
                mib(untaken)
            )
        })
    }
}

fn free_in(directory: &Path) -> Result<u64, HostError> {
    let file_system = statvfs(directory).map_err(|error| {
        let message = format!("cannot tell the room in {}: {error}", directory.display());
        HostError::new(ErrorKind::Internal, message)
    })?;
    Ok(file_system.blocks_available() * file_system.fragment_size())
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::PageIndex;
    use understudy_report::events::EventKind;

    const GIB: u64 = 1 << 30;

    #[test]
    fn promises_count_before_they_are_used() {
        let room =
            Room { vms: 3, promised: 3 * GIB, untaken: 2 * GIB, available: 3 * GIB, limit: None };
        assert_eq!(room.refusal(GIB / 2, "b"), None);
        let refusal = room.refusal(GIB, "b").unwrap();
        for part in [
            "needs 1184 MiB",
            "1024 for the guest",
            "has 3072 MiB",
            "2048 MiB are promised",
            "3 VMs",
        ] {
            assert!(refusal.contains(part), "{refusal}");
        }
        assert_eq!(room.free(), GIB);
        let taken = Room { untaken: 0, ..room };
        assert_eq!(taken.refusal(GIB, "b"), None);
        // As a peer may ask for: the sum was a small one.
        assert!(taken.refusal(u64::MAX, "b").is_some());
    }

    /// A host that is asked every few seconds has other figures each time.
    #[test]
    fn a_refusal_is_one_event_however_little_is_left() {
        let directory = Path::new("/var/lib/understudy/db-2");
        let no_backup = |reason: Option<String>| EventKind::NoBackup {
            reason: format!("host b: {}", reason.unwrap()),
        };
        let memory = |available: u64| {
            let room =
                Room { vms: 1, promised: GIB, untaken: available / 3, available, limit: None };
            no_backup(room.refusal(GIB, "b"))
        };
        let disks = |free: u64| {
            let space = DiskSpace { used: GIB, full: GIB, free };
            no_backup(space.refusal("b", directory))
        };
        assert_ne!(memory(100 * MIB), memory(200 * MIB));
        assert!(memory(100 * MIB).says_the_same(&memory(200 * MIB)));
        assert!(disks(100 * MIB).says_the_same(&disks(0)));
        assert!(!disks(100 * MIB).says_the_same(&memory(100 * MIB)));
    }

    #[test]
    fn a_configured_limit_holds_whatever_is_available() {
        let room =
            Room { vms: 1, promised: GIB, untaken: 0, available: 64 * GIB, limit: Some(2 * GIB) };
        assert_eq!(room.refusal(GIB / 2, "b"), None);
        assert_eq!(room.free(), GIB);
        let refusal = room.refusal(GIB, "b").unwrap();
        for part in ["gives its VMs 2048 MiB", "`memory`", "1 have 1024 MiB"] {
            assert!(refusal.contains(part), "{refusal}");
        }
    }

    #[test]
    fn disks_must_fit_as_they_are_and_growth_is_told() {
        let directory = Path::new("/var/lib/understudy/db");
        let space = DiskSpace { used: 100 * MIB, full: GIB, free: 4 * GIB };
        assert_eq!((space.refusal("b", directory), space.warning("b", directory)), (None, None));
        let tight = DiskSpace { free: 200 * MIB, ..space };
        assert_eq!(tight.refusal("b", directory), None);
        let words = tight.warning("b", directory).unwrap();
        assert!(words.contains("grow to 1024 MiB") && words.contains("200 MiB left"), "{words}");
        let full = DiskSpace { free: 110 * MIB, ..space };
        let words = full.refusal("b", directory).unwrap();
        for part in ["no space", "take 100 MiB", "host b has 110 MiB left in /var/lib"] {
            assert!(words.contains(part), "{words}");
        }
    }

    /// A backup's memory is written by its keeper, and a replaced keeper's QEMU is not its child: counted by what QEMUs have
    /// mapped, the memory of both was still promised when it was taken.
    #[test]
    fn a_guests_memory_is_taken_whoever_has_written_it() {
        let (ram, before) = (GuestRam::create(8 * MIB).unwrap(), taken_by(std::process::id()));
        ram.write(PageIndex(0), &vec![1; 4 << 20]);
        let taken = taken_by(std::process::id()).guests - before.guests;
        assert_eq!(taken, 4 * MIB, "of those that are there, whatever else this process has");
    }

    #[test]
    fn sizes_that_a_peer_names_have_no_small_sum() {
        assert_eq!(sum([MIB, 2 * MIB].into_iter()), 3 * MIB);
        assert_eq!(sum([u64::MAX, 2].into_iter()), u64::MAX);
    }
}
