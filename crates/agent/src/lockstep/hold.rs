// SPDX-License-Identifier: GPL-2.0-or-later
//! A primary stands still for a moment at a place of its log, and the daemon reads its memory.
//!
//! The machine is not stopped: that would be no part of the log. In a callback of the main loop
//! this thread has QEMU's lock of replay, without which the vCPU executes nothing, and the big
//! lock, without which no device does anything. So the log, brought out up to this instruction,
//! tells exactly how the machine came to what the daemon finds.

use super::{Lockstep, Role};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A daemon that takes longer has lost its turn: the guest must run.
const LONGEST: Duration = Duration::from_millis(100);

/// Whether the machine is to stand still.
#[derive(Default)]
pub struct Hold {
    wish: Mutex<Wish>,
    changed: Condvar,
}

#[derive(Default)]
struct Wish {
    /// Number of the last hold that was asked for.
    last: u64,
    /// Its number, as long as it is wanted.
    wanted: Option<u64>,
}

impl Hold {
    fn wish(&self) -> MutexGuard<'_, Wish> {
        self.wish.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The machine may go on.
    pub fn end(&self) {
        self.wish().wanted = None;
        self.changed.notify_all();
    }
}

/// The machine is to stand still when the main loop comes to it. Gives the number of that hold:
/// an earlier one may still be about to end.
pub fn begin(lockstep: &'static Lockstep) -> u64 {
    let number = {
        let mut wish = lockstep.hold.wish();
        wish.last += 1;
        wish.wanted = Some(wish.last);
        wish.last
    };
    let argument = std::ptr::from_ref(lockstep).cast_mut().cast();
    // SAFETY: `stand_still` gets what it expects, which lives for good.
    unsafe { lockstep.qemu.schedule(stand_still, argument) };
    number
}

unsafe extern "C" fn stand_still(lockstep: *mut c_void) {
    // SAFETY: `begin` gave us this; nobody has a mutable reference.
    unsafe { &*lockstep.cast::<Lockstep>() }.stand_still();
}

impl Lockstep {
    /// Stands still, in the main loop.
    fn stand_still(&self) {
        let attached = self.role() == Role::Record && self.flowing.load(Ordering::Acquire);
        if self.hold.wish().wanted.is_none() || !attached {
            return;
        }
        // Not under the lock of the wish: it may wait for room.
        self.flush_now();
        let wish = self.hold.wish();
        let Some(number) = wish.wanted else { return };
        let page = self.page;
        let begun = |now: u64, before: &AtomicU64| now - before.load(Ordering::Acquire);
        let position = begun(self.passed.load(Ordering::Acquire), &self.attached.position);
        let requests = begun(self.qemu.disk_requests(), &self.attached.disk_requests);
        page.held_position.store(position, Ordering::Relaxed);
        page.held_instructions.store(self.qemu.instructions(), Ordering::Relaxed);
        page.held_disk_requests.store(requests, Ordering::Relaxed);
        page.held.store(number, Ordering::Release);
        let lasts = |wish: &mut Wish| wish.wanted == Some(number);
        let waited = self.hold.changed.wait_timeout_while(wish, LONGEST, lasts);
        // Before the guest runs: the daemon looks whether the hold has lasted.
        page.held.store(0, Ordering::Release);
        let mut wish = waited.unwrap_or_else(PoisonError::into_inner).0;
        if wish.wanted == Some(number) {
            wish.wanted = None;
        }
    }
}
