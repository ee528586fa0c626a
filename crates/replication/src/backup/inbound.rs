//! Copies of what the primary's guest receives, kept for the take-over.
//! `understudy_protocol::inbound` says what they are for.

use crate::clock;
use tracing::debug;
use understudy_link::link::Link;
use understudy_machine::Machine;
use understudy_protocol::{CardFrames, CardIndex, Epoch, Kept};
use understudy_report::InboundReport;
use understudy_threads::{Mutex, lock};

/// What is kept, and the connection that it comes over.
pub struct Inbound(Mutex<State>);

struct State {
    kept: Kept,
    frames: u64,
    bytes: u64,
    link: Option<Link>,
    closed: bool,
}

impl Inbound {
    /// Nothing yet, for a guest with so many cards.
    pub fn new(cards: usize) -> Inbound {
        let kept = Kept::new(cards);
        Inbound(Mutex::new(State { kept, frames: 0, bytes: 0, link: None, closed: false }))
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

    /// The state after `epoch` is on this host.
    pub fn commit(&self, epoch: Epoch) {
        lock(&self.0).kept.commit(epoch);
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

    /// What `status` shows.
    pub fn report(&self) -> InboundReport {
        let state = lock(&self.0);
        let (kept_frames, kept_bytes) = state.kept.size();
        let (frames, bytes, dropped) = (state.frames, state.bytes, state.kept.dropped());
        InboundReport { frames, bytes, dropped, kept_frames, kept_bytes }
    }
}
