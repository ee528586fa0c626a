//! A port: one network card of one VM, as this host serves it.

mod output;

use crate::announce::{PAUSES, announcements};
use crate::buffer::{Gate, OutputBuffer};
use crate::error::NetworkError;
use crate::fabric::{Fabric, Inlet, message};
use crate::header::{HEADER_BYTES, Offloads};
use crate::mac::MacAddress;
use crate::netlink;
use crate::next::NextGuest;
use crate::outbound::InboundSink;
use crate::pump::Pump;
use crate::shared::{OutputWaiting, PortCounters, Shared};
use crate::stations::Station;
use crate::switch::Seat;
use crate::tap::Tap;
use crate::unread::{GuestsEnd, Unread};
use crate::vlan::Vlans;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, setsockopt, socketpair, sockopt};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_protocol::{CardIndex, Epoch, Time};
use understudy_threads::spawn;

/// Room in the socket to QEMU; beyond it frames wait in the tap.
const INBOUND_BUFFER_BYTES: usize = 4 << 20;

/// Room in the socket from QEMU: more than a card's full queue of the longest
/// frames. Frames that QEMU cannot pass on are lost at the next `stop`, which
/// purges its queues.
pub(crate) const OUTBOUND_BUFFER_BYTES: usize = 32 << 20;

/// The configuration of a port's card.
#[derive(Clone, Debug)]
pub struct PortConfig {
    /// Index of the card in the VM.
    pub card: CardIndex,
    /// The guest's address on this card.
    pub mac: MacAddress,
    /// Name of the tap device to make.
    pub tap: String,
    /// The bridge of this host to attach it to.
    pub bridge: String,
    /// The VLANs that it is in there.
    pub vlans: Vlans,
    /// Whether the VM runs here. A standby takes no inbound frames and holds
    /// all output until told otherwise.
    pub live: bool,
    /// The most bytes that the output buffer holds;
    /// [`DEFAULT_LIMIT_BYTES`](crate::DEFAULT_LIMIT_BYTES) is usual.
    pub output_limit_bytes: usize,
}

/// QEMU's end of a card's socket, to be inherited by the QEMU process, which takes
/// it for a tap: `-netdev tap,fd=…`. It needs the agent for that, which must know
/// the descriptor's number, see [`CARDS_VARIABLE`](crate::CARDS_VARIABLE).
#[derive(Debug)]
pub struct GuestEnd {
    /// The descriptor; close-on-exec, so the launcher must clear that (or dup it)
    /// in the child, and drop this one afterwards so that the port sees the end.
    pub socket: OwnedFd,
}

/// One card of one VM: tap, socket to QEMU, output buffer and the thread that
/// carries frames. Dropping it drops what is held and removes the tap.
pub struct Port {
    card: CardIndex,
    mac: MacAddress,
    bridge: String,
    vlans: Vlans,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Port {
    /// Makes the tap, attaches it to the bridge and starts the pump. QEMU is
    /// attached by [`attach_guest`](Self::attach_guest). Blocks for some
    /// milliseconds.
    ///
    /// # Errors
    /// If the tap cannot be made or attached; nothing is left behind then.
    pub fn open(config: PortConfig, output_waiting: OutputWaiting) -> Result<Port, NetworkError> {
        let tap = Tap::open_in(&config.tap, &config.bridge, config.mac, &config.vlans)?;
        Port::on(tap, config, output_waiting)
    }

    /// The port of a process that has ended, with the QEMU and on the tap that were its own; from
    /// [`duplicate_guest`](Self::duplicate_guest) and [`duplicate_tap`](Self::duplicate_tap).
    ///
    /// # Errors
    /// If nothing is known of its card, or no thread can be started.
    pub fn adopt(
        config: PortConfig,
        [connection, note]: [OwnedFd; 2],
        tap: OwnedFd,
        output_waiting: OutputWaiting,
    ) -> Result<Port, NetworkError> {
        let tap = Tap::adopt(tap, &config.tap)?;
        let port = Port::on(tap, config, output_waiting)?;
        let shared = &port.shared;
        let adopted = shared.outbound().adopt_with_tap(connection.into(), note, &shared.tap);
        adopted.map_err(|source| NetworkError::system("read what is known of a card", source))?;
        shared.wake();
        Ok(port)
    }

    fn on(
        tap: Tap,
        config: PortConfig,
        output_waiting: OutputWaiting,
    ) -> Result<Port, NetworkError> {
        let gate = if config.live { Gate::Open } else { Gate::Hold };
        let buffer = OutputBuffer::new(gate, config.output_limit_bytes);
        let shared = Shared::new(tap, buffer, config.live, output_waiting)
            .map_err(|errno| NetworkError::system("make an eventfd", errno))?;
        let shared = Arc::new(shared);
        let pump = Pump::new(shared.clone());
        let thread = spawn(format!("net{}", config.card), move || pump.run())
            .map_err(|source| NetworkError::system("start a thread", source))?;
        Ok(Port {
            card: config.card,
            mac: config.mac,
            bridge: config.bridge,
            vlans: config.vlans,
            shared,
            thread: Some(thread),
        })
    }

    /// A fresh connection for a QEMU that is about to be started. Any earlier
    /// one ends.
    ///
    /// An inherited socket pair rather than a listening socket: no path to
    /// protect, no moment at which QEMU runs without its card, and the send
    /// buffer of QEMU's side can be set from here. Of packets, since a tap is
    /// read and written frame by frame.
    ///
    /// # Errors
    /// If no more sockets can be made.
    pub fn attach_guest(&self) -> Result<GuestEnd, NetworkError> {
        let (end, ours) = socket_pair()?;
        // Frames meant for whatever was attached before.
        self.shared.tap.discard_queued();
        self.shared
            .tap
            .set_offloads(Offloads::NONE)
            .map_err(|source| NetworkError::system("reset a tap's offloads", source))?;
        self.shared.outbound().connect(ours.into());
        self.shared.wake();
        Ok(end)
    }

    /// The connection of a QEMU that has outlived the daemon which attached it; from
    /// [`duplicate_guest`](Self::duplicate_guest). What it has sent since is taken.
    ///
    /// # Errors
    /// If nothing is known of its card.
    pub fn adopt_guest(&self, [connection, note]: [OwnedFd; 2]) -> io::Result<()> {
        self.shared.outbound().adopt(connection.into(), note, &self.shared.tap)?;
        self.shared.wake();
        Ok(())
    }

    /// Its connection, and what is known of its card, for another process to keep. None
    /// without a QEMU.
    ///
    /// # Errors
    /// If there are no more descriptors.
    pub fn duplicate_guest(&self) -> io::Result<Option<[OwnedFd; 2]>> {
        self.shared.outbound().duplicate()
    }

    /// The tap's descriptor, for another process to keep: as long as it does, the device is there, and what
    /// the bridge sends waits in it.
    ///
    /// # Errors
    /// If there are no more descriptors.
    pub fn duplicate_tap(&self) -> io::Result<OwnedFd> {
        self.shared.tap.duplicate()
    }

    /// A connection for a QEMU that is to go on in the place of the one that is attached,
    /// once [`hand_over`](Self::hand_over) is called.
    ///
    /// # Errors
    /// If no more sockets can be made.
    pub fn prepare_guest(&self) -> Result<(GuestEnd, NextGuest), NetworkError> {
        let (end, ours) = socket_pair()?;
        Ok((end, NextGuest::serve(ours)?))
    }

    /// Lets frames for the guest wait in the tap, so that QEMU has taken all that it was given
    /// when its guest is stopped soon after. Returns whether it has, within `at_most`.
    pub fn hold_inbound(&self, at_most: Duration) -> bool {
        let deadline = Instant::now() + at_most;
        self.shared.live.store(false, Ordering::Release);
        self.shared.wake();
        loop {
            let taken = self.shared.outbound().is_taken();
            if taken || Instant::now() > deadline {
                return taken;
            }
            thread::sleep(Duration::from_micros(200));
        }
    }

    /// Delivers inbound frames again, after [`hold_inbound`](Self::hold_inbound), when the guest
    /// goes on in the QEMU that was attached.
    pub fn resume_inbound(&self) {
        self.shared.live.store(true, Ordering::Release);
        self.shared.wake();
    }

    /// The guest goes on in another QEMU, which has loaded the card's state: takes what the
    /// former sent, then leaves it. Inbound frames that waited are delivered.
    pub fn hand_over(&self, next: NextGuest) {
        self.attach_next(next);
        self.go_live();
    }

    /// A standby's place is another QEMU's from now on, which takes no inbound frames either.
    pub fn attach_next(&self, next: NextGuest) {
        let mut outbound = self.shared.outbound();
        self.shared.drain(&mut outbound);
        let (socket, said) = next.take();
        outbound.connect(socket);
        if let Some(said) = said {
            outbound.resume(said, &self.shared.tap);
        }
        drop(outbound);
        self.shared.wake();
        self.shared.flush();
    }

    /// Sees that the tap is on its bridge, which may have been made anew, and puts it there again; whether that was
    /// needed. Blocks for some milliseconds.
    ///
    /// # Errors
    /// If it cannot be there: there is no such bridge, or it is down; or the tap is gone.
    pub fn see_to_bridge(&self) -> Result<bool, NetworkError> {
        netlink::see_to(self.tap_name(), &self.bridge, self.mac.for_tap(), &self.vlans)
    }

    /// The index of the card in the VM.
    pub fn card(&self) -> CardIndex {
        self.card
    }

    /// The guest's address.
    pub fn mac(&self) -> MacAddress {
        self.mac
    }

    /// The bridge that the tap belongs to.
    pub fn bridge(&self) -> &str {
        &self.bridge
    }

    /// The VLANs that it is in there.
    pub fn vlans(&self) -> &Vlans {
        &self.vlans
    }

    pub(crate) fn downgrade(&self) -> Weak<Shared> {
        Arc::downgrade(&self.shared)
    }

    /// Frames to other members of a group take the short way from now on.
    pub(crate) fn take_seat(&self, seat: Seat) {
        self.shared.outbound().seat = Some(seat);
        // The thread must know before an echo comes.
        self.shared.wake();
    }

    /// Sets the fabric, if any, that from now on carries frames between this card and those of
    /// other members of its cluster, whatever the gate does; until the port is shut.
    pub fn set_fabric(&self, fabric: Option<Arc<dyn Fabric>>) {
        self.shared.outbound().fabric = fabric;
        // The thread must know before an echo comes.
        self.shared.wake();
    }

    /// The way to this card for a fabric's frames.
    pub fn inlet(&self) -> Inlet {
        Inlet(self.downgrade())
    }

    /// Takes every frame that the guest, which stands still, has sent. What may go out has
    /// gone when this returns.
    pub fn drain(&self) {
        let mut outbound = self.shared.outbound();
        self.shared.drain(&mut outbound);
        drop(outbound);
        self.shared.flush();
    }

    /// Has the fabric carry a message behind all that the guest has sent, when that may go.
    pub fn push_message(&self, message: &[u8]) {
        let first_held = self.shared.outbound().push_message(message);
        if first_held {
            (self.shared.output_waiting)();
        }
        self.shared.flush();
    }

    /// The frames that this card was given and its guest, which stands still until that is read,
    /// has not taken. `end` is the socket's other end.
    pub fn unread(&self, end: GuestsEnd) -> Unread {
        Unread::new(self.shared.clone(), end)
    }

    /// Name of the tap device.
    pub fn tap_name(&self) -> &str {
        self.shared.tap.name()
    }

    /// Whether QEMU has its end of the socket.
    pub fn is_connected(&self) -> bool {
        self.shared.outbound().connection().is_some()
    }

    /// The reason why the last connection ended, if there is none.
    pub fn disconnect_reason(&self) -> Option<String> {
        self.shared.outbound().ended.clone()
    }

    /// A take-over may be near: discards what the bridge has sent to the standby. What it
    /// sends from now on, as it does once the primary's link is down, is delivered when the
    /// VM runs here, as much of it as the tap queues.
    pub fn discard_inbound(&self) {
        if !self.shared.is_live() {
            self.shared.tap.discard_queued();
        }
    }

    /// The VM runs here: delivers inbound frames from now on. Not before QEMU has
    /// loaded the card's state: until then it drops them. Output stays as it is.
    pub fn go_live(&self) {
        // What the guest's driver takes was said while QEMU loaded that state.
        let mut outbound = self.shared.outbound();
        self.shared.receive(&mut outbound);
        let released = outbound.buffer.has_released();
        drop(outbound);
        if released {
            self.shared.flush();
        }
        if !self.shared.live.swap(true, Ordering::AcqRel) {
            self.shared.wake();
        }
    }

    /// Has `sink`, if any, get from now on a copy of each inbound frame from the bridge.
    pub fn forward_inbound(&self, sink: Option<InboundSink>) {
        self.shared.outbound().sink = sink;
        self.shared.wake();
    }

    /// Gives the guest, which runs here, a frame that did not come over the bridge.
    /// Returns whether its card can take such frames.
    pub fn inject(&self, frame: &[u8]) -> bool {
        self.shared.take_inside(frame)
    }

    /// Calls `each` with the frames of an epoch that wait for its commit, each with its
    /// header before it, oldest first.
    ///
    /// Not those that a fabric carries: another host has no use for them.
    pub fn held_of(&self, epoch: Epoch, each: impl FnMut(&[u8])) {
        let outbound = self.shared.outbound();
        outbound.buffer.held_of(epoch).filter(|packet| message(packet).is_none()).for_each(each);
    }

    /// Sends a frame that the guest sent on another host, for this one is its owner now.
    /// Returns false, having sent nothing, if this host is fenced.
    pub fn resend(&self, frame: &[u8]) -> bool {
        self.shared.send_aside(frame)
    }

    /// Frames that wait for their epoch's commit.
    pub fn held_frames(&self) -> usize {
        self.shared.outbound().buffer.held_frames()
    }

    /// The time since which a frame of the epoch that runs has waited for its commit, if any does.
    pub fn waits_since(&self) -> Option<Time> {
        self.shared.outbound().waits_since()
    }

    /// Whether a frame of the epoch that runs waits for its commit.
    pub fn has_new_output(&self) -> bool {
        self.shared.outbound().buffer.holds_current()
    }

    /// The state of the gate.
    pub fn gate(&self) -> Gate {
        self.shared.outbound().buffer.gate()
    }

    /// The counters of what the card has carried.
    pub fn counters(&self) -> PortCounters {
        self.shared.counters()
    }

    /// Bytes of frames that the guest sent, whether they have left or wait, and that it was given.
    pub fn carried_bytes(&self) -> u64 {
        let sent = self.shared.outbound().bytes_sent;
        sent + self.shared.bytes_in()
    }

    /// Makes the switches learn that the guest is behind this port, and those of `stations` that
    /// are behind its card: sends [`announcements`] at once and repeats them for some 800 ms in
    /// the background. Stops by itself when the port is dropped or fenced.
    pub fn announce(&self, stations: &[Station]) {
        let behind = stations.iter().filter(|station| station.card() == self.card);
        let frames: Vec<Vec<u8>> = announcements(self.mac, &self.vlans)
            .chain(behind.map(Station::announcement))
            .map(|frame| [&[0; HEADER_BYTES][..], &frame].concat())
            .collect();
        let sent = |frame: &Vec<u8>| self.shared.send_aside(frame);
        // Whether the port is shut is of no concern here.
        let _ = frames.iter().all(sent);
        let shared = Arc::downgrade(&self.shared);
        let repeat = move || repeat_announcements(&shared, &frames);
        // The first ones are sent: no reason to undo a take-over.
        if let Err(error) = spawn(format!("net{}-announce", self.card), repeat) {
            warn!(mac = %self.mac, "where the guest is was announced once: no thread for more: {error}");
        }
    }
}

fn socket_pair() -> Result<(GuestEnd, OwnedFd), NetworkError> {
    let failed = |errno| NetworkError::system("make a socket pair for a card", errno);
    let (ours, guests) =
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
            .map_err(failed)?;
    setsockopt(&ours, sockopt::SndBufForce, &INBOUND_BUFFER_BYTES).map_err(failed)?;
    setsockopt(&guests, sockopt::SndBufForce, &OUTBOUND_BUFFER_BYTES).map_err(failed)?;
    Ok((GuestEnd { socket: guests }, ours))
}

/// Holds the port only while it sends, so that a drop removes the tap at once.
fn repeat_announcements(shared: &Weak<Shared>, frames: &[Vec<u8>]) {
    for pause in PAUSES {
        thread::sleep(pause);
        let go_on = shared
            .upgrade()
            .is_some_and(|shared| frames.iter().all(|frame| shared.send_aside(frame)));
        if !go_on {
            return;
        }
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            // A pump that panicked has reported that itself.
            let _ = thread.join();
        }
    }
}
