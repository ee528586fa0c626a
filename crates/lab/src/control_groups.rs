//! Control groups that daemons leave when they are killed.

use std::fs;
use std::path::{Path, PathBuf};

/// Removes the control groups of QEMUs that died with their daemon. What is in use cannot be
/// removed, what is another's is left to it.
pub(crate) fn remove_dead() {
    for mount in own() {
        for entry in fs::read_dir(mount).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let pid = name.to_str().and_then(owner);
            if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
                let _ = fs::remove_dir(entry.path());
            }
        }
    }
}

/// The process that a group of the product's is named after: a QEMU, whose processors it limits, or
/// the daemon of one that it limits.
fn owner(name: &str) -> Option<&str> {
    let rest = name.strip_prefix("understudy-").or(name.strip_prefix("understudy.qemu-"))?;
    rest.split('-').next()
}

/// Places of this process in the hierarchies that daemons use.
fn own() -> Vec<PathBuf> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = |line: &str| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let known = matches!(controllers, "" | "cpu" | "memory" | "pids");
        let mount = Path::new("/sys/fs/cgroup").join(controllers);
        known.then(|| mount.join(path.trim_start_matches('/')))
    };
    groups.lines().filter_map(own).collect()
}
