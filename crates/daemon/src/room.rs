//! Whether this host has room for one more VM, or backup of one.
//!
//! Memory that a VM was promised counts before it is used: a standby fills up only
//! while it is synchronised, and a guest takes its memory when it first writes it.

use crate::error::{ErrorKind, HostError};
use crate::host::Host;
use crate::machine::Machine;
use crate::sync::lock;
use crate::vm::Vm;
use std::path::Path;
use std::sync::Arc;

/// What a VM takes beside the guest's memory, at most: QEMU, the daemon's queues
/// (32 MiB) and the epoch in them.
const BESIDE_BYTES: u64 = 96 << 20;

/// What the VMs on a host take, and what is left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Room {
    /// VMs and backups.
    vms: usize,
    /// Bytes that they may take.
    promised: u64,
    /// Of these, bytes that they have not taken yet.
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

    /// Bytes of memory that this host could promise to further VMs.
    pub(crate) fn free_memory(&self) -> u64 {
        self.room().map_or(0, |room| room.free())
    }

    fn room(&self) -> anyhow::Result<Room> {
        let mut room = Room {
            available: kib_field(Path::new("/proc/meminfo"), "MemAvailable:")?,
            limit: self.config.memory_limit,
            ..Room::default()
        };
        for machine in self.machines() {
            let ram = machine.ram();
            // A QEMU that has just ended takes nothing, and will not.
            let status = format!("/proc/{}/status", machine.qemu_pid());
            let beside = kib_field(Path::new(&status), "RssAnon:").unwrap_or(BESIDE_BYTES);
            room.vms += 1;
            room.promised += ram.bytes() + BESIDE_BYTES;
            room.untaken += ram.bytes().saturating_sub(ram.resident_bytes()?);
            room.untaken += BESIDE_BYTES.saturating_sub(beside);
        }
        Ok(room)
    }

    fn machines(&self) -> Vec<Arc<Machine>> {
        let machine = |vm: &Vm| match vm {
            Vm::Primary(vm) => Some(vm.machine()),
            Vm::Backup(session) => Some(session.machine()),
            Vm::Fenced(_) => None,
        };
        lock(&self.vms).values().filter_map(machine).collect()
    }
}

impl Room {
    fn free(&self) -> u64 {
        let free = self.available.saturating_sub(self.untaken);
        self.limit.map_or(free, |limit| free.min(limit.saturating_sub(self.promised)))
    }

    /// Why a guest of so many bytes does not fit, for people.
    fn refusal(&self, bytes: u64, host: &str) -> Option<String> {
        let Room { vms, promised, untaken, available, limit } = *self;
        let needed = bytes + BESIDE_BYTES;
        let mib = |bytes: u64| bytes >> 20;
        let wish = format!(
            "the VM needs {} MiB of memory ({} for the guest, {} beside it)",
            mib(needed),
            mib(bytes),
            mib(BESIDE_BYTES)
        );
        if let Some(limit) = limit.filter(|limit| promised + needed > *limit) {
            return Some(format!(
                "{wish}; host {host} gives its VMs {} MiB by its configuration (`memory`), of which \
                 {vms} have {} MiB",
                mib(limit),
                mib(promised)
            ));
        }
        (untaken + needed > available).then(|| {
            format!(
                "{wish}; host {host} has {} MiB available, of which {} MiB are promised to the {vms} VMs \
                 and backups there",
                mib(available),
                mib(untaken)
            )
        })
    }
}

/// A field of a file like `/proc/meminfo`, in bytes.
fn kib_field(file: &Path, name: &str) -> anyhow::Result<u64> {
    let text = std::fs::read_to_string(file)?;
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|rest| rest.trim().strip_suffix(" kB"))
        .and_then(|number| number.trim().parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| anyhow::anyhow!("{} has no {name}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn promises_count_before_they_are_used() {
        let room =
            Room { vms: 3, promised: 3 * GIB, untaken: 2 * GIB, available: 3 * GIB, limit: None };
        assert_eq!(room.refusal(GIB / 2, "b"), None);
        let refusal = room.refusal(GIB, "b").unwrap();
        for part in [
            "needs 1120 MiB",
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
    fn this_machine_says_what_it_has() {
        assert!(kib_field(Path::new("/proc/meminfo"), "MemAvailable:").unwrap() > 0);
        assert!(kib_field(Path::new("/proc/self/status"), "RssAnon:").unwrap() > 0);
        let error = kib_field(Path::new("/proc/meminfo"), "Nonsense:").unwrap_err().to_string();
        assert!(error.contains("Nonsense"), "{error}");
    }
}
