// SPDX-License-Identifier: GPL-2.0-or-later
//! Errands of a pause ([`crate::pause`]) in a QEMU in lockstep. All of it is called in QEMU's
//! main loop, of a machine that stands still, and nothing is logged in between.

use super::{Lockstep, Role, lockstep};
use std::sync::atomic::Ordering;
use understudy_agent_protocol::LogErrand;

/// Whether a pause with this errand is possible: a machine that is not in lockstep must run.
pub fn takes(errand: LogErrand, runs: bool) -> bool {
    match lockstep().map(Lockstep::role) {
        None => runs && errand == LogErrand::None,
        Some(Role::Record) => true,
        Some(Role::Live) => errand == LogErrand::None,
        // Its main loop belongs to the log.
        Some(Role::Replay) => false,
    }
}

/// Makes the machine one whose device state can be saved, and gives the bytes of log that
/// have led to it; none if it cannot be saved. `detached` is called when all of a log that ends here has
/// left; `write_back` when no disk request is under way, and tells whether all that disks' formats kept back
/// is written.
///
/// # Safety
/// In the main loop, of a stopped machine.
pub unsafe fn settle(
    errand: LogErrand,
    detached: impl FnOnce(),
    write_back: impl FnOnce() -> bool,
) -> Option<u64> {
    let Some(lockstep) = lockstep() else {
        return write_back().then_some(0);
    };
    let mut position = lockstep.passed.load(Ordering::Acquire);
    match lockstep.role() {
        Role::Record => {
            if errand == LogErrand::Detach {
                lockstep.flush_now();
                position = lockstep.passed.load(Ordering::Acquire);
                lockstep.flowing.store(false, Ordering::Release);
                detached();
            }
            if lockstep.flowing.load(Ordering::Acquire) {
                // What `quiesce` does is no part of the log: the backup would diverge.
                return None;
            }
            // SAFETY: as the caller vouches; this machine records.
            if !unsafe { lockstep.qemu.quiesce(write_back) } {
                return None;
            }
            if errand == LogErrand::Attach {
                // SAFETY: as above; nothing is under way.
                unsafe { lockstep.qemu.queues.forget() };
            }
        }
        // SAFETY: as the caller vouches; this machine has ended its replay.
        Role::Live => {
            unsafe { lockstep.qemu.prepare_for_save().ok()? };
            if !write_back() {
                return None;
            }
        }
        Role::Replay => return None,
    }
    Some(position)
}

/// The log goes to the daemon from here on; gives the bytes that have passed by. In the main
/// loop, right after the device state was saved.
pub fn attach() -> u64 {
    let Some(lockstep) = lockstep() else {
        return 0;
    };
    lockstep.flush_now();
    lockstep.flowing.store(true, Ordering::Release);
    let position = lockstep.passed.load(Ordering::Acquire);
    lockstep.attached.position.store(position, Ordering::Release);
    lockstep.attached.disk_requests.store(lockstep.qemu.disk_requests(), Ordering::Release);
    position
}
