//! End of all keepers of a host in order before it goes down, while its network, its storage and
//! its daemon are still there: each hands its VM over, or has it power off, as after any SIGTERM.

use super::note::{self, Process};
use super::vm_of;
use crate::file_lock;
use nix::poll::PollTimeout;
use nix::sys::signal::Signal;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};
use tracing::{info, warn};
use understudy_protocol::VmName;
use understudy_qemu::process::{has_ended, pidfd_of, signal};

/// The file in the state directory that is locked while a host's keepers end. No VM has such a name.
const MARK: &str = ".ending";
/// Time between two looks at whether the time is over, in milliseconds.
const LOOK_MS: u16 = 500;

/// VMs whose keepers have not ended.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Their keepers cannot be told to end.
    pub untold: Vec<VmName>,
    /// Their keepers were told to end, and have not in time.
    pub unended: Vec<VmName>,
}

/// Tells all keepers of a host to end, but for those that end already, and waits until they have. With each of them
/// `goes_on` is called, and the others have so much time again. One that another host has begun meanwhile is not waited
/// for: it backs up what may as well have no backup.
pub fn end_all(state_dir: &Path, patience: Duration, goes_on: impl Fn()) -> io::Result<Left> {
    let _mark = mark(state_dir);
    let Keepers { alive, unknown } = Keepers::below(state_dir)?;
    let mut left = Left { untold: unknown, unended: Vec::new() };
    let mut ending = Vec::new();
    for keeper in alive.into_values() {
        match keeper.tell() {
            Ok(()) => ending.push(keeper),
            Err(error) => {
                warn!(vms = %keeper.names(), "their keeper cannot be told to end: {error}");
                left.untold.extend(keeper.vms);
            }
        }
    }
    goes_on();
    let mut deadline = Instant::now() + patience;
    for keeper in ending {
        if !keeper.ends_by(deadline)? {
            left.unended.extend(keeper.vms);
            continue;
        }
        goes_on();
        deadline = Instant::now() + patience;
    }
    Ok(left)
}

/// Whether the keepers of the host with this state directory are being ended: it is about to go down.
pub(crate) fn is_under_way(state_dir: &Path) -> bool {
    let mark = File::open(state_dir.join(MARK));
    mark.and_then(|mark| file_lock::is_taken(&mark)).unwrap_or(false)
}

/// Says that they are, until this is dropped. Who cannot say it ends them all the same.
fn mark(state_dir: &Path) -> Option<File> {
    let path = state_dir.join(MARK);
    let mark = File::options().write(true).create(true).truncate(false).open(&path);
    let taken = mark.and_then(|mark| Ok(file_lock::try_take(&mark)?.then_some(mark)));
    match taken {
        Ok(mark) => mark,
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            warn!("other hosts may yet choose this one for a backup: {}: {error}", path.display());
            None
        }
    }
}

/// A process that keeps VMs, those of a group say.
struct Keeper {
    process: OwnedFd,
    /// It was told already: told once more, it would cut its guests.
    ending: bool,
    vms: Vec<VmName>,
}

impl Keeper {
    fn names(&self) -> String {
        self.vms.join(", ")
    }

    fn tell(&self) -> io::Result<()> {
        let vms = self.names();
        if self.ending {
            info!(%vms, "their keeper ends already");
            return Ok(());
        }
        signal(self.process.as_fd(), Signal::SIGTERM)?;
        info!(%vms, "their keeper was told to end");
        Ok(())
    }

    fn ends_by(&self, deadline: Instant) -> io::Result<bool> {
        loop {
            if has_ended(self.process.as_fd(), PollTimeout::from(LOOK_MS))? {
                return Ok(true);
            }
            if Instant::now() > deadline {
                return Ok(false);
            }
        }
    }
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
                Ok(Some((Process { pid, ending }, process))) => {
                    let keeper = || Keeper { process, ending: false, vms: Vec::new() };
                    let keeper = keepers.alive.entry(pid).or_insert_with(keeper);
                    keeper.ending |= ending;
                    keeper.vms.push(vm);
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

/// The VMs with directories there; none where there is no such directory.
fn vms_below(state_dir: &Path) -> io::Result<Vec<VmName>> {
    let entries = match fs::read_dir(state_dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?.collect::<io::Result<Vec<_>>>()?,
    };
    Ok(entries.iter().filter_map(vm_of).collect())
}

/// The keeper of the VM with this directory, if there is one. Its lock and its number are enough: it may be of a
/// release of which no more is understood.
pub(super) fn keeper_of(directory: &Path) -> io::Result<Option<(Process, OwnedFd)>> {
    let Some(Process { pid, .. }) = note::process_in(directory)? else { return Ok(None) };
    let keeper = pidfd_of(pid);
    // Of one that has ended meanwhile the number may be another process's by now, or nobody's.
    match note::process_in(directory)? {
        Some(process) if process.pid == pid => Ok(Some((process, keeper?))),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::super::note::Claim;
    use super::*;
    use std::process::{Child, Command};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use understudy_protocol::literal;

    const LONG: Duration = Duration::from_secs(60);

    fn end(state_dir: &Path) -> Left {
        end_all(state_dir, LONG, || ()).unwrap()
    }

    /// A process in a keeper's place, which is not this one. It writes down that it was told, and ends a moment after
    /// the first time.
    fn counting(counted: &Path) -> Child {
        let script = format!(
            "trap 'echo told >> {0}; ends=1' TERM; echo > {0}; while [ -z $ends ]; do sleep 0.1; done; sleep 1",
            counted.display()
        );
        let keeper = Command::new("sh").args(["-c", &script]).spawn().unwrap();
        while !counted.exists() {
            thread::sleep(Duration::from_millis(5));
        }
        keeper
    }

    // Before, the keeper of a group was told once for each of its VMs: the second time its guests were cut.
    #[test]
    fn all_that_live_are_told_to_end_once_and_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        assert_eq!(end(directory), Left::default(), "nobody is there");
        assert_eq!(end(&directory.join("nowhere")), Left::default());
        let (db, cache): (VmName, VmName) = (literal("db"), literal("cache"));
        let counted = directory.join("counted");
        let mut keeper = counting(&counted);
        let claims = [&db, &cache].map(|vm| claimed_by(keeper.id(), directory, vm));
        let calls = AtomicUsize::new(0);
        let left = end_all(directory, LONG, || {
            calls.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(left.unwrap(), Left::default());
        assert_eq!(calls.into_inner(), 2, "time was asked for at the beginning, and with its end");
        assert!(keeper.wait().unwrap().success());
        assert_eq!(fs::read_to_string(&counted).unwrap(), "\ntold\n", "once for both");
        fs::write(db.below(directory).join("keeper.json"), "{}").unwrap();
        fs::remove_file(cache.below(directory).join("keeper.json")).unwrap();
        let left = Left { untold: vec![db], unended: Vec::new() };
        assert_eq!(end(directory), left, "nobody knows whose lock it is");
        drop(claims);
        // What another test starts at this moment has the locks, too, until it is another program.
        let until = Instant::now() + LONG;
        while end(directory) != Left::default() {
            assert!(Instant::now() < until, "it is locked for good");
            thread::sleep(Duration::from_millis(5));
        }
    }

    // Before, it ran on: its daemon's release alone was told of it.
    #[test]
    fn a_keeper_of_another_release_is_told_too() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let db: VmName = literal("db");
        let counted = directory.join("counted");
        let mut keeper = counting(&counted);
        let _claim = claimed_by(keeper.id(), directory, &db);
        let note = format!("{{\"protocol\":99,\"pid\":{}}}", keeper.id());
        fs::write(db.below(directory).join("keeper.json"), note).unwrap();
        assert_eq!(end(directory), Left::default());
        assert!(keeper.wait().unwrap().success());
    }

    // Before, its guests were cut: the second signal means that.
    #[test]
    fn a_keeper_that_ends_already_is_not_told_again_and_not_waited_for_without_end() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let db: VmName = literal("db");
        let counted = directory.join("counted");
        let mut keeper = counting(&counted);
        let mut claim = claimed_by(keeper.id(), directory, &db);
        // As the keeper's.
        claim.note_ending().unwrap();
        let file = db.below(directory).join("keeper.json");
        fs::write(&file, said_by(keeper.id(), &file)).unwrap();
        let left = end_all(directory, Duration::ZERO, || assert!(is_under_way(directory))).unwrap();
        assert_eq!(left, Left { untold: Vec::new(), unended: vec![db] });
        assert!(!is_under_way(directory));
        assert_eq!(fs::read_to_string(&counted).unwrap(), "\n", "it was told");
        keeper.kill().unwrap();
        keeper.wait().unwrap();
        drop(claim);
    }

    /// A keeper's note of this process, as if it were another one's.
    fn said_by(pid: u32, file: &Path) -> String {
        let of = |pid: u32| format!("\"pid\":{pid}");
        fs::read_to_string(file).unwrap().replace(&of(std::process::id()), &of(pid))
    }

    /// The lock of a VM's keeper, which is said to be another process.
    fn claimed_by(pid: u32, state_dir: &Path, vm: &VmName) -> Claim {
        let directory = vm.below(state_dir);
        fs::create_dir(&directory).unwrap();
        let claim = Claim::take(&directory, &literal("a"), vm, None).unwrap();
        let file = directory.join("keeper.json");
        fs::write(&file, said_by(pid, &file)).unwrap();
        claim
    }
}
