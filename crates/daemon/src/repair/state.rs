//! What is known of the repair of one VM's protection, and what follows from it. Nothing here waits: it is a part of the
//! VM's state, which leases need.

use super::Wish;
use std::time::Duration;
use understudy_protocol::repair::{Repair, RepairPhase};
use understudy_protocol::{Time, VmName};
use understudy_replication::membership::GroupMembers;

/// Time between two looks at a synchronisation.
const SYNC_INTERVAL: Duration = Duration::from_millis(100);
/// A next try that is so near is worth waiting for.
const SOON: Duration = Duration::from_secs(5);
/// A divergence so long after another is not the second in a row.
const HEALTHY: Duration = Duration::from_secs(600);
/// The thread looks up at least this often: its VM may have gone.
const LONGEST_SLEEP: Duration = Duration::from_secs(2);

/// See the module.
pub(crate) struct State {
    /// Whether this host restores protection at all.
    enabled: bool,
    pub(super) core: Repair,
    pub(super) wish: Option<Wish>,
    /// The end of the last wait that the log knows of.
    logged: Option<Time>,
    /// Number of times in a row that a backup diverged, and when last.
    divergences: (u32, Time),
    /// Whether there is a thread that sees to it.
    pub(super) has_thread: bool,
}

/// The VM whose thread restores a VM's protection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Restorer<'a> {
    /// The VM itself.
    Itself,
    /// The first VM of this group.
    First(&'a GroupMembers),
}

impl State {
    /// State of a VM that should be protected as `wish` says, on a host that restores protection or not.
    pub fn new(wish: Option<Wish>, enabled: bool) -> State {
        State {
            enabled,
            core: Repair::default(),
            wish,
            logged: None,
            divergences: Default::default(),
            has_thread: false,
        }
    }

    /// The one that restores lost protection of `vm`; none if that is not wanted.
    pub(super) fn restorer(&self, vm: &VmName) -> Option<Restorer<'_>> {
        let wanted = |wish: &&Wish| self.enabled && wish.request.repair;
        let wish = self.wish.as_ref().filter(wanted)?;
        Some(wish.followed_by(vm).map_or(Restorer::Itself, Restorer::First))
    }

    /// Takes the wish back if it is for this group; whether it was.
    pub(super) fn leave(&mut self, group: &GroupMembers) -> bool {
        self.wish.take_if(|wish| wish.group.as_ref() == Some(group)).is_some()
    }

    pub(super) fn diverged(&mut self, now: Time) {
        let (count, last) = self.divergences;
        let in_a_row = now - last < HEALTHY;
        self.divergences = (if in_a_row { count + 1 } else { 1 }, now);
    }

    pub(super) fn distrusts_lockstep(&self) -> bool {
        self.divergences.0 > 1
    }

    pub(super) fn trust_lockstep(&mut self) {
        self.divergences = Default::default();
    }

    /// Words on what is being done about lost protection of `vm`, for people.
    pub(super) fn describe(&self, vm: &VmName, now: Time) -> Option<String> {
        if let Some(Restorer::First(group)) = self.restorer(vm) {
            let (group, leader) = (&group.name, group.vms.first()?);
            return Some(format!("unprotected: group {group} is protected again with {leader}"));
        }
        let detail = match self.core.phase() {
            RepairPhase::Idle | RepairPhase::Replacing(_) => return None,
            RepairPhase::Surveying => "asking the hosts".to_owned(),
            RepairPhase::Attempting(host) => format!("trying {host}"),
            RepairPhase::Waiting(until) => {
                let seconds = (*until - now).as_secs_f64();
                format!("{}, next try in {seconds:.1} s", self.core.reason())
            }
        };
        Some(format!("unprotected: looking for a backup ({detail})"))
    }

    /// Time until its thread looks again.
    pub(super) fn sleep(&self, now: Time) -> Duration {
        match (self.core.phase(), self.core.deadline()) {
            (RepairPhase::Attempting(_), _) => SYNC_INTERVAL,
            (_, Some(until)) => (until - now).min(LONGEST_SLEEP),
            _ => LONGEST_SLEEP,
        }
    }

    /// Reason why no host took the VM in a round of which the log does not know yet.
    pub(super) fn new_round(&mut self) -> Option<String> {
        let &RepairPhase::Waiting(until) = self.core.phase() else { return None };
        let former = self.logged.replace(until);
        (former != Some(until)).then(|| self.core.reason().to_owned())
    }

    /// Whether lost protection of `vm` may be back soon.
    pub(super) fn is_restoring(&self, vm: &VmName, now: Time) -> bool {
        let is_own = self.restorer(vm) == Some(Restorer::Itself);
        is_own
            && match self.core.phase() {
                // It is wanted, and not protected: the loss is about to be heard of.
                RepairPhase::Idle | RepairPhase::Surveying | RepairPhase::Attempting(_) => true,
                RepairPhase::Replacing(_) => false,
                RepairPhase::Waiting(until) => *until - now < SOON,
            }
    }

    /// Notes that there is a thread that sees to it; returns whether there was.
    pub(super) fn begin_thread(&mut self) -> bool {
        std::mem::replace(&mut self.has_thread, true)
    }

    /// Whether the thread that sees to it, which has heard all if this says so, has nothing more to do; it is none any
    /// more then.
    pub(super) fn may_rest(&mut self, has_heard_all: bool) -> bool {
        let rests = *self.core.phase() == RepairPhase::Idle && has_heard_all;
        self.has_thread &= !rests;
        rests
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;
    use understudy_protocol::repair::RepairEvent;
    use understudy_report::ProtectRequest;

    fn state(repair: bool, enabled: bool) -> State {
        let group =
            GroupMembers { name: literal("shop"), vms: vec![literal("db"), literal("web")] };
        let request = ProtectRequest { to: "b".into(), repair, ..Default::default() };
        State::new(Some(Wish { request, group: Some(group) }), enabled)
    }

    #[test]
    fn a_group_is_repaired_by_its_first_vm_alone() {
        let state = state(true, true);
        assert_eq!(state.restorer(&literal("db")), Some(Restorer::Itself));
        let follower = literal("web");
        assert!(matches!(state.restorer(&follower), Some(Restorer::First(_))));
        let words = state.describe(&follower, Time::default()).unwrap();
        assert!(words.contains("group shop") && words.contains("db"), "{words}");
    }

    #[test]
    fn nobody_repairs_what_nobody_wants() {
        let vm = literal("web");
        for unwanted in [state(false, true), state(true, false)] {
            assert_eq!(unwanted.restorer(&vm), None);
            assert_eq!(unwanted.describe(&vm, Time::default()), None);
        }
        let mut ended = state(true, true);
        ended.wish = None;
        assert_eq!(ended.restorer(&literal("db")), None);
    }

    /// A group that another order has protected since was left without repair.
    #[test]
    fn a_wish_is_taken_back_with_its_group_alone() {
        let mut state = state(true, true);
        let group = state.wish.as_ref().and_then(|wish| wish.group.clone()).unwrap();
        let other = GroupMembers { name: literal("other"), ..group.clone() };
        assert!(!state.leave(&other) && state.wish.is_some());
        assert!(state.leave(&group) && state.wish.is_none());
        assert!(!state.leave(&group));
    }

    #[test]
    fn a_round_is_logged_once() {
        let mut state = state(true, true);
        assert_eq!(state.new_round(), None, "nobody was asked");
        let lost = RepairEvent::Lost("b is silent".to_owned());
        for event in [lost, RepairEvent::Surveyed(Vec::new())] {
            state.core.handle(Time::default(), 0, event, &mut Vec::new());
        }
        assert_eq!(state.new_round(), Some(state.core.reason().to_owned()));
        assert_eq!(state.new_round(), None);
    }
}
