//! The most that one QEMU may use of its host. What takes more memory is ended by the kernel, alone: a
//! failure of that VM's host, and of no other VM.

use super::{Controller, Version, candidates, find, groups, handing_on, mounts, write};
use anyhow::Context;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use tracing::warn;
use understudy_qemu::{Accelerator, VmDefinition};
use understudy_report::LimitsReport;

/// The bytes that QEMU may hold beside the guest's memory unless the host's configuration says
/// otherwise: its own memory, that of devices, and the kernel's for it.
const BESIDE_BYTES: u64 = 512 << 20;
/// Emulation keeps the code that it has translated, up to so much.
const TRANSLATED_BYTES: u64 = 1 << 30;
/// The divisor of the guest's memory that gives the part for page tables, QEMU's and KVM's.
const PAGE_TABLES: u64 = 128;

/// Groups of QEMUs are named so, with the daemon's process id and a number behind.
const PREFIX: &str = "understudy.qemu-";

/// The most that each QEMU of a host may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of memory beside the guest's; by how the guest is executed if none are given.
    pub memory_beside: Option<u64>,
    /// Number of open files.
    pub descriptors: u64,
    /// Threads beside those that run the guest's processors.
    pub threads: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { memory_beside: None, descriptors: 4096, threads: 256 }
    }
}

impl Limits {
    /// Bytes of memory of a VM's QEMU, the guest's memory included.
    pub fn memory_of(&self, definition: &VmDefinition, accelerator: Accelerator) -> u64 {
        let guest = definition.memory.bytes();
        let beside = self.memory_beside.unwrap_or(match accelerator {
            Accelerator::Kvm => BESIDE_BYTES,
            Accelerator::Tcg => BESIDE_BYTES + TRANSLATED_BYTES,
        });
        guest.saturating_add(guest / PAGE_TABLES).saturating_add(beside)
    }

    /// Threads of a VM's QEMU.
    pub fn threads_of(&self, definition: &VmDefinition) -> u64 {
        self.threads + u64::from(definition.vcpus)
    }
}

/// One QEMU's limits, and the control groups that hold it to them. Dropped behind QEMU's end, it
/// removes the groups.
#[derive(Debug)]
pub struct LimitGroup {
    memory: Option<u64>,
    threads: Option<u64>,
    descriptors: u64,
    directories: Vec<(Controller, Version, PathBuf)>,
    missing: Vec<String>,
}

impl LimitGroup {
    /// Holds a QEMU that has just been started to its limits. What cannot be limited is said in the
    /// log, and in the report.
    pub fn impose(
        limits: &Limits,
        qemu_pid: u32,
        definition: &VmDefinition,
        accelerator: Accelerator,
    ) -> LimitGroup {
        let mut group = LimitGroup {
            memory: None,
            threads: None,
            descriptors: limits.descriptors,
            directories: Vec::new(),
            missing: Vec::new(),
        };
        let (memory, threads) =
            (limits.memory_of(definition, accelerator), limits.threads_of(definition));
        let name = unique_name();
        if group.hold(Controller::Memory, &name, qemu_pid, memory) {
            group.memory = Some(memory);
        }
        if group.hold(Controller::Pids, &name, qemu_pid, threads) {
            group.threads = Some(threads);
        }
        for missing in &group.missing {
            warn!(vm = %definition.name, "QEMU is not limited: {missing}");
        }
        group
    }

    /// The groups of a QEMU that another daemon has started.
    pub fn of_another(limits: &Limits, qemu_pid: u32) -> LimitGroup {
        let directories = [Controller::Memory, Controller::Pids].map(|controller| {
            let (directory, version) = find(controller, qemu_pid).ok()?;
            let is_ours = file_name(&directory).starts_with(PREFIX);
            is_ours.then_some((controller, version, directory))
        });
        let directories: Vec<_> = directories.into_iter().flatten().collect();
        let limit = |wanted| {
            let (controller, version, directory) =
                directories.iter().find(|(controller, ..)| *controller == wanted)?;
            let file = directory.join(limit_file(*controller, *version));
            fs::read_to_string(file).ok()?.trim().parse().ok()
        };
        LimitGroup {
            memory: limit(Controller::Memory),
            threads: limit(Controller::Pids),
            descriptors: limits.descriptors,
            missing: Vec::new(),
            directories,
        }
    }

    /// Whether it could be held to that.
    fn hold(&mut self, controller: Controller, name: &str, pid: u32, most: u64) -> bool {
        let held = || -> anyhow::Result<(Version, PathBuf)> {
            let (parent, version) = place(controller)?;
            remove_stale(&parent);
            let directory = parent.join(name);
            fs::create_dir_all(&directory)
                .with_context(|| format!("cannot make {}", directory.display()))?;
            let limit = || -> anyhow::Result<()> {
                write(&directory.join(limit_file(controller, version)), &most.to_string())?;
                write(&directory.join("cgroup.procs"), &pid.to_string())
            };
            limit().inspect_err(|_| {
                let _ = fs::remove_dir(&directory);
            })?;
            Ok((version, directory))
        };
        match held() {
            Ok((version, directory)) => {
                self.directories.push((controller, version, directory));
                true
            }
            Err(error) => {
                self.missing.push(format!("{}: {error:#}", what(controller)));
                false
            }
        }
    }

    /// The reason why the kernel has ended QEMU, if it went beyond its memory.
    pub fn went_beyond(&self) -> Option<String> {
        let (_, version, directory) =
            self.directories.iter().find(|(controller, ..)| *controller == Controller::Memory)?;
        let read = |file| fs::read_to_string(directory.join(file)).unwrap_or_default();
        // When the whole host is out of memory, kills are counted, and the limit is not reached.
        let (events, reached) = match version {
            Version::One => (read("memory.oom_control"), read("memory.failcnt")),
            Version::Two => (read("memory.events"), field(&read("memory.events"), "oom ")),
        };
        let none = |count: &str| matches!(count.trim(), "" | "0");
        let mib = self.memory? >> 20;
        (!none(&field(&events, "oom_kill ")) && !none(&reached)).then(|| {
            format!(
                "the kernel has ended QEMU, which went beyond its limit of {mib} MiB of memory, the \
                 guest's included ([qemu_process] memory_beside in the host's configuration)"
            )
        })
    }

    /// The report about it.
    pub fn report(&self) -> LimitsReport {
        let used = self.directories.iter().find_map(|(controller, version, directory)| {
            let file = match (controller, version) {
                (Controller::Memory, Version::One) => "memory.usage_in_bytes",
                (Controller::Memory, Version::Two) => "memory.current",
                _ => return None,
            };
            fs::read_to_string(directory.join(file)).ok()?.trim().parse().ok()
        });
        LimitsReport {
            memory_bytes: self.memory,
            memory_used_bytes: used,
            threads: self.threads,
            descriptors: self.descriptors,
            missing: self.missing.clone(),
        }
    }
}

impl Drop for LimitGroup {
    fn drop(&mut self) {
        for (_, _, directory) in &self.directories {
            // Both may be one.
            if directory.exists()
                && let Err(error) = remove(directory)
            {
                warn!("cannot remove the control group {}: {error:#}", directory.display());
            }
        }
    }
}

fn what(controller: Controller) -> &'static str {
    match controller {
        Controller::Cpu => "processor time",
        Controller::Memory => "memory",
        Controller::Pids => "threads",
    }
}

fn limit_file(controller: Controller, version: Version) -> &'static str {
    match (controller, version) {
        (Controller::Cpu, _) => "cpu.max",
        (Controller::Memory, Version::One) => "memory.limit_in_bytes",
        (Controller::Memory, Version::Two) => "memory.max",
        (Controller::Pids, _) => "pids.max",
    }
}

/// The place where this daemon makes groups with the controller.
fn place(controller: Controller) -> anyhow::Result<(PathBuf, Version)> {
    let found = candidates(&mounts()?, &groups(std::process::id())?, controller);
    let one = found.iter().find(|(_, version)| *version == Version::One);
    let (own, version) = one.or(found.first()).with_context(|| super::missing(controller))?;
    match version {
        Version::One => Ok((own.clone(), Version::One)),
        Version::Two => {
            let place = handing_on(own)?;
            anyhow::ensure!(super::has(&place, controller), super::missing(controller));
            Ok((place, Version::Two))
        }
    }
}

fn field(text: &str, name: &str) -> String {
    text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().to_owned()
}

fn unique_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{PREFIX}{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

fn file_name(directory: &Path) -> String {
    directory.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Groups of daemons that had no time to remove them. One with a process in it stays.
fn remove_stale(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let daemon = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
        if daemon.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            let _ = remove(&entry.path());
        }
    }
}

/// Removes a group with what is below it: that of the vCPUs.
fn remove(directory: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(directory)?.flatten().filter(|entry| entry.path().is_dir()) {
        fs::remove_dir(entry.path())?;
    }
    fs::remove_dir(directory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};
    use understudy_protocol::literal;
    use understudy_qemu::definition::MemorySize;

    fn definition() -> VmDefinition {
        VmDefinition::new(literal("db"), "64M".parse::<MemorySize>().unwrap(), 2)
    }

    #[test]
    fn an_emulated_guest_has_room_for_translated_code() {
        let (limits, definition) = (Limits::default(), definition());
        let of = |accelerator| limits.memory_of(&definition, accelerator);
        assert_eq!(of(Accelerator::Tcg) - of(Accelerator::Kvm), TRANSLATED_BYTES);
        assert!(of(Accelerator::Kvm) > definition.memory.bytes() + BESIDE_BYTES);
        let given = Limits { memory_beside: Some(1 << 20), ..limits };
        assert_eq!(given.memory_of(&definition, Accelerator::Tcg), (65 << 20) + (1 << 19));
        assert_eq!(limits.threads_of(&definition), 258);
    }

    fn sleeping() -> Child {
        Command::new("sleep").arg("1000").spawn().unwrap()
    }

    /// A test in real groups, where this machine has them.
    #[test]
    fn a_process_is_held_to_its_limits_and_nothing_is_left_of_them() {
        let mut process = sleeping();
        let limits = Limits { memory_beside: Some(32 << 20), ..Limits::default() };
        let group = LimitGroup::impose(&limits, process.id(), &definition(), Accelerator::Tcg);
        let report = group.report();
        let told = (report.memory_bytes.is_none(), report.threads.is_none());
        for (controller, missing) in [(Controller::Memory, told.0), (Controller::Pids, told.1)] {
            if missing {
                eprintln!("SKIPPED: no {controller} controller: {:?}", report.missing);
                assert!(report.missing.iter().any(|line| line.starts_with(what(controller))));
                continue;
            }
            let (found, version) = find(controller, process.id()).unwrap();
            assert!(file_name(&found).starts_with(PREFIX), "{}", found.display());
            let limit = fs::read_to_string(found.join(limit_file(controller, version))).unwrap();
            let expected = match controller {
                Controller::Memory => limits.memory_of(&definition(), Accelerator::Tcg),
                _ => 258,
            };
            assert_eq!(limit.trim(), expected.to_string());
        }
        assert_eq!(group.went_beyond(), None);
        let again = LimitGroup::of_another(&limits, process.id());
        assert_eq!(again.report().memory_bytes, report.memory_bytes);
        std::mem::forget(again);
        process.kill().unwrap();
        process.wait().unwrap();
        let directories = group.directories.clone();
        drop(group);
        assert!(directories.iter().all(|(_, _, directory)| !directory.exists()));
    }

    #[test]
    fn groups_of_a_daemon_that_is_gone_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let (gone, own) =
            (format!("{PREFIX}4194305-3"), format!("{PREFIX}{}-1", std::process::id()));
        for name in [&gone, &own, "understudy-17"] {
            fs::create_dir(directory.path().join(name)).unwrap();
        }
        remove_stale(directory.path());
        assert!(!directory.path().join(gone).exists());
        assert!(directory.path().join(own).exists());
        assert!(directory.path().join("understudy-17").exists());
    }
}
