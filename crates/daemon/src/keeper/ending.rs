//! End of all keepers of a host in order before it goes down, while its network, its storage and
//! its daemon are still there: each hands its VM over, or has it power off, as after any SIGTERM.

use super::note::{self, Found};
use super::vm_of;
use crate::config::HostConfig;
use nix::poll::PollTimeout;
use nix::sys::signal::Signal;
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
    let (mut ending, mut left) = (Vec::new(), Vec::new());
    for vm in vms_below(&config.state_dir)? {
        match told_to_end(&vm.below(&config.state_dir)) {
            Ok(None) => {}
            Ok(Some(keeper)) => {
                info!(%vm, "its keeper was told to end");
                ending.push(keeper);
            }
            Err(error) => {
                warn!(%vm, "its keeper cannot be told to end: {error}");
                left.push(vm);
            }
        }
    }
    for keeper in ending {
        while !has_ended(keeper.as_fd(), PollTimeout::NONE)? {}
    }
    Ok(left)
}

fn vms_below(state_dir: &Path) -> io::Result<Vec<VmName>> {
    let entries = fs::read_dir(state_dir)?.collect::<io::Result<Vec<_>>>()?;
    Ok(entries.iter().filter_map(vm_of).collect())
}

/// The keeper that was told; none if there is none. That of a group is told once for each VM, which changes nothing.
fn told_to_end(directory: &Path) -> io::Result<Option<OwnedFd>> {
    let pid = match note::look(directory) {
        Found::Nobody(_) => return Ok(None),
        Found::Lives(note) => note.pid,
        Found::Starting => return Err(io::Error::other("it is just starting")),
        Found::Unknown(problem) => return Err(io::Error::other(problem)),
    };
    let keeper = pidfd_of(pid);
    // Of one that has ended meanwhile the number may be another process's by now, or nobody's.
    match note::look(directory) {
        Found::Lives(note) if note.pid == pid => {}
        _ => return Ok(None),
    }
    let keeper = keeper?;
    signal(keeper.as_fd(), Signal::SIGTERM)?;
    Ok(Some(keeper))
}

#[cfg(test)]
mod tests {
    use super::super::note::Claim;
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;
    use understudy_protocol::literal;

    #[test]
    fn all_that_live_are_told_to_end_and_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let text = format!(
            "name = \"a\"\nlisten = \"127.0.0.1:7700\"\nstate_dir = {:?}\ninsecure = true\n",
            directory.path()
        );
        let file = directory.path().join("host.toml");
        fs::write(&file, text).unwrap();
        let config = HostConfig::load(&file).unwrap();
        assert!(end_all(&config).unwrap().is_empty(), "nobody is there");
        let vm: VmName = literal("db");
        let db = vm.below(directory.path());
        fs::create_dir(&db).unwrap();
        let claim = Claim::take(&db, &literal("a"), &vm, None).unwrap();
        // Not this process.
        let mut keeper = Command::new("sleep").arg("1000").spawn().unwrap();
        let note = fs::read_to_string(db.join("keeper.json")).unwrap();
        let pid = |pid: u32| format!("\"pid\":{pid}");
        let note = note.replace(&pid(std::process::id()), &pid(keeper.id()));
        fs::write(db.join("keeper.json"), note).unwrap();
        assert!(end_all(&config).unwrap().is_empty());
        assert_eq!(keeper.wait().unwrap().signal(), Some(Signal::SIGTERM as i32));
        fs::write(db.join("keeper.json"), "{}").unwrap();
        assert_eq!(end_all(&config).unwrap(), [vm], "nobody knows whose lock it is");
        drop(claim);
        assert!(end_all(&config).unwrap().is_empty());
    }
}
