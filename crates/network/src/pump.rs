//! The two threads that carry a card's frames, and what they share.
//!
//! Locks, in the order in which they are taken: `tap_order` (who writes to the
//! tap, so that frames leave in the order of release), then `outbound` (socket
//! and output buffer; never held across a write), then another port's `inside`. And
//! `moving`, then `inside`; neither is held while anything else is taken or waited for.

use crate::buffer::{FrameBatch, Gate, OutputBuffer};
use crate::entitlement::Entitlement;
use crate::fabric::{Fabric, Inside, Moving, message};
use crate::frames::Frames;
use crate::header::{HEADER_BYTES, MAX_BYTES};
use crate::limit::{Limit, boot_time};
use crate::messages;
use crate::outbound::{Inbound, Outbound, Received};
use crate::tap::Tap;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Instant;
use understudy_threads::{Mutex, MutexGuard};

/// Called when the first frame of an epoch begins to wait: a checkpoint now
/// would shorten its wait. Runs on a pump thread, without locks held.
pub type OutputWaiting = Arc<dyn Fn() + Send + Sync>;

/// Inbound frames are gathered until these are exceeded before they go to QEMU.
const INBOUND_BYTES: usize = 256 * 1024;
const INBOUND_FRAMES: usize = 64;

/// What a card has carried since it was opened.
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
    /// Those of them that came past the bridge.
    pub frames_inside: u64,
    /// Frames from other members dropped because too many waited.
    pub dropped_inside: u64,
    /// Frames from the guest dropped because the output buffer was full or shut.
    pub dropped_by_buffer: u64,
    /// Frames from the guest that the tap did not take, or that no tap would.
    pub dropped_by_tap: u64,
}

/// What the threads of a port and its owner share.
pub(crate) struct Shared {
    pub tap: Tap,
    pub outbound: Mutex<Outbound>,
    pub tap_order: Mutex<()>,
    /// Frames from other members of the group.
    inside: Mutex<Inside>,
    /// Those of them that the inbound thread has taken.
    moving: Mutex<Moving>,
    pub output_waiting: OutputWaiting,
    /// Whether inbound frames are delivered; a standby takes none.
    pub live: AtomicBool,
    pub stop: AtomicBool,
    /// What the inbound thread knows of `outbound` is out of date.
    changed: AtomicBool,
    outbound_wake: EventFd,
    inbound_wake: EventFd,
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
        let wake =
            || EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC);
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
            outbound_wake: wake()?,
            inbound_wake: wake()?,
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

    /// Makes both threads look at what has changed.
    pub fn wake(&self) {
        self.changed.store(true, Ordering::Release);
        for event in [&self.outbound_wake, &self.inbound_wake] {
            // Fails only if it is signalled 2^64 times already.
            let _ = event.write(1);
        }
    }

    /// Reads once what QEMU sent.
    pub fn receive(&self, outbound: &mut Outbound) -> Received {
        let received = outbound.receive(&self.tap);
        if received.changed {
            self.wake();
        }
        received
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
            if !entitled.lasts(Instant::now()) || limit.is_over(boot_time) {
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

    fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Guest to bridge, until the port is dropped.
    pub fn run_outbound(&self) {
        while !self.stopping() {
            let connection = self.outbound().connection().cloned();
            wait(&self.outbound_wake, connection.as_ref().map(|c| (c.as_fd(), PollFlags::POLLIN)));
            loop {
                let (received, released) = {
                    let mut outbound = self.outbound();
                    (self.receive(&mut outbound), outbound.buffer.has_released())
                };
                if received.first_held {
                    (self.output_waiting)();
                }
                if released {
                    self.flush();
                }
                if !received.full || self.stopping() {
                    break;
                }
            }
        }
    }

    /// Takes a frame that does not come over the bridge, if the card can. Never
    /// waits.
    pub fn take_inside(&self, packet: &[u8]) -> bool {
        if !self.live.load(Ordering::Acquire) {
            return true;
        }
        let taken = self.inside().push(packet, self.tap.offloads());
        self.look_again();
        taken
    }

    /// The same for a frame of another member of a cluster, in pieces if need be. `early`: also
    /// before the guest runs here.
    pub fn take_from_fabric(&self, packet: &[u8], early: bool) {
        if !early && !self.live.load(Ordering::Acquire) {
            return;
        }
        self.inside().push_cut(packet, self.tap.offloads());
        self.look_again();
    }

    /// Makes the inbound thread look for frames from members.
    fn look_again(&self) {
        // Fails only if it is signalled 2^64 times already.
        let _ = self.inbound_wake.write(1);
    }

    pub fn moving(&self) -> MutexGuard<'_, Moving> {
        self.moving.lock().unwrap_or_else(understudy_threads::poisoned)
    }

    pub fn inside(&self) -> MutexGuard<'_, Inside> {
        // Other members' threads put frames there: it is not this VM's alone. Of half a change,
        // at worst frames are lost.
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bridge and other members to guest, until the port is dropped.
    pub fn run_inbound(&self) {
        let mut gathered = Frames::default();
        let mut known = None;
        while !self.stopping() {
            let live = self.live.load(Ordering::Acquire) && known.is_some();
            let tap = live.then(|| (self.tap.as_fd(), PollFlags::POLLIN));
            wait(&self.inbound_wake, tap);
            // An echo may be what it waited for: what is known must be renewed first.
            self.renew(&mut known);
            let Some(inbound) = known.as_ref().filter(|_| self.live.load(Ordering::Acquire)) else {
                continue;
            };
            self.deliver_inside(inbound);
            if let Err(error) = self.gather(&mut gathered, inbound) {
                tracing::error!(tap = self.tap.name(), %error, "the tap device is gone");
                return;
            }
            self.deliver(inbound, &gathered);
            if let Some(sink) = &inbound.sink {
                gathered.iter().for_each(|frame| sink(frame));
            }
        }
    }

    /// Looks at how frames get to QEMU, if that has changed, and tells the agent
    /// if it waits for that.
    fn renew(&self, known: &mut Option<Inbound>) {
        if !self.changed.swap(false, Ordering::AcqRel) {
            return;
        }
        let (inbound, answer_due) = self.outbound().inbound();
        if let Some(inbound) = inbound.as_ref().filter(|_| answer_due) {
            while messages::answer(&inbound.connection) == Err(Errno::EAGAIN)
                && self.wait_for_room(&inbound.connection)
            {}
            self.look_again();
        }
        *known = inbound;
    }

    /// Reads frames that wait in the tap. What members sent is not taken twice.
    fn gather(&self, to: &mut Frames, inbound: &Inbound) -> std::io::Result<()> {
        to.clear();
        while to.used() < INBOUND_BYTES && to.len() < INBOUND_FRAMES {
            let room = to.room(MAX_BYTES);
            let Some(count) = self.tap.receive(room)? else {
                break;
            };
            if !inbound.is_echo(&room[..count]) {
                to.taken(count);
            }
        }
        Ok(())
    }

    /// Gives QEMU what members sent, as [`deliver`](Self::deliver) does. No lock is held
    /// while it waits, and no frame is out of sight at any moment.
    fn deliver_inside(&self, to: &Inbound) {
        let mut waited = false;
        loop {
            let mut moving = self.moving();
            if moving.is_done() {
                moving.clear();
                self.inside().take(&mut moving.frames);
            }
            if moving.is_done() {
                break;
            }
            let from = moving.sent;
            match messages::write(&to.connection, &moving.frames, from, to.header) {
                Ok(count) => {
                    moving.sent += count;
                    self.count_inside(moving.frames.iter().skip(from).take(count));
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    drop(moving);
                    waited = true;
                    if !self.wait_for_room(&to.connection) {
                        self.moving().clear();
                        return;
                    }
                }
                Err(_) => return moving.clear(),
            }
        }
        if waited {
            // As in `deliver`.
            self.look_again();
        }
    }

    fn count_inside<'a>(&self, frames: impl Iterator<Item = &'a [u8]>) {
        let (mut count, mut bytes) = (0, 0);
        for frame in frames {
            (count, bytes) = (count + 1, bytes + frame.len() - HEADER_BYTES);
        }
        self.counters.frames_inside.fetch_add(count, Ordering::Relaxed);
        self.counters.frames_in.fetch_add(count, Ordering::Relaxed);
        self.counters.bytes_in.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Gives frames to QEMU, waiting while it does not read: tap and switch queue
    /// meanwhile, as for any card that is slow. Gives up when the connection
    /// ends or is replaced.
    fn deliver(&self, to: &Inbound, frames: &Frames) {
        let (mut sent, mut waited) = (0, false);
        while sent < frames.len() {
            match messages::write(&to.connection, frames, sent, to.header) {
                Ok(count) => sent += count,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) if self.wait_for_room(&to.connection) => waited = true,
                // The outbound thread sees the end of the connection too.
                Err(_) => return,
            }
        }
        if waited {
            // What else woke this thread meanwhile is still to be seen to.
            self.look_again();
        }
        let (frames, bytes) = (frames.len(), frames.used() - frames.len() * HEADER_BYTES);
        self.counters.frames_in.fetch_add(frames as u64, Ordering::Relaxed);
        self.counters.bytes_in.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Waits until QEMU has read something. Returns false when the connection is
    /// none any more, or the port is dropped or fenced.
    fn wait_for_room(&self, connection: &Arc<OwnedFd>) -> bool {
        wait(&self.inbound_wake, Some((connection.as_fd(), PollFlags::POLLOUT)));
        let outbound = self.outbound();
        let same = outbound.connection().is_some_and(|now| Arc::ptr_eq(now, connection));
        same && outbound.buffer.gate() != Gate::Shut && !self.stopping()
    }
}

/// Blocks until the event is signalled or the descriptor, if any, is ready.
fn wait(wake: &EventFd, ready: Option<(BorrowedFd<'_>, PollFlags)>) {
    let on_wake = PollFd::new(wake.as_fd(), PollFlags::POLLIN);
    let mut on_both;
    let mut on_one;
    let fds: &mut [PollFd<'_>] = match ready {
        Some((fd, flags)) => {
            on_both = [on_wake, PollFd::new(fd, flags)];
            &mut on_both
        }
        None => {
            on_one = [on_wake];
            &mut on_one
        }
    };
    // A failure (a signal) only makes the caller look once more.
    let _ = poll(fds, PollTimeout::NONE);
    if fds[0].any().unwrap_or(true) {
        let _ = wake.read();
    }
}
