//! How much processor time a QEMU's vCPUs may use: the kernel's control groups.
//!
//! Only the threads that run the guest are limited; those that answer monitors and disks
//! are not, since checkpoints wait for them. With version 2 that takes a threaded group;
//! version 1 groups threads as they come.

use anyhow::{Context, bail, ensure};
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl VcpuGroup {
    /// Puts QEMU's vCPU threads into a group of their own, without a limit.
    pub fn create(qemu_pid: u32) -> anyhow::Result<VcpuGroup> {
        let (parent, version) = parent(qemu_pid)?;
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

fn write(file: &Path, value: &str) -> anyhow::Result<()> {
    fs::write(file, value).with_context(|| format!("cannot write {value:?} to {}", file.display()))
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

/// Tries to make a group where the CPU controller is for this process, and removes it; returns
/// where that was.
pub fn probe() -> anyhow::Result<PathBuf> {
    let own = std::process::id();
    let (parent, _) = parent(own)?;
    // Not `PREFIX`: that would be taken for a QEMU's.
    let directory = parent.join(format!("doctor-{own}"));
    fs::create_dir(&directory)
        .and_then(|()| fs::remove_dir(&directory))
        .with_context(|| format!("cannot make the control group {}", directory.display()))?;
    Ok(parent)
}

/// The group that QEMU is in, where the CPU controller is.
fn parent(qemu_pid: u32) -> anyhow::Result<(PathBuf, Version)> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("cannot list mounts")?;
    let groups = fs::read_to_string(format!("/proc/{qemu_pid}/cgroup"))
        .context("cannot tell QEMU's control group")?;
    locate(&mounts, &groups)
}

/// The same from the texts of `mountinfo` and `cgroup` in `/proc`.
fn locate(mounts: &str, groups: &str) -> anyhow::Result<(PathBuf, Version)> {
    // Each: ID PARENT DEVICE ROOT MOUNTPOINT OPTIONS … - TYPE SOURCE OPTIONS
    let mounts = mounts.lines().filter_map(|line| {
        let (mount, system) = line.split_once(" - ")?;
        let (mut mount, mut system) = (mount.split(' ').skip(3), system.split(' '));
        let place = (mount.next()?, mount.next()?);
        Some((system.next()?, place, system.nth(1)?))
    });
    let has_cpu = |list: &str| list.split(',').any(|word| word == "cpu");
    // Each: ID:CONTROLLERS:PATH; version 2 names no controllers.
    let group = |wanted: &dyn Fn(&str) -> bool| {
        let mut groups = groups.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        groups.find(|(controllers, _)| wanted(controllers)).map(|(_, path)| path)
    };
    for (kind, (root, point), options) in mounts {
        let (version, path) = match kind {
            "cgroup" if has_cpu(options) => (Version::One, group(&has_cpu)),
            "cgroup2" => (Version::Two, group(&str::is_empty)),
            _ => continue,
        };
        let Some(inside) = path.and_then(|path| Path::new(path).strip_prefix(root).ok()) else {
            continue;
        };
        let directory = Path::new(point).join(inside);
        let controllers = fs::read_to_string(directory.join("cgroup.controllers"));
        if version == Version::One
            || controllers.is_ok_and(|list| list.split_whitespace().any(|word| word == "cpu"))
        {
            return Ok((directory, version));
        }
    }
    bail!(
        "no control group with the CPU controller: mount /sys/fs/cgroup, and delegate the \
         controller to the daemon (Delegate=cpu in its systemd unit)"
    );
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

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "30 24 0:27 / /sys/fs/cgroup/cpuacct rw - cgroup none rw,cpuacct\n\
                       31 24 0:28 / /sys/fs/cgroup/cpu,x rw,nosuid shared:3 - cgroup none rw,cpu\n";

    #[test]
    fn version_one_is_found_where_it_is_mounted() {
        let found = locate(ONE, "3:cpuset:/\n2:cpu,cpuacct:/a/b\n0::/\n").unwrap();
        assert_eq!(found, ("/sys/fs/cgroup/cpu,x/a/b".into(), Version::One));
    }

    #[test]
    fn version_two_is_found_if_it_has_the_controller() {
        let directory = tempfile::tempdir().unwrap();
        let group = directory.path().join("system.slice/u.service");
        fs::create_dir_all(&group).unwrap();
        let point = directory.path().display();
        let mounts = format!("31 24 0:28 / {point} rw shared:3 - cgroup2 none rw\n");
        let groups = "0::/system.slice/u.service\n";
        let refused = locate(&mounts, groups).unwrap_err().to_string();
        assert!(refused.contains("Delegate=cpu"), "{refused}");
        fs::write(group.join("cgroup.controllers"), "memory cpu pids\n").unwrap();
        assert_eq!(locate(&mounts, groups).unwrap(), (group, Version::Two));
    }

    #[test]
    fn without_any_it_says_what_to_do() {
        let refused = locate("", "0::/\n").unwrap_err().to_string();
        assert!(refused.contains("mount /sys/fs/cgroup"), "{refused}");
    }
}
