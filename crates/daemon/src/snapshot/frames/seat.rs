//! A member's seat at the network of its cluster: what the driver of its snapshots sees.

use super::mutant;
use super::network::{Call, Frame, Network};
use std::sync::Arc;
use understudy_machine::Machine;
use understudy_snapshot::{CutEvent, InFlightFrame, Member, SnapshotNumber};

/// One member that runs on this host.
#[derive(Clone)]
pub struct Seat {
    network: Arc<Network>,
    member: Member,
}

impl Seat {
    pub(super) fn new(network: Arc<Network>, member: Member) -> Seat {
        Seat { network, member }
    }

    /// The coordinator says that this snapshot is to be taken now.
    pub fn take(&self, number: SnapshotNumber) {
        self.event(CutEvent::Take(number));
    }

    /// The machine stands still, its state is that of this snapshot: to be called before it
    /// goes on. What it was given and has not read goes to the log.
    ///
    /// # Errors
    /// If the cards' sockets cannot be looked into; the snapshot must be given up.
    pub fn taken(&self, machine: &Machine, number: SnapshotNumber) -> anyhow::Result<()> {
        // What it has sent was sent before the snapshot.
        machine.ports().iter().for_each(|port| port.drain());
        let cards = machine.unread()?;
        let (calls, signs) = {
            let mut state = self.network.state();
            let mut unread = Vec::new();
            for (card, frames) in &cards {
                for bytes in frames.frames()? {
                    // What came from outside may be lost.
                    if let Some(from) = state.roster.sender(self.member, *card, &bytes) {
                        unread.push((from, Frame { card: Some(*card), bytes: bytes.into() }));
                    }
                }
            }
            state.event(self.member, CutEvent::Taken { number, unread })
        };
        drop(cards);
        for sign in signs.iter().map(|sign| sign.encode()) {
            // Behind what each card has sent: the last of these is behind all of it.
            machine.ports().iter().for_each(|port| port.push_message(&sign));
            if machine.ports().is_empty() {
                self.network.carry(&sign);
            }
        }
        calls.into_iter().for_each(Call::make);
        Ok(())
    }

    /// Notes that this snapshot is over: all of it is saved, or there will be none.
    pub fn over(&self, number: SnapshotNumber) {
        self.event(CutEvent::Over(number));
    }

    /// The frames in flight to the member across its last snapshot, in the order of their
    /// arrival; none before [`log_complete`](super::CutListener::log_complete).
    pub fn log(&self) -> Option<Vec<InFlightFrame>> {
        let state = self.network.state();
        let log = state.locals.get(&self.member)?.cut.log()?;
        if mutant::is("unlogged") {
            return Some(Vec::new());
        }
        let mut frames = Vec::new();
        for (from, frame) in log {
            let cards = match frame.card {
                Some(card) => vec![card],
                None => state.roster.takers(*from, self.member, &frame.bytes),
            };
            let of = |card| InFlightFrame { from: *from, card, bytes: frame.bytes.to_vec() };
            frames.extend(cards.into_iter().map(of));
        }
        Some(frames)
    }

    /// Gives the guest, which does not run yet, the log of the snapshot that it was restored
    /// from. It reads that before anything else.
    pub fn deliver(&self, log: &[InFlightFrame]) {
        let state = self.network.state();
        let Some(local) = state.locals.get(&self.member) else { return };
        let times = match () {
            () if mutant::is("undelivered") => 0,
            () if mutant::is("delivered-twice") => 2,
            () => 1,
        };
        for frame in std::iter::repeat_n(log, times).flatten() {
            local.inlet(frame.card).inspect(|inlet| inlet.deliver_first(&frame.bytes));
        }
    }

    /// Reason why the member does not reach all others yet, for people; none if it does. Before
    /// that no snapshot can be complete.
    pub fn lacks(&self) -> Option<String> {
        self.network.state().lacks()
    }

    fn event(&self, event: CutEvent<Frame>) {
        let (calls, _) = self.network.state().event(self.member, event);
        calls.into_iter().for_each(Call::make);
    }
}
