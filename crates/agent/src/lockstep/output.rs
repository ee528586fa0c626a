// SPDX-License-Identifier: GPL-2.0-or-later
//! What the guest sends: the log that leads to it leaves QEMU first.

use super::{Lockstep, Role, lockstep, next};
use std::ffi::c_int;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

type SendMessage = unsafe extern "C" fn(c_int, *const libc::msghdr, c_int) -> isize;

/// Stands in for the C library's `sendmsg`, by which QEMU gives frames to a card's socket.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const libc::msghdr, flags: c_int) -> isize {
    static NEXT: OnceLock<usize> = OnceLock::new();
    let next: SendMessage = next(&NEXT, c"sendmsg");
    let Some(lockstep) = lockstep().filter(|lockstep| lockstep.cards.contains(&fd)) else {
        // SAFETY: the arguments are passed on as they are.
        return unsafe { next(fd, message, flags) };
    };
    lockstep.status.frames.fetch_add(1, Ordering::Relaxed);
    match lockstep.role() {
        Role::Record => lockstep.flush_for_output(),
        // The primary sends it. QEMU must not notice a difference.
        // SAFETY: the message is the caller's.
        Role::Replay => return unsafe { bytes_of(message) },
        Role::Live => {}
    }
    loop {
        // SAFETY: the arguments are passed on as they are.
        let sent = unsafe { next(fd, message, flags) };
        if sent >= 0 || io::Error::last_os_error().kind() != io::ErrorKind::WouldBlock {
            return sent;
        }
        // To be refused would change what QEMU does next, and the log does not tell of it.
        wait_for_room(fd);
    }
}

impl Lockstep {
    fn flush_for_output(&self) {
        self.qemu.save_instructions();
        self.flush();
    }
}

unsafe fn bytes_of(message: *const libc::msghdr) -> isize {
    // SAFETY: the caller of `sendmsg` gives a message with that many parts.
    let parts = unsafe { std::slice::from_raw_parts((*message).msg_iov, (*message).msg_iovlen) };
    parts.iter().map(|part| part.iov_len).sum::<usize>() as isize
}

fn wait_for_room(fd: c_int) {
    let mut poll = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one structure, filled. A wait that ends early is followed by another.
    unsafe { libc::poll(&mut poll, 1, -1) };
}
