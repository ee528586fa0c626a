//! The two threads that carry a card's frames, and what they share.
//!
//! Locks, in the order in which they are taken: `tap_order` (who writes to the
//! tap, so that frames leave in the order of release), then `outbound` (socket,
//! decoder and output buffer; never held across a write), then another port's
//! `inside`.

use crate::buffer::{FrameBatch, Gate, OutputBuffer, Pushed};
use crate::codec::{Decoder, HEADER_BYTES, MAX_FRAME_BYTES, encode};
use crate::switch::{Inside, Seat};
use crate::tap::Tap;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{MsgFlags, recv, send};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;
use understudy_protocol::STALL;

/// Called when the first frame of an epoch begins to wait: a checkpoint now
/// would shorten its wait. Runs on a pump thread, without locks held.
pub type OutputWaiting = Arc<dyn Fn() + Send + Sync>;

/// Inbound frames are gathered up to this size before they go to QEMU.
const INBOUND_BYTES: usize = 256 * 1024;

/// What a card has carried since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortCounters {
    /// Frames from the guest that were given to the bridge.
    pub frames_out: u64,
    /// Their bytes.
    pub bytes_out: u64,
    /// Frames from the bridge, or from other members of a group, that were
    /// given to QEMU.
    pub frames_in: u64,
    /// Their bytes.
    pub bytes_in: u64,
    /// Those of them that came from other members, past the bridge.
    pub frames_inside: u64,
    /// Frames from other members dropped because too many waited.
    pub dropped_inside: u64,
    /// Frames from the guest dropped because the output buffer was full or shut.
    pub dropped_by_buffer: u64,
    /// Frames from the guest that the tap did not take.
    pub dropped_by_tap: u64,
}

/// QEMU's end of the story: the socket and what came out of it.
pub(crate) struct Outbound {
    pub connection: Option<Arc<OwnedFd>>,
    pub decoder: Decoder,
    pub buffer: OutputBuffer,
    /// The place among the cards of a group, while there is one.
    pub seat: Option<Seat>,
    /// Why the last connection ended.
    pub ended: Option<String>,
    /// When it was known for the last time that output may go.
    pub entitled: Instant,
    /// Until when output may go that is not held.
    pub permitted_until: Instant,
}

/// Until when frames may be written.
#[derive(Clone, Copy)]
enum Entitlement {
    /// For good: the sole owner needs no fresh word.
    Forever,
    /// For [`STALL`] after this, and after each frame in turn.
    Fresh(Instant),
    /// Until then.
    Until(Instant),
}

impl Entitlement {
    /// What entitles the batch that is taken now; `before` entitled the one before it.
    fn of(outbound: &Outbound, before: Option<Entitlement>) -> Entitlement {
        match (outbound.buffer.gate(), before) {
            (Gate::Hold, Some(Entitlement::Fresh(at))) => {
                Entitlement::Fresh(outbound.entitled.max(at))
            }
            (Gate::Hold, _) => Entitlement::Fresh(outbound.entitled),
            (Gate::Unheld, _) => Entitlement::Until(outbound.permitted_until),
            (Gate::Open | Gate::Shut, _) => Entitlement::Forever,
        }
    }

    fn is_over(self) -> bool {
        match self {
            Entitlement::Forever => false,
            Entitlement::Fresh(at) => at.elapsed() > STALL,
            Entitlement::Until(end) => Instant::now() >= end,
        }
    }

    /// A frame was written.
    fn renew(&mut self) {
        if let Entitlement::Fresh(at) = self {
            *at = Instant::now();
        }
    }
}

/// What one reading of QEMU's socket brought.
#[derive(Default)]
pub(crate) struct Received {
    /// Something was read. Only a reading that finds nothing proves, while the
    /// guest is paused, that the socket is empty.
    pub any: bool,
    /// All the room was filled, so more is likely to wait.
    pub full: bool,
    /// The first frame of an epoch began to wait.
    pub first_held: bool,
}

impl Outbound {
    /// Reads once, without blocking, and pushes the frames that are complete.
    pub fn receive(&mut self) -> Received {
        let Some(connection) = &self.connection else {
            return Received::default();
        };
        let spare = self.decoder.spare();
        let room = spare.len();
        match recv(connection.as_raw_fd(), spare, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => self.disconnect("QEMU closed the socket".to_owned()),
            Ok(count) => {
                self.decoder.filled(count);
                return Received {
                    first_held: self.push_frames(),
                    any: self.connection.is_some(),
                    full: count == room,
                };
            }
            Err(Errno::EAGAIN) => {}
            Err(Errno::EINTR) => {
                return Received { any: true, ..Received::default() };
            }
            Err(errno) => self.disconnect(format!("reading from QEMU failed: {errno}")),
        }
        Received::default()
    }

    /// Returns whether the first frame of an epoch began to wait.
    fn push_frames(&mut self) -> bool {
        let mut first_held = false;
        loop {
            match self.decoder.next_frame() {
                Ok(Some(frame)) => {
                    if self.seat.as_ref().is_none_or(|seat| seat.pass(frame)) {
                        first_held |= self.buffer.push(frame) == Pushed::FirstHeld;
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    self.disconnect(error.to_string());
                    break;
                }
            }
        }
        first_held
    }

    fn disconnect(&mut self, reason: String) {
        tracing::info!(%reason, "card disconnected from QEMU");
        self.connection = None;
        // Bytes of a frame that QEMU did not finish.
        self.decoder.reset();
        self.ended = Some(reason);
    }
}

/// Where inbound frames go, and what is known of where they come from.
struct Inbound {
    connection: Arc<OwnedFd>,
    seat: Option<Seat>,
}

/// What the threads of a port and its owner share.
pub(crate) struct Shared {
    pub tap: Tap,
    pub outbound: Mutex<Outbound>,
    pub tap_order: Mutex<()>,
    /// Frames from other members of the group.
    inside: Mutex<Inside>,
    pub output_waiting: OutputWaiting,
    /// Whether inbound frames are delivered; a standby takes none.
    pub live: AtomicBool,
    pub stop: AtomicBool,
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
            outbound: Mutex::new(Outbound {
                connection: None,
                decoder: Decoder::new(),
                buffer,
                seat: None,
                ended: None,
                entitled: Instant::now(),
                permitted_until: Instant::now(),
            }),
            tap_order: Mutex::new(()),
            inside: Mutex::default(),
            output_waiting: notify,
            live: AtomicBool::new(live),
            stop: AtomicBool::new(false),
            outbound_wake: wake()?,
            inbound_wake: wake()?,
            counters: Counters::default(),
        })
    }

    /// A poisoned lock means that an invariant of output commit was violated:
    /// nothing more may leave then, so it is passed on.
    pub fn outbound(&self) -> MutexGuard<'_, Outbound> {
        self.outbound.lock().expect("a thread died holding the output buffer")
    }

    /// Makes both threads look at what has changed.
    pub fn wake(&self) {
        for event in [&self.outbound_wake, &self.inbound_wake] {
            // Fails only if it is signalled 2^64 times already.
            let _ = event.write(1);
        }
    }

    /// Writes everything that is released to the tap, in order. A host that was
    /// stopped meanwhile may have lost the VM: what is left then waits for the next
    /// epoch's commit.
    pub fn flush(&self) {
        let _order = self.tap_order.lock().expect("a thread died writing to the tap");
        let mut entitled = None;
        loop {
            let mut outbound = self.outbound();
            let Some(batch) = outbound.buffer.take_released() else { return };
            let now = entitled.insert(Entitlement::of(&outbound, entitled));
            drop(outbound);
            let written = self.write(&batch, now);
            let mut outbound = self.outbound();
            if written == batch.len() {
                outbound.buffer.recycle(batch);
                continue;
            }
            if matches!(now, Entitlement::Fresh(_)) {
                let tap = self.tap.name();
                tracing::info!(tap, "stalled: released output waits once more");
            }
            outbound.buffer.take_back(batch, written);
            drop(outbound);
            (self.output_waiting)();
        }
    }

    /// Writes a batch's frames for as long as they are entitled to it; returns how many.
    fn write(&self, batch: &FrameBatch, entitled: &mut Entitlement) -> usize {
        let (mut frames, mut refused, mut bytes) = (0, 0, 0);
        for frame in batch.frames() {
            if entitled.is_over() {
                break;
            }
            match self.tap.send(frame) {
                Ok(()) => (frames, bytes) = (frames + 1, bytes + frame.len() as u64),
                Err(_) => refused += 1,
            }
            entitled.renew();
        }
        self.counters.frames_out.fetch_add(frames, Ordering::Relaxed);
        self.counters.bytes_out.fetch_add(bytes, Ordering::Relaxed);
        self.counters.dropped_by_tap.fetch_add(refused, Ordering::Relaxed);
        (frames + refused) as usize
    }

    /// Sends a frame that is not the guest's own output. Returns false, having
    /// sent nothing, if this host is fenced.
    pub fn send_aside(&self, frame: &[u8]) -> bool {
        let _order = self.tap_order.lock().expect("a thread died writing to the tap");
        if self.outbound().buffer.gate() == Gate::Shut {
            return false;
        }
        if let Err(error) = self.tap.send(frame) {
            tracing::warn!(tap = self.tap.name(), %error, "the tap did not take an announcement");
        }
        true
    }

    pub fn counters(&self) -> PortCounters {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        // One lock at a time.
        let dropped_inside = self.inside().dropped();
        PortCounters {
            frames_out: read(&self.counters.frames_out),
            bytes_out: read(&self.counters.bytes_out),
            frames_in: read(&self.counters.frames_in),
            bytes_in: read(&self.counters.bytes_in),
            frames_inside: read(&self.counters.frames_inside),
            dropped_inside,
            dropped_by_buffer: self.outbound().buffer.dropped_frames(),
            dropped_by_tap: read(&self.counters.dropped_by_tap),
        }
    }

    fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Guest to bridge, until the port is dropped.
    pub fn run_outbound(&self) {
        while !self.stopping() {
            let connection = self.outbound().connection.clone();
            wait(&self.outbound_wake, connection.as_ref().map(|c| (c.as_fd(), PollFlags::POLLIN)));
            loop {
                let (received, released) = {
                    let mut outbound = self.outbound();
                    (outbound.receive(), outbound.buffer.has_released())
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

    /// Takes a frame from another member of the group. Never waits.
    pub fn take_inside(&self, frame: &[u8]) {
        if self.live.load(Ordering::Acquire) {
            self.inside().push(frame);
            // Fails only if it is signalled 2^64 times already.
            let _ = self.inbound_wake.write(1);
        }
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().expect("a thread died holding the frames of a group")
    }

    /// Bridge and other members to guest, until the port is dropped.
    pub fn run_inbound(&self) {
        let mut gathered = vec![0; INBOUND_BYTES];
        let mut inside = Vec::new();
        while !self.stopping() {
            let inbound = self.inbound();
            let tap = inbound.as_ref().map(|_| (self.tap.as_fd(), PollFlags::POLLIN));
            wait(&self.inbound_wake, tap);
            // Looked up again: an echo may be what it waited for.
            let Some(inbound) = self.inbound() else {
                continue;
            };
            let frames = self.inside().take(&mut inside);
            self.deliver(&inbound.connection, &inside, frames);
            self.counters.frames_inside.fetch_add(frames, Ordering::Relaxed);
            match self.gather(&mut gathered, inbound.seat.as_ref()) {
                Ok((length, frames)) => {
                    self.deliver(&inbound.connection, &gathered[..length], frames);
                }
                Err(error) => {
                    tracing::error!(tap = self.tap.name(), %error, "the tap device is gone");
                    return;
                }
            }
        }
    }

    /// QEMU's socket, if inbound frames are to be delivered to it.
    fn inbound(&self) -> Option<Inbound> {
        if !self.live.load(Ordering::Acquire) {
            return None;
        }
        let outbound = self.outbound();
        let connection = outbound.connection.clone()?;
        Some(Inbound { connection, seat: outbound.seat.clone() })
    }

    /// Reads frames that wait in the tap, each after its length. Returns the
    /// bytes and the frames read. What members sent is not taken twice.
    fn gather(&self, to: &mut [u8], seat: Option<&Seat>) -> std::io::Result<(usize, u64)> {
        let (mut length, mut frames) = (0, 0);
        while to.len() - length >= HEADER_BYTES + MAX_FRAME_BYTES {
            let (header, frame) = to[length..].split_at_mut(HEADER_BYTES);
            let Some(count) = self.tap.receive(frame)? else {
                break;
            };
            if seat.is_some_and(|seat| seat.is_echo(&frame[..count])) {
                continue;
            }
            encode(header, count);
            length += HEADER_BYTES + count;
            frames += 1;
        }
        Ok((length, frames))
    }

    /// Gives bytes to QEMU, waiting while it does not read: tap and switch queue
    /// meanwhile, as for any card that is slow. Gives up when the connection
    /// ends or is replaced.
    fn deliver(&self, connection: &Arc<OwnedFd>, mut bytes: &[u8], frames: u64) {
        let total = (bytes.len() - frames as usize * HEADER_BYTES) as u64;
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        while !bytes.is_empty() {
            match send(connection.as_raw_fd(), bytes, flags) {
                Ok(count) => bytes = &bytes[count..],
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    wait(&self.inbound_wake, Some((connection.as_fd(), PollFlags::POLLOUT)));
                    let current = self.inbound();
                    let same = current.is_some_and(|now| Arc::ptr_eq(&now.connection, connection));
                    if self.stopping() || !same {
                        return;
                    }
                }
                // The outbound thread sees the end of the connection too.
                Err(_) => return,
            }
        }
        self.counters.frames_in.fetch_add(frames, Ordering::Relaxed);
        self.counters.bytes_in.fetch_add(total, Ordering::Relaxed);
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
