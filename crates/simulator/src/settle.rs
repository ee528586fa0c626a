//! The end of a schedule: what must have come back once nothing fails any more.

use crate::host::{HostId, Role};
use crate::world::World;
use std::time::Duration;
use understudy_protocol::{Epoch, PrimaryPhase};

/// Time within which protection must be back once nothing goes wrong any more. A disk hangs for up to 9 s, and what it keeps
/// from forgetting the VM is refused meanwhile: the next try is up to 12 s later.
const RETURN_WITHIN: Duration = Duration::from_secs(25);

impl World {
    /// The time to wait for what the schedule allows to come back.
    pub(crate) fn patience(&self) -> Duration {
        // A primary that has told a backup to take over, whose disk hangs by now, gives it 10 s. So it
        // does a backup with its first epoch, and half as much before that goes over another path.
        let slow_to_give_up = self.lost.is_hung() || self.schedule.paths > 1;
        if self.lost.is_hung() && self.may_be_protected() {
            // A first copy has 40 s to get to the backup's disks, as long as that lives.
            return RETURN_WITHIN * 2;
        }
        let waits = self.may_be_protected() || slow_to_give_up;
        if waits { RETURN_WITHIN } else { RETURN_WITHIN / 2 }
    }

    /// Whether there are two hosts that can work together, and an arbiter for each of them, in the end.
    fn may_be_protected(&self) -> bool {
        let schedule = &self.schedule;
        let lost = [schedule.never_returns.is_some(), self.lost.is_any()];
        let left = self.hosts.len() - lost.into_iter().filter(|lost| *lost).count();
        left > 1 && schedule.without_arbiter.is_none()
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
            if self.is_looked_for_in_vain(host) {
                self.violation(format!("{host}'s VM is protected, and a backup is looked for"));
            }
            if self.may_be_protected() && !self.waits_for_the_dead(host) {
                self.violation("protection did not return although nothing fails".to_owned());
            }
        }
        if self.schedule.never_returns.is_none()
            && self.primary_host().is_none()
            && cut_off.is_none()
            && !self.waits_for_a_disk()
        {
            self.violation("nobody has the VM although nothing fails".to_owned());
        }
    }

    /// Whether a VM that is protected is to be protected again.
    fn is_looked_for_in_vain(&self, host: HostId) -> bool {
        let Role::Primary(running) = &self.hosts[host.0].role else { return false };
        let session = running.session.as_ref().map(|session| session.core.phase());
        session == Some(&PrimaryPhase::Protected) && running.repair.awaits_protection()
    }

    /// Whether the last copy is on a host whose disk never answers, and waits for that.
    fn waits_for_a_disk(&self) -> bool {
        let waits = |host: &HostId| {
            let role = &self.hosts[host.0].role;
            matches!(role, Role::Backup(_)) && self.has_lost_its_disk(*host)
        };
        (0..self.hosts.len()).map(HostId).any(|host| waits(&host))
    }

    /// Whether it keeps its guest for a winner that is never heard of again: nobody knows whether that ran it.
    fn waits_for_the_dead(&self, host: HostId) -> bool {
        let Role::Primary(running) = &self.hosts[host.0].role else { return false };
        let owner = running.session.as_ref().and_then(|session| session.core.winner());
        let owner = owner.and_then(|owner| owner.host.clone());
        let mut all = (0..self.hosts.len()).map(HostId);
        let Some(owner) = all.find(|host| Some(host.name()) == owner) else { return false };
        self.schedule.never_returns == Some(owner.0) || self.never_talk(host, owner)
    }

    /// Whether calm has come and the VM is protected, and works, again.
    pub(crate) fn has_settled(&self) -> bool {
        let Some(before) = self.commits_before else { return false };
        let protected = |(host, role): (usize, &Role)| match role {
            Role::Primary(running) => running.session.as_ref().is_some_and(|session| {
                !running.repair.awaits_protection()
                    && *session.core.phase() == PrimaryPhase::Protected
                    && session.core.obstacle(self.clock_of_cores(HostId(host))).is_none()
                    && session.core.committed() > Epoch(3)
            }),
            _ => false,
        };
        self.coverage.commits > before + 3 && {
            let mut roles = self.hosts.iter().map(|host| &host.role).enumerate();
            roles.any(protected)
        }
    }
}
