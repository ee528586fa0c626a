//! The frames that a port's guest sends, on their way out: held, released, let out at once, or
//! never.

use super::Port;
use crate::limit::{Limit, boot_time};
use std::sync::atomic::Ordering;
use understudy_protocol::{Epoch, Time};

impl Port {
    /// Ends the current epoch: takes every frame that the paused guest has sent
    /// into it; later ones belong to `next`. Returns how many frames are held.
    ///
    /// Call it between QMP `stop` and `cont`: QEMU has then written all that the
    /// epoch sent. No frame can be counted to the wrong epoch, for the pump
    /// reads under the same lock. A frame is one message, there or not.
    ///
    /// # Panics
    /// If `next` does not follow the current epoch.
    pub fn drain_and_barrier(&self, next: Epoch) -> usize {
        let mut outbound = self.shared.outbound();
        self.shared.drain(&mut outbound);
        outbound.buffer.barrier(next);
        let held = outbound.buffer.held_frames();
        let released = outbound.buffer.has_released();
        drop(outbound);
        if released {
            self.shared.flush();
        }
        held
    }

    /// Ends the current epoch while the guest runs on: every frame that was read belongs to
    /// it, what has not been read to `next`. For epochs that are batches of a log (lockstep
    /// mode): a frame that belongs to a later one than it could waits longer, and is safe.
    ///
    /// # Panics
    /// If `next` does not follow the current epoch.
    pub fn barrier(&self, next: Epoch) {
        let mut outbound = self.shared.outbound();
        outbound.buffer.barrier(next);
        let released = outbound.buffer.has_released();
        drop(outbound);
        if released {
            self.shared.flush();
        }
    }

    /// The backup has `epoch` and all before it: sends their frames. That this host
    /// may do so was known at `entitled`, by [`boot_time`]; long after it, they wait once more.
    ///
    /// # Panics
    /// If output is held and `epoch` has not ended.
    pub fn release_through(&self, epoch: Epoch, entitled: Time) {
        let mut outbound = self.shared.outbound();
        outbound.buffer.release_through(epoch);
        outbound.entitled = entitled;
        drop(outbound);
        self.shared.flush();
    }

    /// Protection begins in epoch `current`: output waits from now on.
    ///
    /// # Panics
    /// If output is held already and `current` would be before its epoch.
    pub fn hold(&self, current: Epoch) {
        self.shared.outbound().buffer.hold(current);
    }

    /// A backup follows from epoch `current` on, without output commit: output leaves at
    /// once while there is a [permit](Self::permit), and else waits for a release.
    ///
    /// # Panics
    /// As [`hold`](Self::hold) does.
    pub fn unhold(&self, current: Epoch) {
        let mut outbound = self.shared.outbound();
        outbound.permitted_until = boot_time();
        outbound.buffer.unhold(current);
    }

    /// Output that is not held may leave until then, by [`boot_time`].
    pub fn permit(&self, until: Time) {
        let mut outbound = self.shared.outbound();
        outbound.permitted_until = until;
        outbound.buffer.release_unheld();
        drop(outbound);
        self.shared.flush();
    }

    /// Output leaves until then at most, by [`boot_time`], whatever the gate says.
    /// What comes later waits for another limit; none ends that.
    pub fn limit_output(&self, until: Option<Time>) {
        self.shared.outbound().limit = Limit(until);
        self.shared.flush();
    }

    /// Sends what is held, as this host is the sole owner by the arbiter's word, and lets all later
    /// output pass at once. A [`Switch`](crate::Switch) is left: all frames go over the bridge.
    pub fn open_gate(&self) {
        let mut outbound = self.shared.outbound();
        outbound.seat = None;
        outbound.buffer.open();
        drop(outbound);
        self.shared.wake();
        self.shared.flush();
    }

    /// Shuts the port of a fenced host: once this returns nothing leaves through this port
    /// any more, for good.
    pub fn shut(&self) {
        let mut outbound = self.shared.outbound();
        outbound.seat = None;
        outbound.fabric = None;
        outbound.buffer.shut();
        drop(outbound);
        self.shared.live.store(false, Ordering::Release);
        self.shared.wake();
        // Wait for a write that is under way.
        drop(self.shared.tap_order.lock());
    }
}
