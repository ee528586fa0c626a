// SPDX-License-Identifier: GPL-2.0-or-later
//! QEMU's log file, which is a socket.

use super::qemu::{EVENT_END, LOG_VERSION};
use super::{Lockstep, Role, lockstep, next};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::ptr;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;
use understudy_agent_protocol::LOG_NAME;
use understudy_lockstep::EventScanner;

/// QEMU's buffer before the log's hooks.
const BUFFER_BYTES: usize = 64 << 10;

/// Longest time that log may wait in QEMU's buffer when no frame brings it out.
const FLUSH_INTERVAL: Duration = Duration::from_millis(1);

/// Time that a backup's QEMU waits for log before it looks whether it is to stop, in milliseconds.
const LOOK_AGAIN: c_int = 10;

type Open = unsafe extern "C" fn(*const c_char, *const c_char) -> *mut libc::FILE;
type Read = unsafe extern "C" fn(*mut c_void, *mut c_char, usize) -> isize;
type Write = unsafe extern "C" fn(*mut c_void, *const c_char, usize) -> isize;
type Seek = unsafe extern "C" fn(*mut c_void, *mut i64, c_int) -> c_int;
type Close = unsafe extern "C" fn(*mut c_void) -> c_int;

/// `cookie_io_functions_t` of the C library.
#[repr(C)]
struct Functions {
    read: Option<Read>,
    write: Option<Write>,
    seek: Option<Seek>,
    close: Option<Close>,
}

unsafe extern "C" {
    fn fopencookie(
        cookie: *mut c_void,
        mode: *const c_char,
        functions: Functions,
    ) -> *mut libc::FILE;
}

/// The first fields of the C library's `FILE`, which its own inline functions use.
#[repr(C)]
struct Buffers {
    flags: c_int,
    read_next: *const u8,
    read_end: *const u8,
    read_base: *const u8,
    write_base: *const u8,
    write_next: *const u8,
}

unsafe extern "C" {
    fn flockfile(file: *mut libc::FILE);
    fn funlockfile(file: *mut libc::FILE);
}

/// Starts the thread that brings the log out and keeps the status up to date.
pub fn start(lockstep: &'static Lockstep) -> Result<(), String> {
    super::control::spawn("understudy-log", move || {
        loop {
            thread::sleep(FLUSH_INTERVAL);
            lockstep.refresh();
        }
    })
}

impl Lockstep {
    /// Brings the log out of QEMU's buffer. Blocks while the daemon has no room.
    pub(super) fn flush(&self) {
        let file = self.file.load(Ordering::Acquire);
        if !file.is_null() && self.role() == Role::Record {
            // SAFETY: the file is never closed while QEMU records.
            unsafe { libc::fflush(file) };
        }
    }

    /// The same, up to this instruction.
    pub(super) fn flush_now(&self) {
        self.qemu.save_instructions();
        self.flush();
    }

    fn refresh(&self) {
        match self.role() {
            Role::Record => {
                self.flush();
                self.bring_words_out();
            }
            Role::Replay => self.publish_taken(),
            Role::Live => {}
        }
        self.show_event();
    }

    /// Shows the event that QEMU waits to execute, and how far it has come.
    pub(super) fn show_event(&self) {
        self.page.instructions.store(self.qemu.instructions(), Ordering::Relaxed);
        self.page.event.store(self.qemu.data_kind().into(), Ordering::Release);
    }

    fn publish_taken(&self) {
        let file = self.file.load(Ordering::Acquire);
        if file.is_null() {
            return;
        }
        // Before the buffer: what is taken meanwhile is then seen too late, never too early.
        let passed = self.passed.load(Ordering::Acquire);
        // SAFETY: two words of a file that is never closed; another thread may change them.
        let buffered = unsafe {
            let buffers = file.cast::<Buffers>();
            let next = (&raw const (*buffers).read_next).read_volatile();
            let end = (&raw const (*buffers).read_end).read_volatile();
            (end as usize).saturating_sub(next as usize)
        };
        let taken = passed.saturating_sub(buffered as u64);
        self.page.position.fetch_max(taken, Ordering::Release);
    }

    /// Bytes of log that QEMU has written, what is in its buffer included.
    pub(super) fn logged(&self) -> u64 {
        let file = self.file.load(Ordering::Acquire);
        if file.is_null() {
            return self.passed.load(Ordering::Acquire);
        }
        // SAFETY: a file that is never closed. While it is locked nobody writes to it, or brings
        // out what is in its buffer.
        unsafe {
            flockfile(file);
            let buffers = file.cast::<Buffers>();
            let buffered = (*buffers).write_next as usize - (*buffers).write_base as usize;
            let logged = self.passed.load(Ordering::Acquire) + buffered as u64;
            funlockfile(file);
            logged
        }
    }

    fn write(&self, bytes: &[u8]) {
        if self.flowing.load(Ordering::Acquire) {
            self.send(bytes);
        }
        let passed = self.passed.fetch_add(bytes.len() as u64, Ordering::AcqRel);
        self.page.position.store(passed + bytes.len() as u64, Ordering::Release);
    }

    fn send(&self, mut bytes: &[u8]) {
        let mut flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        while !bytes.is_empty() {
            // SAFETY: reads from a slice.
            let sent = unsafe { libc::send(self.log, bytes.as_ptr().cast(), bytes.len(), flags) };
            match usize::try_from(sent) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(_) => match io::Error::last_os_error().kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => {
                        flags = libc::MSG_NOSIGNAL;
                        self.page.begin_block();
                    }
                    // The daemon takes no more: it has lost the backup, and says so next.
                    _ => break,
                },
            }
        }
        self.page.end_block();
    }

    fn read(&self, buffer: &mut [u8]) -> usize {
        if let Some(bytes) = self.read_prelude(buffer) {
            return bytes;
        }
        let read = loop {
            let (start, length) = (buffer.as_mut_ptr().cast(), buffer.len());
            // SAFETY: writes into a slice.
            let read = unsafe { libc::recv(self.log, start, length, libc::MSG_DONTWAIT) };
            match usize::try_from(read) {
                Ok(read) => break read,
                Err(_) => match io::Error::last_os_error().kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock if self.may_end_early() => {
                        self.stopped_early.store(true, Ordering::Release);
                        buffer[0] = EVENT_END;
                        return 1;
                    }
                    io::ErrorKind::WouldBlock => {
                        self.page.begin_block();
                        self.await_more();
                    }
                    _ => break 0,
                },
            }
        };
        self.page.end_block();
        if read == 0 {
            // The log has ended. What follows is no part of it, and not counted.
            let event = self.qemu.questions.answer().unwrap_or_else(|| vec![EVENT_END]);
            buffer[..event.len()].copy_from_slice(&event);
            return event.len();
        }
        // An event that is none: QEMU itself says so.
        let _ = self.received().scan(&buffer[..read]);
        self.passed.fetch_add(read as u64, Ordering::AcqRel);
        read
    }

    /// Waits for more of the log, but not for long: the machine may be about to stop since now.
    fn await_more(&self) {
        let mut log = libc::pollfd { fd: self.log, events: libc::POLLIN, revents: 0 };
        // SAFETY: one descriptor.
        unsafe { libc::poll(&raw mut log, 1, LOOK_AGAIN) };
    }

    fn received(&self) -> MutexGuard<'_, EventScanner> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether QEMU, which finds no log for now, gets an end: the machine is about to stop, and to
    /// wait would keep it from that. What follows is read when it runs.
    ///
    /// In the midst of an instruction it must wait for how that ended, and in the midst of an
    /// event for the rest, and not for long: the primary logs that right behind, so it is on its
    /// way, or the log ends here.
    fn may_end_early(&self) -> bool {
        self.qemu.is_stopping() && self.received().partial() == 0 && !self.qemu.questions.is_asked()
    }

    /// Reads what a backup's QEMU finds in its log before it follows: the version, and ends, which
    /// it reads at its start and when it has loaded the device state.
    fn read_prelude(&self, buffer: &mut [u8]) -> Option<usize> {
        if self.prelude.load(Ordering::Acquire) == 0 {
            self.prelude.store(1, Ordering::Release);
            buffer[..LOG_VERSION.len()].copy_from_slice(&LOG_VERSION);
            return Some(LOG_VERSION.len());
        }
        if self.flowing.load(Ordering::Acquire) {
            return None;
        }
        buffer[0] = EVENT_END;
        Some(1)
    }

    /// Opens the log for QEMU.
    fn open(&'static self, mode: *const c_char) -> *mut libc::FILE {
        let functions =
            Functions { read: Some(read_hook), write: Some(write_hook), seek: None, close: None };
        // SAFETY: `mode` is the caller's; the hooks do without a cookie.
        unsafe {
            let file = fopencookie(ptr::null_mut(), mode, functions);
            if !file.is_null() {
                libc::setvbuf(file, ptr::null_mut(), libc::_IOFBF, BUFFER_BYTES);
                self.file.store(file, Ordering::Release);
                // QEMU opens its log once, after it made its main loop.
                self.watch_runs();
            }
            file
        }
    }
}

unsafe extern "C" fn read_hook(_: *mut c_void, buffer: *mut c_char, bytes: usize) -> isize {
    let Some(lockstep) = lockstep().filter(|_| bytes >= LOG_VERSION.len()) else {
        return -1;
    };
    // SAFETY: the C library gives its buffer of that size.
    let buffer = unsafe { std::slice::from_raw_parts_mut(buffer.cast::<u8>(), bytes) };
    lockstep.read(buffer) as isize
}

unsafe extern "C" fn write_hook(_: *mut c_void, buffer: *const c_char, bytes: usize) -> isize {
    if let Some(lockstep) = lockstep() {
        // SAFETY: the C library gives its buffer of that size.
        lockstep.write(unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), bytes) });
    }
    bytes as isize
}

/// Opens the log if `path` is its name.
unsafe fn open_log(path: *const c_char, mode: *const c_char) -> Option<*mut libc::FILE> {
    let lockstep = lockstep()?;
    // SAFETY: the caller of `fopen` gives a string.
    let is_log = unsafe { CStr::from_ptr(path) }.to_bytes() == LOG_NAME.as_bytes();
    is_log.then(|| lockstep.open(mode))
}

/// Stands in for the C library's `fopen`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fopen(path: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    static NEXT: OnceLock<usize> = OnceLock::new();
    // SAFETY: the arguments are passed on as they are.
    unsafe { open_log(path, mode).unwrap_or_else(|| next::<Open>(&NEXT, c"fopen")(path, mode)) }
}

/// Stands in for the C library's `fopen64`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fopen64(path: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    static NEXT: OnceLock<usize> = OnceLock::new();
    // SAFETY: the arguments are passed on as they are.
    unsafe { open_log(path, mode).unwrap_or_else(|| next::<Open>(&NEXT, c"fopen64")(path, mode)) }
}
