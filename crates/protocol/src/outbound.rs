//! Frames of the guest, carried to its backup with their epoch, so that a fail-over
//! does not lose what the guest has just answered.
//!
//! The primary may die after the backup has the whole of an epoch and before it has
//! released what the guest sent in it. The guest goes on behind those frames: only its
//! TCP would repeat them, after 200 ms at the earliest. So the frames with which an epoch
//! begins travel with it, as much a part of it as its pages, and the backup sends
//! them when it goes live ([`Carried`]).
//!
//! That is output commit to the letter: the state that produced them is on this host, and
//! the arbiter has given the VM to it. Frames of an epoch that is not whole are dropped
//! with it. What the primary had sent after all is on the wire twice, as every Ethernet
//! may have it.

use crate::{Allowance, CardFrames, CardIndex, Epoch, KEPT_FOR, PIPELINE_DEPTH, Time};
use std::collections::VecDeque;

/// Bytes that are carried at most for each epoch and card: the longest frame and some
/// beside it. Of a bulk transfer far less is, see [`Allowance`].
pub const CARRIED_BYTES: usize = 80 << 10;

/// The frames of committed epochs that the backup keeps: of those that the primary may not
/// have released. Before it could capture an epoch, it had to hear that all but
/// [`PIPELINE_DEPTH`] before the next one are committed, and released them.
#[derive(Clone, Debug)]
pub struct Carried {
    cards: u16,
    epochs: VecDeque<Frames>,
    frames: u64,
    bytes: u64,
}

/// The frames of one epoch, in the order in which each card sent them.
#[derive(Clone, Debug)]
struct Frames {
    epoch: Epoch,
    committed: Time,
    frames: Vec<(CardIndex, Vec<u8>)>,
}

impl Carried {
    /// Creates an empty one, for a guest with so many cards.
    pub fn new(cards: usize) -> Carried {
        let cards = u16::try_from(cards).unwrap_or(u16::MAX);
        Carried { cards, epochs: VecDeque::new(), frames: 0, bytes: 0 }
    }

    /// `epoch` is committed, and `sent` came with it. What is older than the primary may still
    /// hold is dropped.
    pub fn commit<'a>(
        &mut self,
        now: Time,
        epoch: Epoch,
        sent: impl IntoIterator<Item = &'a CardFrames>,
    ) {
        let mut allowances = vec![Allowance::new(CARRIED_BYTES); usize::from(self.cards)];
        let mut frames = Vec::new();
        for sent in sent {
            let card = sent.card();
            if let Some(allowance) = allowances.get_mut(usize::from(card.0)) {
                let fits = |frame: &&[u8]| allowance.admit(epoch, frame.len());
                frames.extend(sent.iter().filter(fits).map(|it| (card, it.to_vec())));
            }
        }
        self.frames += frames.len() as u64;
        self.bytes += frames.iter().map(|(_, frame)| frame.len() as u64).sum::<u64>();
        self.epochs.retain(|older| older.epoch.0 + PIPELINE_DEPTH > epoch.0);
        self.epochs.push_back(Frames { epoch, committed: now, frames });
    }

    /// The frames that the guest's new host must send: oldest first, and nothing afterwards.
    pub fn take(&mut self, now: Time) -> Vec<(CardIndex, Vec<u8>)> {
        let epochs = std::mem::take(&mut self.epochs).into_iter();
        let fresh = epochs.filter(|epoch| now - epoch.committed <= KEPT_FOR);
        fresh.flat_map(|epoch| epoch.frames).collect()
    }

    /// Frames of committed epochs that came, and their bytes.
    pub fn came(&self) -> (u64, u64) {
        (self.frames, self.bytes)
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

    /// Frames of these cards and lengths are committed with an epoch.
    fn commit(carried: &mut Carried, ms: u64, epoch: u64, frames: &[(u16, usize)]) {
        let sent = |&(card, length): &(u16, usize)| {
            let mut one = CardFrames::outbound(Epoch(epoch), CardIndex(card));
            assert!(one.push(&vec![epoch as u8; length]));
            one
        };
        let sent: Vec<_> = frames.iter().map(sent).collect();
        carried.commit(at(ms), Epoch(epoch), &sent);
    }

    #[test]
    fn what_the_primary_may_not_have_released_is_sent_in_order() {
        let mut carried = Carried::new(2);
        for epoch in 1..=5 {
            commit(&mut carried, 0, epoch, &[(1, 1), (0, 1)]);
        }
        let expected = [(1, 4), (0, 4), (1, 5), (0, 5)].map(|(c, e)| (CardIndex(c), vec![e]));
        assert_eq!(carried.take(at(10)), expected);
        assert_eq!(carried.take(at(10)), [], "once");
        assert_eq!(carried.came(), (10, 10));
    }

    #[test]
    fn silent_epochs_count_too() {
        let mut carried = Carried::new(1);
        commit(&mut carried, 0, 1, &[(0, 3)]);
        commit(&mut carried, 0, 2, &[]);
        assert_eq!(carried.clone().take(at(0)), [(CARD, vec![1; 3])]);
        commit(&mut carried, 0, 3, &[]);
        assert_eq!(carried.take(at(0)), [], "the primary has released it");
    }

    #[test]
    fn old_frames_are_not_sent() {
        let mut carried = Carried::new(1);
        commit(&mut carried, 0, 1, &[(0, 3)]);
        commit(&mut carried, 1_000, 2, &[(0, 3)]);
        assert_eq!(carried.take(at(2_001)), [(CARD, vec![2; 3])]);
    }

    proptest! {
        #[test]
        fn a_backup_keeps_no_more_than_the_bound(
            epochs in prop::collection::vec(
                prop::collection::vec((0u16..3, 1usize..70_000), 0..6), 1..6),
        ) {
            let mut carried = Carried::new(2);
            for (n, frames) in epochs.iter().enumerate() {
                commit(&mut carried, 0, n as u64 + 1, frames);
            }
            let kept = carried.take(at(0));
            let bytes: usize = kept.iter().map(|(_, frame)| frame.len()).sum();
            prop_assert!(bytes <= 2 * PIPELINE_DEPTH as usize * CARRIED_BYTES);
            prop_assert!(kept.iter().all(|(card, _)| card.0 < 2));
            let oldest = (epochs.len() as u64 + 1).saturating_sub(PIPELINE_DEPTH);
            prop_assert!(kept.iter().all(|(_, frame)| u64::from(frame[0]) >= oldest));
        }
    }
}
