//! The words of a primary: its events, its actions and its phases.

use crate::{Epoch, Generation, Headway, Verdict};
use std::fmt;
use std::time::Duration;

/// An event that happens to the primary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PrimaryEvent {
    /// A checkpoint placed its barrier: the running epoch is closed.
    Captured,
    /// The backup holds the whole of this epoch.
    Acknowledged(Epoch),
    /// Any sign of life of the backup.
    Heard,
    /// The connection to the backup ended, or the backup refused to go on.
    PeerGone(String),
    /// Headway: so much has got to the backup by now.
    Headway(Headway),
    /// Time has passed.
    Tick,
    /// The arbiter answered a [`PrimaryAction::Contest`].
    Verdict(Verdict),
    /// The last checkpoint of a planned fail-over placed its barrier: the guest
    /// stands still until the backup runs it.
    CapturedLast,
    /// The guest's QEMU lives and does not answer, for this reason: the backup is to go on with the
    /// last epoch that it has.
    GuestHangs(String),
    /// No checkpoint can be taken any more, for this reason, although QEMU lives: whoever cannot
    /// save its guest is not the one to go on with it.
    CannotCapture(String),
    /// The backup lives, and another host is to be the backup instead, for this reason.
    Replace(String),
    /// The operator wants no more protection.
    Unprotect,
    /// Whoever wanted no more waits no longer: an end that comes later is a loss.
    StillWanted,
    /// The backup forgot the VM, after [`PrimaryAction::StandDown`].
    StoodDown,
    /// The backup, or whoever has won, runs the VM at this generation.
    LiveElsewhere(Generation),
    /// The guest died here although the host lives.
    GuestDied(String),
}

/// An action that the primary must take, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PrimaryAction {
    /// Let out every frame of epochs up to this one.
    Release(Epoch),
    /// Let output go at once, for so long from now on: only with [`Output::Unheld`].
    Permit(Duration),
    /// Let out everything, from now on at once: this host is the sole owner.
    OpenOutput,
    /// Ask the arbiter for the generation after this one.
    Contest(Generation),
    /// Tell the backup to take over, now.
    YieldToBackup,
    /// Tell the backup to forget the VM.
    StandDown,
    /// Close the connection to the backup.
    ClosePeer,
    /// Another host has won the VM and may not run it yet: let the guest stand still, and let
    /// nothing out. The arbiter is asked on, and whoever has won.
    Freeze,
    /// Let nothing out ever again and end the guest's copy here.
    Halt(String),
}

/// The phase in which the primary is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PrimaryPhase {
    /// First synchronisation; the backup cannot take over yet.
    Syncing,
    /// The backup follows. Every output waits for its epoch's acknowledgement, unless the
    /// output is [unheld](Output::Unheld).
    Protected,
    /// The last checkpoint is being handed over and the guest stands still, or it hangs.
    HandingOver,
    /// Waiting for the backup to forget the VM.
    StandingDown,
    /// The backup seems lost; the arbiter decides. Nothing new is let out.
    Contesting(String),
    /// Another host has won the VM; this copy is kept until that one runs it, or hands it back.
    Frozen(String),
    /// Sole owner, without protection, for this reason (none: asked for).
    Alone(Option<String>),
    /// The backup has, or may take, the VM; this copy is halted.
    Halted(String),
}

/// Writes it for people, as the end of a sentence about the VM.
impl fmt::Display for PrimaryPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PrimaryPhase::Syncing => f.write_str("it is being copied to its backup"),
            PrimaryPhase::Protected => f.write_str("its backup follows"),
            PrimaryPhase::HandingOver => f.write_str("it is being handed over"),
            PrimaryPhase::StandingDown => f.write_str("its backup has not forgotten it yet"),
            PrimaryPhase::Contesting(reason) => write!(f, "{reason}; the arbiter decides"),
            PrimaryPhase::Frozen(reason) => write!(f, "{reason}; this copy stands still"),
            PrimaryPhase::Alone(None) => f.write_str("it runs here unprotected"),
            PrimaryPhase::Alone(Some(reason)) => write!(f, "it runs here unprotected: {reason}"),
            PrimaryPhase::Halted(reason) => write!(f, "its copy here is halted: {reason}"),
        }
    }
}

impl PrimaryPhase {
    /// Whether another host has the VM, as far as this one knows.
    pub fn has_lost(&self) -> bool {
        matches!(self, PrimaryPhase::Frozen(_) | PrimaryPhase::Halted(_))
    }

    /// Whether protection is over, here or altogether.
    pub fn is_over(&self) -> bool {
        matches!(self, PrimaryPhase::Alone(_) | PrimaryPhase::Halted(_))
    }
}
