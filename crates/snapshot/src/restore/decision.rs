//! Whether the members of a restore stay, once they run: decided once, by a record that the arbiter keeps
//! for each incarnation. It names the coordinator's host if they stay, and nobody if the restore was given up.

use crate::Incarnation;
use understudy_protocol::{Generation, Ownership, Verdict, planted};

/// The decision about members that run, made once for all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The members stay.
    Settled,
    /// The members are stopped: the restore has failed.
    GivenUp,
}

impl Decision {
    /// Of the coordinator, by the answer to its claim of the record [behind](Decision::before) that of the incarnation
    /// before.
    ///
    /// # Errors
    /// If the arbiter did not answer: it is asked again.
    pub fn of_claim(verdict: Verdict) -> Result<Decision, String> {
        match verdict {
            Verdict::Granted(_) => Ok(Decision::Settled),
            Verdict::Taken(_) | Verdict::Returned(_) => Ok(Decision::GivenUp),
            Verdict::Unreachable(_) if planted!(SettleUnheard) => Ok(Decision::Settled),
            Verdict::Unreachable(why) => Err(why),
        }
    }

    /// Of a member's host, by the record that stands once it has given it up.
    pub fn of_record(record: Option<&Ownership>, incarnation: Incarnation) -> Decision {
        // A record of a later incarnation: nobody waits for this one any more.
        let is_its = |record: &&Ownership| record.generation == Generation(incarnation.0.into());
        match record.filter(is_its).is_some_and(|record| record.host.is_some()) {
            true => Decision::Settled,
            false => Decision::GivenUp,
        }
    }

    /// The generation behind which the record of an incarnation is claimed, or given up.
    pub fn before(incarnation: Incarnation) -> Generation {
        Generation(u64::from(incarnation.0).saturating_sub(1))
    }
}
