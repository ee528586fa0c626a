//! The limit of the processor time that a QEMU's vCPUs may use.
//!
//! Only the threads that run the guest are limited; those that answer monitors and disks
//! are not, since checkpoints wait for them. With version 2 that takes a threaded group;
//! version 1 groups threads as they come.

use super::{Controller, Version, find, write};
use anyhow::{Context, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use tracing::warn;
use understudy_qemu::urgency::VCPU_NAMES;

/// A thread that has used its share up stands still for the rest of it: as short as the
/// least quota and the least share allow.
const PERIOD_US: u64 = 50_000;

/// The kernel accepts no less.
const LEAST_QUOTA_US: u64 = 1_000;

/// Groups of ours are named so, with QEMU's process id behind.
const PREFIX: &str = "understudy-";

/// The vCPU threads of one QEMU. Dropping it puts them back where they were.
#[derive(Debug)]
pub struct VcpuGroup {
    directory: PathBuf,
    version: Version,
    vcpus: u64,
}

impl VcpuGroup {
    /// Puts QEMU's vCPU threads into a group of their own, without a limit.
    pub fn create(qemu_pid: u32) -> anyhow::Result<VcpuGroup> {
        let (parent, version) = find(Controller::Cpu, qemu_pid)?;
        remove_stale(&parent);
        let directory = parent.join(format!("{PREFIX}{qemu_pid}"));
        fs::create_dir_all(&directory).with_context(|| {
            format!("cannot make the control group {}; run the daemon as root", directory.display())
        })?;
        let mut group = VcpuGroup { directory, version, vcpus: 0 };
        if version == Version::Two {
            group.write("cgroup.type", "threaded")?;
            write(&parent.join("cgroup.subtree_control"), "+cpu")?;
        }
        for tid in vcpu_threads(qemu_pid)? {
            group.write(group.thread_list(), &tid)?;
            group.vcpus += 1;
        }
        ensure!(group.vcpus > 0, "QEMU (process {qemu_pid}) has no thread named as a vCPU");
        Ok(group)
    }

    /// Lets each vCPU run for this part of the time, 0 to 1; 1 is no limit.
    pub fn limit(&self, share: f64) -> anyhow::Result<()> {
        let quota = (share < 1.0)
            .then(|| ((PERIOD_US * self.vcpus) as f64 * share).max(LEAST_QUOTA_US as f64) as u64);
        match self.version {
            Version::Two => {
                let quota = quota.map_or_else(|| "max".to_owned(), |quota| quota.to_string());
                self.write("cpu.max", &format!("{quota} {PERIOD_US}"))
            }
            Version::One => {
                self.write("cpu.cfs_period_us", &PERIOD_US.to_string())?;
                let quota = quota.map_or_else(|| "-1".to_owned(), |quota| quota.to_string());
                self.write("cpu.cfs_quota_us", &quota)
            }
        }
    }

    fn thread_list(&self) -> &'static str {
        thread_list(self.version)
    }

    fn write(&self, file: &str, value: &str) -> anyhow::Result<()> {
        write(&self.directory.join(file), value)
    }

    fn dissolve(&self) -> anyhow::Result<()> {
        let threads = fs::read_to_string(self.directory.join(self.thread_list()))?;
        let parent = self.directory.parent().context("a group has a parent")?;
        for tid in threads.lines() {
            // It may have ended since it was listed.
            let _ = write(&parent.join(self.thread_list()), tid);
        }
        Ok(fs::remove_dir(&self.directory)?)
    }
}

impl Drop for VcpuGroup {
    fn drop(&mut self) {
        if let Err(error) = self.dissolve() {
            warn!("cannot remove the control group {}: {error:#}", self.directory.display());
        }
    }
}

fn thread_list(version: Version) -> &'static str {
    match version {
        Version::One => "tasks",
        Version::Two => "cgroup.threads",
    }
}

/// Groups of QEMUs whose daemon had no time to remove them.
fn remove_stale(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid =
            name.to_string_lossy().strip_prefix(PREFIX).map(|pid| Path::new("/proc").join(pid));
        if pid.is_some_and(|process| !process.exists()) {
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// The ids of the threads that run the guest.
pub fn vcpu_threads(qemu_pid: u32) -> anyhow::Result<Vec<String>> {
    let mut threads = Vec::new();
    for entry in fs::read_dir(format!("/proc/{qemu_pid}/task")).context("QEMU is gone")? {
        let entry = entry?;
        // It may have ended since it was listed.
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if VCPU_NAMES.iter().any(|prefix| name.starts_with(prefix)) {
            threads.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    Ok(threads)
}
