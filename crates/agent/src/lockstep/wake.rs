// SPDX-License-Identifier: GPL-2.0-or-later
//! A backup's vCPU wakes nobody for what it executes by itself.
//!
//! QEMU's vCPU wakes the main loop, and the monitors' thread, after every event that it has
//! replayed. For nearly all there is nothing to do there; the woken threads take the vCPU's
//! processor, and then its locks. Where threads outnumber processors that is a good part of a
//! backup's work. QEMU wakes a loop by a write to its eventfd: such a write is left out here,
//! and the main loop, which sleeps for a bounded time ([`super::wait`]), finds what it is to do
//! a little later. A primary's vCPU does not wake the monitors' thread either.

use super::qemu::{Loop, Qemu};
use super::wait::is_of_vcpu;
use super::{Role, lockstep, next};
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

type Write = unsafe extern "C" fn(c_int, *const c_void, usize) -> isize;

/// A vCPU that wakes the main loop so often in front of the same event waits for it.
const MOST_CALLS: u32 = 4;

const UNKNOWN: c_int = -1;

/// The eventfd of each loop; found by having QEMU write to it.
static EVENTS: [AtomicI32; Loop::ALL.len()] = [const { AtomicI32::new(UNKNOWN) }; Loop::ALL.len()];

/// The event in front of which the vCPU stands, by its number, and how often it has called.
static EVENT: AtomicU32 = AtomicU32::new(0);
static CALLS: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// The loop whose eventfd this thread is about to learn.
    static LEARNING: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Learns the eventfds, once. Called on the main thread when it is about to wait: its loops
/// are to be woken then by such a write, and the others nearly always.
pub fn learn(qemu: &Qemu) {
    for (n, &one) in Loop::ALL.iter().enumerate() {
        if EVENTS[n].load(Ordering::Relaxed) == UNKNOWN {
            LEARNING.set(Some(n));
            qemu.wake(one);
            LEARNING.set(None);
        }
    }
}

/// Whether this write wakes a loop that has nothing to do.
fn is_needless(fd: c_int) -> bool {
    if let Some(n) = LEARNING.get() {
        EVENTS[n].store(fd, Ordering::Relaxed);
        return false;
    }
    let Some(lockstep) = lockstep() else {
        return false;
    };
    let Some(which) = EVENTS.iter().position(|event| event.load(Ordering::Relaxed) == fd) else {
        return false;
    };
    let qemu = &lockstep.qemu;
    if !qemu.is_vcpu_thread() {
        return false;
    }
    if Loop::ALL[which] == Loop::Monitors {
        // It looks at sockets, and the vCPU has only the clock to tell of.
        return true;
    }
    if lockstep.role() != Role::Replay {
        return false;
    }
    if !is_of_vcpu(qemu.data_kind()) || qemu.is_vcpu_idle() {
        return false;
    }
    let event = qemu.event_number();
    if EVENT.swap(event, Ordering::Relaxed) != event {
        CALLS.store(0, Ordering::Relaxed);
    }
    CALLS.fetch_add(1, Ordering::Relaxed) < MOST_CALLS
}

/// Stands in for the C library's `write`, by which QEMU wakes its loops.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(fd: c_int, buffer: *const c_void, bytes: usize) -> isize {
    static NEXT: OnceLock<usize> = OnceLock::new();
    if bytes == size_of::<u64>() && is_needless(fd) {
        return bytes as isize;
    }
    // SAFETY: the arguments are passed on as they are.
    unsafe { next::<Write>(&NEXT, c"write")(fd, buffer, bytes) }
}
