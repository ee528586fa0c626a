// SPDX-License-Identifier: GPL-2.0-or-later
//! The agent: a small library that the daemon preloads (`LD_PRELOAD`) into a stock QEMU.
//!
//! Some things can only be done, or done well, from inside QEMU's process:
//!
//! - creating userfaultfds for QEMU's memory (every later call on them works from the
//!   daemon, which gets the descriptors over a unix socket);
//! - dropping QEMU's mappings, so that accesses to memory are noticed (`memory.rs`);
//! - ending QEMU at once when the daemon dies, however it dies: a guest whose daemon is
//!   gone is a copy that nobody controls, and there must be at most one live copy (unless a
//!   custodian of the daemon's has the connection, too: then QEMU stands still);
//! - answering for the cards' taps, which are none (`card`);
//! - pausing the machine for a checkpoint without a dozen hand-overs between threads
//!   (`pause.rs`);
//! - reading QEMU's dirty log, on KVM (`dirty_log.rs`);
//! - keeping the guest's clocks from losing its pauses (`clock.rs`, `kvm_clock.rs`).
//!
//! What is said between daemon and agent is described in `understudy-agent-protocol`.
//!
//! The agent acts only if `UNDERSTUDY_AGENT` holds the path of the daemon's socket. If
//! anything fails it says so on stderr and ends QEMU: a guest never runs half protected.
#![allow(unsafe_code)] // The whole crate is a library constructor and a few raw system calls.

mod card;
mod clock;
mod daemon;
mod descriptor;
mod dirty_log;
mod ioctl;
mod kvm_clock;
mod lockstep;
mod main_loop;
mod memory;
mod pause;
mod qemu_symbols;

use pause::QemuPause;
use std::env;
use std::ffi::c_int;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use understudy_agent_protocol::{DEVICE_VARIABLE, Hello, SOCKET_VARIABLE};

/// `USERFAULTFD_IOC_NEW` of `<linux/userfaultfd.h>`.
const IOC_NEW: libc::c_ulong = 0xAA00;

/// Exit status of QEMU when the agent could not do its work.
const EXIT_FAILED: c_int = 70;

/// Exit status of QEMU when its daemon is gone.
const EXIT_DAEMON_GONE: c_int = 71;

#[used]
// SAFETY: `.init_array` holds pointers to functions that the dynamic linker calls before `main`.
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

extern "C" fn constructor() {
    let Some(path) = env::var_os(SOCKET_VARIABLE) else {
        return;
    };
    let device = env::var(DEVICE_VARIABLE).ok().and_then(|number| number.parse().ok());
    let cards = env::var(card::VARIABLE).ok();
    // SAFETY: the constructor runs before `main`, when no other thread reads the environment.
    unsafe {
        env::remove_var(DEVICE_VARIABLE);
        env::remove_var(card::VARIABLE);
        // Programs started by QEMU must not announce themselves as guests of the daemon.
        env::remove_var(SOCKET_VARIABLE);
        env::remove_var("LD_PRELOAD");
    }
    let cards = cards.map_or(Ok(()), |numbers| card::register(&numbers));
    if let Err(reason) = cards.and_then(|()| start(Path::new(&path), device)) {
        eprintln!("understudy agent: {reason}");
        exit_now(EXIT_FAILED);
    }
}

/// Hands new userfaultfds to the daemon and starts watching the daemon's life.
fn start(path: &Path, device: Option<c_int>) -> Result<(), String> {
    disable_huge_pages().map_err(|e| format!("cannot disable transparent huge pages: {e}"))?;
    // SAFETY: the daemon has passed this descriptor on for this one use; nobody else in this
    // process knows of it.
    let device = device.map(|device| unsafe { OwnedFd::from_raw_fd(device) });
    let create = || create_userfaultfd(device.as_ref()).map_err(explain_userfaultfd);
    let (tracking, faults) = (create()?, create()?);
    let link = UnixStream::connect(path)
        .map_err(|e| format!("cannot reach the daemon at {}: {e}", path.display()))?;
    let pausing = QemuPause::find();
    let hello = Hello {
        missing: pausing.as_ref().err().cloned(),
        missing_for_lockstep: lockstep::probe().err(),
        ..Hello::default()
    };
    let (requests, daemons_end) =
        memory::socket_pair().map_err(|e| format!("cannot make a pair of sockets: {e}"))?;
    daemon::send_hello(&link, &hello, [&tracking, &faults, &daemons_end])
        .map_err(|e| format!("cannot send the userfaultfds to the daemon: {e}"))?;
    // If the daemon ends while the guest waits for memory, it must go on waiting until this
    // process ends, too: were its last descriptor closed, it would find zeros.
    mem::forget(faults);
    let no_thread = |e: io::Error| format!("cannot start the agent's threads: {e}");
    start_thread("understudy", move || attend(link, pausing.ok())).map_err(no_thread)?;
    start_thread("understudy-map", move || memory::serve(&requests)).map_err(no_thread)?;
    lockstep::start()
}

/// Keeps the kernel from mapping guest memory in units of 2 MiB, which QEMU asks for: when it
/// splits such a unit, it forgets that pages in it were written.
fn disable_huge_pages() -> io::Result<()> {
    // SAFETY: the call takes numbers and touches no memory.
    match unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Creates a userfaultfd that also sees the writes of QEMU's own system calls
/// (`UFFD_USER_MODE_ONLY` would not: disk reads into guest memory are such writes).
fn create_userfaultfd(device: Option<&OwnedFd>) -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    let fd = match device {
        // SAFETY: the call takes one flag word and touches no memory of ours.
        Some(device) => i64::from(unsafe { libc::ioctl(device.as_raw_fd(), IOC_NEW, flags) }),
        // SAFETY: as above.
        None => unsafe { libc::syscall(libc::SYS_userfaultfd, flags) },
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave us this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as c_int) })
}

fn explain_userfaultfd(error: io::Error) -> String {
    let remedy = match error.raw_os_error() {
        Some(libc::EPERM) => {
            "; run the daemon as root, with /dev/userfaultfd, \
             or set sysctl vm.unprivileged_userfaultfd=1"
        }
        Some(libc::ENOSYS) => "; this kernel is built without CONFIG_USERFAULTFD",
        _ => "",
    };
    format!("cannot create a userfaultfd: {error}{remedy}")
}

/// Starts a thread that QEMU's signals leave alone.
fn start_thread(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    // QEMU's signal handling expects signals on its own threads: a new thread inherits the
    // mask, so block all while it is made.
    let previous = block_all_signals()?;
    let started = thread::Builder::new().name(name.into()).spawn(work);
    restore_signals(&previous)?;
    started.map(drop)
}

/// Does what the daemon says until its end, then ends QEMU.
///
/// No message and no clean-up on the way: a stderr that nobody reads may block, and the
/// guest must not run on.
fn attend(link: UnixStream, mut pausing: Option<QemuPause>) {
    while let Ok(descriptors) = daemon::receive_arm(&link) {
        let armed = pausing.take().is_some_and(|pausing| pause::arm(pausing, descriptors).is_ok());
        if !armed {
            break;
        }
    }
    exit_now(EXIT_DAEMON_GONE)
}

fn block_all_signals() -> io::Result<libc::sigset_t> {
    // SAFETY: both sets are plain data on our stack, filled before they are read.
    let (status, previous) = unsafe {
        let mut all: libc::sigset_t = mem::zeroed();
        let mut previous: libc::sigset_t = mem::zeroed();
        libc::sigfillset(&mut all);
        let status = libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut previous);
        (status, previous)
    };
    signal_result(status).map(|()| previous)
}

fn restore_signals(mask: &libc::sigset_t) -> io::Result<()> {
    // SAFETY: `mask` is a set that the kernel gave us.
    signal_result(unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, std::ptr::null_mut()) })
}

fn signal_result(status: c_int) -> io::Result<()> {
    match status {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// Ends the process without running any handler of QEMU's.
fn exit_now(status: c_int) -> ! {
    // SAFETY: `_exit` takes a number and does not return.
    unsafe { libc::_exit(status) }
}
