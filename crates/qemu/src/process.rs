//! The running QEMU process and its end.

#![allow(unsafe_code)]

use crate::user::{User, become_user};
use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::PoisonError;
use std::time::{Duration, Instant};
use understudy_threads::{Mutex, MutexGuard};

/// Bytes of the end of QEMU's messages that go into an error.
const TAIL_BYTES: u64 = 2048;

/// Number added to the share of memory, in thousandths, by which the kernel chooses what to end.
const QEMU_OOM_SCORE: &[u8] = b"300";

/// Signals that a terminal, a service manager or a shutdown sends to all processes: they tell the daemon to end its
/// guests in order, and would end QEMU, or swtpm, at once.
const MEANT_FOR_DAEMON: [Signal; 3] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM];

/// The way to start QEMU.
pub struct Launch<'a> {
    /// The program: a path, or a name to look for in `PATH`.
    pub binary: &'a Path,
    /// Its arguments, from [`crate::command_line`].
    pub args: &'a [OsString],
    /// Variables added to the daemon's environment: the agent's `LD_PRELOAD` and
    /// `UNDERSTUDY_AGENT`.
    pub env: &'a [(OsString, OsString)],
    /// Descriptors that QEMU inherits, under the numbers that they have here.
    /// It inherits no others but standard input, output and error.
    pub inherit: &'a [BorrowedFd<'a>],
    /// File that QEMU's standard output and error are appended to.
    pub log: &'a Path,
    /// The directory that it works in; this process's own without.
    pub directory: Option<&'a Path>,
    /// User that it runs as; this process's own if there is none.
    pub user: Option<User>,
    /// Number of files that it may have open; as many as this process without. Those that it
    /// inherits may have higher numbers.
    pub descriptors: Option<u64>,
}

/// QEMU could not be started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The program is missing or not executable.
    #[error("cannot run {}: {source}; is it installed?", binary.display())]
    Run {
        /// The program.
        binary: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The log file cannot be written.
    #[error("cannot write QEMU's log {}: {source}", log.display())]
    Log {
        /// The file.
        log: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The directory that it should work in cannot be opened.
    #[error("cannot use {} as QEMU's directory: {source}", directory.display())]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The system refused a process descriptor.
    #[error("cannot watch QEMU: {0}")]
    Watch(io::Error),
}

/// The end of a QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Exit code or signal; only its parent is told.
    pub status: Option<ExitStatus>,
    /// The last lines that QEMU said.
    pub last_words: String,
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "QEMU ended")?;
        if let Some(status) = self.status {
            write!(f, " with {status}")?;
        }
        if !self.last_words.is_empty() {
            write!(f, "; it said: {}", self.last_words)?;
        }
        Ok(())
    }
}

/// A running QEMU. Dropping it kills it.
///
/// Its descriptor (`AsFd`) is a pidfd: it polls readable once QEMU has ended.
#[derive(Debug)]
pub struct Qemu {
    /// The process as a child; none if another process has started it.
    child: Option<Mutex<Child>>,
    pid: u32,
    pidfd: OwnedFd,
    log: PathBuf,
    log_start: u64,
}

impl Qemu {
    /// Starts QEMU. That it runs shows when its monitor answers; if it does
    /// not, [`Qemu::wait`] says why.
    pub fn launch(launch: &Launch<'_>) -> Result<Qemu, LaunchError> {
        Qemu::start(launch, false)
    }

    /// The same for one that is only asked something: the kernel ends it with the calling thread, and so with
    /// a process that is killed meanwhile. Not for one that becomes another user, which undoes that.
    pub fn launch_for_thread(launch: &Launch<'_>) -> Result<Qemu, LaunchError> {
        Qemu::start(launch, true)
    }

    fn start(launch: &Launch<'_>, for_thread: bool) -> Result<Qemu, LaunchError> {
        let log_error = |source| LaunchError::Log { log: launch.log.to_owned(), source };
        let log = File::options().create(true).append(true).open(launch.log).map_err(log_error)?;
        let log_start = log.metadata().map_err(log_error)?.len();
        let mut command = Command::new(launch.binary);
        command
            .args(launch.args)
            .envs(launch.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(log.try_clone().map_err(log_error)?)
            .stderr(log);
        let directory = launch.directory.map(open_directory).transpose()?;
        let (user, descriptors) = (launch.user, launch.descriptors);
        let not_its_own: SigSet = MEANT_FOR_DAEMON.into_iter().collect();
        let inherit: Vec<RawFd> = launch.inherit.iter().map(AsRawFd::as_raw_fd).collect();
        // SAFETY: between fork and exec the closure only makes system calls; it
        // neither allocates nor locks. The descriptors are open: they are borrowed
        // for as long as `launch`.
        unsafe {
            command.pre_exec(move || {
                pass_on_only(&inherit)?;
                be_expendable();
                not_its_own.thread_block()?;
                descriptors.map_or(Ok(()), limit_descriptors)?;
                become_user(directory.as_ref().map(AsFd::as_fd), user)?;
                if for_thread { set_pdeathsig(Signal::SIGKILL).map_err(Into::into) } else { Ok(()) }
            })
        };
        let mut child = command
            .spawn()
            .map_err(|source| LaunchError::Run { binary: launch.binary.to_owned(), source })?;
        let pid = child.id();
        let pidfd = match pidfd_of(pid) {
            Ok(pidfd) => pidfd,
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(LaunchError::Watch(error));
            }
        };
        tracing::info!(pid, program = %launch.binary.display(), "started");
        let child = Some(Mutex::new(child));
        Ok(Qemu { child, pid, pidfd, log: launch.log.to_owned(), log_start })
    }

    /// A QEMU that another process has started, which is no more. `pidfd` is its descriptor.
    pub fn adopt(pid: u32, pidfd: OwnedFd, log: PathBuf, log_start: u64) -> Qemu {
        Qemu { child: None, pid, pidfd, log, log_start }
    }

    /// The offset at which its last words begin in its log.
    pub fn log_start(&self) -> u64 {
        self.log_start
    }

    /// Lets a QEMU go on that was stopped with SIGSTOP.
    pub fn go_on(&self) -> io::Result<()> {
        signal(self.pidfd.as_fd(), Signal::SIGCONT)
    }

    /// The process's number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The end of QEMU, if it has ended.
    pub fn try_wait(&self) -> io::Result<Option<Exit>> {
        let ended = match &self.child {
            Some(child) => lock(child).try_wait()?.map(Some),
            None => has_ended(self.pidfd.as_fd(), PollTimeout::ZERO)?.then_some(None),
        };
        Ok(ended.map(|status| Exit { status, last_words: self.last_words() }))
    }

    /// Waits until QEMU has ended, at most so long; none if it still runs.
    pub fn wait(&self, at_most: Duration) -> io::Result<Option<Exit>> {
        let deadline = Instant::now() + at_most;
        loop {
            if let Some(exit) = self.try_wait()? {
                return Ok(Some(exit));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            // Rounded up, or the last fraction of a millisecond would spin.
            let millis = i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX);
            let timeout = PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX);
            has_ended(self.pidfd.as_fd(), timeout)?;
        }
    }

    /// Has QEMU end at once (SIGKILL), and does not wait until it has. The guest gets no warning.
    pub fn tell_to_end(&self) -> io::Result<()> {
        match signal(self.pidfd.as_fd(), Signal::SIGKILL) {
            Err(error) if error.raw_os_error() != Some(libc::ESRCH) => Err(error),
            _ => Ok(()),
        }
    }

    /// Ends QEMU at once and reaps it.
    pub fn kill(&self) -> io::Result<Exit> {
        self.tell_to_end()?;
        // Not under the lock: it may hang in the kernel, and others ask whether it lives.
        while !has_ended(self.pidfd.as_fd(), PollTimeout::NONE)? {}
        let status = self.child.as_ref().map(|child| lock(child).wait()).transpose()?;
        Ok(Exit { status, last_words: self.last_words() })
    }

    /// The end of what QEMU has said since it was started.
    pub fn last_words(&self) -> String {
        // Only for an error message: a log that cannot be read says nothing.
        read_tail(&self.log, self.log_start).unwrap_or_default()
    }
}

impl AsFd for Qemu {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            tracing::error!(pid = self.pid, %error, "cannot end QEMU");
        }
    }
}

fn lock(child: &Mutex<Child>) -> MutexGuard<'_, Child> {
    child.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for the end of a process; whether it has come.
pub fn has_ended(pidfd: BorrowedFd<'_>, at_most: PollTimeout) -> io::Result<bool> {
    match nix::poll::poll(&mut [PollFd::new(pidfd, PollFlags::POLLIN)], at_most) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::EINTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Ends the process of a pidfd; returns when it has ended.
pub fn kill(pidfd: BorrowedFd<'_>) {
    // Fails if it has ended already.
    let _ = signal(pidfd, Signal::SIGKILL);
    while !has_ended(pidfd, PollTimeout::NONE).unwrap_or(true) {}
}

/// Sends a signal to the process of a pidfd; ESRCH if it has ended.
pub fn signal(pidfd: BorrowedFd<'_>, signal: Signal) -> io::Result<()> {
    let (pidfd, number) = (pidfd.as_raw_fd(), signal as libc::c_int);
    let information = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: a system call on an open descriptor, whose only pointer may be null.
    let result =
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd, number, information, 0) };
    Errno::result(result).map(drop).map_err(io::Error::from)
}

/// Has the kernel end this process before the daemon when memory runs out: one VM's backup takes
/// over then, instead of all VMs'. Only system calls, for use between fork and exec.
fn be_expendable() {
    use nix::fcntl::{OFlag, open};
    use nix::sys::stat::Mode;
    // Anybody may make himself more expendable; where there is no such file nobody is chosen by it.
    if let Ok(file) = open(c"/proc/self/oom_score_adj", OFlag::O_WRONLY, Mode::empty()) {
        let _ = nix::unistd::write(file, QEMU_OOM_SCORE);
    }
}

/// Limits the descriptors for good: no process without rights can raise it again. Only system
/// calls, for use between fork and exec.
fn limit_descriptors(most: u64) -> io::Result<()> {
    let (_, allowed) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let most = most.min(allowed);
    Ok(setrlimit(Resource::RLIMIT_NOFILE, most, most)?)
}

fn open_directory(path: &Path) -> Result<File, LaunchError> {
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW;
    let opened = File::options().read(true).custom_flags(flags).open(path);
    opened.map_err(|source| LaunchError::Directory { directory: path.to_owned(), source })
}

/// Makes exec close every descriptor from 3 up, except these.
fn pass_on_only(inherit: &[RawFd]) -> io::Result<()> {
    // CLOEXEC instead of closing at once: the standard library reports a failed
    // exec through a descriptor of its own.
    let flags = libc::CLOSE_RANGE_CLOEXEC as libc::c_int;
    // SAFETY: a system call without pointers, on this process's own descriptors.
    if unsafe { libc::close_range(3, libc::c_uint::MAX, flags) } < 0 {
        return Err(io::Error::last_os_error());
    }
    for &fd in inherit {
        // SAFETY: a system call without pointers, on an open descriptor.
        if unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// A descriptor of a process, which polls readable once that has ended. Whoever asks knows that the number is
/// still its own: as its parent, which has not reaped it, or by a lock that it holds.
pub fn pidfd_of(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: a system call without pointers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = RawFd::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made this descriptor, for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The processes that a process has started, and that were not waited for.
pub fn children_of(pid: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = threads.filter_map(|it| fs::read_to_string(it.path().join("children")).ok());
    let numbers = |list: String| -> Vec<u32> {
        list.split_whitespace().filter_map(|number| number.parse().ok()).collect()
    };
    lists.flat_map(numbers).collect()
}

fn read_tail(log: &Path, start: u64) -> io::Result<String> {
    let mut file = File::open(log)?;
    let end = file.metadata()?.len();
    // Shorter than at the start: it was cut since, and all of it was said after that.
    let start = if start > end { 0 } else { start };
    file.seek(SeekFrom::Start(start.max(end.saturating_sub(TAIL_BYTES))))?;
    let mut bytes = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
}

#[cfg(test)]
#[path = "process_tests.rs"]
mod tests;
