//! The state that a port's thread shares with its owner, and with whoever else sends through the
//! port.
//!
//! Locks, in the order in which they are taken: `tap_order` (who writes to the
//! tap, so that frames leave in the order of release), then `outbound` (socket
//! and output buffer; never held across a write), then another port's `inside`. And
//! `moving`, then `inside`; neither is held while anything else is taken or waited for.

use crate::buffer::{FrameBatch, Gate, OutputBuffer};
use crate::entitlement::Entitlement;
use crate::fabric::{Fabric, Inside, message};
use crate::frames::Moving;
use crate::header::HEADER_BYTES;
use crate::limit::{Limit, boot_time};
use crate::outbound::{Outbound, Received};
use crate::port::OUTBOUND_BUFFER_BYTES;
use crate::tap::Tap;
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use understudy_threads::{Mutex, MutexGuard};

/// Bytes that a full socket from QEMU holds at most, as [`Received::bytes`] counts them: the kernel allows twice what
/// it is told, and counts more.
const OUTBOUND_ROOM: usize = 2 * OUTBOUND_BUFFER_BYTES + (1 << 20);

/// Callback, called when the first frame of an epoch begins to wait: a checkpoint now
/// would shorten its wait. Runs on a port's thread, without locks held: it must not wait.
pub type OutputWaiting = Arc<dyn Fn() + Send + Sync>;

/// The counters of what a card has carried since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortCounters {
    /// Frames from the guest that were given to the bridge.
    pub frames_out: u64,
    /// Their bytes, without headers of ours.
    pub bytes_out: u64,
    /// Frames from the bridge, from other members of a group, or kept for a take-over,
    /// that were given to QEMU.
    pub frames_in: u64,
    /// Their bytes, without headers of ours.
    pub bytes_in: u64,
    /// Frames among them that came past the bridge.
    pub frames_inside: u64,
    /// Frames from other members dropped because too many waited.
    pub dropped_inside: u64,
    /// Frames from the guest dropped because the output buffer was full or shut.
    pub dropped_by_buffer: u64,
    /// Frames from the guest that the tap did not take, or that no tap would.
    pub dropped_by_tap: u64,
}

/// The state that a port's thread and its owner share.
pub(crate) struct Shared {
    pub tap: Tap,
    pub outbound: Mutex<Outbound>,
    pub tap_order: Mutex<()>,
    /// Frames from other members of the group.
    inside: Mutex<Inside>,
    /// Frames among them that go to QEMU just now. Whoever takes a snapshot must see each frame in
    /// exactly one place: here, in `inside`, or in QEMU's socket.
    moving: Mutex<Moving>,
    pub output_waiting: OutputWaiting,
    /// Whether inbound frames are delivered; a standby takes none.
    pub live: AtomicBool,
    pub stop: AtomicBool,
    /// Whether what the thread knows of `outbound` is out of date.
    changed: AtomicBool,
    /// Event that the thread has something else to see to than frames that come and go.
    wake: EventFd,
    counters: Counters,
}

#[derive(Default)]
struct Counters {
    frames_out: AtomicU64,
    bytes_out: AtomicU64,
    frames_in: AtomicU64,
    bytes_in: AtomicU64,
    frames_inside: AtomicU64,
    dropped_by_tap: AtomicU64,
}

impl Shared {
    pub fn new(
        tap: Tap,
        buffer: OutputBuffer,
        live: bool,
        notify: OutputWaiting,
    ) -> nix::Result<Self> {
        Ok(Shared {
            tap,
            outbound: Mutex::new(Outbound::new(buffer)?),
            tap_order: Mutex::new(()),
            inside: Mutex::default(),
            moving: Mutex::default(),
            output_waiting: notify,
            live: AtomicBool::new(live),
            stop: AtomicBool::new(false),
            changed: AtomicBool::new(false),
            wake: EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?,
            counters: Counters::default(),
        })
    }

    /// A poisoned lock means that an invariant of output commit may be violated: nothing more
    /// leaves then, for good, whoever asks.
    pub fn outbound(&self) -> MutexGuard<'_, Outbound> {
        self.outbound.lock().unwrap_or_else(|poisoned| {
            let mut outbound = poisoned.into_inner();
            outbound.seat = None;
            outbound.fabric = None;
            outbound.buffer.shut();
            outbound
        })
    }

    /// Makes the thread look at what has changed.
    pub fn wake(&self) {
        self.changed.store(true, Ordering::Release);
        self.look_again();
    }

    /// Makes the thread look for frames from members.
    pub fn look_again(&self) {
        // Fails only if it is signalled 2^64 times already.
        let _ = self.wake.write(1);
    }

    /// Readable when the thread is to look again.
    pub fn wakes(&self) -> &EventFd {
        &self.wake
    }

    /// Whether [`wake`](Self::wake) was called since this was asked.
    pub fn has_changed(&self) -> bool {
        self.changed.swap(false, Ordering::AcqRel)
    }

    /// Reads once what QEMU sent.
    pub fn receive(&self, outbound: &mut Outbound) -> Received {
        let received = outbound.receive(&self.tap);
        if received.changed {
            self.wake();
        }
        received
    }

    /// Takes all that a QEMU has sent whose guest stands still, which is no more than its socket holds. One that goes on
    /// sending was taken over, and is disconnected: a pause does not wait for it.
    pub fn drain(&self, outbound: &mut Outbound) {
        let mut left = OUTBOUND_ROOM;
        loop {
            let received = self.receive(outbound);
            if !received.any {
                return;
            }
            let Some(rest) = left.checked_sub(received.bytes) else {
                outbound.disconnect("QEMU goes on sending while its guest stands still".to_owned());
                return self.wake();
            };
            left = rest;
        }
    }

    /// Writes everything that is released to the tap, in order. A host that was
    /// stopped meanwhile may have lost the VM: what is left then waits for the next
    /// epoch's commit. After the port's limit it waits for the next limit.
    pub fn flush(&self) {
        let _order = self.tap_order.lock().unwrap_or_else(understudy_threads::poisoned);
        let mut entitled = None;
        loop {
            let mut outbound = self.outbound();
            let limit = outbound.limit;
            if limit.is_over(boot_time) {
                return;
            }
            let Some(batch) = outbound.buffer.take_released() else { return };
            let now = entitled.insert(Entitlement::of(&outbound, entitled));
            let fabric = outbound.fabric.clone();
            drop(outbound);
            let written = self.write(&batch, fabric.as_deref(), now, limit);
            let mut outbound = self.outbound();
            if written == batch.frames().len() {
                outbound.buffer.recycle(batch);
                continue;
            }
            if matches!(now, Entitlement::Fresh(_)) {
                let tap = self.tap.name();
                tracing::info!(tap, "stalled: released output waits once more");
            }
            outbound.take_back(batch, written);
            drop(outbound);
            (self.output_waiting)();
        }
    }

    /// Writes a batch's frames for as long as they are entitled to it; returns how many.
    fn write(
        &self,
        batch: &FrameBatch,
        fabric: Option<&dyn Fabric>,
        entitled: &mut Entitlement,
        limit: Limit,
    ) -> usize {
        let (mut frames, mut refused, mut carried, mut bytes) = (0, 0, 0, 0);
        for packet in batch.frames().iter() {
            if !entitled.lasts(boot_time()) || limit.is_over(boot_time) {
                break;
            }
            if let Some(message) = message(packet) {
                // Without a fabric the card has left its cluster meanwhile.
                fabric.inspect(|fabric| fabric.carry(message));
                carried += 1;
                continue;
            }
            match self.tap.send(packet) {
                Ok(()) => (frames, bytes) = (frames + 1, bytes + packet.len() as u64),
                Err(_) => refused += 1,
            }
        }
        self.counters.frames_out.fetch_add(frames, Ordering::Relaxed);
        let bytes = bytes - frames * HEADER_BYTES as u64;
        self.counters.bytes_out.fetch_add(bytes, Ordering::Relaxed);
        self.counters.dropped_by_tap.fetch_add(refused, Ordering::Relaxed);
        (frames + refused + carried) as usize
    }

    /// Sends a frame, its header before it, that is not output of the guest that runs
    /// here. Returns false, having sent nothing, if this host is fenced, or its limit is over.
    pub fn send_aside(&self, packet: &[u8]) -> bool {
        let _order = self.tap_order.lock().unwrap_or_else(understudy_threads::poisoned);
        let outbound = self.outbound();
        if outbound.buffer.gate() == Gate::Shut || outbound.limit.is_over(boot_time) {
            return false;
        }
        drop(outbound);
        if let Err(error) = self.tap.send(packet) {
            tracing::warn!(tap = self.tap.name(), %error, "the tap did not take a frame");
        }
        true
    }

    pub fn counters(&self) -> PortCounters {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        // One lock at a time.
        let dropped_inside = self.inside().dropped();
        let (too_long, dropped_by_buffer) = {
            let outbound = self.outbound();
            (outbound.too_long, outbound.buffer.dropped_frames())
        };
        PortCounters {
            frames_out: read(&self.counters.frames_out),
            bytes_out: read(&self.counters.bytes_out),
            frames_in: read(&self.counters.frames_in),
            bytes_in: read(&self.counters.bytes_in),
            frames_inside: read(&self.counters.frames_inside),
            dropped_inside,
            dropped_by_buffer,
            dropped_by_tap: read(&self.counters.dropped_by_tap) + too_long,
        }
    }

    pub fn bytes_in(&self) -> u64 {
        self.counters.bytes_in.load(Ordering::Relaxed)
    }

    /// Counts frames that QEMU was given; returns how many.
    pub fn count_in<'a>(&self, frames: impl Iterator<Item = &'a [u8]>) -> u64 {
        let (mut count, mut bytes) = (0, 0);
        for frame in frames {
            (count, bytes) = (count + 1, bytes + frame.len() - HEADER_BYTES);
        }
        self.counters.frames_in.fetch_add(count, Ordering::Relaxed);
        self.counters.bytes_in.fetch_add(bytes as u64, Ordering::Relaxed);
        count
    }

    /// The same for frames that came past the bridge.
    pub fn count_inside<'a>(&self, frames: impl Iterator<Item = &'a [u8]>) {
        let count = self.count_in(frames);
        self.counters.frames_inside.fetch_add(count, Ordering::Relaxed);
    }

    pub fn is_live(&self) -> bool {
        self.live.load(Ordering::Acquire)
    }

    pub fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Takes a frame that does not come over the bridge, if the card can. Never
    /// waits.
    pub fn take_inside(&self, packet: &[u8]) -> bool {
        if !self.is_live() {
            return true;
        }
        let taken = self.inside().push(packet, self.tap.offloads());
        self.look_again();
        taken
    }

    /// The same for a frame of another member of a cluster, in pieces if need be. `early`: also
    /// before the guest runs here.
    pub fn take_from_fabric(&self, packet: &[u8], early: bool) {
        if !early && !self.is_live() {
            return;
        }
        self.inside().push_cut(packet, self.tap.offloads());
        self.look_again();
    }

    pub fn moving(&self) -> MutexGuard<'_, Moving> {
        self.moving.lock().unwrap_or_else(understudy_threads::poisoned)
    }

    pub fn inside(&self) -> MutexGuard<'_, Inside> {
        // Other members' threads put frames there: it is not this VM's alone. Of half a change,
        // at worst frames are lost.
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
