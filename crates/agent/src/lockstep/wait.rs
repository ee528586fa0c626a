// SPDX-License-Identifier: GPL-2.0-or-later
//! QEMU's main loop must not sleep while there is something to log or to replay.

use super::qemu::{EVENT_END, MODE_PLAY, MODE_RECORD};
use super::{console, lockstep, next, ticks, wake};
use std::ffi::c_int;
use std::sync::OnceLock;

type Poll = unsafe extern "C" fn(
    *mut libc::pollfd,
    libc::nfds_t,
    *const libc::timespec,
    *const libc::sigset_t,
) -> c_int;

/// Event kinds of QEMU's log (`replay/replay-internal.h`) that the main loop executes, so
/// that it must look again at once: clocks, their warp, resets and checkpoints of timers.
const OF_MAIN_LOOP: [u32; 7] = [28, 29, 30, 32, 33, 35, 36];

/// Event kinds that the vCPU's thread executes by itself: instructions, interrupts, exceptions,
/// what other threads asked for (bottom halves, frames), the account of the clock's warp and
/// the checkpoint of virtual timers.
const OF_VCPU: [u32; 8] = [0, 1, 2, 3, 4, 9, 31, 34];

/// Time that the main loop of a backup leaves the vCPU alone; it is woken before when an
/// event is its own.
const LEAVE_ALONE: i64 = 10_000_000;

/// Interval of the checks of what holds the vCPU up, in nanoseconds.
const LOOK_AGAIN: i64 = 200_000;

/// Whether the vCPU's thread executes events of this kind, without the main loop.
pub fn is_of_vcpu(kind: u32) -> bool {
    OF_VCPU.contains(&kind)
}

/// Time that the main loop of a backup may sleep before it looks at the log again, in
/// nanoseconds; none without a limit.
fn longest_sleep() -> Option<i64> {
    let lockstep = lockstep()?;
    ticks::install();
    wake::learn(&lockstep.qemu);
    match lockstep.qemu.mode() {
        MODE_RECORD => {
            // Events that came while the vCPU sleeps would wait for its next timer. If the
            // machine is stopped, they wait until it runs.
            if lockstep.qemu.has_events() && lockstep.qemu.runs() {
                lockstep.qemu.wake_vcpu();
            }
            None
        }
        MODE_PLAY => match lockstep.qemu.data_kind() {
            kind if kind == u32::from(EVENT_END) => None,
            kind if OF_MAIN_LOOP.contains(&kind) => Some(0),
            kind if is_of_vcpu(kind) && !lockstep.qemu.is_vcpu_idle() => Some(LEAVE_ALONE),
            _ => Some(LOOK_AGAIN),
        },
        _ => None,
    }
}

/// The place among these of a console that is not to be looked at now.
///
/// # Safety
/// As of `ppoll`.
unsafe fn silent_console(fds: *const libc::pollfd, count: libc::nfds_t) -> Option<usize> {
    if fds.is_null() {
        return None;
    }
    // SAFETY: the caller's word.
    let fds = unsafe { std::slice::from_raw_parts(fds, count as usize) };
    fds.iter().position(|fd| console::must_wait(fd.fd))
}

unsafe fn wait(
    next: Poll,
    fds: *mut libc::pollfd,
    count: libc::nfds_t,
    timeout: *const libc::timespec,
    mask: *const libc::sigset_t,
) -> c_int {
    // SAFETY: as the caller vouches.
    let silent = unsafe { silent_console(fds, count) };
    let limit = longest_sleep().or(silent.map(|_| LOOK_AGAIN));
    let limit = limit.map(|tv_nsec| libc::timespec { tv_sec: 0, tv_nsec });
    // SAFETY: `timeout` is null or the caller's, as is `fds`; the others are passed on as they
    // are.
    unsafe {
        let looked_for = silent.map(|place| std::mem::take(&mut (*fds.add(place)).events));
        let timeout = match &limit {
            Some(limit)
                if timeout.is_null()
                    || (*timeout).tv_sec > 0
                    || (*timeout).tv_nsec > limit.tv_nsec =>
            {
                limit
            }
            _ => timeout,
        };
        let ready = next(fds, count, timeout, mask);
        if let (Some(place), Some(events)) = (silent, looked_for) {
            (*fds.add(place)).events = events;
        }
        ready
    }
}

/// Stands in for the C library's `ppoll`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ppoll(
    fds: *mut libc::pollfd,
    count: libc::nfds_t,
    timeout: *const libc::timespec,
    mask: *const libc::sigset_t,
) -> c_int {
    static NEXT: OnceLock<usize> = OnceLock::new();
    // SAFETY: the arguments are the caller's.
    unsafe { wait(next(&NEXT, c"ppoll"), fds, count, timeout, mask) }
}

/// Stands in for the `ppoll` of programs that were built to check their buffers.
///
/// # Safety
/// As of `ppoll`; the compiler has checked the size of `fds`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __ppoll_chk(
    fds: *mut libc::pollfd,
    count: libc::nfds_t,
    timeout: *const libc::timespec,
    mask: *const libc::sigset_t,
    _size: usize,
) -> c_int {
    // SAFETY: the arguments are the caller's.
    unsafe { ppoll(fds, count, timeout, mask) }
}
