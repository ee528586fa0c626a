//! Frames in flight across the cut, as they are stored with their receiver.

use super::bytes::{Malformed, Reader};
use crate::Member;
use crate::cut::{LOGGED_BYTES, memory};
use understudy_protocol::CardIndex;

/// A frame that was sent before its sender's snapshot and not received before its receiver's:
/// part of the group's state, though of no member's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InFlightFrame {
    /// Sender.
    pub from: Member,
    /// The receiver's card that it is for.
    pub card: CardIndex,
    /// The frame with its virtio header.
    pub bytes: Vec<u8>,
}

/// A receiver's frames, in the order of their arrival.
pub(crate) fn encode_frames(frames: &[InFlightFrame]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for frame in frames {
        bytes.extend(frame.from.0.to_le_bytes());
        bytes.extend(frame.card.0.to_le_bytes());
        bytes.extend((frame.bytes.len() as u32).to_le_bytes());
        bytes.extend(&frame.bytes);
    }
    bytes
}

/// Decodes what [`encode_frames`] made: no more than a snapshot is taken with, by the memory that it takes.
pub(crate) fn decode_frames(bytes: &[u8]) -> Result<Vec<InFlightFrame>, Malformed> {
    let mut reader = Reader(bytes);
    let (mut frames, mut room) = (Vec::new(), LOGGED_BYTES);
    while !reader.0.is_empty() {
        let (from, card) = (Member(reader.u16()?), CardIndex(reader.u16()?));
        let length = reader.u32()? as usize;
        let bytes = reader.bytes(length)?;
        let left = room.checked_sub(memory(&bytes));
        room = left.ok_or(Malformed("there are more frames than any snapshot has"))?;
        frames.push(InFlightFrame { from, card, bytes: bytes.to_vec() });
    }
    Ok(frames)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_come_back_in_order_and_cut_ones_are_refused(
            frames in proptest::collection::vec(
                (any::<u16>(), any::<u16>(), proptest::collection::vec(any::<u8>(), 0..50)), 1..9,
            ),
        ) {
            let frame = |(from, card, bytes)| {
                InFlightFrame { from: Member(from), card: CardIndex(card), bytes }
            };
            let frames: Vec<_> = frames.into_iter().map(frame).collect();
            let bytes = encode_frames(&frames);
            prop_assert_eq!(decode_frames(&bytes[..bytes.len() - 1]).ok().filter(|f| *f == frames), None);
            prop_assert_eq!(decode_frames(&bytes), Ok(frames));
        }

        #[test]
        fn any_bytes_are_decoded_or_refused(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let _ = decode_frames(&bytes);
        }
    }
}
