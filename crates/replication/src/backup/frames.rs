//! Frames of the primary's guest, kept for the take-over: copies of those that it receives, and those
//! that it sent in committed epochs. `understudy_protocol::{Kept, Carried}` say what they are for.

use super::session::Session;
use crate::clock;
use std::sync::Arc;
use tracing::debug;
use understudy_link::link::Link;
use understudy_network::{Port, Station, Stations};
use understudy_protocol::{CardFrames, CardIndex, Carried, Epoch, Kept};
use understudy_report::{InboundReport, OutboundReport};
use understudy_threads::lock;

/// The frames that are kept, and the connection that copies come over.
pub(super) struct Frames {
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
        Frames {
            carried: Carried::new(ports.len()),
            kept: Kept::new(ports.len()),
            stations: Stations::new(own),
            frames: 0,
            bytes: 0,
            link: None,
            closed: false,
        }
    }

    /// Copies come over this connection from now on; returns the former one, which is to be closed.
    fn attach(&mut self, link: &Link) -> anyhow::Result<Option<Link>> {
        anyhow::ensure!(!self.closed, "the session is over");
        Ok(self.link.replace(link.clone()))
    }

    /// Keeps what the guest received.
    fn received(&mut self, frames: &CardFrames) {
        for frame in frames.iter() {
            self.stations.received(frames.card(), frame);
            self.kept.put(clock::now(), frames.epoch(), frames.card(), frame);
            self.frames += 1;
            self.bytes += frame.len() as u64;
        }
    }

    /// The epoch is committed, in which the guest sent these; what its state has received is of no more
    /// use.
    pub fn commit(&mut self, epoch: Epoch, sent: &[CardFrames]) {
        let now = clock::now();
        for frames in sent {
            let card = frames.card();
            frames.iter().for_each(|frame| self.stations.sent(now, card, frame));
        }
        self.kept.commit(epoch);
        self.carried.commit(now, epoch, sent.iter());
    }

    /// The stations behind the guest's cards, by what it sent.
    pub fn stations(&self) -> Vec<Station> {
        self.stations.get(clock::now())
    }

    /// The frames that this host, which owns the VM now, must send.
    pub fn take_sent(&mut self) -> Vec<(CardIndex, Vec<u8>)> {
        self.carried.take(clock::now())
    }

    /// Takes what the guest received and does not know of.
    fn take_kept(&mut self) -> Vec<(CardIndex, Vec<u8>)> {
        self.kept.take(clock::now())
    }

    /// Ends for good; returns the connection, which is to be closed.
    pub fn close(&mut self) -> Option<Link> {
        self.closed = true;
        self.link.take()
    }

    fn outbound(&self) -> OutboundReport {
        let (frames, bytes) = self.carried.came();
        OutboundReport { frames, bytes, left_out: 0 }
    }

    fn inbound(&self) -> InboundReport {
        let (kept_frames, kept_bytes) = self.kept.size();
        let (frames, bytes, dropped) = (self.frames, self.bytes, self.kept.dropped());
        InboundReport { frames, bytes, dropped, kept_frames, kept_bytes }
    }
}

impl Session {
    /// Looks at the frames that are kept, or changes them. Nothing may be waited for.
    pub(super) fn frames<T>(&self, act: impl FnOnce(&mut Frames) -> T) -> T {
        act(&mut lock(&self.present).frames)
    }

    /// Keeps what comes over `link`, until its end. It replaces an earlier one.
    pub(super) fn receive_inbound(&self, link: &Link) {
        let outcome = self.attach_inbound(link).and_then(|()| self.keep_all_inbound(link));
        if let Err(error) = outcome {
            debug!("no more frames for the guest: {error:#}");
        }
        link.close();
    }

    fn attach_inbound(&self, link: &Link) -> anyhow::Result<()> {
        link.set_read_timeout(None)?;
        if let Some(old) = self.frames(|frames| frames.attach(link))? {
            old.close();
        }
        Ok(())
    }

    fn keep_all_inbound(&self, link: &Link) -> anyhow::Result<()> {
        loop {
            let received = CardFrames::decode(link.receive()?)?;
            self.frames(|frames| frames.received(&received));
        }
    }

    /// Gives the guest, which has just gone live, what is kept; returns how many frames.
    pub(super) fn inject_kept(&self) -> u64 {
        let (machine, kept) = (self.machine(), self.frames(Frames::take_kept));
        // Kept only of cards that there are.
        let inject = |(card, frame): &&(CardIndex, Vec<u8>)| {
            machine.ports()[usize::from(card.0)].inject(frame)
        };
        kept.iter().filter(inject).count() as u64
    }

    /// The report that `status` shows of frames that the guest sent.
    pub fn outbound(&self) -> OutboundReport {
        self.frames(|frames| frames.outbound())
    }

    /// The report that `status` shows of those that it received.
    pub fn inbound(&self) -> InboundReport {
        self.frames(|frames| frames.inbound())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backup_knows_who_is_behind_the_guests_card() {
        let mut frames = Frames::new(&[]);
        let mut sent = CardFrames::outbound(Epoch(3), CardIndex(0));
        let header = [0; understudy_network::HEADER_BYTES];
        assert!(sent.push(&[&header[..], &[0xff; 6], &[2, 0x42, 0, 0, 0, 9], &[8; 48]].concat()));
        frames.commit(Epoch(3), &[sent]);
        let found = frames.stations();
        assert_eq!((found.len(), found[0].card()), (1, CardIndex(0)));
    }
}
