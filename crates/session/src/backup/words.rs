//! The events that happen to a backup, and their effects.

use crate::Place;
use understudy_protocol::{Epoch, Generation, Ownership, Time, Verdict};

/// An event that happens to the backup of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A member's part of this epoch is whole, and its checksum is right.
    Staged(Place, Epoch),
    /// A batch of log is taken in: an epoch that is not applied. In lockstep a group has one member.
    Logged(Epoch),
    /// Any sign of life of the primary.
    Heard,
    /// The signs of life ended.
    PeerLost(String),
    /// A member's data connection ended, or broke the protocol.
    DataEnded(Place, String),
    /// The primary asks for the take-over; `planned` by its operator.
    TakeOver {
        /// Whether its operator wants it.
        planned: bool,
    },
    /// The primary ends protection.
    StandDown,
    /// QEMU has not followed the log: its copy must not be started any more. Why comes with
    /// [`Event::Diverged`].
    Doomed,
    /// A copy cannot be started any more, for this reason.
    CannotServe(String),
    /// The same, since QEMU did not follow the log.
    Diverged(String),
    /// A turn comes that cannot be carried out here, for this reason.
    CannotTurn(String),
    /// The former primary keeps its guest, and asks what becomes of the VM.
    Awaited,
    /// The former primary says who owns the VM.
    OwnedElsewhere(Ownership),
    /// The arbiter answered.
    Verdict(Verdict),
    /// Time has passed.
    Tick,
    /// The times since which the members' disks and QEMUs have been awaited, in the order of the
    /// members.
    Look(Vec<Awaited>),
    /// The reason why the arbiter would not give this host the VM; nothing if it would.
    Proven(Result<(), String>),
    /// A member's errand ended so.
    Done(Place, Errand, Result<(), String>),
    /// A thread of a member panicked.
    Panicked(String),
    /// A thread that was to end the copies has not done so, and may be the thread that is no more.
    Abandoned,
}

/// The times since which something has been awaited of a member's host, if anything is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Awaited {
    /// Its disks.
    pub disk: Option<Time>,
    /// Its QEMU.
    pub qemu: Option<Time>,
}

/// An errand for a member beside receiving: one at a time, each reported with
/// [`Event::Done`] but for the last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Errand {
    /// Apply this committed epoch.
    Apply(Epoch),
    /// Drop it: it would be applied behind a gap.
    Skip(Epoch),
    /// Bring what was applied to stable storage.
    Settle,
    /// This host has won: execute what there is of a log.
    Complete,
    /// Write the activation record: this host's images are the valid ones.
    Activate(Generation),
    /// Start the guest; nothing leaves it.
    Start,
    /// Let it take up its conversations.
    Open,
    /// End a copy that was won and is not started.
    Halt,
    /// End the copy: the VM is not this host's.
    Forget,
    /// No errand is left.
    End(Ending),
}

/// The end of a member's session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The VM runs here, at the leader's generation, for this reason.
    Live(Generation, String),
    /// The VM owns nothing here any more.
    Discarded,
    /// This host won the VM, could not start it for this reason, and has handed it back.
    Returned(String),
    /// This host owns the VM and could not start it, for this reason.
    Failed(Generation, String),
}

/// A word to a member's primary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// This backup gives up, for this reason.
    Refuse(String),
    /// QEMU did not follow the log, for this reason.
    Diverged(String),
    /// The VM is forgotten here.
    StoodDown,
    /// The VM is this host's, at the leader's generation.
    Live(Generation),
}

/// An effect that must be brought about, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// A member's part of this epoch is committed: it is the next to be applied or skipped.
    Commit(Place, Epoch),
    /// Tell the primary that the epoch is here.
    Acknowledge(Epoch),
    /// The primary seems lost: what its guest yet receives is of no use here.
    Suspect,
    /// Ask the arbiter for the generation after this one.
    Contest(Generation),
    /// Ask the arbiter to make the former primary the owner again, from this generation on.
    HandBack(Generation),
    /// This host has won the VM, and goes on from this epoch.
    Granted {
        /// The leader's generation.
        generation: Generation,
        /// The last committed epoch.
        epoch: Epoch,
        /// The reason, for people.
        reason: String,
    },
    /// No more comes of the log, if there is one.
    EndLog,
    /// A copy is of no use any more, for this reason.
    GiveUp(String),
    /// The VM is to be forgotten, for this reason; none if the primary asked for it.
    Leave(Option<String>),
    /// Have a member's errand done.
    Do(Place, Errand),
    /// Tell a member's primary.
    Say(Place, Word),
    /// End a member's connections.
    Close(Place),
    /// Tell the primary why this host could not take over now; nothing if it could.
    TellObstacle(Option<String>),
    /// Note that this has changed: there is an obstacle now, or there is none any more.
    NoteObstacle(Option<String>),
}
