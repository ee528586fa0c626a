//! Copies of frames on their way to the backup: how many of an epoch, and how they
//! travel. [`inbound`](crate::inbound) and [`outbound`](crate::outbound) say what
//! they are for.

use crate::wire::{Kind, Message, WireError};
use crate::{CardIndex, Epoch};
use std::time::Duration;

/// The age from which copies are of no use: TCP has repeated what they say long since.
pub const KEPT_FOR: Duration = Duration::from_secs(2);

/// The bytes that a frame costs beside its own: its length.
const LENGTH_BYTES: usize = 4;

/// The card, before the frames of a message.
const CARD_BYTES: usize = 2;

/// An epoch with more than this is one of a bulk transfer, and so, most likely, is the next.
const BULK_BYTES: usize = 32 << 10;

/// The bytes that are copied of such a next epoch, or its first frame if that is longer.
const BULK_COPIED_BYTES: usize = 8 << 10;

/// The choice of a card's frames that are copied: those with which an epoch begins, as many as
/// there is room for.
///
/// In the midst of a bulk transfer those are few: copying it all would replicate the guest's
/// traffic, and TCP needs no more than the acknowledgement of a first frame to repeat the
/// rest without waiting for its timer.
#[derive(Clone, Debug)]
pub struct Allowance {
    bytes: usize,
    epoch: Epoch,
    /// The room in this epoch.
    limit: usize,
    used: usize,
    /// Bytes of all frames of this epoch, copied or not.
    seen: usize,
}

impl Allowance {
    /// Creates an allowance of `bytes` for each epoch.
    pub fn new(bytes: usize) -> Allowance {
        Allowance { bytes, epoch: Epoch::default(), limit: bytes, used: 0, seen: 0 }
    }

    /// Whether the next frame, which is one of `epoch`, is copied.
    pub fn admit(&mut self, epoch: Epoch, frame_bytes: usize) -> bool {
        if epoch != self.epoch {
            let bulk = epoch == self.epoch.next() && self.seen > BULK_BYTES;
            let limit = if bulk { BULK_COPIED_BYTES.min(self.bytes) } else { self.bytes };
            *self = Allowance { bytes: self.bytes, epoch, limit, used: 0, seen: 0 };
        }
        let used = self.used + LENGTH_BYTES + frame_bytes;
        let first = self.seen == 0 && used <= self.bytes;
        let admitted = first || used <= self.limit;
        // After the first one that does not fit, none: a hole helps nobody.
        self.used = if admitted { used } else { self.bytes };
        self.seen += LENGTH_BYTES + frame_bytes;
        admitted
    }
}

/// Frames of one card and epoch, on the wire: [`Kind::Inbound`] and [`Kind::Outbound`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardFrames {
    epoch: Epoch,
    limit: usize,
    /// The card, then each frame after its length.
    payload: Vec<u8>,
}

impl CardFrames {
    /// No frames yet, that a card received in an epoch.
    pub fn inbound(epoch: Epoch, card: CardIndex) -> CardFrames {
        CardFrames::new(epoch, card, crate::FORWARDED_BYTES)
    }

    /// No frames yet, that a card sent in an epoch.
    pub fn outbound(epoch: Epoch, card: CardIndex) -> CardFrames {
        CardFrames::new(epoch, card, crate::CARRIED_BYTES)
    }

    fn new(epoch: Epoch, card: CardIndex, limit: usize) -> CardFrames {
        CardFrames { epoch, limit, payload: card.0.to_le_bytes().to_vec() }
    }

    /// Appends a frame, if it fits.
    pub fn push(&mut self, frame: &[u8]) -> bool {
        let fits = self.payload.len() + LENGTH_BYTES + frame.len() <= CARD_BYTES + self.limit;
        if fits && !frame.is_empty() {
            // It fits into the limit, and so its length into four bytes.
            self.payload.extend_from_slice(&(frame.len() as u32).to_le_bytes());
            self.payload.extend_from_slice(frame);
        }
        fits
    }

    /// The epoch that received or sent the frames.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The message's payload.
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// Takes the message's payload.
    pub fn into_payload(self) -> Vec<u8> {
        self.payload
    }

    /// The card that received or sent them.
    pub fn card(&self) -> CardIndex {
        let (card, _) = self.divide();
        CardIndex(u16::from_le_bytes(*card))
    }

    /// The frames, in order.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let (_, mut rest) = self.divide();
        std::iter::from_fn(move || {
            let (frame, after) = first_frame(rest).ok()?;
            rest = after;
            Some(frame)
        })
    }

    fn divide(&self) -> (&[u8; CARD_BYTES], &[u8]) {
        self.payload.split_first_chunk().expect("no payload is made, or taken, without a card")
    }

    /// Reads a message.
    ///
    /// # Errors
    /// If it is larger than any that [`push`](CardFrames::push) makes, a frame is
    /// empty, or the lengths do not fit.
    pub fn decode(message: Message) -> Result<CardFrames, WireError> {
        let limit = match message.header.kind {
            Kind::Inbound => crate::FORWARDED_BYTES,
            Kind::Outbound => crate::CARRIED_BYTES,
            _ => return Err(message.malformed("it carries no frames")),
        };
        if message.payload.len() > CARD_BYTES + limit {
            return Err(message.malformed("more frames than are copied of an epoch"));
        }
        let Some((_, mut rest)) = message.payload.split_first_chunk::<CARD_BYTES>() else {
            return Err(message.malformed("no room for the card"));
        };
        while !rest.is_empty() {
            (_, rest) = first_frame(rest).map_err(|what| message.malformed(what))?;
        }
        Ok(CardFrames { epoch: message.header.epoch, limit, payload: message.payload })
    }
}

/// The first of some frames, and the others.
fn first_frame(frames: &[u8]) -> Result<(&[u8], &[u8]), &'static str> {
    let (length, rest) =
        frames.split_first_chunk::<LENGTH_BYTES>().ok_or("no room for a frame's length")?;
    let length = u32::from_le_bytes(*length) as usize;
    if length == 0 {
        return Err("a frame of an impossible length");
    }
    rest.split_at_checked(length).ok_or("a frame of an impossible length")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CARRIED_BYTES, FORWARDED_BYTES};
    use proptest::prelude::*;

    #[test]
    fn an_epochs_beginning_is_copied_and_the_next_one_begins_anew() {
        let mut allowance = Allowance::new(FORWARDED_BYTES);
        let longest = FORWARDED_BYTES - LENGTH_BYTES;
        assert!(allowance.admit(Epoch(1), longest));
        assert!(!allowance.admit(Epoch(1), 1));
        assert!(allowance.admit(Epoch(3), 1000));
        assert!(!allowance.admit(Epoch(3), longest));
        assert!(!allowance.admit(Epoch(3), 1), "no hole");
    }

    #[test]
    fn of_a_bulk_transfer_each_epochs_first_frame_is_enough() {
        let mut allowance = Allowance::new(FORWARDED_BYTES);
        let mut copied = |epoch, lengths: &[usize]| {
            lengths.iter().filter(|&&length| allowance.admit(Epoch(epoch), length)).count()
        };
        assert_eq!(copied(1, &[60_000, 60_000, 60_000]), 2);
        assert_eq!(copied(2, &[60_000, 60_000, 60_000]), 1, "however long it is");
        assert_eq!(copied(3, &[1_500; 40]), 5);
        assert_eq!(copied(4, &[1_500; 20]), 5);
        assert_eq!(copied(5, &[1_500; 20]), 20, "the last epoch had little");
        assert_eq!(copied(6, &[60_000]), 1);
        assert_eq!(copied(8, &[60_000, 60_000]), 2, "the last epoch had nothing");
    }

    #[test]
    fn malformed_messages_are_refused() {
        let decode = |payload: Vec<u8>| {
            CardFrames::decode(Message::new(Kind::Inbound, Epoch(1), payload))
                .map(|frames| (frames.card(), frames.iter().count()))
        };
        assert_eq!(decode(vec![1, 0]), Ok((CardIndex(1), 0)));
        assert_eq!(decode(vec![1, 0, 2, 0, 0, 0, 7, 7]), Ok((CardIndex(1), 1)));
        for wrong in [
            vec![],
            vec![0],
            vec![0, 0, 1, 0, 0],
            vec![0, 0, 0, 0, 0, 0],
            vec![0, 0, 2, 0, 0, 0, 7],
            vec![0, 0, 0xff, 0xff, 0xff, 0xff, 7],
            vec![0; CARD_BYTES + FORWARDED_BYTES + 1],
        ] {
            assert!(decode(wrong.clone()).is_err(), "{wrong:?}");
        }
        let other = Message::new(Kind::DeviceState, Epoch(1), vec![0, 0]);
        assert!(CardFrames::decode(other).is_err());
    }

    #[test]
    fn each_direction_has_its_bound() {
        let frame = vec![7; CARRIED_BYTES];
        let mut message = CardFrames::inbound(Epoch(1), CardIndex(0));
        assert!(message.push(&frame));
        let decode = |kind| {
            let message = Message::new(kind, Epoch(1), message.payload().to_vec());
            CardFrames::decode(message).map(|frames| frames.iter().count())
        };
        assert_eq!(decode(Kind::Inbound), Ok(1));
        assert!(decode(Kind::Outbound).is_err());
    }

    proptest! {
        #[test]
        fn what_was_admitted_fits_a_message_and_comes_back(
            lengths in prop::collection::vec(1usize..70_000, 0..40),
            outbound in any::<bool>(),
        ) {
            let (kind, limit, mut message) = if outbound {
                (Kind::Outbound, CARRIED_BYTES, CardFrames::outbound(Epoch(3), CardIndex(2)))
            } else {
                (Kind::Inbound, FORWARDED_BYTES, CardFrames::inbound(Epoch(3), CardIndex(2)))
            };
            let mut allowance = Allowance::new(limit);
            let mut sent = Vec::new();
            for length in lengths {
                if allowance.admit(Epoch(3), length) {
                    let frame = vec![length as u8; length];
                    prop_assert!(message.push(&frame));
                    sent.push(frame);
                }
            }
            let message = Message::new(kind, message.epoch(), message.into_payload());
            let frames = CardFrames::decode(message).unwrap();
            prop_assert_eq!(frames.card(), CardIndex(2));
            prop_assert_eq!(frames.iter().collect::<Vec<_>>(), sent);
        }

        #[test]
        fn random_bytes_never_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..3000),
            outbound in any::<bool>(),
        ) {
            let kind = if outbound { Kind::Outbound } else { Kind::Inbound };
            let _ = CardFrames::decode(Message::new(kind, Epoch(1), bytes));
        }
    }
}
