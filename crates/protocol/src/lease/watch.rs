//! The other half: who wants the VM looks at its owner's renewals.

use crate::{HostName, Time};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A sole owner's proof that it lives, kept beside the record of ownership.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Renewal {
    /// The owner.
    pub host: HostName,
    /// Milliseconds for which it lets output out without another proof.
    pub length_ms: u64,
    /// Tells it from the one before; counts for nothing else.
    pub mark: u64,
}

impl Renewal {
    /// The time for which it must not have changed: the owner's clock may be slower than the
    /// asker's.
    pub fn patience(&self) -> Duration {
        let length = Duration::from_millis(self.length_ms);
        if planted!(ClocksAgree) {
            return length;
        }
        length + length / 10 + Duration::from_secs(1).min(length / 4)
    }
}

/// The sight of a lease in a look at the renewals.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseSight {
    /// No lease is there.
    None,
    /// The renewal has not changed yet, and must not for so long.
    Wait(Duration),
    /// Its owner lets nothing out any more.
    Over(Renewal),
    /// Its owner lives: it renewed the lease, or withdrew it, just now.
    Alive,
}

/// Looks at one lease, by the clock of whoever looks.
#[derive(Clone, Debug, Default)]
pub struct LeaseWatch {
    seen: Option<(Renewal, Time)>,
}

impl LeaseWatch {
    /// Looks: `found` was read between these two times, which may be far apart. A renewal counts as seen from the later one
    /// on, and as unchanged until the earlier one.
    pub fn look(&mut self, (asked, read): (Time, Time), found: Option<Renewal>) -> LeaseSight {
        match (&self.seen, found) {
            (None, None) => LeaseSight::None,
            (None, Some(renewal)) => {
                let patience = renewal.patience();
                self.seen = Some((renewal, read));
                LeaseSight::Wait(patience)
            }
            (Some((seen, since)), Some(found)) if *seen == found => {
                let left = seen.patience().saturating_sub(asked - *since);
                match left.is_zero() || planted!(TakeAtOnce) {
                    true => LeaseSight::Over(found),
                    false => LeaseSight::Wait(left),
                }
            }
            (Some(_), _) => LeaseSight::Alive,
        }
    }
}
