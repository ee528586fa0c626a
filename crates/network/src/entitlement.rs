//! The time until which released frames may be written: a host that stood still may have
//! lost the VM meanwhile. Times are of [`boot_time`](crate::boot_time): a host that slept stood still, too.

use crate::buffer::Gate;
use crate::outbound::Outbound;
use understudy_protocol::{STALL, Time};

/// The time until which frames may be written.
#[derive(Clone, Copy)]
pub(crate) enum Entitlement {
    /// Frames may be written for good: the sole owner needs no fresh word.
    Forever,
    /// Frames may be written for [`STALL`] after this, and after each frame in turn.
    Fresh(Time),
    /// Frames may be written until then.
    Until(Time),
}

impl Entitlement {
    /// The entitlement of the batch that is taken now; `before` entitled the one before it.
    pub fn of(outbound: &Outbound, before: Option<Entitlement>) -> Entitlement {
        match (outbound.buffer.gate(), before) {
            (Gate::Hold, Some(Entitlement::Fresh(at))) => {
                Entitlement::Fresh(outbound.entitled.max(at))
            }
            (Gate::Hold, _) => Entitlement::Fresh(outbound.entitled),
            (Gate::Unheld, _) => Entitlement::Until(outbound.permitted_until),
            (Gate::Open | Gate::Shut, _) => Entitlement::Forever,
        }
    }

    /// Whether a frame may be written at `now`, just before it is. While the word is fresh it
    /// stays so from frame to frame: from this check to the next, not from the end of the
    /// write, for a host that is stopped in a write comes out of it much later.
    pub fn lasts(&mut self, now: Time) -> bool {
        match self {
            Entitlement::Forever => true,
            Entitlement::Fresh(at) if now - *at > STALL => false,
            Entitlement::Fresh(at) => {
                *at = now.max(*at);
                true
            }
            Entitlement::Until(end) => now < *end,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_fresh_word_lasts_while_frames_follow_each_other() {
        let start = Time::default();
        let mut entitled = Entitlement::Fresh(start);
        for n in 1..10 {
            assert!(entitled.lasts(start + n * STALL));
        }
    }

    #[test]
    fn a_host_that_was_stopped_in_a_write_sends_nothing_after_it() {
        let start = Time::default();
        let mut entitled = Entitlement::Fresh(start);
        assert!(entitled.lasts(start));
        let resumed = start + STALL + Duration::from_millis(1);
        assert!(!entitled.lasts(resumed));
        assert!(!entitled.lasts(resumed), "it takes a new word");
    }

    #[test]
    fn a_permit_ends_when_it_says() {
        let end = Time(Duration::from_secs(9));
        let mut entitled = Entitlement::Until(end);
        assert!(entitled.lasts(Time(Duration::from_millis(8_999))));
        assert!(!entitled.lasts(end));
    }
}
