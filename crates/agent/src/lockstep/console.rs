// SPDX-License-Identifier: GPL-2.0-or-later
//! The guest's console.
//!
//! **What it says** leaves a primary behind the log that leads to it. QEMU logs a write to the
//! console after it was carried out ([`EVENT_CHAR_WRITE`](CHAR_WRITE_BYTES)), and a backup whose
//! log ends before that event may say something else. So the words wait here until the thread that
//! brings the log out has brought out that event, too: a millisecond at most.
//!
//! **What is typed** comes to a primary's port when the log's turn comes, but QEMU asks the port
//! for room as if it had come at once, and loses what does not fit. So nothing is read while
//! events wait to be logged, and no more than the port has room for when it is read.

use super::{Lockstep, Role, lockstep, next};
use std::collections::VecDeque;
use std::env;
use std::ffi::c_int;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use understudy_agent_protocol::CONSOLE_VARIABLE as VARIABLE;

/// The event of a write to the console in QEMU's log: its kind and two words.
const CHAR_WRITE_BYTES: u64 = 9;

/// The event that comes before it, if instructions have been executed since the last one: its kind
/// and a word.
const INSTRUCTIONS_BYTES: u64 = 5;

/// Most output that waits; beyond it the guest waits.
const MOST_WAITING: usize = 64 << 10;

/// Time that a guest that waits for room sleeps before it looks again.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

type SendMessage = unsafe extern "C" fn(c_int, *const libc::msghdr, c_int) -> isize;
type ReceiveMessage = unsafe extern "C" fn(c_int, *mut libc::msghdr, c_int) -> isize;

/// QEMU's end of the console.
pub struct Console {
    socket: c_int,
    /// Words that the guest has said, each byte with the position in the log that tells of it.
    waiting: Mutex<VecDeque<(u64, u8)>>,
    room: Condvar,
}

/// The console that the daemon has named, if it has. Before `main`, on its only thread.
pub fn find() -> Result<Option<Console>, String> {
    let Ok(number) = env::var(VARIABLE) else {
        return Ok(None);
    };
    // SAFETY: before `main`; no other thread reads the environment.
    unsafe { env::remove_var(VARIABLE) };
    let socket = number.parse().map_err(|_| format!("{VARIABLE}={number}: no descriptor"))?;
    Ok(Some(Console { socket, waiting: Mutex::default(), room: Condvar::new() }))
}

impl Console {
    fn waiting(&self) -> MutexGuard<'_, VecDeque<(u64, u8)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The guest says this; the log up to `position` tells of it.
    fn push(&self, words: &[u8], position: u64) {
        let mut waiting = self.waiting();
        while waiting.len() >= MOST_WAITING {
            let woken = self.room.wait_timeout(waiting, LOOK_AGAIN);
            waiting = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        waiting.extend(words.iter().map(|&byte| (position, byte)));
    }

    /// The log has left QEMU up to `position`. What the socket has no room for waits on.
    fn bring_out(&self, position: u64) {
        let mut waiting = self.waiting();
        loop {
            let covered = waiting.iter().take_while(|(tells, _)| *tells <= position);
            let words: Vec<u8> = covered.take(4096).map(|&(_, byte)| byte).collect();
            if words.is_empty() {
                break;
            }
            let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
            // SAFETY: reads from a slice.
            let sent =
                unsafe { libc::send(self.socket, words.as_ptr().cast(), words.len(), flags) };
            let gone = match usize::try_from(sent) {
                Ok(sent) => sent,
                Err(_) => match io::Error::last_os_error().kind() {
                    io::ErrorKind::Interrupted => 0,
                    io::ErrorKind::WouldBlock => break,
                    // The daemon has ended, and QEMU ends with it.
                    _ => words.len(),
                },
            };
            waiting.drain(..gone);
        }
        drop(waiting);
        self.room.notify_all();
    }
}

impl Lockstep {
    /// Lets out what the guest has said, as far as the log that has left tells of it.
    pub(super) fn bring_words_out(&self) {
        if let Some(console) = &self.console {
            console.bring_out(self.passed.load(Ordering::Acquire));
        }
    }

    /// Notes `words`, which the guest says: called where QEMU writes to the console; it logs that
    /// next.
    fn say(&self, console: &Console, words: &[u8]) {
        let before = if self.qemu.has_executed() { INSTRUCTIONS_BYTES } else { 0 };
        console.push(words, self.logged() + before + CHAR_WRITE_BYTES);
    }

    /// Bytes that may be typed now.
    fn room_for_typed(&self) -> usize {
        if self.qemu.has_events() { 0 } else { self.qemu.console_room() }
    }
}

/// The console of a primary, if that is what this descriptor is.
fn console_of(fd: c_int) -> Option<(&'static Lockstep, &'static Console)> {
    let lockstep = lockstep().filter(|lockstep| lockstep.role() == Role::Record)?;
    let console = lockstep.console.as_ref().filter(|console| console.socket == fd)?;
    Some((lockstep, console))
}

/// Whether the console is not to be looked at: it would be readable, and nothing read.
pub fn must_wait(fd: c_int) -> bool {
    console_of(fd).is_some_and(|(lockstep, _)| lockstep.qemu.has_events())
}

/// Stands in for the C library's `sendmsg`, by which QEMU writes to a console.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const libc::msghdr, flags: c_int) -> isize {
    static NEXT: OnceLock<usize> = OnceLock::new();
    let Some((lockstep, console)) = console_of(fd) else {
        // SAFETY: the arguments are passed on as they are.
        return unsafe { next::<SendMessage>(&NEXT, c"sendmsg")(fd, message, flags) };
    };
    // SAFETY: the caller gives a message with so many parts, each of that length.
    let words: Vec<u8> = unsafe {
        let parts = std::slice::from_raw_parts((*message).msg_iov, (*message).msg_iovlen);
        let bytes = |part: &libc::iovec| {
            std::slice::from_raw_parts(part.iov_base.cast::<u8>(), part.iov_len).to_vec()
        };
        parts.iter().flat_map(bytes).collect()
    };
    lockstep.say(console, &words);
    words.len() as isize
}

/// Stands in for the C library's `recvmsg`, by which QEMU reads from a console.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(fd: c_int, message: *mut libc::msghdr, flags: c_int) -> isize {
    static NEXT: OnceLock<usize> = OnceLock::new();
    let next: ReceiveMessage = next(&NEXT, c"recvmsg");
    let Some((lockstep, _)) = console_of(fd) else {
        // SAFETY: the arguments are passed on as they are.
        return unsafe { next(fd, message, flags) };
    };
    let room = lockstep.room_for_typed();
    // SAFETY: the caller gives a message, with one part as QEMU reads a console.
    unsafe {
        if room == 0 || (*message).msg_iovlen != 1 {
            *libc::__errno_location() = libc::EAGAIN;
            return -1;
        }
        let whole = *(*message).msg_iov;
        (*(*message).msg_iov).iov_len = whole.iov_len.min(room);
        let read = next(fd, message, flags);
        *(*message).msg_iov = whole;
        read
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    fn console() -> (Console, UnixStream, UnixStream) {
        let (ours, qemus) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let socket = qemus.as_raw_fd();
        (Console { socket, waiting: Mutex::default(), room: Condvar::new() }, ours, qemus)
    }

    fn heard(stream: &mut UnixStream) -> Vec<u8> {
        let mut words = Vec::new();
        // Ends with an error: nothing more is there.
        let _ = stream.read_to_end(&mut words);
        words
    }

    #[test]
    fn words_leave_behind_the_log_that_tells_of_them() {
        let (console, mut daemon, _qemus) = console();
        console.push(b"a", 9);
        console.push(b"bc", 30);
        console.bring_out(8);
        assert_eq!(heard(&mut daemon), b"");
        console.bring_out(29);
        assert_eq!(heard(&mut daemon), b"a");
        console.bring_out(30);
        assert_eq!(heard(&mut daemon), b"bc");
    }

    #[test]
    fn what_the_socket_does_not_take_comes_later() {
        let (console, mut daemon, _qemus) = console();
        let words: Vec<u8> = (0..MOST_WAITING).map(|n| n as u8).collect();
        let (mut came, mut rounds) = (Vec::new(), 0);
        while console.waiting().is_empty() {
            console.push(&words, rounds);
            console.bring_out(rounds);
            rounds += 1;
        }
        while came.len() < rounds as usize * words.len() {
            came.extend(heard(&mut daemon));
            console.bring_out(rounds);
        }
        assert!(came.chunks(words.len()).all(|chunk| chunk == words));
    }

    #[test]
    fn a_guest_that_says_too_much_waits() {
        let (console, mut daemon, _qemus) = console();
        console.push(&[b'x'; MOST_WAITING], 1);
        std::thread::scope(|scope| {
            let guest = scope.spawn(|| console.push(b"y", 2));
            console.bring_out(1);
            let mut came = heard(&mut daemon);
            guest.join().unwrap();
            console.bring_out(2);
            came.extend(heard(&mut daemon));
            assert_eq!((came.len(), came.last()), (MOST_WAITING + 1, Some(&b'y')));
        });
    }
}
