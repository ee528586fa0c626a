//! End of all keepers of a host in order before it goes down, while its network, its storage and
//! its daemon are still there: each hands its VM over, or has it power off, as after any SIGTERM.

use super::note::{self, Found};
use super::vm_of;
use crate::config::HostConfig;
use nix::poll::PollTimeout;
use nix::sys::signal::Signal;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use tracing::{info, warn};
use understudy_protocol::VmName;
use understudy_qemu::process::{has_ended, pidfd_of, signal};

/// Tells all keepers of a host to end, and waits until they have; the VMs of those that cannot be told. One that
/// another host has begin meanwhile is not waited for: it backs up what may as well have no backup.
pub fn end_all(config: &HostConfig) -> io::Result<Vec<VmName>> {
    let Keepers { alive, unknown: mut left } = Keepers::below(&config.state_dir)?;
    let mut ending = Vec::new();
    for Keeper { process, vms } in alive.into_values() {
        let names = vms.join(", ");
        match signal(process.as_fd(), Signal::SIGTERM) {
            Ok(()) => {
                info!(vms = %names, "their keeper was told to end");
                ending.push(process);
            }
            Err(error) => {
                warn!(vms = %names, "their keeper cannot be told to end: {error}");
                left.extend(vms);
            }
        }
    }
    for keeper in ending {
        while !has_ended(keeper.as_fd(), PollTimeout::NONE)? {}
    }
    Ok(left)
}

/// A process that keeps VMs, those of a group say.
struct Keeper {
    process: OwnedFd,
    vms: Vec<VmName>,
}

/// The keepers of a host, each of them once: to one that ends already, a further signal means that its guests are to
/// be cut.
struct Keepers {
    alive: BTreeMap<u32, Keeper>,
    /// VMs that may have one, of which nothing else is known.
    unknown: Vec<VmName>,
}

impl Keepers {
    fn below(state_dir: &Path) -> io::Result<Keepers> {
        let mut keepers = Keepers { alive: BTreeMap::new(), unknown: Vec::new() };
        for vm in vms_below(state_dir)? {
            match keeper_of(&vm.below(state_dir)) {
                Ok(None) => {}
                Ok(Some((pid, process))) => {
                    let keeper = || Keeper { process, vms: Vec::new() };
                    keepers.alive.entry(pid).or_insert_with(keeper).vms.push(vm);
                }
                Err(error) => {
                    warn!(%vm, "its keeper cannot be told to end: {error}");
                    keepers.unknown.push(vm);
                }
            }
        }
        Ok(keepers)
    }
}

fn vms_below(state_dir: &Path) -> io::Result<Vec<VmName>> {
    let entries = fs::read_dir(state_dir)?.collect::<io::Result<Vec<_>>>()?;
    Ok(entries.iter().filter_map(vm_of).collect())
}

/// The keeper of the VM with this directory, if there is one.
fn keeper_of(directory: &Path) -> io::Result<Option<(u32, OwnedFd)>> {
    let pid = match note::look(directory) {
        Found::Nobody(_) => return Ok(None),
        Found::Lives(note) => note.pid,
        Found::Starting => return Err(io::Error::other("it is just starting")),
        Found::Unknown(problem) => return Err(io::Error::other(problem)),
    };
    let keeper = pidfd_of(pid);
    // Of one that has ended meanwhile the number may be another process's by now, or nobody's.
    match note::look(directory) {
        Found::Lives(note) if note.pid == pid => Ok(Some((pid, keeper?))),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::super::note::Claim;
    use super::*;
    use std::process::Command;
    use std::thread;
    use std::time::Duration;
    use understudy_protocol::literal;

    // Before, the keeper of a group was told once for each of its VMs: the second time its guests were cut.
    #[test]
    fn all_that_live_are_told_to_end_once_and_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let text = format!(
            "name = \"a\"\nlisten = \"127.0.0.1:7700\"\nstate_dir = {:?}\ninsecure = true\n",
            directory.path()
        );
        let file = directory.path().join("host.toml");
        fs::write(&file, text).unwrap();
        let config = HostConfig::load(&file).unwrap();
        assert!(end_all(&config).unwrap().is_empty(), "nobody is there");
        let (db, cache): (VmName, VmName) = (literal("db"), literal("cache"));
        // Not this process; it counts, and ends a moment after the first.
        let counted = directory.path().join("counted");
        let count = format!(
            "trap 'echo told >> {0}; ends=1' TERM; echo > {0}; while [ -z $ends ]; do sleep 0.1; done; sleep 1",
            counted.display()
        );
        let mut keeper = Command::new("sh").args(["-c", &count]).spawn().unwrap();
        while !counted.exists() {
            thread::sleep(Duration::from_millis(5));
        }
        let claims = [&db, &cache].map(|vm| claimed_by(keeper.id(), directory.path(), vm));
        assert!(end_all(&config).unwrap().is_empty());
        assert!(keeper.wait().unwrap().success());
        assert_eq!(fs::read_to_string(&counted).unwrap(), "\ntold\n", "once for both");
        fs::write(db.below(directory.path()).join("keeper.json"), "{}").unwrap();
        fs::remove_file(cache.below(directory.path()).join("keeper.json")).unwrap();
        assert_eq!(end_all(&config).unwrap(), [db], "nobody knows whose lock it is");
        drop(claims);
        assert!(end_all(&config).unwrap().is_empty());
    }

    /// The lock of a VM's keeper, which is said to be another process.
    fn claimed_by(pid: u32, state_dir: &Path, vm: &VmName) -> Claim {
        let directory = vm.below(state_dir);
        fs::create_dir(&directory).unwrap();
        let claim = Claim::take(&directory, &literal("a"), vm, None).unwrap();
        let file = directory.join("keeper.json");
        let of = |pid: u32| format!("\"pid\":{pid}");
        let note = fs::read_to_string(&file).unwrap().replace(&of(std::process::id()), &of(pid));
        fs::write(file, note).unwrap();
        claim
    }
}
