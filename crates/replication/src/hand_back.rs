//! What a host that lost a VM and keeps its guest asks the winner, and is told.

use crate::membership::Membership;
use serde::{Deserialize, Serialize};
use understudy_protocol::{Generation, HostName};

/// What the winner says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WinnersWord {
    /// The generation at which it runs the VM, if it does.
    pub runs: Option<Generation>,
    /// The generation at which it ran it, if it did and has nothing of it now.
    pub ran: Option<Generation>,
}

/// Asks a winner; none if it does not answer.
pub type AskWinner =
    Box<dyn Fn(&HostName, &Membership, Generation) -> Option<WinnersWord> + Send + Sync>;
