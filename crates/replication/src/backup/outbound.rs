//! Frames of the primary's guest that came with committed epochs, kept for the take-over.
//! `understudy_protocol::Carried` says what they are for.

use crate::clock;
use crate::messages::{Piece, WholeEpoch};
use understudy_protocol::{CardIndex, Carried};
use understudy_report::OutboundReport;
use understudy_threads::{Mutex, lock};

/// What is kept.
pub struct Outbound(Mutex<Carried>);

impl Outbound {
    /// Nothing yet, for a guest with so many cards.
    pub fn new(cards: usize) -> Outbound {
        Outbound(Mutex::new(Carried::new(cards)))
    }

    /// The epoch is committed: takes its frames out of it.
    pub fn commit(&self, part: &mut WholeEpoch) {
        let sent = part.pieces.iter().filter_map(|piece| match piece {
            Piece::Outbound(frames) => Some(frames),
            _ => None,
        });
        lock(&self.0).commit(clock::now(), part.epoch, sent);
        part.pieces.retain(|piece| !matches!(piece, Piece::Outbound(_)));
    }

    /// What this host, which owns the VM now, must send.
    pub fn take(&self) -> Vec<(CardIndex, Vec<u8>)> {
        lock(&self.0).take(clock::now())
    }

    /// What `status` shows.
    pub fn report(&self) -> OutboundReport {
        let (frames, bytes) = lock(&self.0).came();
        OutboundReport { frames, bytes, left_out: 0 }
    }
}
