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
    /// What a VM's keeper says on this socket of its API.
    pub hears: H,
}

/// What is heard of a VM's keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// It answers, whatever that is.
    Answers,
    /// Nobody listens there any more: it is about to end, or has ended the VM.
    Closed,
    /// It does not answer in time.
    Silent,
}

/// Tells all keepers of a host to end, but for those that end already, and waits until they have. With each of them
/// `goes_on` is called, and the others have so much time again. One that hangs is given up much sooner, and one that another
/// host has begun meanwhile is not waited for: it backs up what may as well have no backup.
pub fn end_all(
    state_dir: &Path,
    patience: &Patience<impl Fn(&VmName, &Path) -> Heard + Sync>,
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
/// given up when only such are left, and are that for another look.
fn await_ends(
    ending: &[Keeper],
    patience: Duration,
    goes_on: impl Fn(),
    left: &mut Left,
) -> io::Result<()> {
    let mut deadline = Instant::now() + patience;
    let mut awaited: Vec<&Keeper> = ending.iter().collect();
    let mut were_silent = false;
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
        let are_silent = silent.len() == awaited.len();
        if silent.is_empty() || (are_silent && were_silent) {
            left.silent.extend(silent.iter().flat_map(|keeper| keeper.vms.iter().cloned()));
            return Ok(());
        }
        (awaited, were_silent) = (silent, are_silent);
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
        patience: &'scope Patience<impl Fn(&VmName, &Path) -> Heard + Sync>,
        over: &'scope AtomicBool,
    ) {
        let listen = move || self.listen(state_dir, patience, over);
        if let Err(error) = thread::Builder::new().spawn_scoped(scope, listen) {
            warn!(vms = %self.names(), "nobody looks whether their keeper hangs: no thread: {error}");
        }
    }

    /// Asks how it is until nobody waits for it any more.
    fn listen(
        &self,
        state_dir: &Path,
        patience: &Patience<impl Fn(&VmName, &Path) -> Heard>,
        over: &AtomicBool,
    ) {
        let is_over = || over.load(Ordering::Acquire);
        // Who waits no more does not wait for the answers of a whole group either.
        let hears = |vm: &VmName| match is_over() {
            true => Heard::Silent,
            false => (patience.hears)(vm, &vm.below(state_dir).join(SOCKET)),
        };
        let mut heard = Instant::now();
        while !is_over() {
            let hangs = match self.lives(hears) {
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

impl Keeper {
    /// Whether it lives, by what is heard of its VMs. The places of a group are closed one after the other: one that
    /// answers is enough, and one that is closed says nothing of those that are not.
    fn lives(&self, hears: impl Fn(&VmName) -> Heard) -> bool {
        let mut is_silent = false;
        for vm in &self.vms {
            match hears(vm) {
                Heard::Answers => return true,
                Heard::Closed => {}
                Heard::Silent => is_silent = true,
            }
        }
        !is_silent
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
#[path = "ending_tests.rs"]
mod tests;
