//! A group, seen from the backup. A VM that is protected by itself is a group of
//! one.
//!
//! The members share one state machine. An epoch is staged when every member's
//! part of it is; then all are acknowledged and applied, and after a failure all
//! go live at the same epoch.

use super::session::Session;
use crate::clock;
use crate::membership::Membership;
use crate::messages::WholeEpoch;
use anyhow::bail;
use std::sync::{Arc, Weak};
use std::time::Duration;
use understudy_machine::doorbell::Doorbell;
use understudy_protocol::HostName;
use understudy_protocol::{Backup, BackupEvent, BackupPhase, Generation, GroupStaging, Output};
use understudy_threads::{Mutex, MutexGuard, lock};

/// Nothing waits longer than this without looking again.
const LONGEST_WAIT: Duration = Duration::from_millis(500);

/// Locks the state machine. After a panic of whoever changed it, it is at its end: it contests
/// nothing any more.
pub(super) fn lock_core(core: &Mutex<Backup>) -> MutexGuard<'_, Backup> {
    core.lock().unwrap_or_else(|poisoned| {
        let mut core = poisoned.into_inner();
        core.condemn();
        core
    })
}

/// The members, and what they share.
pub struct Group {
    /// Members of the group.
    pub membership: Membership,
    /// The primary's host name.
    pub primary: HostName,
    /// The state machine of all.
    pub(super) core: Arc<Mutex<Backup>>,
    staging: Mutex<GroupStaging<WholeEpoch>>,
    sessions: Mutex<Vec<Weak<Session>>>,
    readiness: Mutex<Readiness>,
    answered: Doorbell,
}

/// Which members can go live.
#[derive(Default)]
struct Readiness {
    answers: usize,
    refusal: Option<String>,
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
        let core = core.with_output(output);
        Arc::new(Group {
            staging: Mutex::new(GroupStaging::new(membership.members.len())),
            membership,
            primary: primary.to_owned(),
            core: Arc::new(Mutex::new(core)),
            sessions: Mutex::default(),
            readiness: Mutex::default(),
            answered: Doorbell::default(),
        })
    }

    /// Whether this is the group that `place` is offered for: the same members of
    /// the same host, the ones before it there already, and all still standing.
    pub fn awaits(&self, membership: &Membership, primary: &str, place: usize) -> bool {
        let syncing = *lock_core(&self.core).phase() == BackupPhase::Syncing;
        let next = lock(&self.sessions).len() == place;
        syncing && next && self.membership == *membership && self.primary == primary
    }

    /// The next member's session begins; in the order of the members.
    pub(super) fn join(&self, session: &Arc<Session>) -> anyhow::Result<()> {
        let core = lock_core(&self.core);
        if *core.phase() != BackupPhase::Syncing {
            bail!("the group's protection has ended");
        }
        lock(&self.sessions).push(Arc::downgrade(session));
        Ok(())
    }

    /// Calls `act` for each member that has begun, in order.
    pub(super) fn each(&self, mut act: impl FnMut(&Session)) {
        let sessions: Vec<_> = lock(&self.sessions).iter().filter_map(Weak::upgrade).collect();
        sessions.iter().for_each(|session| act(session));
    }

    /// A member's part of an epoch is staged whole.
    pub(super) fn staged(&self, member: &Session, part: WholeEpoch) {
        let whole = lock(&self.staging).put(member.place, part.epoch, part);
        // Nobody can complete the next epoch before this thread has staged its part.
        if let Some((epoch, parts)) = whole {
            member.event(BackupEvent::Staged(epoch), Some(parts));
        }
    }

    /// A member's generation, when the leader's is `leaders`.
    pub(super) fn generation(&self, member: &Session, leaders: Generation) -> Generation {
        self.membership.generation_of(&self.membership.members[member.place], leaders)
    }

    /// Whether it has more than one member.
    pub(super) fn is_shared(&self) -> bool {
        self.membership.members.len() > 1
    }

    /// Waits until every member says whether it can go live: all do, or none.
    pub(super) fn all_or_none<T>(&self, own: anyhow::Result<T>) -> anyhow::Result<T> {
        {
            let mut readiness = lock(&self.readiness);
            readiness.answers += 1;
            if let Err(error) = &own {
                readiness.refusal.get_or_insert_with(|| format!("{error:#}"));
            }
        }
        self.answered.ring();
        loop {
            let seen = self.answered.count();
            let readiness = lock(&self.readiness);
            if readiness.answers == self.membership.members.len() {
                return match &readiness.refusal {
                    Some(why) if own.is_ok() => bail!("another VM of the group cannot: {why}"),
                    _ => own,
                };
            }
            drop(readiness);
            self.answered.wait(seen, LONGEST_WAIT);
        }
    }
}
