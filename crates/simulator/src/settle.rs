//! How a schedule ends: what must have come back once nothing fails any more.

use crate::host::{HostId, Role};
use crate::world::World;
use std::time::Duration;
use understudy_protocol::{Epoch, PrimaryPhase};

/// Once nothing goes wrong any more, protection must be back within this time.
const RETURN_WITHIN: Duration = Duration::from_secs(20);

impl World {
    /// How long to wait for what the schedule allows to come back.
    pub(crate) fn patience(&self) -> Duration {
        if self.may_be_protected() { RETURN_WITHIN } else { RETURN_WITHIN / 2 }
    }

    /// Whether there are two hosts, and an arbiter for each of them, in the end.
    fn may_be_protected(&self) -> bool {
        let left = self.hosts.len() - usize::from(self.schedule.never_returns.is_some());
        left > 1 && self.schedule.without_arbiter.is_none()
    }

    /// Protection has not come back. Excused only where there is no VM any more,
    /// and where it waits for a backup or an arbiter that never comes: then the
    /// VM must at least work, unless its own host lacks the arbiter.
    pub(crate) fn check_what_never_settled(&mut self) {
        let silent = self.now - self.last_output > self.patience() / 2;
        let cut_off = self.schedule.without_arbiter.map(HostId);
        for host in (0..self.hosts.len()).map(HostId).filter(|host| Some(*host) != cut_off) {
            if self.hosts[host.0].running().is_none() {
                continue;
            }
            if silent && !self.waits_for_the_dead(host) {
                self.violation(format!("{host} reaches the arbiter, and yet its VM is held up"));
            }
            if self.may_be_protected() && !self.waits_for_the_dead(host) {
                self.violation("protection did not return although nothing fails".to_owned());
            }
        }
        if self.schedule.never_returns.is_none()
            && self.primary_host().is_none()
            && cut_off.is_none()
        {
            self.violation("nobody has the VM although nothing fails".to_owned());
        }
    }

    /// Whether it keeps its guest for a winner that never returns: nobody knows whether that ran it.
    fn waits_for_the_dead(&self, host: HostId) -> bool {
        let Role::Primary(running) = &self.hosts[host.0].role else { return false };
        let owner = running.session.as_ref().and_then(|session| session.core.winner());
        let dead = self.schedule.never_returns.map(|dead| HostId(dead).name());
        owner.is_some_and(|owner| owner.host.is_some() && owner.host == dead)
    }

    /// Whether calm has come and the VM is protected, and works, again.
    pub(crate) fn has_settled(&self) -> bool {
        let Some(before) = self.commits_before else { return false };
        let protected = |role: &Role| match role {
            Role::Primary(running) => running.session.as_ref().is_some_and(|session| {
                *session.core.phase() == PrimaryPhase::Protected
                    && session.core.committed() > Epoch(3)
            }),
            _ => false,
        };
        self.coverage.commits > before + 3 && self.hosts.iter().any(|host| protected(&host.role))
    }
}
