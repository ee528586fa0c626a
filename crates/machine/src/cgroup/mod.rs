//! The kernel's control groups, in either version: how much of its host a QEMU may use.

mod limits;
mod vcpus;

pub use limits::{LimitGroup, Limits};
pub use vcpus::{VcpuGroup, vcpu_threads};

use anyhow::{Context, bail};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// A resource that a group can limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controller {
    /// Processor time.
    Cpu,
    /// Memory.
    Memory,
    /// Processes and threads.
    Pids,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Controller {
    /// The kernel's name for it.
    pub fn name(self) -> &'static str {
        match self {
            Controller::Cpu => "cpu",
            Controller::Memory => "memory",
            Controller::Pids => "pids",
        }
    }

    fn is_in(self, list: &str, separator: char) -> bool {
        list.trim().split(separator).any(|word| word == self.name())
    }
}

impl fmt::Display for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Tries to make a group where the controller is for this process, and removes it; returns
/// where that was.
pub fn probe(controller: Controller) -> anyhow::Result<PathBuf> {
    let own = std::process::id();
    let (parent, _) = find(controller, own)?;
    // Not the prefix of a QEMU's: that would be taken for one.
    let directory = parent.join(format!("doctor-{own}"));
    fs::create_dir(&directory)
        .and_then(|()| fs::remove_dir(&directory))
        .with_context(|| format!("cannot make the control group {}", directory.display()))?;
    Ok(parent)
}

/// The group that a process is in, where the controller is.
fn find(controller: Controller, pid: u32) -> anyhow::Result<(PathBuf, Version)> {
    let found = candidates(&mounts()?, &groups(pid)?, controller)
        .into_iter()
        .find(|(directory, version)| *version == Version::One || has(directory, controller));
    found.with_context(|| missing(controller))
}

fn mounts() -> anyhow::Result<String> {
    fs::read_to_string("/proc/self/mountinfo").context("cannot list mounts")
}

fn groups(pid: u32) -> anyhow::Result<String> {
    fs::read_to_string(format!("/proc/{pid}/cgroup"))
        .with_context(|| format!("cannot tell the control group of process {pid}"))
}

/// Whether a group of version 2 may be limited by it.
fn has(directory: &Path, controller: Controller) -> bool {
    let controllers = fs::read_to_string(directory.join("cgroup.controllers"));
    controllers.is_ok_and(|list| controller.is_in(&list, ' '))
}

fn missing(controller: Controller) -> String {
    format!(
        "no control group with the {controller} controller: mount /sys/fs/cgroup, and delegate \
         the controller to the daemon (Delegate= in its systemd unit)"
    )
}

/// The places where a process may be in a group with the controller, from the texts of `mountinfo`
/// and `cgroup` in `/proc`.
fn candidates(mounts: &str, groups: &str, controller: Controller) -> Vec<(PathBuf, Version)> {
    // Each: ID PARENT DEVICE ROOT MOUNTPOINT OPTIONS … - TYPE SOURCE OPTIONS
    let mounts = mounts.lines().filter_map(|line| {
        let (mount, system) = line.split_once(" - ")?;
        let (mut mount, mut system) = (mount.split(' ').skip(3), system.split(' '));
        let place = (mount.next()?, mount.next()?);
        Some((system.next()?, place, system.nth(1)?))
    });
    // Each: ID:CONTROLLERS:PATH; version 2 names no controllers.
    let group = |wanted: &dyn Fn(&str) -> bool| {
        let mut groups = groups.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        groups.find(|(controllers, _)| wanted(controllers)).map(|(_, path)| path)
    };
    let listed = |list: &str| controller.is_in(list, ',');
    let directory = |(kind, (root, point), options): (&str, (&str, &str), &str)| {
        let (version, path) = match kind {
            "cgroup" if listed(options) => (Version::One, group(&listed)?),
            "cgroup2" => (Version::Two, group(&str::is_empty)?),
            _ => return None,
        };
        let inside = Path::new(path).strip_prefix(root).ok()?;
        Some((Path::new(point).join(inside), version))
    };
    mounts.filter_map(directory).collect()
}

fn write(file: &Path, value: &str) -> anyhow::Result<()> {
    fs::write(file, value).with_context(|| format!("cannot write {value:?} to {}", file.display()))
}

/// The group of version 2 below which groups of processes can be made: the controllers are handed on
/// to them. Only the root, or a group without processes of its own, can do that.
fn handing_on(own: &Path) -> anyhow::Result<PathBuf> {
    let is_root = !own.join("cgroup.type").exists();
    let place = match (is_root, own.ends_with(OWN_GROUP), own.parent()) {
        (true, _, _) => own,
        (false, true, Some(parent)) => parent,
        _ => bail!(
            "the daemon is not in a group {OWN_GROUP:?} of its own below that of its service, as \
             systemd 254 or later makes it (Delegate=cpu memory pids, DelegateSubgroup={OWN_GROUP})"
        ),
    };
    for controller in [Controller::Cpu, Controller::Memory, Controller::Pids] {
        if has(place, controller) {
            write(&place.join("cgroup.subtree_control"), &format!("+{controller}"))?;
        }
    }
    Ok(place.to_owned())
}

/// The daemon's own group, where version 2 allows groups beside it.
const OWN_GROUP: &str = "daemon";

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "30 24 0:27 / /sys/fs/cgroup/cpuacct rw - cgroup none rw,cpuacct\n\
                       31 24 0:28 / /sys/fs/cgroup/cpu,x rw,nosuid shared:3 - cgroup none rw,cpu\n\
                       32 24 0:29 / /sys/fs/cgroup/memory rw - cgroup none rw,memory\n";

    #[test]
    fn version_one_is_found_where_it_is_mounted() {
        let groups = "4:memory:/c\n3:cpuset:/\n2:cpu,cpuacct:/a/b\n0::/\n";
        let found = |controller| candidates(ONE, groups, controller);
        assert_eq!(found(Controller::Cpu), [("/sys/fs/cgroup/cpu,x/a/b".into(), Version::One)]);
        assert_eq!(found(Controller::Memory), [("/sys/fs/cgroup/memory/c".into(), Version::One)]);
        assert_eq!(found(Controller::Pids), []);
    }

    #[test]
    fn version_two_is_where_the_process_is() {
        let mounts = "31 24 0:28 / /sys/fs/cgroup rw shared:3 - cgroup2 none rw\n";
        let found = candidates(mounts, "0::/system.slice/u.service\n", Controller::Pids);
        let group = "/sys/fs/cgroup/system.slice/u.service";
        assert_eq!(found, [(group.into(), Version::Two)]);
    }

    /// Directories in the place of groups.
    struct Tree(tempfile::TempDir);

    impl Tree {
        fn with(groups: &[(&str, &str)]) -> Tree {
            let tree = Tree(tempfile::tempdir().unwrap());
            for (group, controllers) in groups {
                let group = tree.at(group);
                fs::create_dir_all(&group).unwrap();
                fs::write(group.join("cgroup.type"), "domain\n").unwrap();
                fs::write(group.join("cgroup.controllers"), controllers).unwrap();
            }
            tree
        }

        fn at(&self, group: &str) -> PathBuf {
            self.0.path().join(group)
        }
    }

    #[test]
    fn a_group_of_version_two_has_the_controllers_that_it_lists() {
        let tree = Tree::with(&[("u.service", "memory cpu pids\n")]);
        assert!(has(&tree.at("u.service"), Controller::Memory));
        assert!(!has(&tree.at("elsewhere"), Controller::Memory));
    }

    #[test]
    fn version_two_hands_controllers_on_beside_the_daemons_own_group() {
        let tree = Tree::with(&[("u.service", "memory pids\n"), ("u.service/daemon", "\n")]);
        assert_eq!(handing_on(&tree.at("u.service/daemon")).unwrap(), tree.at("u.service"));
        let handed_on = fs::read_to_string(tree.at("u.service/cgroup.subtree_control")).unwrap();
        // A real group adds up what is written to this file.
        assert_eq!(handed_on, "+pids");
        let refused = handing_on(&tree.at("u.service")).unwrap_err().to_string();
        assert!(refused.contains("DelegateSubgroup=daemon"), "{refused}");
        // The root alone has no type, and may have processes.
        assert_eq!(handing_on(tree.0.path()).unwrap(), tree.0.path());
    }

    #[test]
    fn what_is_missing_is_named_with_what_to_do() {
        let words = missing(Controller::Memory);
        for part in ["the memory controller", "mount /sys/fs/cgroup", "Delegate="] {
            assert!(words.contains(part), "{words}");
        }
    }
}
