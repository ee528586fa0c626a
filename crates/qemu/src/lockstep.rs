//! A QEMU in lockstep: what it must be, and the way of its log.
//!
//! QEMU's own record and replay (`-icount rr=…`) makes the log; the agent inside QEMU carries
//! it (`crates/agent/src/lockstep`). A log is a stream of bytes on a socket: a primary writes
//! it, and waits while the socket is full; a backup reads it, and waits while it is empty.
#![allow(unsafe_code)] // Maps a page that QEMU shares.

use crate::capabilities::Accelerator;
use crate::definition::{CardModel, DiskBus, DiskFormat, Vga, VmDefinition};
use crate::hold::Held;
use crate::qmp::QemuVersion;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::socket::{MsgFlags, recv, setsockopt, sockopt};
use nix::unistd::ftruncate;
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use understudy_agent_protocol::{Hello, LOCKSTEP_VARIABLE, LogPage};
use understudy_threads::Mutex;

pub(crate) use understudy_agent_protocol::LOG_NAME;
pub use understudy_agent_protocol::{CONSOLE_VARIABLE, LogErrand, LogRole, Request};

/// Versions of QEMU (major, minor) in which lockstep is proven. The log's format, and what the
/// agent calls, may change with any other.
const PROVEN: [(u32, u32); 1] = [(10, 0)];

/// Guest instructions take 2 ns each: 500 million a second. (`auto` makes the guest wait for
/// up to 1.3 s now and then; 3 lets its time run 11 times too fast under load.)
pub(crate) const ICOUNT_SHIFT: u32 = 1;

/// Room for log between QEMU and the daemon, in bytes.
const SOCKET_BUFFER_BYTES: usize = 1 << 20;

/// The reasons why this VM cannot run in lockstep, for people; empty if it can. Each is followed by
/// what to do: `--mode checkpoint` works with all of them.
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
        if disk.cdrom {
            refuse(format!("disk {n} is a CD-ROM drive, which is not proven"));
        } else if disk.bus != DiskBus::Virtio || disk.format != DiskFormat::Raw {
            refuse(format!("disk {n} is not a raw virtio disk; no other is proven"));
        }
    }
    for (n, card) in vm.cards.iter().enumerate() {
        if card.model != CardModel::VirtioNet {
            refuse(format!("card {n} is no virtio-net; no other is proven"));
        }
    }
    for (there, what) in [
        (vm.firmware.is_some(), "a UEFI firmware"),
        (vm.tpm.is_some(), "a TPM"),
        (vm.vnc, "a display"),
        (vm.guest_agent, "the channel of a guest agent"),
        (!vm.empty_cdroms.is_empty(), "a CD-ROM drive"),
    ] {
        if there {
            refuse(format!("it has {what}, which is not proven"));
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

/// The reason why a QEMU that runs cannot be in lockstep, as the agent inside found; none if it
/// can. Its version, which [`obstacles`] checks, says what it does; this, whether it was built so
/// that the agent can steer it.
pub fn build_obstacle(hello: &Hello) -> Option<String> {
    let what = hello.missing.as_ref().or(hello.missing_for_lockstep.as_ref())?;
    Some(format!(
        "this build of QEMU is not one that lockstep is proven with ({what}); Debian's builds of \
         QEMU {}.{} are",
        PROVEN[0].0, PROVEN[0].1
    ))
}

/// The agent did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum LockstepError {
    /// The agent cannot do it in this role.
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
    page: OwnedFd,
    control: OwnedFd,
}

impl LogEnds {
    /// The descriptors for [`crate::process::Launch::inherit`].
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 3] {
        [self.log.as_fd(), self.page.as_fd(), self.control.as_fd()]
    }

    /// The variable for [`crate::process::Launch::env`].
    pub fn environment(&self, role: LogRole) -> (OsString, OsString) {
        let [log, page, control] = self.descriptors().map(|fd| fd.as_raw_fd());
        (LOCKSTEP_VARIABLE.into(), format!("{},{log},{page},{control}", role.name()).into())
    }
}

/// The daemon's ends of the way of a log.
#[derive(Debug)]
pub struct LogChannel {
    /// The log itself.
    pub log: UnixStream,
    page: Page,
    /// Connection to the agent, for one request at a time.
    control: Mutex<UnixStream>,
}

impl LogChannel {
    /// Creates both ends; `timeout` is for each answer of the agent's.
    pub fn create(timeout: Duration) -> io::Result<(LogChannel, LogEnds)> {
        let (log, qemus_log) = UnixStream::pair()?;
        for end in [&log, &qemus_log] {
            setsockopt(end, sockopt::SndBuf, &SOCKET_BUFFER_BYTES)?;
        }
        let (control, qemus_control) = UnixStream::pair()?;
        control.set_read_timeout(Some(timeout))?;
        let (page, memfd) = Page::create()?;
        let ends = LogEnds { log: qemus_log.into(), page: memfd, control: qemus_control.into() };
        Ok((LogChannel { log, page, control: Mutex::new(control) }, ends))
    }

    /// Asks the agent, waits, and gives the bytes of log that have passed it so far.
    pub fn ask(&self, request: Request) -> Result<u64, LockstepError> {
        let mut control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        control.write_all(&[request as u8])?;
        let mut answer = [0; 8];
        control.read_exact(&mut answer)?;
        match u64::from_le_bytes(answer) {
            Request::REFUSED => Err(LockstepError::Refused(request)),
            passed => Ok(passed),
        }
    }

    /// Throws away the log that was not read. Between [`Request::Detach`] and the next
    /// [`LogErrand::Attach`]: what is left of one backup's log is no part of the next one's.
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

    /// Ends a log that nobody follows, wherever that is. Whoever waits for room in it goes on even if the
    /// agent does not answer now, as long as QEMU stands still: it heeds the request when it runs again.
    pub fn release(&self) -> Result<(), LockstepError> {
        self.discard_log()?;
        let detached = self.ask(Request::Detach);
        self.discard_log()?;
        detached.map(drop)
    }

    /// The log begins behind `position`, where a pause has attached it, and the machine stands still
    /// until this returns. Throws away what was left of an earlier log: a sender that waited for
    /// room when that ended has given the rest since, however late.
    pub fn begin_log(&self, position: u64) -> io::Result<()> {
        self.discard_log()?;
        let passed = self.status().position;
        if passed != position {
            let what =
                format!("{passed} bytes of log have passed QEMU where it begins behind {position}");
            return Err(io::Error::other(what));
        }
        Ok(())
    }

    /// Reads log that is there; never waits. 0 when QEMU has ended.
    pub fn read_now(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match recv(self.log.as_raw_fd(), buffer, MsgFlags::MSG_DONTWAIT) {
                Err(Errno::EINTR) => {}
                result => return Ok(result?),
            }
        }
    }

    /// The point at which QEMU stands still for [`LogChannel::hold`], if it does.
    pub(crate) fn held(&self) -> Option<Held> {
        self.page.held()
    }

    /// The status of its work that QEMU shows.
    pub fn status(&self) -> LogStatus {
        self.page.read()
    }
}

/// The status of its work that QEMU shows without being asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogStatus {
    /// Primary: bytes of log that it has written and that have left it. Backup: bytes that
    /// it has taken; a millisecond old.
    pub position: u64,
    /// Whether it stands still for the log: no room, or none left.
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

/// This process's mapping of the page that the agent writes.
#[derive(Debug)]
struct Page(NonNull<LogPage>);

// SAFETY: the page has atomics only, and stays mapped as long as this lives.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    const BYTES: NonZeroUsize = NonZeroUsize::new(LogPage::BYTES).unwrap();

    fn create() -> Result<(Page, OwnedFd), Errno> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let memfd = memfd_create(c"understudy-log", flags)?;
        ftruncate(&memfd, Self::BYTES.get() as i64)?;
        // QEMU must not be able to cut the page off from under this process.
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&memfd, FcntlArg::F_ADD_SEALS(seals))?;
        let access = ProtFlags::PROT_READ;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let page = unsafe { mmap(None, Self::BYTES, access, MapFlags::MAP_SHARED, &memfd, 0)? };
        Ok((Page(page.cast()), memfd))
    }

    fn held(&self) -> Option<Held> {
        let page = self.page();
        let word = |word: &AtomicU64| word.load(Ordering::Acquire);
        let number = word(&page.held);
        let held = Held {
            number,
            position: word(&page.held_position),
            instructions: word(&page.held_instructions),
            disk_requests: word(&page.held_disk_requests),
        };
        // The agent writes the others while this is 0.
        (number != 0 && word(&page.held) == number).then_some(held)
    }

    fn page(&self) -> &LogPage {
        // SAFETY: mapped until this is dropped, never shrunk, and valid whatever it contains.
        unsafe { self.0.as_ref() }
    }

    fn read(&self) -> LogStatus {
        let page = self.page();
        let word = |word: &AtomicU64| word.load(Ordering::Acquire);
        LogStatus {
            position: word(&page.position),
            is_blocked: word(&page.blocked_since) != 0,
            blocked: word(&page.blocked),
            instructions: word(&page.instructions),
            event: word(&page.event),
            frames: word(&page.frames),
        }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: mapped in `create`, and nobody has a reference into it.
        if let Err(error) = unsafe { munmap(self.0.cast(), Self::BYTES.get()) } {
            tracing::warn!("cannot unmap a log's page: {error}");
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
    fn an_unproven_build_is_refused_with_the_proven_ones() {
        assert_eq!(build_obstacle(&Hello::default()), None);
        let other = "replay_state has 72 bytes".to_owned();
        let hello = Hello { missing_for_lockstep: Some(other), ..Hello::default() };
        let found = build_obstacle(&hello).unwrap();
        assert!(found.contains("72 bytes") && found.contains("QEMU 10.0"), "{found}");
    }

    /// It waited for ever.
    #[test]
    fn who_waits_for_room_in_a_log_goes_on_though_nobody_answers_that_it_has_ended() {
        let (channel, ends) = LogChannel::create(Duration::from_millis(10)).unwrap();
        let mut qemu = UnixStream::from(ends.log);
        qemu.set_nonblocking(true).unwrap();
        while qemu.write(&[0; 4096]).is_ok() {}
        assert!(matches!(channel.release(), Err(LockstepError::Silent(_))));
        assert!(qemu.write(&[0; 4096]).is_ok());
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
