//! End of all keepers of a host in order before it goes down, while its network, its storage and
//! its daemon are still there: each hands its VM over, or has it power off, as after any SIGTERM.

use super::note::{self, Process};
use super::{SOCKET, vm_of};
use crate::file_lock;
use nix::poll::PollTimeout;
use nix::sys::signal::Signal;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};
use tracing::{info, warn};
use understudy_protocol::VmName;
use understudy_qemu::process::{has_ended, pidfd_of, signal};

/// The file in the state directory that is locked while a host's keepers end. No VM has such a name.
const MARK: &str = ".ending";
/// Time between two looks at whether the time is over, in milliseconds.
const LOOK_MS: u16 = 500;
/// Pause between two questions whether a keeper still answers, in milliseconds.
const ASK_MS: u16 = 1000;

/// VMs whose keepers have not ended.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Their keepers cannot be told to end.
    pub untold: Vec<VmName>,
    /// Their keepers were told to end, and have not in time.
    pub unended: Vec<VmName>,
    /// Their keepers hang: they were told to end, and have answered nothing since.
    pub silent: Vec<VmName>,
}

/// The longest that a keeper is waited for, and how it is found out that it hangs.
pub struct Patience<H> {
    /// Time for one to end, from the last moment on at which another one has.
    pub end: Duration,
    /// Time for one to say anything meanwhile.
    pub silence: Duration,
    /// Whether a VM's keeper says something on this socket of its API. One that listens no more is about to end.
    pub hears: H,
}

/// Tells all keepers of a host to end, but for those that end already, and waits until they have. With each of them
/// `goes_on` is called, and the others have so much time again. One that hangs is given up much sooner, and one that another
/// host has begun meanwhile is not waited for: it backs up what may as well have no backup.
pub fn end_all(
    state_dir: &Path,
    patience: &Patience<impl Fn(&VmName, &Path) -> bool + Sync>,
    goes_on: impl Fn(),
) -> io::Result<Left> {
    let _mark = mark(state_dir);
    let Keepers { alive, unknown } = Keepers::below(state_dir)?;
    let mut left = Left { untold: unknown, ..Left::default() };
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
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for keeper in &ending {
            keeper.listen_in(scope, state_dir, patience, &over);
        }
        let awaited = await_ends(&ending, patience.end, goes_on, &mut left);
        over.store(true, Ordering::Release);
        awaited
    })?;
    Ok(left)
}

/// Waits until all of these have ended, or are given up. One that hangs may answer again while others are waited for: it is
/// given up when only such are left.
fn await_ends(
    ending: &[Keeper],
    patience: Duration,
    goes_on: impl Fn(),
    left: &mut Left,
) -> io::Result<()> {
    let mut deadline = Instant::now() + patience;
    let mut awaited: Vec<&Keeper> = ending.iter().collect();
    loop {
        let mut silent = Vec::new();
        for keeper in &awaited {
            match keeper.ends_by(deadline)? {
                Ended::Yes => {
                    goes_on();
                    deadline = Instant::now() + patience;
                }
                Ended::Late => left.unended.extend(keeper.vms.iter().cloned()),
                Ended::Hangs => silent.push(*keeper),
            }
        }
        if silent.len() == awaited.len() {
            left.silent.extend(silent.iter().flat_map(|keeper| keeper.vms.iter().cloned()));
            return Ok(());
        }
        awaited = silent;
    }
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
    /// It has said nothing for too long, up to now.
    hangs: AtomicBool,
    vms: Vec<VmName>,
}

/// Outcome of the wait for a keeper's end.
enum Ended {
    Yes,
    /// Not in time.
    Late,
    Hangs,
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

    fn ends_by(&self, deadline: Instant) -> io::Result<Ended> {
        loop {
            if has_ended(self.process.as_fd(), PollTimeout::from(LOOK_MS))? {
                return Ok(Ended::Yes);
            }
            if self.hangs.load(Ordering::Acquire) {
                return Ok(Ended::Hangs);
            }
            if Instant::now() > deadline {
                return Ok(Ended::Late);
            }
        }
    }

    /// Has it asked how it is in a thread of its own, until nobody waits for it any more. Without a thread it is waited for
    /// all the same.
    fn listen_in<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        state_dir: &'scope Path,
        patience: &'scope Patience<impl Fn(&VmName, &Path) -> bool + Sync>,
        over: &'scope AtomicBool,
    ) {
        let listen = move || self.listen(state_dir, patience, over);
        if let Err(error) = thread::Builder::new().spawn_scoped(scope, listen) {
            warn!(vms = %self.names(), "nobody looks whether their keeper hangs: no thread: {error}");
        }
    }

    /// Asks how it is until nobody waits for it any more. One of its VMs that answers is enough: the places of a group are
    /// closed one after the other.
    fn listen(
        &self,
        state_dir: &Path,
        patience: &Patience<impl Fn(&VmName, &Path) -> bool>,
        over: &AtomicBool,
    ) {
        let is_over = || over.load(Ordering::Acquire);
        // Who waits no more does not wait for the answers of a whole group either.
        let hears =
            |vm: &VmName| !is_over() && (patience.hears)(vm, &vm.below(state_dir).join(SOCKET));
        let mut heard = Instant::now();
        while !is_over() {
            let hangs = match self.vms.iter().any(hears) {
                true => {
                    heard = Instant::now();
                    false
                }
                false => heard.elapsed() >= patience.silence,
            };
            self.hangs.store(hangs, Ordering::Release);
            // An error shows in whoever waits for it.
            if has_ended(self.process.as_fd(), PollTimeout::from(ASK_MS)).unwrap_or(true) {
                return;
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
                    let hangs = AtomicBool::new(false);
                    let keeper = || Keeper { process, ending: false, hangs, vms: Vec::new() };
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
    use std::sync::atomic::AtomicUsize;
    use understudy_protocol::literal;

    const LONG: Duration = Duration::from_secs(60);

    fn patience(end: Duration) -> Patience<impl Fn(&VmName, &Path) -> bool + Sync> {
        Patience { end, silence: LONG, hears: |_: &VmName, _: &Path| true }
    }

    fn end(state_dir: &Path) -> Left {
        end_all(state_dir, &patience(LONG), || ()).unwrap()
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
        let left = end_all(directory, &patience(LONG), || {
            calls.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(left.unwrap(), Left::default());
        assert_eq!(calls.into_inner(), 2, "time was asked for at the beginning, and with its end");
        assert!(keeper.wait().unwrap().success());
        assert_eq!(fs::read_to_string(&counted).unwrap(), "\ntold\n", "once for both");
        fs::write(db.below(directory).join("keeper.json"), "{}").unwrap();
        fs::remove_file(cache.below(directory).join("keeper.json")).unwrap();
        let left = Left { untold: vec![db], ..Left::default() };
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
        let goes_on = || assert!(is_under_way(directory));
        let left = end_all(directory, &patience(Duration::ZERO), goes_on).unwrap();
        assert_eq!(left, Left { unended: vec![db], ..Left::default() });
        assert!(!is_under_way(directory));
        assert_eq!(fs::read_to_string(&counted).unwrap(), "\n", "it was told");
        keeper.kill().unwrap();
        keeper.wait().unwrap();
        drop(claim);
    }

    /// A process that hangs; it does not outlive the test, whatever becomes of that.
    struct Stopped(Child);

    impl Stopped {
        fn begin() -> Stopped {
            let stopped = Stopped(Command::new("sleep").arg("600").spawn().unwrap());
            signal(stopped.pidfd().as_fd(), Signal::SIGSTOP).unwrap();
            // Until then a signal that comes later, and ends it, is taken first.
            let status = format!("/proc/{}/status", stopped.0.id());
            while !fs::read_to_string(&status).unwrap().contains("T (stopped)") {
                thread::sleep(Duration::from_millis(1));
            }
            stopped
        }

        fn pidfd(&self) -> OwnedFd {
            pidfd_of(self.0.id()).unwrap()
        }
    }

    impl Drop for Stopped {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    // Before, the host's shutdown waited for it as long as for one that hands its VMs over.
    #[test]
    fn a_keeper_that_answers_nothing_is_given_up_long_before_one_that_answers() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let (db, web): (VmName, VmName) = (literal("db"), literal("web"));
        let keepers = [Stopped::begin(), Stopped::begin()];
        let _claims = [(&keepers[0], &db), (&keepers[1], &web)]
            .map(|(it, vm)| claimed_by(it.0.id(), directory, vm));
        let hears = |vm: &VmName, socket: &Path| vm.as_str() == "web" && socket.ends_with(SOCKET);
        let moment = Duration::from_secs(3);
        let patience = Patience { end: moment, silence: Duration::ZERO, hears };
        let left = end_all(directory, &patience, || ()).unwrap();
        assert_eq!(left, Left { unended: vec![web], silent: vec![db], ..Left::default() });
    }

    // Before, one that had been silent once was given up, and so was a group of which one VM's place was closed.
    #[test]
    fn one_vm_that_answers_again_takes_back_that_its_keeper_hangs() {
        let (process, directory) = (Stopped::begin(), tempfile::tempdir().unwrap());
        let keeper = Keeper {
            process: process.pidfd(),
            ending: false,
            hangs: AtomicBool::new(false),
            vms: vec![literal("db"), literal("web")],
        };
        let (answers, over) = (AtomicBool::new(false), AtomicBool::new(false));
        let hears = |vm: &VmName, _: &Path| vm.as_str() == "web" && answers.load(Ordering::Acquire);
        let patience = Patience { end: LONG, silence: Duration::ZERO, hears };
        let comes = |hangs: bool| {
            let until = Instant::now() + LONG;
            while keeper.hangs.load(Ordering::Acquire) != hangs && Instant::now() < until {
                thread::sleep(Duration::from_millis(5));
            }
            keeper.hangs.load(Ordering::Acquire) == hangs
        };
        let (told, taken_back) = thread::scope(|scope| {
            keeper.listen_in(scope, directory.path(), &patience, &over);
            let told = comes(true);
            answers.store(true, Ordering::Release);
            let taken_back = comes(false);
            over.store(true, Ordering::Release);
            (told, taken_back)
        });
        assert!(told, "it was silent");
        assert!(taken_back, "it answered");
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
