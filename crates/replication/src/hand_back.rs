//! The question of a host that lost a VM and keeps its guest to the winner, and its answer.

use crate::membership::Membership;
use serde::{Deserialize, Serialize};
use understudy_protocol::{Generation, HostName};
use understudy_session::hand_back::WinnersWord;

/// The word of the winner, as it travels.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct SaidByWinner {
    runs: Option<Generation>,
    ran: Option<Generation>,
}

impl From<WinnersWord> for SaidByWinner {
    fn from(WinnersWord { runs, ran }: WinnersWord) -> SaidByWinner {
        SaidByWinner { runs, ran }
    }
}

impl From<SaidByWinner> for WinnersWord {
    fn from(SaidByWinner { runs, ran }: SaidByWinner) -> WinnersWord {
        WinnersWord { runs, ran }
    }
}

/// Asks a winner; none if it does not answer.
pub type AskWinner =
    Box<dyn Fn(&HostName, &Membership, Generation) -> Option<WinnersWord> + Send + Sync>;
