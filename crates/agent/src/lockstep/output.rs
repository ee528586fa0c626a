// SPDX-License-Identifier: GPL-2.0-or-later
//! Output of the guest: the log that leads to it leaves QEMU first.

use super::{Role, lockstep, next};
use crate::card::is_card;
use std::ffi::c_int;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

type WriteParts = unsafe extern "C" fn(c_int, *const libc::iovec, c_int) -> isize;

/// Stands in for the C library's `writev`, by which QEMU gives a frame to a card's socket.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn writev(fd: c_int, parts: *const libc::iovec, count: c_int) -> isize {
    static NEXT: OnceLock<usize> = OnceLock::new();
    let next: WriteParts = next(&NEXT, c"writev");
    let Some(lockstep) = lockstep().filter(|_| is_card(fd)) else {
        // SAFETY: the arguments are passed on as they are.
        return unsafe { next(fd, parts, count) };
    };
    lockstep.page.frames.fetch_add(1, Ordering::Relaxed);
    match lockstep.role() {
        Role::Record => lockstep.flush_now(),
        // The primary sends it. QEMU must not notice a difference.
        // SAFETY: the parts are the caller's.
        Role::Replay => return unsafe { bytes_of(parts, count) },
        Role::Live => {}
    }
    loop {
        // SAFETY: the arguments are passed on as they are.
        let sent = unsafe { next(fd, parts, count) };
        if sent >= 0 || io::Error::last_os_error().kind() != io::ErrorKind::WouldBlock {
            return sent;
        }
        // To be refused would change what QEMU does next, and the log does not tell of it.
        wait_for_room(fd);
    }
}

unsafe fn bytes_of(parts: *const libc::iovec, count: c_int) -> isize {
    // SAFETY: the caller of `writev` gives that many parts.
    let parts = unsafe { std::slice::from_raw_parts(parts, count as usize) };
    parts.iter().map(|part| part.iov_len).sum::<usize>() as isize
}

fn wait_for_room(fd: c_int) {
    let mut poll = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one structure, filled. A wait that ends early is followed by another.
    unsafe { libc::poll(&mut poll, 1, -1) };
}
