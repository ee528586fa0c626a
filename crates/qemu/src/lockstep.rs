//! A QEMU in lockstep: what it must be, and the way of its log.
//!
//! QEMU's own record and replay (`-icount rr=…`) makes the log; the agent inside QEMU carries
//! it (`crates/agent/src/lockstep`). A log is a stream of bytes on a socket: a primary writes
//! it, and waits while the socket is full; a backup reads it, and waits while it is empty.
#![allow(unsafe_code)] // Maps a page that QEMU shares.

use crate::capabilities::Accelerator;
use crate::definition::{CardModel, DiskBus, DiskFormat, Vga, VmDefinition};
use crate::qmp::QemuVersion;
use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::socket::{setsockopt, sockopt};
use nix::unistd::ftruncate;
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Versions of QEMU (major, minor) in which lockstep is proven. The log's format, and what the
/// agent calls, may change with any other.
const PROVEN: [(u32, u32); 1] = [(10, 0)];

/// Tells the agent what to do; the agent's source has the same.
const VARIABLE: &str = "UNDERSTUDY_LOCKSTEP";

/// The log's name for QEMU; the agent's source has the same.
pub(crate) const LOG_NAME: &str = "understudy-log";

/// Guest instructions take 2 ns each: 500 million a second. (`auto` makes the guest wait for
/// up to 1.3 s now and then; 3 lets its time run 11 times too fast under load.)
pub(crate) const ICOUNT_SHIFT: u32 = 1;

/// First word of the status page; the agent writes the same.
const STATUS_MAGIC: u64 = u64::from_le_bytes(*b"USTDYLK1");

/// Room for log between QEMU and the daemon, in bytes.
const SOCKET_BUFFER_BYTES: usize = 1 << 20;

/// What the agent answers to what it cannot do.
const REFUSED: u64 = u64::MAX;

/// What a QEMU in lockstep does with its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogRole {
    /// A primary: writes it.
    Record,
    /// A backup: executes it.
    Replay,
}

impl LogRole {
    pub(crate) fn name(self) -> &'static str {
        match self {
            LogRole::Record => "record",
            LogRole::Replay => "replay",
        }
    }
}

/// Why this VM cannot run in lockstep, for people; empty if it can. Each is followed by what
/// to do: `--mode checkpoint` works with all of them.
pub fn obstacles(
    vm: &VmDefinition,
    accelerator: Accelerator,
    version: Option<QemuVersion>,
) -> Vec<String> {
    let mut found = Vec::new();
    let mut refuse = |what: String| found.push(what);
    if vm.vcpus != 1 {
        refuse(format!("it has {} vCPUs; lockstep works with one", vm.vcpus));
    }
    if accelerator != Accelerator::Tcg {
        refuse(format!("it runs on {accelerator}; lockstep needs `accel = \"tcg\"`"));
    }
    if vm.vga != Vga::None {
        refuse("it has a display; lockstep is proven with `vga = \"none\"` only".to_owned());
    }
    for (n, disk) in vm.disks.iter().enumerate() {
        if disk.bus != DiskBus::Virtio || disk.format != DiskFormat::Raw {
            refuse(format!("disk {n} is not a raw virtio disk; no other is proven"));
        }
    }
    for (n, card) in vm.cards.iter().enumerate() {
        if card.model != CardModel::VirtioNet {
            refuse(format!("card {n} is no virtio-net; no other is proven"));
        }
    }
    if !vm.qemu_args.is_empty() {
        refuse(format!("it has further QEMU arguments ({})", vm.qemu_args.join(" ")));
    }
    if let Some(version) = version.filter(|v| !PROVEN.contains(&(v.major, v.minor))) {
        refuse(format!("QEMU {version} is not proven; {}.{} is", PROVEN[0].0, PROVEN[0].1));
    }
    found
}

/// What the agent is asked for. All but [`Request::Detach`] are done in QEMU's main loop,
/// which on a backup may be waiting for log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Primary, stopped: leave nothing under way, so that the machine can be copied.
    Quiesce,
    /// Primary, stopped: the log goes to the daemon from here on, not to nowhere.
    Attach,
    /// Primary: the log goes to nowhere from here on.
    Detach,
    /// Primary: bring the log out up to this instruction.
    Flush,
    /// Backup, loaded and stopped: the log comes from the daemon from here on. Waits for its
    /// first bytes.
    Follow,
    /// Backup, stopped at the end of its log: an ordinary machine from here on.
    GoLive,
    /// The same, later, stopped: make a device state that another primary can load.
    PrepareForSave,
}

impl Request {
    fn byte(self) -> u8 {
        match self {
            Request::Quiesce => b'q',
            Request::Attach => b'a',
            Request::Detach => b'd',
            Request::Flush => b's',
            Request::Follow => b'f',
            Request::GoLive => b'l',
            Request::PrepareForSave => b'p',
        }
    }
}

/// The agent did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum LockstepError {
    /// It cannot, in this role.
    #[error("QEMU's agent refused to {0:?}")]
    Refused(Request),
    /// QEMU has ended, or hangs.
    #[error("QEMU's agent did not answer: {0}")]
    Silent(#[from] io::Error),
}

/// QEMU's ends of a [`LogChannel`]: to be inherited. Drop them when it has.
#[derive(Debug)]
pub struct LogEnds {
    log: OwnedFd,
    status: OwnedFd,
    control: OwnedFd,
}

impl LogEnds {
    /// For [`crate::process::Launch::inherit`].
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 3] {
        [self.log.as_fd(), self.status.as_fd(), self.control.as_fd()]
    }

    /// For [`crate::process::Launch::env`].
    pub fn environment(&self, role: LogRole) -> (OsString, OsString) {
        let [log, status, control] = self.descriptors().map(|fd| fd.as_raw_fd());
        (VARIABLE.into(), format!("{},{log},{status},{control}", role.name()).into())
    }
}

/// The daemon's ends of the way of a log.
#[derive(Debug)]
pub struct LogChannel {
    /// The log itself.
    pub log: UnixStream,
    status: StatusPage,
    /// One request at a time.
    control: Mutex<UnixStream>,
}

impl LogChannel {
    /// New ones; `timeout` is for each answer of the agent's.
    pub fn create(timeout: Duration) -> io::Result<(LogChannel, LogEnds)> {
        let (log, qemus_log) = UnixStream::pair()?;
        for end in [&log, &qemus_log] {
            setsockopt(end, sockopt::SndBuf, &SOCKET_BUFFER_BYTES)?;
        }
        let (control, qemus_control) = UnixStream::pair()?;
        control.set_read_timeout(Some(timeout))?;
        let (status, memfd) = StatusPage::create()?;
        let ends = LogEnds { log: qemus_log.into(), status: memfd, control: qemus_control.into() };
        Ok((LogChannel { log, status, control: Mutex::new(control) }, ends))
    }

    /// Asks the agent, waits, and gives the bytes of log that have passed it so far.
    pub fn ask(&self, request: Request) -> Result<u64, LockstepError> {
        let mut control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        control.write_all(&[request.byte()])?;
        let mut answer = [0; 8];
        control.read_exact(&mut answer)?;
        match u64::from_le_bytes(answer) {
            REFUSED => Err(LockstepError::Refused(request)),
            passed => Ok(passed),
        }
    }

    /// Throws away the log that was not read. Between [`Request::Detach`] and the next
    /// [`Request::Attach`]: what is left of one backup's log is no part of the next one's.
    pub fn discard_log(&self) -> io::Result<()> {
        self.log.set_nonblocking(true)?;
        let mut rest = [0; 4096];
        loop {
            match (&self.log).read(&mut rest) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.log.set_nonblocking(false)
    }

    /// What QEMU shows of its work.
    pub fn status(&self) -> LogStatus {
        self.status.read()
    }
}

/// What QEMU shows of its work without being asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogStatus {
    /// Primary: bytes of log that it has written and that have left it. Backup: bytes that
    /// it has taken; a millisecond old.
    pub position: u64,
    /// It stands still for the log: no room, or none left.
    pub is_blocked: bool,
    /// Nanoseconds that it stood still until now, without this time.
    pub blocked: u64,
    /// Instructions executed, as of the last event.
    pub instructions: u64,
    /// Kind of the event that a backup waits to execute.
    pub event: u64,
    /// Frames that the guest has sent.
    pub frames: u64,
}

/// The page that the agent writes: words, in the order of the agent's `Status`.
#[derive(Debug)]
struct StatusPage(NonNull<[AtomicU64; 7]>);

// SAFETY: the page has atomics only, and stays mapped as long as this lives.
unsafe impl Send for StatusPage {}
// SAFETY: as above.
unsafe impl Sync for StatusPage {}

impl StatusPage {
    const BYTES: NonZeroUsize = NonZeroUsize::new(4096).unwrap();

    fn create() -> Result<(StatusPage, OwnedFd), Errno> {
        let memfd = memfd_create(c"lockstep-status", MFdFlags::MFD_CLOEXEC)?;
        ftruncate(&memfd, Self::BYTES.get() as i64)?;
        let access = ProtFlags::PROT_READ;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let page = unsafe { mmap(None, Self::BYTES, access, MapFlags::MAP_SHARED, &memfd, 0)? };
        Ok((StatusPage(page.cast()), memfd))
    }

    fn read(&self) -> LogStatus {
        // SAFETY: mapped, aligned to a page, and valid whatever it contains.
        let words = unsafe { self.0.as_ref() };
        let [magic, position, blocked_since, blocked, instructions, event, frames] =
            words.each_ref().map(|word| word.load(Ordering::Acquire));
        if magic != STATUS_MAGIC {
            return LogStatus::default(); // The agent has not started.
        }
        let is_blocked = blocked_since != 0;
        LogStatus { position, is_blocked, blocked, instructions, event, frames }
    }
}

impl Drop for StatusPage {
    fn drop(&mut self) {
        // SAFETY: mapped in `create`, and nobody has a reference into it.
        if let Err(error) = unsafe { munmap(self.0.cast(), Self::BYTES.get()) } {
            tracing::warn!("cannot unmap a log's status: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn definition(toml: &str) -> VmDefinition {
        toml::from_str(toml).unwrap()
    }

    #[test]
    fn what_is_not_proven_is_named() {
        let ten = QemuVersion { major: 10, minor: 0, micro: 2 };
        let good = definition(
            "name = \"a\"\nmemory = \"64M\"\nvcpus = 1\n[[disk]]\npath = \"a\"\nformat = \"raw\"",
        );
        assert_eq!(obstacles(&good, Accelerator::Tcg, Some(ten)), Vec::<String>::new());
        let bad = definition(
            "name = \"a\"\nmemory = \"64M\"\nvcpus = 2\nvga = \"std\"\n\
             [[disk]]\npath = \"a\"\nformat = \"qcow2\"\n\
             [[card]]\nmac = \"52:54:00:00:00:01\"\nbridge = \"b\"\nmodel = \"e1000\"",
        );
        let version = QemuVersion { major: 9, ..ten };
        let found = obstacles(&bad, Accelerator::Kvm, Some(version));
        assert_eq!(found.len(), 6, "{found:?}");
    }
}
