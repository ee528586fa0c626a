//! Frames for the guest, copied to its backup, so that a fail-over does not lose
//! what clients have just said.
//!
//! A request that reached the primary in an epoch that was never committed is lost
//! with it, and TCP repeats it after 200 ms at the earliest. So the primary sends a
//! copy of what it gives to the guest to the backup as well, tagged with the epoch
//! that will have received it. The backup keeps the copies of epochs that are not
//! committed ([`Kept`]), and gives them to the guest when it goes live.
//!
//! Nothing of it touches output commit: a kept frame is one that a client really
//! sent, it goes to the guest only after the arbiter's grant, and what the guest
//! answers is output of a sole owner. A frame that comes twice, late or not at all is
//! what every Ethernet may do. So copies are bounded, and lost without regret.

use crate::{Allowance, CardIndex, Epoch, KEPT_FOR, PIPELINE_DEPTH, Time};
use std::collections::BTreeMap;

/// Bytes that are forwarded at most for each epoch and card: the longest frame and more
/// beside it. Of a bulk transfer far less is, see [`Allowance`].
pub const FORWARDED_BYTES: usize = 128 << 10;

/// The inbound frames of a guest that the backup keeps. Bounded: a few epochs, each
/// with [`FORWARDED_BYTES`] a card.
#[derive(Clone, Debug)]
pub struct Kept {
    cards: u16,
    committed: Epoch,
    over: bool,
    buckets: BTreeMap<(Epoch, CardIndex), Bucket>,
    dropped: u64,
}

#[derive(Clone, Debug)]
struct Bucket {
    allowance: Allowance,
    bytes: usize,
    frames: Vec<(Time, Vec<u8>)>,
}

impl Bucket {
    fn empty() -> Bucket {
        Bucket { allowance: Allowance::new(FORWARDED_BYTES), bytes: 0, frames: Vec::new() }
    }
}

impl Kept {
    /// Creates an empty one, for a guest with so many cards.
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
        let bucket = self.buckets.entry((epoch, card)).or_insert_with(Bucket::empty);
        if bucket.allowance.admit(epoch, frame.len()) {
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
    use std::time::Duration;

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

    proptest! {
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
    }
}
