// SPDX-License-Identifier: GPL-2.0-or-later
//! Halts of the machine, during which nothing is logged, and nothing is replayed.
//!
//! QEMU serves the timers of its clock VIRTUAL_RT even then, and logs that; but the one of them
//! that warps the guest's time acts differently then. A primary and a backup, one of which runs
//! while the other does not, would diverge. So these timers stop with the machine.

use super::{Lockstep, Role, lockstep};
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

impl Lockstep {
    /// Watches the machine's runs: to be called before the machine runs for the first time.
    ///
    /// # Safety
    /// Once, on QEMU's main thread, after its main loop was made.
    pub(super) unsafe fn watch_runs(&self) {
        // SAFETY: as the caller vouches.
        unsafe {
            self.qemu.on_run(run_changed);
            self.qemu.enable_timers(false);
        }
    }
}

unsafe extern "C" fn run_changed(_: *mut c_void, runs: bool, _: c_int) {
    let Some(lockstep) = lockstep() else {
        return;
    };
    // SAFETY: QEMU calls this on its main loop, when the monitor, the agent or a request of the
    // guest's starts or stops the machine: never out of a timer.
    unsafe { lockstep.qemu.enable_timers(runs) };
    match lockstep.role() {
        // A backup executes the last event, a power-off for one, when it sees what follows.
        Role::Record if !runs => {
            if lockstep.flowing.load(Ordering::Acquire) {
                lockstep.flush_now();
            } else {
                lockstep.flush();
            }
            // What it said is part of what it is now.
            lockstep.bring_words_out();
        }
        Role::Replay if runs && lockstep.stopped_early.swap(false, Ordering::AcqRel) => {
            // SAFETY: on the main loop, before the vCPU runs.
            unsafe { lockstep.qemu.refetch() }
        }
        _ => {}
    }
}
