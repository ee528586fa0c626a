//! A group, seen from the backup: its members, and what is decided for them
//! (`understudy_session::backup`). A VM that is protected by itself is a group of one.

use super::session::Session;
use crate::clock;
use crate::membership::Membership;
use anyhow::ensure;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::Duration;
use understudy_protocol::HostName;
use understudy_protocol::{Backup, BackupPhase, Generation, Output};
use understudy_session::backup::Standby;
use understudy_threads::{Mutex, MutexGuard};

/// The members, and what they share.
pub struct Group {
    /// Members of the group.
    pub membership: Membership,
    /// The primary's host name.
    pub primary: HostName,
    /// Whether this host is about to end.
    pub(super) ends_soon: AtomicBool,
    core: Mutex<Core>,
}

/// What decides for all members, and those for whom it does.
pub(super) struct Core {
    /// The state machine.
    pub standby: Standby,
    /// The sessions that have begun, in the order of the members.
    sessions: Vec<Weak<Session>>,
}

/// The members that have begun, and live.
pub(super) struct Begun(Vec<Option<Arc<Session>>>);

impl Core {
    /// The members that have begun. To be dropped without the lock: it may have the last of a session.
    pub fn begun(&self) -> Begun {
        Begun(self.sessions.iter().map(Weak::upgrade).collect())
    }
}

impl Begun {
    /// Calls `act` for each of them, in order.
    pub fn each(&self, mut act: impl FnMut(&Session)) {
        self.0.iter().flatten().for_each(|member| act(member));
    }

    /// Calls `act` for the member at this place, if it is one of them.
    pub fn at(&self, place: usize, act: impl FnOnce(&Session)) {
        if let Some(member) = self.0.get(place).and_then(Option::as_ref) {
            act(member);
        }
    }
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
            ends_soon: AtomicBool::new(false),
            core: Mutex::new(Core { standby, sessions: Vec::new() }),
        })
    }

    /// Locks what decides. After a panic of whoever changed it, it is at its end: it contests
    /// nothing any more.
    pub(super) fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(|poisoned| {
            let mut core = poisoned.into_inner();
            core.standby.condemn();
            core
        })
    }

    /// Whether this is the group that `place` is offered for: the same members of
    /// the same host, the ones before it there already, and all still standing.
    pub fn awaits(&self, membership: &Membership, primary: &str, place: usize) -> bool {
        let core = self.core();
        let syncing = *core.standby.phase() == BackupPhase::Syncing;
        let next = core.standby.joined() == place;
        syncing && next && self.membership == *membership && self.primary == primary
    }

    /// The next member's session begins; in the order of the members.
    pub(super) fn join(&self, session: &Arc<Session>) -> anyhow::Result<()> {
        let mut core = self.core();
        ensure!(core.standby.join(), "the group's protection has ended");
        core.sessions.push(Arc::downgrade(session));
        Ok(())
    }

    /// Calls `act` for each member that has begun, in order; for those who do not hold what decides.
    pub(super) fn each(&self, act: impl FnMut(&Session)) {
        let begun = self.core().begun();
        begun.each(act);
    }

    /// A member's generation, when the leader's is `leaders`.
    pub(super) fn generation(&self, member: &Session, leaders: Generation) -> Generation {
        self.membership.generation_of(&self.membership.members[member.place], leaders)
    }
}
