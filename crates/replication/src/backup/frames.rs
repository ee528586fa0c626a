//! Frames of the primary's guest, kept for the take-over: copies of those that it receives, and those
//! that it sent in committed epochs. `understudy_protocol::{Kept, Carried}` say what they are for.

use crate::clock;
use crate::messages::{Piece, WholeEpoch};
use tracing::debug;
use understudy_link::link::Link;
use understudy_machine::Machine;
use understudy_protocol::{CardFrames, CardIndex, Carried, Kept};
use understudy_report::{InboundReport, OutboundReport};
use understudy_threads::{Mutex, lock};

/// What is kept, and the connection that copies come over.
pub struct Frames(Mutex<State>);

struct State {
    carried: Carried,
    kept: Kept,
    frames: u64,
    bytes: u64,
    link: Option<Link>,
    closed: bool,
}

impl Frames {
    /// Nothing yet, for a guest with so many cards.
    pub fn new(cards: usize) -> Frames {
        let (carried, kept) = (Carried::new(cards), Kept::new(cards));
        let state = State { carried, kept, frames: 0, bytes: 0, link: None, closed: false };
        Frames(Mutex::new(state))
    }

    /// Keeps what comes over `link`, until its end. It replaces an earlier one.
    pub fn receive(&self, link: &Link) {
        if let Err(error) = self.attach(link).and_then(|()| self.receive_all(link)) {
            debug!("no more frames for the guest: {error:#}");
        }
        link.close();
    }

    fn attach(&self, link: &Link) -> anyhow::Result<()> {
        link.set_read_timeout(None)?;
        let mut state = lock(&self.0);
        anyhow::ensure!(!state.closed, "the session is over");
        if let Some(old) = state.link.replace(link.clone()) {
            old.close();
        }
        Ok(())
    }

    fn receive_all(&self, link: &Link) -> anyhow::Result<()> {
        loop {
            let frames = CardFrames::decode(link.receive()?)?;
            let mut state = lock(&self.0);
            for frame in frames.iter() {
                state.kept.put(clock::now(), frames.epoch(), frames.card(), frame);
                state.frames += 1;
                state.bytes += frame.len() as u64;
            }
        }
    }

    /// The epoch is committed: its frames are taken out of it, and what its state has received is
    /// of no more use.
    pub fn commit(&self, part: &mut WholeEpoch) {
        let sent = part.pieces.iter().filter_map(|piece| match piece {
            Piece::Outbound(frames) => Some(frames),
            _ => None,
        });
        let mut state = lock(&self.0);
        state.kept.commit(part.epoch);
        state.carried.commit(clock::now(), part.epoch, sent);
        drop(state);
        part.pieces.retain(|piece| !matches!(piece, Piece::Outbound(_)));
    }

    /// What this host, which owns the VM now, must send.
    pub fn take_sent(&self) -> Vec<(CardIndex, Vec<u8>)> {
        lock(&self.0).carried.take(clock::now())
    }

    /// Gives the guest, which has just gone live, what is kept; returns how many frames.
    pub fn inject(&self, machine: &Machine) -> u64 {
        let frames = lock(&self.0).kept.take(clock::now());
        // Kept only of cards that there are.
        let inject = |(card, frame): &&(CardIndex, Vec<u8>)| {
            machine.ports()[usize::from(card.0)].inject(frame)
        };
        frames.iter().filter(inject).count() as u64
    }

    /// Ends the connection for good.
    pub fn close(&self) {
        let mut state = lock(&self.0);
        state.closed = true;
        if let Some(link) = state.link.take() {
            link.close();
        }
    }

    /// What `status` shows of those that the guest sent.
    pub fn outbound(&self) -> OutboundReport {
        let (frames, bytes) = lock(&self.0).carried.came();
        OutboundReport { frames, bytes, left_out: 0 }
    }

    /// What `status` shows of those that it received.
    pub fn inbound(&self) -> InboundReport {
        let state = lock(&self.0);
        let (kept_frames, kept_bytes) = state.kept.size();
        let (frames, bytes, dropped) = (state.frames, state.bytes, state.kept.dropped());
        InboundReport { frames, bytes, dropped, kept_frames, kept_bytes }
    }
}
