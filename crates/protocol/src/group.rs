//! Groups: VMs that take their checkpoints together (Remus, section 5), so that
//! what they say to each other need not wait.
//!
//! A group has one [`Primary`](crate::Primary) and one [`Backup`](crate::Backup)
//! between all its members: they are protected, taken over and fenced as one,
//! and a VM that is protected by itself is a group of one. What a group needs
//! beside them is here:
//!
//! - [`Rendezvous`]: no member runs on before all stand still, so that no frame
//!   crosses the cut backwards (sent after it, received before it);
//! - [`GroupStaging`]: an epoch is staged when every member's part of it is.
//!
//! A frame that crosses the cut forwards, sent before it and received after it,
//! is lost in a fail-over, as on any Ethernet.

use crate::{EndedEpoch, Epoch, EpochLength, LastCheckpoint, Policy, Time};
use std::time::Duration;

/// The next step of a group, decided once for all members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupStep {
    /// Take a checkpoint.
    Checkpoint,
    /// Take the last checkpoint of a planned fail-over.
    LastCheckpoint,
}

/// A place at which members wait for each other; the next one after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gate(u64);

/// The outcome of an arrival at a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// All others are there: this member acts for all, then calls
    /// [`Rendezvous::open`].
    Last,
    /// Wait until [`Rendezvous::is_open`] says so of this gate.
    Wait(Gate),
}

/// The rendezvous of a group's members on the primary: before each checkpoint, and
/// once all stand still.
#[derive(Clone, Debug)]
pub struct Rendezvous {
    members: usize,
    arrived: usize,
    gate: Gate,
    broken: bool,
    step: Option<(Epoch, GroupStep)>,
    resumed: usize,
    last: Option<LastCheckpoint>,
    /// Time since which the epoch that the last checkpoint closed ran.
    began: Option<Time>,
    length: EpochLength,
}

impl Rendezvous {
    /// Creates one for so many members, at least one.
    pub fn new(members: usize) -> Rendezvous {
        assert!(members > 0, "a group has a member");
        Rendezvous {
            members,
            arrived: 0,
            gate: Gate(0),
            broken: false,
            step: None,
            resumed: 0,
            last: None,
            began: None,
            length: EpochLength::default(),
        }
    }

    /// A member has come to the next gate.
    pub fn arrive(&mut self) -> Arrival {
        self.arrived += 1;
        if self.arrived < self.members {
            return Arrival::Wait(self.gate);
        }
        Arrival::Last
    }

    /// Lets all who have come pass.
    pub fn open(&mut self) {
        assert_eq!(self.arrived, self.members, "opened by the last to arrive");
        self.arrived = 0;
        self.gate = Gate(self.gate.0 + 1);
    }

    /// Whether all may pass `gate`.
    pub fn is_open(&self, gate: Gate) -> bool {
        self.gate > gate || planted!(PassTheGate)
    }

    /// A member cannot take checkpoints any more: nobody needs to wait for it.
    /// Returns whether it is the first.
    pub fn break_up(&mut self) -> bool {
        !std::mem::replace(&mut self.broken, true)
    }

    /// Whether a member will never come.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// A member runs again after its pause.
    pub fn resumed(&mut self, checkpoint: LastCheckpoint, policy: &Policy) {
        // The first one to say so begins a new count.
        let last = match self.last.filter(|_| self.resumed > 0) {
            None => checkpoint,
            Some(last) => LastCheckpoint {
                started: last.started.min(checkpoint.started),
                resumed: last.resumed.max(checkpoint.resumed),
                pages: last.pages.max(checkpoint.pages),
                carried: last.carried + checkpoint.carried,
            },
        };
        self.last = Some(last);
        self.resumed = (self.resumed + 1) % self.members;
        if self.resumed == 0 {
            self.learn(last, policy);
        }
    }

    fn learn(&mut self, last: LastCheckpoint, policy: &Policy) {
        if let Some(began) = self.began.replace(last.resumed) {
            self.length.ended(EndedEpoch {
                lasted: last.resumed - began,
                carried: last.carried,
                by_pages: policy.length_by_pages(last),
            });
        }
    }

    /// The length that an epoch of a busy group should have.
    pub fn length(&self) -> Duration {
        self.length.now()
    }

    /// The group's last checkpoint, from the first pause to the last resumption;
    /// none while a member stands still, or before the first one.
    pub fn last(&self) -> Option<LastCheckpoint> {
        self.last.filter(|_| self.resumed == 0)
    }

    /// One member has found that `step` is due in the epoch that runs.
    pub fn announce(&mut self, running: Epoch, step: GroupStep) {
        if self.announced(running).is_none() {
            self.step = Some((running, step));
        }
    }

    /// The step that was announced for the epoch that runs.
    pub fn announced(&self, running: Epoch) -> Option<GroupStep> {
        self.step.filter(|(epoch, _)| *epoch == running).map(|(_, step)| step)
    }
}

/// The members' parts of epochs on the backup. `T` is a part, whole and checked.
#[derive(Clone, Debug)]
pub struct GroupStaging<T> {
    members: Vec<std::collections::VecDeque<(Epoch, T)>>,
}

impl<T> GroupStaging<T> {
    /// Creates one for so many members.
    pub fn new(members: usize) -> GroupStaging<T> {
        GroupStaging { members: (0..members).map(|_| Default::default()).collect() }
    }

    /// A member's part of an epoch is staged; its parts come in order. Returns
    /// the epoch that is now whole, and every member's part of it, in order.
    pub fn put(&mut self, member: usize, epoch: Epoch, part: T) -> Option<(Epoch, Vec<T>)> {
        self.members[member].push_back((epoch, part));
        let whole = |parts: &std::collections::VecDeque<(Epoch, T)>| {
            parts.front().is_some_and(|(oldest, _)| *oldest == epoch)
        };
        if !self.members.iter().all(whole) && !planted!(CommitWithoutAll) {
            return None;
        }
        let parts = self.members.iter_mut().filter_map(|parts| parts.pop_front());
        Some((epoch, parts.map(|(_, part)| part).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint(started: u64, resumed: u64) -> LastCheckpoint {
        let at = |ms| Time(Duration::from_millis(ms));
        LastCheckpoint { started: at(started), resumed: at(resumed), pages: 0, carried: 0 }
    }

    #[test]
    fn nobody_passes_before_all_have_come() {
        let mut rendezvous = Rendezvous::new(3);
        let Arrival::Wait(first) = rendezvous.arrive() else { panic!("alone at the gate") };
        assert_eq!(rendezvous.arrive(), Arrival::Wait(first));
        assert!(!rendezvous.is_open(first));
        assert_eq!(rendezvous.arrive(), Arrival::Last);
        assert!(!rendezvous.is_open(first), "the last one acts first");
        rendezvous.open();
        assert!(rendezvous.is_open(first));
        let Arrival::Wait(second) = rendezvous.arrive() else { panic!("alone at the gate") };
        assert!(!rendezvous.is_open(second), "the next gate is another one");
        assert_eq!(Rendezvous::new(1).arrive(), Arrival::Last, "a VM by itself never waits");
    }

    #[test]
    fn a_step_holds_for_its_epoch_and_the_first_word_counts() {
        let mut rendezvous = Rendezvous::new(2);
        rendezvous.announce(Epoch(4), GroupStep::LastCheckpoint);
        rendezvous.announce(Epoch(4), GroupStep::Checkpoint);
        assert_eq!(rendezvous.announced(Epoch(4)), Some(GroupStep::LastCheckpoint));
        assert_eq!(rendezvous.announced(Epoch(5)), None);
    }

    #[test]
    fn the_groups_pause_is_from_the_first_stop_to_the_last_start() {
        let mut rendezvous = Rendezvous::new(2);
        assert!(rendezvous.last().is_none());
        rendezvous.resumed(checkpoint(10, 14), &Policy::default());
        assert!(rendezvous.last().is_none(), "one still stands still");
        rendezvous.resumed(checkpoint(11, 19), &Policy::default());
        let last = rendezvous.last().unwrap();
        assert_eq!(
            (last.started, last.resumed),
            (checkpoint(10, 19).started, checkpoint(10, 19).resumed)
        );
        rendezvous.resumed(checkpoint(30, 31), &Policy::default());
        rendezvous.resumed(checkpoint(29, 32), &Policy::default());
        assert_eq!(rendezvous.last().unwrap().started, checkpoint(29, 32).started);
    }

    #[test]
    fn an_epoch_is_whole_when_every_members_part_is_there() {
        let mut staging = GroupStaging::new(2);
        assert_eq!(staging.put(0, Epoch(1), 'a'), None);
        assert_eq!(staging.put(0, Epoch(2), 'b'), None);
        assert_eq!(staging.put(1, Epoch(1), 'A'), Some((Epoch(1), vec!['a', 'A'])));
        assert_eq!(staging.put(1, Epoch(2), 'B'), Some((Epoch(2), vec!['b', 'B'])));
    }
}
