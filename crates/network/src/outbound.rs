//! QEMU's end of a card: its socket, what came out of it, and who waits for that.

use crate::buffer::{FrameBatch, OutputBuffer, Pushed};
use crate::control::{Control, HeaderLength};
use crate::fabric::{Fabric, marked};
use crate::header::Offloads;
use crate::limit::{Limit, boot_time};
use crate::messages::{self, Inbox, Message, READ_AT_ONCE};
use crate::next::FrameFormat;
use crate::note::CardNote;
use crate::switch::Seat;
use crate::tap::Tap;
use nix::errno::Errno;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use understudy_protocol::Time;

/// Callback, called with a copy of each frame from the bridge that QEMU was given, its header
/// before it. Runs on the port's thread: it must not wait.
pub type InboundSink = Arc<dyn Fn(&[u8]) + Send + Sync>;

/// The way of frames to the guest, and what is known of where they come from.
#[derive(Clone)]
pub(crate) struct Inbound {
    pub connection: Arc<OwnedFd>,
    pub header: HeaderLength,
    pub seat: Option<Seat>,
    pub fabric: Option<Arc<dyn Fabric>>,
    pub sink: Option<InboundSink>,
}

impl Inbound {
    /// Whether a frame from the bridge comes by another way, or has come already.
    pub fn is_echo(&self, packet: &[u8]) -> bool {
        self.seat.as_ref().is_some_and(|seat| seat.is_echo(packet))
            || self.fabric.as_ref().is_some_and(|fabric| fabric.is_echo(packet))
    }
}

/// The socket and what came out of it.
pub(crate) struct Outbound {
    connection: Option<Arc<OwnedFd>>,
    /// The header's length in QEMU.
    header: HeaderLength,
    /// The agent waits to hear that the header's length is known.
    answer_due: bool,
    /// Note of what was said of the card, for a daemon that goes on when this one has died.
    note: CardNote,
    inbox: Inbox,
    pub buffer: OutputBuffer,
    /// The place among the cards of a group, while there is one.
    pub seat: Option<Seat>,
    /// Carrier of frames to other members of a cluster, if the card is a member's.
    pub fabric: Option<Arc<dyn Fabric>>,
    /// Receiver of copies of inbound frames.
    pub sink: Option<InboundSink>,
    /// The reason why the last connection ended.
    pub ended: Option<String>,
    /// Time at which it was known last that output may go.
    pub entitled: Time,
    /// Time until which output may go that is not held.
    pub permitted_until: Time,
    /// Time until which anything may go.
    pub limit: Limit,
    /// Frames that were longer than any can be.
    pub too_long: u64,
    /// Bytes of the guest's frames, headers of ours included.
    pub bytes_sent: u64,
    /// Time since which the first waiting frame of the newest epoch with any has waited.
    waits_since: Option<Time>,
}

/// The result of one reading of QEMU's socket.
#[derive(Default)]
pub(crate) struct Received {
    /// Whether something was read. Only a reading that finds nothing proves, while the
    /// guest is paused, that the socket is empty.
    pub any: bool,
    /// Whether as much as can be was read, so that more is likely to wait.
    pub full: bool,
    /// Bytes of it, and of what the sender's socket holds beside each message at least.
    pub bytes: usize,
    /// The first frame of an epoch began to wait.
    pub first_held: bool,
    /// Whether what the pump goes by has changed.
    pub changed: bool,
}

impl Outbound {
    pub fn new(buffer: OutputBuffer) -> nix::Result<Self> {
        Ok(Outbound {
            connection: None,
            header: HeaderLength::Short,
            answer_due: false,
            note: CardNote::create()?,
            inbox: Inbox::new(),
            buffer,
            seat: None,
            fabric: None,
            sink: None,
            ended: None,
            entitled: boot_time(),
            permitted_until: boot_time(),
            limit: Limit::default(),
            too_long: 0,
            bytes_sent: 0,
            waits_since: None,
        })
    }

    /// A new QEMU is at the other end of this socket.
    pub fn connect(&mut self, connection: Arc<OwnedFd>) {
        self.connection = Some(connection);
        (self.header, self.answer_due) = (HeaderLength::Short, false);
        self.note.write(FrameFormat { header: HeaderLength::Short, offloads: Offloads::NONE });
        self.ended = None;
    }

    /// Takes over what QEMU has said of its card already.
    pub fn resume(&mut self, format: FrameFormat, tap: &Tap) {
        self.header = format.header;
        set_offloads(tap, format.offloads);
        self.note.write(format);
    }

    /// A daemon that has died had this QEMU, and wrote down what it said.
    pub fn adopt(&mut self, connection: Arc<OwnedFd>, note: OwnedFd, tap: &Tap) -> io::Result<()> {
        let note = CardNote::adopt(note);
        let format = note.read()?;
        self.adopt_as(connection, note, format, tap);
        Ok(())
    }

    /// The same on the tap that it had.
    pub fn adopt_with_tap(
        &mut self,
        connection: Arc<OwnedFd>,
        note: OwnedFd,
        tap: &Tap,
    ) -> io::Result<()> {
        let note = CardNote::adopt(note);
        let format = note.read()?;
        tap.assume_offloads(format.offloads);
        self.adopt_as(connection, note, format, tap);
        Ok(())
    }

    fn adopt_as(
        &mut self,
        connection: Arc<OwnedFd>,
        note: CardNote,
        format: FrameFormat,
        tap: &Tap,
    ) {
        self.connect(connection);
        self.note = note;
        self.resume(format, tap);
    }

    /// The descriptors that [`Outbound::adopt`] takes; none without a QEMU.
    pub fn duplicate(&self) -> io::Result<Option<[OwnedFd; 2]>> {
        let duplicate =
            |connection: &Arc<OwnedFd>| Ok([connection.try_clone()?, self.note.duplicate()?]);
        self.connection.as_ref().map(duplicate).transpose()
    }

    /// Whether QEMU has taken all frames that it was given.
    pub fn is_taken(&self) -> bool {
        self.connection.as_ref().is_none_or(|connection| messages::is_taken(connection))
    }

    /// The socket, if QEMU has its other end.
    pub fn connection(&self) -> Option<&Arc<OwnedFd>> {
        self.connection.as_ref()
    }

    /// The header's length, as QEMU has it.
    pub fn header(&self) -> HeaderLength {
        self.header
    }

    /// The way of frames to QEMU, and whether the agent must be answered before the
    /// next one.
    pub fn inbound(&mut self) -> (Option<Inbound>, bool) {
        let inbound = self.connection.clone().map(|connection| Inbound {
            connection,
            header: self.header,
            seat: self.seat.clone(),
            fabric: self.fabric.clone(),
            sink: self.sink.clone(),
        });
        (inbound, std::mem::take(&mut self.answer_due))
    }

    /// Reads once, without blocking, and pushes the frames.
    pub fn receive(&mut self, tap: &Tap) -> Received {
        let Some(connection) = self.connection.clone() else {
            return Received::default();
        };
        let count = match self.inbox.receive(&connection, self.header) {
            Ok(count) => count,
            Err(Errno::EAGAIN) => return Received::default(),
            // Told once when QEMU ended with inbound frames unread; what it sent
            // before that still waits.
            Err(Errno::EINTR | Errno::ECONNRESET) => {
                return Received { any: true, ..Received::default() };
            }
            Err(errno) => {
                self.disconnect(format!("reading from QEMU failed: {errno}"));
                return Received { changed: true, ..Received::default() };
            }
        };
        let (full, bytes) = (count == READ_AT_ONCE, self.inbox.bytes());
        let mut received = Received { full, bytes, ..Received::default() };
        let mut ended = None;
        for n in 0..count {
            match self.inbox.message(n) {
                Message::Frame(packet) => {
                    self.bytes_sent += packet.len() as u64;
                    if push(&mut self.buffer, self.fabric.as_deref(), self.seat.as_ref(), packet) {
                        received.first_held = true;
                        self.waits_since = Some(boot_time());
                    }
                }
                Message::TooLong => self.too_long += 1,
                Message::Control(bytes) => match Control::decode(bytes) {
                    Some(Control::Header(length)) => {
                        (self.header, self.answer_due) = (length, true);
                        self.note.write(FrameFormat { header: length, offloads: tap.offloads() });
                        received.changed = true;
                    }
                    Some(Control::Offloads(offloads)) => {
                        set_offloads(tap, offloads);
                        self.note.write(FrameFormat { header: self.header, offloads });
                    }
                    None => {
                        ended = Some(
                            "the agent in QEMU said what is not known here; are it and this daemon of one version?",
                        )
                    }
                },
                Message::Short => ended = Some("QEMU sent a frame without a whole header"),
                Message::End => ended = Some("QEMU closed the socket"),
            }
            if let Some(reason) = ended {
                self.disconnect(reason.to_owned());
                return Received { any: false, changed: true, ..received };
            }
        }
        Received { any: true, ..received }
    }

    /// Takes a message for the fabric, behind all that the guest has sent. Returns whether it is
    /// the first of its epoch that waits.
    pub fn push_message(&mut self, message: &[u8]) -> bool {
        let first_held = self.buffer.push_always(&marked(&[message])) == Pushed::FirstHeld;
        if first_held {
            self.waits_since = Some(boot_time());
        }
        first_held
    }

    /// Takes back frames that were not written; see [`OutputBuffer::take_back`].
    pub fn take_back(&mut self, batch: FrameBatch, written: usize) {
        if !self.buffer.holds_current() {
            self.waits_since = Some(boot_time());
        }
        self.buffer.take_back(batch, written);
    }

    /// The time since which output of the epoch that runs waits, if any does.
    pub fn waits_since(&self) -> Option<Time> {
        self.waits_since.filter(|_| self.buffer.holds_current())
    }

    pub fn disconnect(&mut self, reason: String) {
        tracing::info!(%reason, "card disconnected from QEMU");
        self.connection = None;
        self.ended = Some(reason);
    }
}

/// Takes what the guest sends the way that it goes. Returns whether it is the first of its
/// epoch that waits.
fn push(
    buffer: &mut OutputBuffer,
    fabric: Option<&dyn Fabric>,
    seat: Option<&Seat>,
    packet: &[u8],
) -> bool {
    let mut first_held = false;
    if let Some(fabric) = fabric {
        let mut keep = |parts: &[&[u8]]| {
            first_held |= buffer.push(&marked(parts)) == Pushed::FirstHeld;
        };
        if !fabric.sent(packet, &mut keep) {
            return first_held;
        }
    }
    if seat.is_none_or(|seat| seat.pass(packet)) {
        first_held |= buffer.push(packet) == Pushed::FirstHeld;
    }
    first_held
}

/// Sets them if it can: without them the guest gets finished frames, which it takes as well.
fn set_offloads(tap: &Tap, offloads: Offloads) {
    match tap.set_offloads(offloads) {
        Ok(()) => tracing::debug!(tap = tap.name(), bits = offloads.bits(), "offloads"),
        Err(error) => tracing::warn!(
            tap = tap.name(), %error,
            "the kernel refuses the offloads of the guest's card: receiving will be slow"
        ),
    }
}
