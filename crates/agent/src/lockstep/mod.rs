// SPDX-License-Identifier: GPL-2.0-or-later
//! Record/replay log of QEMU in lockstep, which passes through the agent.
//!
//! The agent stands in for a few functions of the C library. It acts only in a QEMU whose
//! daemon asked for it by `UNDERSTUDY_LOCKSTEP`; in every other it passes the calls on.
//!
//! - `fopen` of `understudy-log` gives a file whose bytes go to, or come from, a socket of the
//!   daemon's ([`log`]): a full one stops the primary, an empty one stops the backup; behind the
//!   end of the log, what a backup still asks is answered ([`question`]);
//! - `writev` to a card's socket brings the log out first, so that the daemon, reading the
//!   frame, finds a position that covers it; on a backup it sends nothing ([`output`]);
//! - `sendmsg` and `recvmsg` on the console's socket: what the guest says leaves behind its log,
//!   what is typed comes as the port has room ([`console`]);
//! - where the log begins, virtio queues forget what no saved state has ([`queues`]);
//! - the main loop stands still for a moment at a place of the log ([`hold`]), for a comparison;
//! - `ppoll` keeps QEMU from sleeping while there is log ([`wait`]);
//! - `write` by the vCPU to an eventfd of QEMU's loops is left out when it wakes them for
//!   nothing: any loop on a backup, the monitors' on a primary ([`wake`]).

mod console;
mod control;
mod halt;
mod hold;
mod log;
mod output;
mod pause;
mod qemu;
mod question;
mod queues;
mod ticks;
mod wait;
mod wake;

use console::Console;
use hold::Hold;
use qemu::Qemu;
use std::env;
use std::ffi::c_int;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use understudy_agent_protocol::{LOCKSTEP_VARIABLE as VARIABLE, LogPage, LogRole};
use understudy_lockstep::EventScanner;

pub use pause::{attach, settle, takes};

static LOCKSTEP: OnceLock<Lockstep> = OnceLock::new();

/// Role of this QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// A primary, whether or not it has a backup.
    Record = 1,
    /// A backup.
    Replay = 2,
    /// A backup that took over.
    Live = 3,
}

/// All about this QEMU's lockstep.
struct Lockstep {
    qemu: Qemu,
    page: &'static LogPage,
    /// The daemon's end has the log; a stream socket.
    log: c_int,
    role: AtomicU8,
    console: Option<Console>,
    /// QEMU's log, once it has opened it.
    file: AtomicPtr<libc::FILE>,
    /// The log goes to the daemon (primary) or comes from it (backup); else it is
    /// discarded (primary), or an end without end (backup).
    flowing: AtomicBool,
    /// A backup's QEMU was given an end, for want of log, because the machine was stopping.
    stopped_early: AtomicBool,
    /// Scanner for the ends of events in what a backup has received.
    received: Mutex<EventScanner>,
    /// Bytes of log that passed through the socket or were discarded.
    passed: AtomicU64,
    /// Place where the log was attached last.
    attached: Attached,
    hold: Hold,
    /// Bytes of the log's prelude that a backup's QEMU has taken.
    prelude: AtomicU64,
}

/// The beginning of the log that the backup gets.
#[derive(Default)]
struct Attached {
    /// Bytes of log that had passed.
    position: AtomicU64,
    /// Requests to disks that had begun, and ended.
    disk_requests: AtomicU64,
}

impl Lockstep {
    fn role(&self) -> Role {
        match self.role.load(Ordering::Acquire) {
            1 => Role::Record,
            2 => Role::Replay,
            _ => Role::Live,
        }
    }
}

/// Lockstep that the hooks act on: none in a QEMU without lockstep.
fn lockstep() -> Option<&'static Lockstep> {
    LOCKSTEP.get()
}

/// Whether this QEMU counts instructions: a primary or backup in lockstep, or one that was.
pub fn is_on() -> bool {
    lockstep().is_some()
}

/// Whether this QEMU is one that lockstep knows, or what of it is not.
pub fn probe() -> Result<(), String> {
    Qemu::find().map(drop)
}

/// Prepares the hooks, if the daemon asked for lockstep. Before `main`, on its only thread.
pub fn start() -> Result<(), String> {
    let Ok(wish) = env::var(VARIABLE) else {
        return Ok(());
    };
    // SAFETY: before `main`; no other thread reads the environment.
    unsafe { env::remove_var(VARIABLE) };
    let (role, descriptors) = parse(&wish).ok_or_else(|| format!("{VARIABLE}={wish}: unknown"))?;
    let [log, page, control] = &descriptors[..] else {
        return Err(format!("{VARIABLE}={wish}: not three descriptors"));
    };
    for &fd in &descriptors {
        // Programs that QEMU starts must not hold them open.
        // SAFETY: changes a flag of a descriptor.
        if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
            return Err(format!("{VARIABLE}={wish}: {fd} is no descriptor"));
        }
    }
    let page = map(*page).map_err(|e| format!("cannot map the log's page: {e}"))?;
    let lockstep = Lockstep {
        qemu: Qemu::find()
            .map_err(|what| format!("lockstep is not proven with this QEMU: {what}"))?,
        page,
        log: *log,
        role: AtomicU8::new(role as u8),
        console: console::find()?,
        file: AtomicPtr::default(),
        flowing: AtomicBool::new(false),
        stopped_early: AtomicBool::new(false),
        received: Mutex::default(),
        passed: AtomicU64::new(0),
        attached: Attached::default(),
        hold: Hold::default(),
        prelude: AtomicU64::new(0),
    };
    let lockstep = LOCKSTEP.get_or_init(|| lockstep);
    ticks::start()?;
    control::start(lockstep, *control)?;
    log::start(lockstep)
}

fn parse(wish: &str) -> Option<(Role, Vec<c_int>)> {
    let (role, descriptors) = wish.split_once(',')?;
    let role = match LogRole::from_name(role)? {
        LogRole::Record => Role::Record,
        LogRole::Replay => Role::Replay,
    };
    let descriptors = descriptors.split(',').map(|number| number.parse().ok());
    Some((role, descriptors.collect::<Option<_>>()?))
}

/// Maps the page that the daemon made.
fn map(fd: c_int) -> io::Result<&'static LogPage> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let page =
        unsafe { libc::mmap(ptr::null_mut(), LogPage::BYTES, access, libc::MAP_SHARED, fd, 0) };
    if page == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: aligned, never unmapped, and valid whatever it contains: it has atomics only.
    Ok(unsafe { &*page.cast::<LogPage>() })
}

/// Finds the function that the agent stands in for, once.
fn next<F: Copy>(place: &'static OnceLock<usize>, name: &std::ffi::CStr) -> F {
    let address = *place.get_or_init(|| {
        // SAFETY: asks the dynamic linker; the name ends with a zero byte.
        let address = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
        if address.is_null() {
            crate::exit_now(crate::EXIT_FAILED);
        }
        address as usize
    });
    assert_eq!(std::mem::size_of::<F>(), std::mem::size_of::<usize>());
    // SAFETY: `F` is the function's type: each caller names a function of the C library.
    unsafe { std::mem::transmute_copy(&address) }
}
