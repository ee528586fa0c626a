//! A group, seen from the primary: VMs that take their checkpoints together
//! (Remus, section 5). A VM that is protected by itself is a group of one.
//!
//! The members share one state machine: what happens to one of them happens to
//! all. Each has its own threads and connections; the first one, the leader,
//! speaks for the group where one word is enough.

use super::Detection;
use super::session::{LONGEST_WAIT, Session};
use super::stance::{Published, Stance};
use crate::clock;
use crate::lockstep::primary::PIPELINE;
use crate::membership::{Member, Membership};
use crate::moments::strike;
use anyhow::{bail, ensure};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use understudy_network::Switch;
use understudy_protocol::{
    Activity, Arrival, Epoch, Generation, Headway, HostName, LastCheckpoint, Output, Primary,
    PrimaryPhase, Rendezvous, Time,
};
use understudy_session::primary::{Event, Guests, Lead};
use understudy_threads::{Mutex, MutexGuard, lock};

/// The reason why protection ended, until more is known.
pub const CONDEMNED: &str = "a thread panicked while it changed the state of protection";

/// The members, and what they share.
pub struct Group {
    /// Members, and how they are owned.
    pub membership: Membership,
    /// The state machine that decides for all.
    core: Mutex<Lead>,
    stance: Published,
    /// Not under the core's lock: the pause is not to wait for effects. It comes after that, and is held for no look
    /// at a member.
    members: Mutex<Members>,
}

/// The members that have begun, and how they meet.
struct Members {
    sessions: Vec<Weak<Session>>,
    rendezvous: Rendezvous,
}

impl Group {
    /// A group whose protection by the host `peer` is about to begin, with these bounds for it;
    /// `output` is the rule for what the guests send.
    pub fn new(
        membership: Membership,
        peer: &HostName,
        bounds: &Detection,
        output: Output,
    ) -> Arc<Group> {
        let now = clock::now();
        let core = Primary::new(membership.leader().generation, bounds.peer, now);
        let core = core.with_epoch_bound(bounds.epoch).with_output(output);
        let lead = Lead::new(core, membership.members.len(), peer.clone(), now);
        let rendezvous = Rendezvous::new(membership.members.len());
        Arc::new(Group {
            membership,
            stance: Published::new(&lead),
            core: Mutex::new(lead),
            members: Mutex::new(Members { sessions: Vec::new(), rendezvous }),
        })
    }

    /// Locks the state machine. After a panic of whoever changed it, it is at its end: nothing is
    /// done by it any more.
    pub(super) fn core(&self) -> MutexGuard<'_, Lead> {
        self.core.lock().unwrap_or_else(|poisoned| {
            let mut core = poisoned.into_inner();
            core.condemn(CONDEMNED);
            self.stance.publish(&core);
            core
        })
    }

    /// The stance of it, as of the last event. Waits for nobody.
    pub(super) fn stance(&self) -> Stance {
        self.stance.get()
    }

    /// Publishes the stance of its state machine, after each event.
    pub(super) fn publish(&self, core: &Lead) {
        self.stance.publish(core);
    }

    /// Whether it has more than one member.
    pub fn is_shared(&self) -> bool {
        self.membership.members.len() > 1
    }

    /// The next member's session begins; in the order of the members.
    pub(super) fn join(&self, session: &Arc<Session>) -> anyhow::Result<()> {
        let core = self.core();
        match core.phase() {
            PrimaryPhase::Alone(Some(reason))
            | PrimaryPhase::Frozen(reason)
            | PrimaryPhase::Halted(reason) => {
                bail!("the group's protection has ended: {reason}")
            }
            PrimaryPhase::Alone(None) => bail!("the group's protection has ended"),
            _ => lock(&self.members).sessions.push(Arc::downgrade(session)),
        }
        Ok(())
    }

    /// Calls `act` for each member that has begun, in order.
    pub(super) fn each(&self, mut act: impl FnMut(&Session)) {
        self.begun().iter().for_each(|session| act(session));
    }

    fn begun(&self) -> Vec<Arc<Session>> {
        lock(&self.members).sessions.iter().filter_map(Weak::upgrade).collect()
    }

    /// The reason why the backup could not take over now, if it could not.
    pub fn obstacle(&self) -> Option<String> {
        self.core().obstacle(clock::now())
    }

    /// The reason why output waits for the backup for longer than it should, if it does.
    pub fn delay(&self) -> Option<String> {
        self.core().delay(clock::now())
    }

    /// Wakes every member's threads.
    pub(super) fn ring(&self) {
        self.each(|member| member.machine().doorbell().ring());
    }

    /// Wakes those of the other members, if there are any, for what the caller knows of.
    pub(super) fn ring_others(&self) {
        if self.is_shared() {
            self.ring();
        }
    }

    /// A member's generation, when the group's state machine is at `leaders`.
    pub(super) fn generation(&self, member: &Member, leaders: Generation) -> Generation {
        self.membership.generation_of(member, leaders)
    }

    /// Looks at the rendezvous of the members, or changes it; what comes next is announced under the core's lock.
    pub(super) fn meeting<T>(&self, act: impl FnOnce(&mut Rendezvous) -> T) -> T {
        act(&mut lock(&self.members).rendezvous)
    }

    /// The rendezvous as it is at this moment.
    pub(super) fn rendezvous(&self) -> Rendezvous {
        self.meeting(|rendezvous| rendezvous.clone())
    }

    /// The headway of the data of all members.
    pub(super) fn headway(&self) -> Headway {
        let mut all: Option<Headway> = None;
        self.each(|member| {
            let one = member.headway();
            all = Some(all.map_or(one, |all| all.beside(one)));
        });
        all.unwrap_or_default()
    }

    /// Waits until every member has come this far. The last one to come does
    /// `act` first.
    pub(super) fn meet(&self, session: &Session, act: impl FnOnce()) -> anyhow::Result<()> {
        let arrival = self.meeting(Rendezvous::arrive);
        let Arrival::Wait(gate) = arrival else {
            act();
            self.meeting(Rendezvous::open);
            self.ring_others();
            return Ok(());
        };
        loop {
            let seen = session.machine().doorbell().count();
            let rendezvous = self.rendezvous();
            if rendezvous.is_open(gate) {
                return Ok(());
            }
            ensure!(!rendezvous.is_broken(), "another member of the group cannot take any");
            ensure!(!session.is_over(), "protection has ended");
            session.machine().doorbell().wait(seen, LONGEST_WAIT);
        }
    }

    /// A member takes no checkpoints any more. Returns whether it is the first.
    pub(super) fn break_up(&self) -> bool {
        let first = self.meeting(Rendezvous::break_up);
        self.ring();
        first
    }

    /// Closes the epoch of every member, all of whom stand still: what they send
    /// or write from here on belongs to the next one. One step with the state
    /// machine, since protection can end at any moment and must not find a gate
    /// held afterwards.
    pub(super) fn place_barrier(&self, session: &Session, last: bool) {
        let mut core = self.core();
        strike("barrier", &session.vm);
        let next = core.running().next();
        let over = core.phase().is_over();
        if !over {
            let first = !core.guards_output();
            self.each(|member| {
                for port in member.machine().ports() {
                    if !first {
                        port.drain_and_barrier(next);
                    } else if core.output() == Output::Unheld {
                        port.unhold(next);
                    } else {
                        // What went out before the first checkpoint is part of its state.
                        port.hold(next);
                    }
                }
                match &member.console {
                    Some(console) if first => console.hold(next),
                    Some(console) => console.drain_and_barrier(next),
                    None => {}
                }
                if first {
                    member.machine().disks().iter().for_each(|disk| disk.set_backup(true));
                }
            });
            if first && self.is_shared() {
                self.connect_members();
            }
        }
        self.each(|member| {
            member.disk_epoch.store(next.0, Ordering::Release);
            member.outbox.room.begin_epoch();
        });
        let event = if last { Event::CapturedLast } else { Event::Captured };
        session.event_locked(&mut core, event);
    }

    /// Closes a batch of a VM's log, in lockstep: what it sent until now belongs to it. With
    /// `last`, the guest stands still. None when protection is over.
    pub(super) fn cut_batch(&self, session: &Session, last: bool) -> Option<Epoch> {
        let mut core = self.core();
        if !core.may_capture() {
            return None;
        }
        let epoch = core.running();
        for port in session.machine().ports() {
            if last {
                port.drain_and_barrier(epoch.next());
            } else {
                port.barrier(epoch.next());
            }
        }
        match &session.console {
            Some(console) if last => console.drain_and_barrier(epoch.next()),
            Some(console) => console.barrier(epoch.next()),
            None => {}
        }
        let event = if last { Event::CapturedLast } else { Event::Captured };
        session.event_locked(&mut core, event);
        Some(epoch)
    }

    /// The VM's epochs will be batches of log: there may be many on their way.
    pub(super) fn follow_log(&self) {
        let mut core = self.core();
        core.set_pipeline(PIPELINE);
    }

    /// Connects the members, who hear each other without waiting from the first cut on.
    fn connect_members(&self) {
        let machines: Vec<_> = self.begun().iter().map(|session| session.machine()).collect();
        Switch::connect(machines.iter().flat_map(|machine| machine.ports()).map(|port| &**port));
    }

    /// Whether a planned fail-over was asked for.
    pub(super) fn was_handed_over(&self) -> bool {
        self.core().is_handed_over()
    }
}

impl Guests for Group {
    fn output_since(&self, last: LastCheckpoint) -> Option<Time> {
        let mut earliest = None;
        self.each(|member| {
            earliest = earliest.into_iter().chain(member.output_since(last)).min();
        });
        earliest
    }

    fn is_full(&self) -> bool {
        let mut full = false;
        self.each(|member| full |= member.outbox.room.is_epoch_full());
        full
    }

    /// The activity of the busiest of them.
    fn activity(&self) -> Activity {
        let mut all = Activity { idle: true, busy_share: 0.0 };
        self.each(|member| {
            let one = member.activity();
            all.idle &= one.idle;
            all.busy_share = all.busy_share.max(one.busy_share);
        });
        all
    }
}
