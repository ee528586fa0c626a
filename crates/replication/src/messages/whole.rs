//! An epoch that has come whole: all that can be known of it is known before it is acknowledged.

use super::Piece;
use crate::medium::Medium;
use understudy_cluster::messages::KeepOrder;
use understudy_protocol::{CardFrames, Epoch, StagedEpoch, Time};

/// An epoch that has come whole.
#[derive(Debug)]
pub struct WholeEpoch {
    /// The epoch.
    pub epoch: Epoch,
    /// Pages, disk writes and words on the console, in the order in which they were sent.
    pub changes: Vec<Piece<'static>>,
    /// QEMU's device state at its end.
    pub device_state: DeviceState,
    /// Turn that it is.
    pub turn: Option<LogTurn>,
    /// Frames that the guest sent.
    pub outbound: Vec<CardFrames>,
    /// Media of drives from its end on, in order.
    pub media: Vec<Medium>,
    /// Order to keep what is there at its end for a snapshot.
    pub keep: Option<KeepOrder>,
    /// Bytes of payload.
    pub bytes: u64,
    /// Time at which its guest stopped, by this host's clock.
    pub taken: Time,
}

/// A device state that came whole, as it came.
#[derive(Debug)]
pub struct DeviceState {
    first: Vec<u8>,
    others: Vec<Vec<u8>>,
}

impl DeviceState {
    /// All of it. Most come in one piece, which is not copied.
    pub fn join(self) -> Vec<u8> {
        let mut state = self.first;
        self.others.into_iter().for_each(|part| state.extend(part));
        state
    }
}

/// A turn of the backup to the other way of keeping up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogTurn {
    /// The log begins behind the epoch.
    Begins,
    /// The log ends with the epoch.
    Ends,
}

/// The reason why an epoch, whose messages are all there, cannot be applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("epoch {0} {1}")]
pub struct Unfit(Epoch, &'static str);

impl TryFrom<StagedEpoch<Piece<'static>>> for WholeEpoch {
    type Error = Unfit;

    fn try_from(staged: StagedEpoch<Piece<'static>>) -> Result<WholeEpoch, Unfit> {
        let StagedEpoch { epoch, pieces, bytes, taken } = staged;
        let mut changes = Vec::with_capacity(pieces.len());
        let (mut parts, mut state) = (Vec::new(), None);
        let (mut turn, mut keep) = (None, None);
        let (mut outbound, mut media) = (Vec::new(), Vec::new());
        for piece in pieces {
            let is_second = match piece {
                Piece::Pages(_) | Piece::DiskWrite(_) | Piece::DiskZero(_) | Piece::Console(_) => {
                    changes.push(piece);
                    false
                }
                Piece::DeviceStatePart(part) => {
                    parts.push(part);
                    state.is_some()
                }
                Piece::DeviceState(last) => state.replace(last).is_some(),
                Piece::LogBegins => turn.replace(LogTurn::Begins).is_some(),
                Piece::LogEnds(_) => turn.replace(LogTurn::Ends).is_some(),
                Piece::Keep(order) => keep.replace(order).is_some(),
                Piece::Outbound(frames) => {
                    outbound.push(frames);
                    false
                }
                Piece::Medium(medium) => {
                    media.push(medium);
                    false
                }
            };
            if is_second {
                return Err(Unfit(epoch, "has twice what it can have once"));
            }
        }
        let last = state.ok_or(Unfit(epoch, "has no device state"))?;
        let mut parts = parts.into_iter().chain([last]);
        let first = parts.next().unwrap_or_default();
        let device_state = DeviceState { first, others: parts.collect() };
        Ok(WholeEpoch { epoch, changes, device_state, turn, outbound, media, keep, bytes, taken })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::device_state;
    use std::time::Duration;
    use understudy_protocol::wire::{LEAST_WIRE_VERSION, MAX_PAYLOAD, WIRE_VERSION};

    fn whole(pieces: Vec<Piece<'static>>) -> Result<WholeEpoch, Unfit> {
        StagedEpoch { epoch: Epoch(5), pieces, bytes: 0, taken: Time(Duration::ZERO) }.try_into()
    }

    fn state(byte: u8) -> Piece<'static> {
        Piece::DeviceState(vec![byte])
    }

    // They were acknowledged, and could not be applied: what the primary's clients had seen by then nobody had.
    #[test]
    fn an_epoch_without_what_it_needs_is_none() {
        let part = || Piece::DeviceStatePart(vec![1]);
        let words = || Piece::Console(b"hello".to_vec());
        let came = whole(vec![words(), Piece::LogBegins, part(), part(), state(2)]).unwrap();
        assert_eq!((came.changes.len(), came.turn), (1, Some(LogTurn::Begins)));
        assert_eq!(came.device_state.join(), [1, 1, 2]);
        for pieces in [
            vec![],
            vec![words(), part()],
            vec![state(1), state(1)],
            vec![state(1), part()],
            vec![Piece::LogBegins, Piece::LogEnds(vec![]), state(1)],
            vec![Piece::LogEnds(vec![]), Piece::LogEnds(vec![]), state(1)],
        ] {
            assert!(whole(pieces.clone()).is_err(), "{pieces:?}");
        }
    }

    /// What the backup has of a state that came in the pieces of this version, and how many.
    fn sent(state: &[u8], version: u32) -> Option<(usize, Vec<u8>)> {
        let pieces: Vec<_> = device_state(state, version).ok()?.collect();
        assert!(pieces.iter().all(|piece| piece.bytes() <= MAX_PAYLOAD as u64));
        Some((pieces.len(), whole(pieces).unwrap().device_state.join()))
    }

    // One of more than 4 MiB ended the thread that sends, and with it the guest.
    #[test]
    fn a_device_state_of_any_size_comes_whole() {
        let most = MAX_PAYLOAD;
        let cases = [(1, 1), (most, 1), (most + 1, 2), (2 * most, 2), (2 * most + 9, 3)];
        for (bytes, pieces) in cases {
            let state: Vec<u8> = (0..bytes).map(|n| (n % 251) as u8).collect();
            let came = sent(&state, WIRE_VERSION).unwrap();
            assert_eq!(came.0, pieces, "{bytes} bytes");
            assert!(came.1 == state, "{bytes} bytes");
            let before = sent(&state, LEAST_WIRE_VERSION);
            assert_eq!(before.map(|came| came.0), (pieces == 1).then_some(1), "{bytes} bytes");
        }
    }
}
