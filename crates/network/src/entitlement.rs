//! Until when released frames may be written: a host that stood still may have
//! lost the VM meanwhile.

use crate::buffer::Gate;
use crate::outbound::Outbound;
use std::time::Instant;
use understudy_protocol::STALL;

/// Until when frames may be written.
#[derive(Clone, Copy)]
pub(crate) enum Entitlement {
    /// For good: the sole owner needs no fresh word.
    Forever,
    /// For [`STALL`] after this, and after each frame in turn.
    Fresh(Instant),
    /// Until then.
    Until(Instant),
}

impl Entitlement {
    /// What entitles the batch that is taken now; `before` entitled the one before it.
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

    pub fn is_over(self) -> bool {
        match self {
            Entitlement::Forever => false,
            Entitlement::Fresh(at) => at.elapsed() > STALL,
            Entitlement::Until(end) => Instant::now() >= end,
        }
    }

    /// A frame was written.
    pub fn renew(&mut self) {
        if let Entitlement::Fresh(at) = self {
            *at = Instant::now();
        }
    }
}
