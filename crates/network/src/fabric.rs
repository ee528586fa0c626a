//! Frames between the members of a cluster, which go through the daemon's own envelopes:
//! what a port asks of whoever puts them in envelopes, and how frames get to a card that way.
//!
//! All that a member sends passes its output buffer first, so output commit holds for what is
//! for another member just as for what goes out to the bridge.

use crate::frames::Frames;
use crate::header::{HEADER_BYTES, Offloads, fitted};
use crate::mac::MacAddress;
use crate::segments::cut_up;
use crate::shared::Shared;
use std::sync::Weak;

/// Bytes that may wait for one card; over it frames are lost, as on any switch.
pub(crate) const QUEUE_BYTES: usize = 8 << 20;

/// Bit in the first byte of a header, where virtio has its flags: behind it is a message of a
/// [`Fabric`]. No guest's frame has it: [`without_mark`].
const MARK: u8 = 0x80;

/// A carrier of frames between the members of a cluster, as one card of a member sees it.
/// Called on the port's thread and others, with its locks held, and the VM's
/// where its lease is tended: it must not wait, nor call the port, nor look at the VM.
pub trait Fabric: Send + Sync {
    /// The guest sends a frame. Gives `keep` the messages that are to be carried once the
    /// frame's epoch may go out, each in parts that belong together. Returns whether the frame goes out to the bridge as well.
    fn sent(&self, packet: &[u8], keep: &mut dyn FnMut(&[&[u8]])) -> bool;

    /// A message that [`sent`](Self::sent) or [`Port::push_message`](crate::Port::push_message)
    /// gave may go out now; in the order in which they were given.
    fn carry(&self, message: &[u8]);

    /// Whether a frame from the bridge is another member's: what that sends to this one comes
    /// through the fabric, and nothing of it is taken twice.
    fn is_echo(&self, packet: &[u8]) -> bool;
}

/// A message as it lies in the output buffer.
pub(crate) fn marked(parts: &[&[u8]]) -> Vec<u8> {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let mut bytes = Vec::with_capacity(HEADER_BYTES + length);
    bytes.push(MARK);
    bytes.resize(HEADER_BYTES, 0);
    parts.iter().for_each(|part| bytes.extend_from_slice(part));
    bytes
}

/// The message, if the output buffer has one here and not a frame.
pub(crate) fn message(packet: &[u8]) -> Option<&[u8]> {
    let is_marked = packet.first().is_some_and(|flags| flags & MARK != 0);
    packet.get(HEADER_BYTES..).filter(|_| is_marked)
}

/// Virtio knows no such flag, and a guest must not make a frame look like a message.
pub(crate) fn without_mark(flags: &mut u8) {
    *flags &= !MARK;
}

/// Target and source of a frame that has its header before it.
pub fn addresses(packet: &[u8]) -> Option<(MacAddress, MacAddress)> {
    let (target, rest) = crate::header::ethernet(packet).split_first_chunk::<6>()?;
    let source = rest.first_chunk::<6>()?;
    Some((MacAddress(*target), MacAddress(*source)))
}

/// The way to a card for frames that do not come over its bridge. Does not keep the port.
#[derive(Clone, Debug)]
pub struct Inlet(pub(crate) Weak<Shared>);

impl Inlet {
    /// Gives the guest a frame, if it runs here; in pieces if its card takes no long ones.
    /// Never waits: over the limit of its queue the frame is lost.
    pub fn deliver(&self, packet: &[u8]) {
        if let Some(port) = self.0.upgrade() {
            port.take_from_fabric(packet, false);
        }
    }

    /// Gives the guest of a standby a frame, before it runs.
    pub fn deliver_first(&self, packet: &[u8]) {
        if let Some(port) = self.0.upgrade() {
            port.take_from_fabric(packet, true);
        }
    }

    /// Whether the port is there.
    pub fn is_open(&self) -> bool {
        self.0.strong_count() > 0
    }
}

/// Frames from other members that wait for a card.
#[derive(Debug, Default)]
pub(crate) struct Inside {
    frames: Frames,
    dropped: u64,
}

impl Inside {
    /// Appends a frame, or drops it if too many wait. Returns false if a card with
    /// these offloads cannot take it.
    pub fn push(&mut self, packet: &[u8], takes: Offloads) -> bool {
        let Some(packet) = fitted(packet, takes) else { return false };
        self.append(&packet);
        true
    }

    /// The same, in pieces if the card cannot take it whole, as many as there is room for. Drops what
    /// cannot be cut up, which no driver sends.
    pub fn push_cut(&mut self, packet: &[u8], takes: Offloads) {
        if self.push(packet, takes) {
            return;
        }
        match cut_up(packet) {
            Some(pieces) => {
                for piece in pieces {
                    if !self.append(&piece) {
                        break;
                    }
                }
            }
            None => self.dropped += 1,
        }
    }

    /// Whether there was room.
    fn append(&mut self, packet: &[u8]) -> bool {
        let fits = self.frames.used() + packet.len() <= QUEUE_BYTES;
        match fits {
            true => self.frames.push(packet),
            false => self.dropped += 1,
        }
        fits
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// The frames that wait, oldest first.
    pub fn frames(&self) -> &Frames {
        &self.frames
    }

    /// Takes all that waits, in exchange for an emptied memory.
    pub fn take(&mut self, into: &mut Frames) {
        into.clear();
        std::mem::swap(&mut self.frames, into);
    }

    /// Frames dropped until now.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header::SegmentBytes;
    use crate::segments::tests::segment;

    #[test]
    fn a_message_is_told_from_a_frame() {
        assert_eq!(message(&marked(&[b"for a ", b"member"])), Some(&b"for a member"[..]));
        assert_eq!(message(&marked(&[])), Some(&b""[..]));
        let mut frame = [0xff; HEADER_BYTES + 60];
        without_mark(&mut frame[0]);
        assert_eq!(message(&frame), None, "a guest's frame, whatever flags it has");
        assert_eq!(message(&[]), None);
    }

    #[test]
    fn a_full_queue_drops_and_goes_on() {
        let mut inside = Inside::default();
        let packet = vec![0; 1000];
        for _ in 0..QUEUE_BYTES / 1000 + 7 {
            assert!(inside.push(&packet, Offloads::NONE));
        }
        assert_eq!(inside.dropped(), 7);
        let mut frames = Frames::default();
        inside.take(&mut frames);
        assert_eq!(frames.len(), QUEUE_BYTES / 1000);
        assert_eq!(frames.used(), QUEUE_BYTES / 1000 * 1000);
        inside.push(&[0; 22], Offloads::NONE);
        inside.take(&mut frames);
        assert_eq!((frames.len(), frames.used()), (1, 22));
    }

    #[test]
    fn nothing_is_cut_up_for_a_full_queue() {
        let mut inside = Inside::default();
        assert!(inside.push(&vec![0; QUEUE_BYTES - 1000], Offloads::NONE));
        let long = segment(true, false, &[7; 60_000], SegmentBytes::LEAST);
        inside.push_cut(&long, Offloads::NONE);
        let pieces = inside.frames().len() - 1;
        assert!((1..20).contains(&pieces), "what there was room for: {pieces}");
        assert_eq!(inside.dropped(), 1, "and no more");
    }
}
