//! A group, seen from the backup: its members, and what is decided for them
//! (`understudy_session::backup`). A VM that is protected by itself is a group of one.

use super::session::Session;
use crate::clock;
use crate::membership::Membership;
use anyhow::ensure;
use std::sync::{Arc, Weak};
use std::time::Duration;
use understudy_protocol::HostName;
use understudy_protocol::{Backup, BackupPhase, Generation, Output};
use understudy_session::backup::Standby;
use understudy_threads::{Mutex, MutexGuard, lock};

/// The members, and what they share.
pub struct Group {
    /// Members of the group.
    pub membership: Membership,
    /// The primary's host name.
    pub primary: HostName,
    /// The state machine that decides for all.
    core: Mutex<Standby>,
    sessions: Mutex<Vec<Weak<Session>>>,
}

impl Group {
    /// A group that is about to be offered by the host `primary`; `timeout` is the
    /// shortest silence that counts as failure, `output` the rule for what the guests send.
    pub fn new(
        membership: Membership,
        primary: &HostName,
        timeout: Duration,
        output: Output,
    ) -> Arc<Group> {
        let core = Backup::new(membership.leader().generation, timeout, clock::now());
        let standby = Standby::new(core.with_output(output), membership.members.len());
        Arc::new(Group {
            membership,
            primary: primary.to_owned(),
            core: Mutex::new(standby),
            sessions: Mutex::default(),
        })
    }

    /// Locks what decides. After a panic of whoever changed it, it is at its end: it contests
    /// nothing any more.
    pub(super) fn core(&self) -> MutexGuard<'_, Standby> {
        self.core.lock().unwrap_or_else(|poisoned| {
            let mut core = poisoned.into_inner();
            core.condemn();
            core
        })
    }

    /// Whether this is the group that `place` is offered for: the same members of
    /// the same host, the ones before it there already, and all still standing.
    pub fn awaits(&self, membership: &Membership, primary: &str, place: usize) -> bool {
        let core = self.core();
        let syncing = *core.phase() == BackupPhase::Syncing;
        let next = core.joined() == place;
        syncing && next && self.membership == *membership && self.primary == primary
    }

    /// The next member's session begins; in the order of the members.
    pub(super) fn join(&self, session: &Arc<Session>) -> anyhow::Result<()> {
        let mut core = self.core();
        ensure!(core.join(), "the group's protection has ended");
        lock(&self.sessions).push(Arc::downgrade(session));
        Ok(())
    }

    /// Calls `act` for each member that has begun, in order.
    pub(super) fn each(&self, mut act: impl FnMut(&Session)) {
        let sessions: Vec<_> = lock(&self.sessions).iter().filter_map(Weak::upgrade).collect();
        sessions.iter().for_each(|session| act(session));
    }

    /// Calls `act` for the member at this place, while it lives.
    pub(super) fn at(&self, place: usize, act: impl FnOnce(&Session)) {
        let member = lock(&self.sessions).get(place).and_then(Weak::upgrade);
        if let Some(member) = member {
            act(&member);
        }
    }

    /// A member's generation, when the leader's is `leaders`.
    pub(super) fn generation(&self, member: &Session, leaders: Generation) -> Generation {
        self.membership.generation_of(&self.membership.members[member.place], leaders)
    }
}
