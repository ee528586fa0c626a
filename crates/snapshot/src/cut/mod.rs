//! The consistent cut through a running group (HotSnap).
//!
//! Members take their snapshots at slightly different moments while they talk to each other.
//! Each frame between them carries its sender's colour: the number of the last snapshot that
//! the sender had taken. With it the snapshots fit together as if taken at one moment:
//!
//! - a frame from behind a snapshot waits until its receiver has taken that snapshot too, and
//!   makes it do so at once: nobody has received what nobody has sent;
//! - a frame from before a snapshot that arrives behind it was in flight: it is delivered, and
//!   logged for delivery after a restore: nothing that was sent is missing.
//!
//! Frames from one member to another arrive in the order in which they were sent, some may be
//! lost. So the log is complete when each other member has been heard from behind its own
//! snapshot; an empty envelope, sent at once, sees to that.

mod envelope;

pub use envelope::{BadEnvelope, ENVELOPE_BYTES, Envelope};

use crate::{Incarnation, Member, SnapshotNumber};
use std::collections::{BTreeSet, VecDeque};
use understudy_protocol::planted;

/// Bytes of frames that wait for this member's snapshot; over it frames are lost, as on any
/// switch whose port is busy.
const HELD_BYTES: usize = 8 << 20;

/// Bytes of frames in flight across one snapshot; with more there is none. Of a network of ten gigabits a second
/// that is a fifth of a second, and a peer decides how many there are.
pub(crate) const LOGGED_BYTES: usize = 256 << 20;

/// Bytes that a frame takes beside its own, for those who send very short ones.
const FRAME_BYTES: usize = 128;

/// Memory that a frame takes.
pub(crate) fn memory(frame: &impl AsRef<[u8]>) -> usize {
    frame.as_ref().len() + FRAME_BYTES
}

/// An event that happens to one member. `F` is a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CutEvent<F> {
    /// An envelope came from another member, with a frame or without.
    Arrived(Envelope, Option<F>),
    /// The coordinator says that this snapshot is to be taken now.
    Take(SnapshotNumber),
    /// The VM stands still, and its state is that of this snapshot.
    Taken {
        /// The snapshot.
        number: SnapshotNumber,
        /// Frames that were delivered and that the guest has not read: they are in the card's
        /// socket, which is no part of the VM's state. It will read them nevertheless.
        unread: Vec<(Member, F)>,
    },
    /// This snapshot is over: all of it is saved, or the coordinator has given it up.
    Over(SnapshotNumber),
}

/// An action that must be taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CutAction<F> {
    /// Send this envelope, without a frame, behind all that the guest has sent.
    Transmit(Envelope),
    /// Give the frame to the guest.
    Deliver {
        /// Sender.
        from: Member,
        /// The frame.
        frame: F,
    },
    /// Pause the VM, capture its state, and say [`CutEvent::Taken`] before it goes on.
    Take(SnapshotNumber),
    /// The log of this snapshot gets no longer: [`Cut::log`].
    LogComplete(SnapshotNumber),
}

/// One member's view of the cut.
#[derive(Clone, Debug)]
pub struct Cut<F> {
    own: Member,
    incarnation: Incarnation,
    /// Number of the last snapshot that was taken, or given up.
    number: SnapshotNumber,
    /// Number of a snapshot that is being taken.
    taking: Option<SnapshotNumber>,
    /// The newest number that each member was heard with.
    heard: Vec<SnapshotNumber>,
    held: VecDeque<(Envelope, F)>,
    held_bytes: usize,
    recording: Option<Recording<F>>,
}

#[derive(Clone, Debug)]
struct Recording<F> {
    number: SnapshotNumber,
    /// Members from which frames may still come that were in flight.
    open: BTreeSet<Member>,
    log: Vec<(Member, F)>,
    log_bytes: usize,
}

impl<F: AsRef<[u8]>> Recording<F> {
    fn new(
        number: SnapshotNumber,
        open: BTreeSet<Member>,
        unread: Vec<(Member, F)>,
    ) -> Recording<F> {
        let log = Vec::new();
        let mut recording = Recording { number, open, log, log_bytes: 0 };
        unread.into_iter().for_each(|(from, frame)| recording.push(from, frame));
        recording
    }

    /// A frame was in flight.
    fn push(&mut self, from: Member, frame: F) {
        self.log_bytes = self.log_bytes.saturating_add(memory(&frame));
        if self.is_lost() {
            self.log = Vec::new();
            self.open.clear();
        } else {
            self.log.push((from, frame));
        }
    }

    /// Whether there were more frames than a log holds.
    fn is_lost(&self) -> bool {
        self.log_bytes > LOGGED_BYTES
    }
}

impl<F: AsRef<[u8]> + Clone> Cut<F> {
    /// A member of a group of `members`. `number` is that of the group's last snapshot: the one
    /// it was restored from, or the last one that was begun.
    pub fn new(
        own: Member,
        members: usize,
        incarnation: Incarnation,
        number: SnapshotNumber,
    ) -> Cut<F> {
        Cut {
            own,
            incarnation,
            number,
            taking: None,
            heard: vec![number; members],
            held: VecDeque::new(),
            held_bytes: 0,
            recording: None,
        }
    }

    /// The snapshot behind which the member is.
    pub fn number(&self) -> SnapshotNumber {
        self.number
    }

    /// The envelope of a frame that its guest sends to another member now.
    pub fn envelope(&self, to: Member) -> Envelope {
        Envelope { from: self.own, to, incarnation: self.incarnation, number: self.number }
    }

    /// Frames in flight to this member across the cut of its last snapshot, in the order of
    /// their arrival; none before [`CutAction::LogComplete`], nor ever if they are too many.
    pub fn log(&self) -> Option<&[(Member, F)]> {
        let complete =
            |recording: &&Recording<F>| recording.open.is_empty() && !recording.is_lost();
        let complete = self.recording.as_ref().filter(complete);
        complete.map(|recording| &recording.log[..])
    }

    /// Takes one event; appends what must be done to `actions`, in order.
    pub fn handle(&mut self, event: CutEvent<F>, actions: &mut Vec<CutAction<F>>) {
        match event {
            CutEvent::Arrived(envelope, frame) => self.arrived(envelope, frame, actions),
            CutEvent::Take(number) => self.take(number, actions),
            CutEvent::Taken { number, unread } => self.taken(number, unread, actions),
            CutEvent::Over(number) => self.over(number, actions),
        }
    }

    fn arrived(&mut self, envelope: Envelope, frame: Option<F>, actions: &mut Vec<CutAction<F>>) {
        let Envelope { from, number, .. } = envelope;
        // Another incarnation's frame is from a past, or a future, that is not this group's.
        let known = from.index() < self.heard.len() && from != self.own;
        let is_of_another = envelope.incarnation != self.incarnation && !planted!(HearAnotherLife);
        if is_of_another || envelope.to != self.own || !known {
            return;
        }
        self.heard[from.index()] = number;
        self.close(from, actions);
        if number > self.number && !planted!(ReadFromBehind) {
            if let Some(frame) = frame {
                self.hold(envelope, frame);
            }
            self.take(number, actions);
        } else if let Some(frame) = frame {
            // What comes from a member that was heard from behind the snapshot is not from before it.
            let is_open = |recording: &Recording<F>| recording.open.contains(&from);
            if self.recording.as_ref().is_some_and(is_open) {
                self.record(envelope, &frame, actions);
            }
            actions.push(CutAction::Deliver { from, frame });
        }
    }

    /// A frame that comes from before the snapshot being recorded was in flight.
    fn record(&mut self, envelope: Envelope, frame: &F, actions: &mut Vec<CutAction<F>>) {
        let Envelope { from, number, .. } = envelope;
        let Some(recording) = &mut self.recording else { return };
        if number < recording.number && !recording.is_lost() {
            recording.push(from, frame.clone());
            if recording.is_lost() {
                actions.push(CutAction::LogComplete(recording.number));
            }
        }
    }

    fn hold(&mut self, envelope: Envelope, frame: F) {
        let bytes = memory(&frame);
        if self.held_bytes + bytes <= HELD_BYTES {
            self.held_bytes += bytes;
            self.held.push_back((envelope, frame));
        }
    }

    /// Closes the recording for a member that was heard from behind the snapshot: nothing from
    /// before it comes any more.
    fn close(&mut self, from: Member, actions: &mut Vec<CutAction<F>>) {
        let Some(recording) = &mut self.recording else { return };
        let behind = self.heard[from.index()] >= recording.number;
        if behind && recording.open.remove(&from) && recording.open.is_empty() {
            actions.push(CutAction::LogComplete(recording.number));
        }
    }

    fn take(&mut self, number: SnapshotNumber, actions: &mut Vec<CutAction<F>>) {
        if number > self.number && self.taking.is_none_or(|taking| taking < number) {
            self.taking = Some(number);
            actions.push(CutAction::Take(number));
        }
    }

    fn taken(
        &mut self,
        number: SnapshotNumber,
        unread: Vec<(Member, F)>,
        actions: &mut Vec<CutAction<F>>,
    ) {
        // Given up while it was being taken.
        if number <= self.number {
            return;
        }
        self.number = number;
        self.taking = self.taking.filter(|taking| *taking > number);
        let others = (0..self.heard.len()).map(|other| Member(other as u16));
        let others: Vec<Member> = others.filter(|other| *other != self.own).collect();
        let open = others.iter().copied().filter(|other| self.heard[other.index()] < number);
        let unread = if planted!(ForgetTheUnread) { Vec::new() } else { unread };
        self.recording = Some(Recording::new(number, open.collect(), unread));
        for other in others.into_iter().filter(|_| !planted!(GiveNoSign)) {
            actions.push(CutAction::Transmit(self.envelope(other)));
        }
        // Also what waited for a snapshot before this one that was given up.
        self.release(actions);
        if self.recording.as_ref().is_some_and(|recording| recording.open.is_empty()) {
            actions.push(CutAction::LogComplete(number));
        }
    }

    /// Ends a snapshot. If it is given up the members' numbers must agree all the same, or frames
    /// from those that took it would wait for ever.
    fn over(&mut self, number: SnapshotNumber, actions: &mut Vec<CutAction<F>>) {
        if self.recording.as_ref().is_some_and(|recording| recording.number == number) {
            self.recording = None;
        }
        if self.number < number && !planted!(ForgetWhatWasGivenUp) {
            self.number = number;
            self.recording = None;
            self.taking = self.taking.filter(|taking| *taking > number);
            self.release(actions);
        }
    }

    /// Delivers what waited for the snapshot that has now been passed.
    fn release(&mut self, actions: &mut Vec<CutAction<F>>) {
        for (envelope, frame) in std::mem::take(&mut self.held) {
            match envelope.number > self.number {
                true => self.held.push_back((envelope, frame)),
                false => {
                    self.held_bytes -= memory(&frame);
                    // It came from before its sender was heard from behind this one.
                    self.record(envelope, &frame, actions);
                    actions.push(CutAction::Deliver { from: envelope.from, frame });
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
