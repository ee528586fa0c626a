//! Frames of the primary's guest, kept for the take-over: copies of those that it receives, and those
//! that it sent in committed epochs. `understudy_protocol::{Kept, Carried}` say what they are for.

use crate::clock;
use std::sync::Arc;
use tracing::debug;
use understudy_link::link::Link;
use understudy_machine::Machine;
use understudy_network::{Port, Station, Stations};
use understudy_protocol::{CardFrames, CardIndex, Carried, Epoch, Kept};
use understudy_report::{InboundReport, OutboundReport};
use understudy_threads::{Mutex, lock};

/// The frames that are kept, and the connection that copies come over.
pub struct Frames(Mutex<State>);

struct State {
    carried: Carried,
    kept: Kept,
    stations: Stations,
    frames: u64,
    bytes: u64,
    link: Option<Link>,
    closed: bool,
}

impl Frames {
    /// No frames yet, for a guest with these cards.
    pub fn new(ports: &[Arc<Port>]) -> Frames {
        let own = ports.iter().map(|port| (port.mac(), port.vlans().clone())).collect();
        Frames(Mutex::new(State {
            carried: Carried::new(ports.len()),
            kept: Kept::new(ports.len()),
            stations: Stations::new(own),
            frames: 0,
            bytes: 0,
            link: None,
            closed: false,
        }))
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
                state.stations.received(frames.card(), frame);
                state.kept.put(clock::now(), frames.epoch(), frames.card(), frame);
                state.frames += 1;
                state.bytes += frame.len() as u64;
            }
        }
    }

    /// The epoch is committed, in which the guest sent these; what its state has received is of no more
    /// use.
    pub fn commit(&self, epoch: Epoch, sent: &[CardFrames]) {
        let (now, mut state) = (clock::now(), lock(&self.0));
        for frames in sent {
            let card = frames.card();
            frames.iter().for_each(|frame| state.stations.sent(now, card, frame));
        }
        state.kept.commit(epoch);
        state.carried.commit(now, epoch, sent.iter());
    }

    /// The stations behind the guest's cards, by what it sent.
    pub fn stations(&self) -> Vec<Station> {
        lock(&self.0).stations.get(clock::now())
    }

    /// The frames that this host, which owns the VM now, must send.
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

    /// The report that `status` shows of those that the guest sent.
    pub fn outbound(&self) -> OutboundReport {
        let (frames, bytes) = lock(&self.0).carried.came();
        OutboundReport { frames, bytes, left_out: 0 }
    }

    /// The report that `status` shows of those that it received.
    pub fn inbound(&self) -> InboundReport {
        let state = lock(&self.0);
        let (kept_frames, kept_bytes) = state.kept.size();
        let (frames, bytes, dropped) = (state.frames, state.bytes, state.kept.dropped());
        InboundReport { frames, bytes, dropped, kept_frames, kept_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backup_knows_who_is_behind_the_guests_card() {
        let frames = Frames::new(&[]);
        let mut sent = CardFrames::outbound(Epoch(3), CardIndex(0));
        let header = [0; understudy_network::HEADER_BYTES];
        assert!(sent.push(&[&header[..], &[0xff; 6], &[2, 0x42, 0, 0, 0, 9], &[8; 48]].concat()));
        frames.commit(Epoch(3), &[sent]);
        let found = frames.stations();
        assert_eq!((found.len(), found[0].card()), (1, CardIndex(0)));
    }
}
