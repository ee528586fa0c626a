//! Frames for the guest, copied to its backup, so that a fail-over does not lose
//! what clients have just said.
//!
//! A request that reached the primary in an epoch that was never committed is lost
//! with it, and TCP repeats it after 200 ms at the earliest. So the primary sends a
//! copy of what it gives to the guest to the backup as well, tagged with the epoch
//! that will have received it ([`Forwarding`]). The backup keeps the copies of epochs
//! that are not committed ([`Kept`]), and gives them to the guest when it goes live.
//!
//! Nothing of it touches output commit: a kept frame is one that a client really
//! sent, it goes to the guest only after the arbiter's grant, and what the guest
//! answers is output of a sole owner. A frame that comes twice, late or not at all is
//! what every Ethernet may do. So copies are bounded, and lost without regret.

use crate::wire::{Kind, Message, WireError};
use crate::{CardIndex, Epoch, PIPELINE_DEPTH, Time};
use std::collections::BTreeMap;
use std::time::Duration;

/// Bytes that are forwarded for each epoch and card: the longest frame and more
/// beside it, and little enough for a bulk transfer not to be sent twice. The
/// beginning of one is enough: its acknowledgements make the sender repeat the rest.
pub const FORWARDED_BYTES: usize = 128 << 10;

/// Older copies are of no use: their senders have repeated them long since.
pub const KEPT_FOR: Duration = Duration::from_secs(2);

/// What a frame costs beside its bytes: its length.
const LENGTH_BYTES: usize = 4;

/// The card, before the frames of a message.
const CARD_BYTES: usize = 2;

/// Decides on the primary which of a card's frames are forwarded: those with which an
/// epoch begins, up to [`FORWARDED_BYTES`].
#[derive(Clone, Debug, Default)]
pub struct Forwarding {
    epoch: Epoch,
    used: usize,
}

impl Forwarding {
    /// Whether the next frame, which the guest receives in `epoch`, is forwarded.
    pub fn admit(&mut self, epoch: Epoch, frame_bytes: usize) -> bool {
        if epoch != self.epoch {
            *self = Forwarding { epoch, used: 0 };
        }
        let used = self.used + LENGTH_BYTES + frame_bytes;
        let admitted = used <= FORWARDED_BYTES;
        // After the first one that does not fit, none: a hole helps nobody.
        self.used = if admitted { used } else { FORWARDED_BYTES };
        admitted
    }
}

/// Frames of one card and epoch, on the wire: [`Kind::Inbound`].
#[derive(Clone, Debug)]
pub struct InboundFrames {
    epoch: Epoch,
    payload: Vec<u8>,
}

impl InboundFrames {
    /// No frames yet, of a card in an epoch.
    pub fn new(epoch: Epoch, card: CardIndex) -> InboundFrames {
        InboundFrames { epoch, payload: card.0.to_le_bytes().to_vec() }
    }

    /// Appends a frame, if it fits.
    pub fn push(&mut self, frame: &[u8]) -> bool {
        let fits = self.payload.len() + LENGTH_BYTES + frame.len() <= CARD_BYTES + FORWARDED_BYTES;
        if fits && !frame.is_empty() {
            // It fits into FORWARDED_BYTES, and so its length into four bytes.
            self.payload.extend_from_slice(&(frame.len() as u32).to_le_bytes());
            self.payload.extend_from_slice(frame);
        }
        fits
    }

    /// The epoch that received the frames.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The message's payload.
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// Reads a message: its card and its frames, in order.
    ///
    /// # Errors
    /// If it is larger than any that [`push`](InboundFrames::push) makes, a frame is
    /// empty, or the lengths do not fit.
    pub fn decode(message: &Message) -> Result<(CardIndex, Vec<&[u8]>), WireError> {
        if message.header.kind != Kind::Inbound {
            return Err(message.malformed("it carries no frames"));
        }
        if message.payload.len() > CARD_BYTES + FORWARDED_BYTES {
            return Err(message.malformed("more frames than are forwarded of an epoch"));
        }
        let Some((card, mut rest)) = message.payload.split_first_chunk::<CARD_BYTES>() else {
            return Err(message.malformed("no room for the card"));
        };
        let mut frames = Vec::new();
        while !rest.is_empty() {
            let (length, after) = rest
                .split_first_chunk::<LENGTH_BYTES>()
                .ok_or_else(|| message.malformed("no room for a frame's length"))?;
            let length = u32::from_le_bytes(*length) as usize;
            if length == 0 || length > after.len() {
                return Err(message.malformed("a frame of an impossible length"));
            }
            let (frame, after) = after.split_at(length);
            frames.push(frame);
            rest = after;
        }
        Ok((CardIndex(u16::from_le_bytes(*card)), frames))
    }
}

/// What the backup keeps of a guest's inbound frames. Bounded: a few epochs, each
/// with [`FORWARDED_BYTES`] a card.
#[derive(Clone, Debug)]
pub struct Kept {
    cards: u16,
    committed: Epoch,
    over: bool,
    buckets: BTreeMap<(Epoch, CardIndex), Bucket>,
    dropped: u64,
}

#[derive(Clone, Debug, Default)]
struct Bucket {
    limit: Forwarding,
    bytes: usize,
    frames: Vec<(Time, Vec<u8>)>,
}

impl Kept {
    /// Nothing yet, for a guest with so many cards.
    pub fn new(cards: usize) -> Kept {
        Kept {
            cards: u16::try_from(cards).unwrap_or(u16::MAX),
            committed: Epoch(0),
            over: false,
            buckets: BTreeMap::new(),
            dropped: 0,
        }
    }

    /// A copy has come of a frame that the primary's guest received in `epoch`.
    pub fn put(&mut self, now: Time, epoch: Epoch, card: CardIndex, frame: &[u8]) {
        // The tag is one ahead of the running epoch at most, which is one ahead of those
        // in flight. What was committed before the copy came is no loss.
        let newest = Epoch(self.committed.0 + PIPELINE_DEPTH + 2);
        if self.over || epoch <= self.committed {
            return;
        }
        if card.0 >= self.cards || epoch > newest {
            self.dropped += 1;
            return;
        }
        let bucket = self.buckets.entry((epoch, card)).or_default();
        if bucket.limit.admit(epoch, frame.len()) {
            bucket.bytes += frame.len();
            bucket.frames.push((now, frame.to_vec()));
        } else {
            self.dropped += 1;
        }
    }

    /// The state after `epoch` is on this host: it has received these frames.
    pub fn commit(&mut self, epoch: Epoch) {
        self.committed = epoch;
        self.buckets = self.buckets.split_off(&(epoch.next(), CardIndex(0)));
    }

    /// All that is kept, for the guest that goes live: in order, and nothing afterwards.
    pub fn take(&mut self, now: Time) -> Vec<(CardIndex, Vec<u8>)> {
        self.over = true;
        let mut taken = Vec::new();
        for ((_, card), bucket) in std::mem::take(&mut self.buckets) {
            for (came, frame) in bucket.frames {
                if now - came <= KEPT_FOR {
                    taken.push((card, frame));
                } else {
                    self.dropped += 1;
                }
            }
        }
        taken
    }

    /// Frames that are kept, and their bytes.
    pub fn size(&self) -> (u64, u64) {
        let buckets = self.buckets.values();
        buckets.fold((0, 0), |(frames, bytes), bucket| {
            (frames + bucket.frames.len() as u64, bytes + bucket.bytes as u64)
        })
    }

    /// Frames that were not kept although their epoch was not committed, or kept for
    /// too long to be of use.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CARD: CardIndex = CardIndex(0);

    fn at(ms: u64) -> Time {
        Time(Duration::from_millis(ms))
    }

    fn frames(kept: &mut Kept) -> Vec<Vec<u8>> {
        kept.take(at(0)).into_iter().map(|(_, frame)| frame).collect()
    }

    #[test]
    fn frames_of_committed_epochs_are_forgotten_and_the_others_come_in_order() {
        let mut kept = Kept::new(1);
        for (epoch, byte) in [(2, 1), (2, 2), (3, 3), (2, 4)] {
            kept.put(at(0), Epoch(epoch), CARD, &[byte]);
        }
        kept.commit(Epoch(1));
        assert_eq!(kept.size(), (4, 4));
        kept.commit(Epoch(2));
        kept.put(at(0), Epoch(2), CARD, &[5]);
        assert_eq!(kept.size(), (1, 1));
        kept.put(at(0), Epoch(4), CARD, &[6]);
        assert_eq!(frames(&mut kept), [[3], [6]]);
        assert_eq!(kept.dropped(), 0);
        kept.put(at(0), Epoch(5), CARD, &[7]);
        assert_eq!(kept.size(), (0, 0), "after the take-over nothing is kept");
    }

    #[test]
    fn what_is_out_of_bounds_is_counted() {
        let mut kept = Kept::new(1);
        kept.put(at(0), Epoch(1), CardIndex(1), &[1]);
        kept.put(at(0), Epoch(PIPELINE_DEPTH + 3), CARD, &[1]);
        assert_eq!((kept.size(), kept.dropped()), ((0, 0), 2));
        kept.put(at(0), Epoch(PIPELINE_DEPTH + 2), CARD, &[1]);
        assert_eq!(kept.take(at(0)).len(), 1);
    }

    #[test]
    fn old_frames_are_no_longer_of_use() {
        let mut kept = Kept::new(1);
        kept.put(at(0), Epoch(1), CARD, &[1]);
        kept.put(at(1_000), Epoch(1), CARD, &[2]);
        assert_eq!(kept.take(at(2_001)), [(CARD, vec![2])]);
        assert_eq!(kept.dropped(), 1);
    }

    #[test]
    fn an_epoch_forwards_its_beginning_and_the_next_one_begins_anew() {
        let mut forwarding = Forwarding::default();
        let longest = FORWARDED_BYTES - LENGTH_BYTES;
        assert!(forwarding.admit(Epoch(1), longest));
        assert!(!forwarding.admit(Epoch(1), 1));
        assert!(forwarding.admit(Epoch(2), 1000));
        assert!(!forwarding.admit(Epoch(2), longest));
        assert!(!forwarding.admit(Epoch(2), 1), "no hole");
    }

    #[test]
    fn malformed_messages_are_refused() {
        let decode = |payload: Vec<u8>| {
            InboundFrames::decode(&Message::new(Kind::Inbound, Epoch(1), payload))
                .map(|(card, frames)| (card, frames.len()))
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
        assert!(InboundFrames::decode(&other).is_err());
    }

    proptest! {
        #[test]
        fn what_was_admitted_fits_a_message_and_comes_back(
            lengths in prop::collection::vec(1usize..70_000, 0..40),
        ) {
            let mut forwarding = Forwarding::default();
            let mut message = InboundFrames::new(Epoch(3), CardIndex(2));
            let mut sent = Vec::new();
            for length in lengths {
                if forwarding.admit(Epoch(3), length) {
                    let frame = vec![length as u8; length];
                    prop_assert!(message.push(&frame));
                    sent.push(frame);
                }
            }
            let message = Message::new(Kind::Inbound, message.epoch(), message.payload().to_vec());
            let (card, frames) = InboundFrames::decode(&message).unwrap();
            prop_assert_eq!(card, CardIndex(2));
            prop_assert_eq!(frames, sent);
        }

        #[test]
        fn a_backup_keeps_no_more_than_the_bound(
            puts in prop::collection::vec((1u64..9, 0u16..3, 1usize..70_000), 0..60),
        ) {
            let mut kept = Kept::new(2);
            for (epoch, card, length) in puts {
                kept.put(at(0), Epoch(epoch), CardIndex(card), &vec![0; length]);
            }
            let most = 2 * (PIPELINE_DEPTH + 2) * FORWARDED_BYTES as u64;
            prop_assert!(kept.size().1 <= most);
        }

        #[test]
        fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..3000)) {
            let _ = InboundFrames::decode(&Message::new(Kind::Inbound, Epoch(1), bytes));
        }
    }
}
