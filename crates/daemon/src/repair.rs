//! Redundancy restored by itself: drives `understudy_protocol::repair`, one
//! thread for each VM that runs here and is not protected.
//!
//! What is wanted is the operator's last `protect` or `unprotect`. It travels to
//! the backup with every offer, so that a survivor knows it too. A group is protected again
//! as a whole: its first VM does what is to be done for all.

mod state;
mod wish;

pub(crate) use state::State;
pub use wish::Wish;

use crate::containment;
use crate::host::Host;
use crate::survey::Needs;
use crate::vm::PrimaryVm;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use state::Restorer;
use std::collections::VecDeque;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, Weak};
use tracing::{error, info, warn};
use understudy_protocol::HostName;
use understudy_protocol::repair::{RepairAction, RepairEvent, is_history};
use understudy_qemu::{CpuNeeds, Vendor};
use understudy_replication::clock;
use understudy_replication::handshake::Offered;
use understudy_replication::membership::GroupMembers;
use understudy_replication::moments::strike;
use understudy_replication::primary::{TellSick, used_bytes};
use understudy_report::Mode;
use understudy_report::events::EventKind;
use understudy_session::primary::Event;
use understudy_threads::{spawn, within};

/// Mail of the thread that restores a VM's protection.
pub(crate) struct Mail {
    events: Sender<Told>,
    inbox: Receiver<Told>,
}

impl Default for Mail {
    fn default() -> Mail {
        let (events, inbox) = crossbeam_channel::unbounded();
        Mail { events, inbox }
    }
}

/// What happens to a VM's protection.
struct Told {
    event: RepairEvent,
    /// The session of which this is the end, if it is the end of one.
    of: Option<String>,
}

impl From<RepairEvent> for Told {
    fn from(event: RepairEvent) -> Told {
        Told { event, of: None }
    }
}

/// The repair of one VM's protection; what is known of it is a part of the VM's own state.
pub(crate) struct Repairer<'a>(pub &'a PrimaryVm);

impl Repairer<'_> {
    fn state<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        self.0.repair_state(act)
    }

    /// Wish for how the VM should be protected; none if it should not.
    pub fn wish(&self) -> Option<Wish> {
        self.state(|state| state.wish.clone())
    }

    /// The group that it should be protected in.
    pub fn group(&self) -> Option<GroupMembers> {
        self.wish()?.group
    }

    /// The operator wants this from now on.
    pub fn set_wish(&self, wish: Option<Wish>) {
        self.state(|state| state.wish = wish);
    }

    /// The operator wants what was wanted before: nothing came of the last wish.
    pub fn take_back(&self, former: Option<Wish>) {
        let is_wanted = former.is_some();
        self.set_wish(former);
        if !is_wanted {
            self.ended();
        }
    }

    /// The VM is not wanted in this group any more, which nobody asked for; false if something else is wanted by now.
    pub fn leave(&self, group: &GroupMembers) -> bool {
        self.state(|state| {
            let is_in = state.leave(group);
            if is_in {
                // Before anybody can wish for something else.
                self.ended();
            }
            is_in
        })
    }

    /// Protection is lost, by the end `of` a session, or could not be set up; whether it shall be restored.
    pub fn lost(&self, reason: &str, of: Option<&str>) -> bool {
        let (is_wanted, is_own) = self.state(|state| {
            let restorer = state.restorer(self.0.name());
            (restorer.is_some(), restorer == Some(Restorer::Itself))
        });
        if is_own {
            let (event, of) = (RepairEvent::Lost(reason.to_owned()), of.map(str::to_owned));
            self.tell(Told { event, of });
        }
        is_wanted
    }

    /// The backup has not been able to take over for long; whether another one is to be looked for.
    fn sick(&self, peer: &HostName, reason: &str, times: u32) -> bool {
        let is_own = self.state(|state| state.restorer(self.0.name()) == Some(Restorer::Itself));
        if is_own {
            let (host, reason) = (peer.clone(), reason.to_owned());
            self.tell(RepairEvent::Sick { host, reason, times }.into());
        }
        is_own
    }

    /// A backup did not follow the log.
    pub fn diverged(&self) {
        let now = clock::now();
        self.state(|state| state.diverged(now));
    }

    /// Whether backups have diverged so often that lockstep is not tried again.
    pub fn distrusts_lockstep(&self) -> bool {
        self.state(|state| state.distrusts_lockstep())
    }

    /// The operator asks for it again.
    pub fn trust_lockstep(&self) {
        self.state(State::trust_lockstep);
    }

    /// Ends the repair: the operator decided.
    pub fn ended(&self) {
        self.tell(RepairEvent::Ended.into());
    }

    fn tell(&self, told: Told) {
        // The inbox is the VM's own.
        let _ = self.0.repairs.events.send(told);
    }

    /// Words on what is being done about lost protection, for people.
    pub fn describe(&self) -> Option<String> {
        self.state(|state| state.describe(self.0.name(), clock::now()))
    }

    /// Whether protection that was lost may be back soon: a host is asked or tried, or will be in no time. A
    /// group is its first VM's affair.
    pub fn is_restoring(&self) -> bool {
        self.state(|state| state.is_restoring(self.0.name(), clock::now()))
    }

    fn handle(&self, event: RepairEvent) -> Vec<RepairAction> {
        let (now, jitter) = (clock::now(), jitter());
        let mut actions = Vec::new();
        self.state(|state| state.core.handle(now, jitter, event, &mut actions));
        actions
    }

    /// Says once for each round why no host took the VM. The journal waits for a disk, and is asked without the lock.
    fn log_round(&self) {
        if let Some(reason) = self.state(State::new_round) {
            self.0.events.record_new(EventKind::NoBackup { reason });
        }
    }

    /// Whether its thread, which asks, has nothing more to do; it is none any more then.
    fn may_rest(&self) -> bool {
        let inbox = &self.0.repairs.inbox;
        // Under the lock: what comes from here on finds no thread.
        self.state(|state| state.may_rest(inbox.is_empty()))
    }
}

/// 0 to 1 000, different on each call and each host.
fn jitter() -> u32 {
    (RandomState::new().build_hasher().finish() % 1_001) as u32
}

/// Protection is lost, by the end `of` a session, or could not be set up; whether it shall be restored. That begins.
pub(crate) fn restore(
    host: &Arc<Host>,
    vm: &Arc<PrimaryVm>,
    reason: &str,
    of: Option<&str>,
) -> bool {
    let wanted = vm.repairer().lost(reason, of);
    if wanted {
        start(host, vm);
    }
    wanted
}

/// What hears of a VM's backup that has not been able to take over for long. It waits for nothing.
pub(crate) fn hearing_of_sick(host: &Arc<Host>, vm: &Arc<PrimaryVm>) -> TellSick {
    let (host, vm) = (Arc::downgrade(host), Arc::downgrade(vm));
    Box::new(move |peer, reason, times| {
        let (Some(host), Some(vm)) = (host.upgrade(), vm.upgrade()) else { return };
        if vm.repairer().sick(peer, reason, times) {
            start(&host, &vm);
        }
    })
}

/// Sees to a VM's protection until it is protected, unless somebody does.
pub(crate) fn start(host: &Arc<Host>, vm: &Arc<PrimaryVm>) {
    if vm.repair_state(State::begin_thread) {
        return;
    }
    let (alive, host, weak) = (host, Arc::downgrade(host), Arc::downgrade(vm));
    let inbox = vm.repairs.inbox.clone();
    let name = vm.name().to_owned();
    let scope = containment::of_vm(alive, &name);
    let watch = move || watch(&host, &weak, &inbox);
    let started = within(&scope, || spawn(format!("repair-{name}"), watch));
    if let Err(error) = started {
        vm.repair_state(|state| state.has_thread = false);
        error!(vm = %name, "lost protection will not be restored: {error}");
    }
}

/// Watches a VM; never holds it while it waits or asks other hosts.
fn watch(host: &Weak<Host>, vm: &Weak<PrimaryVm>, inbox: &Receiver<Told>) {
    loop {
        let Some(sleep) = vm.upgrade().map(|vm| vm.repair_state(|state| state.sleep(clock::now())))
        else {
            return;
        };
        let told = match inbox.recv_timeout(sleep) {
            Ok(told) => told,
            Err(RecvTimeoutError::Timeout) => RepairEvent::Tick.into(),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        if step(host, vm, told).is_none() {
            return;
        }
        let rests = vm.upgrade().is_none_or(|vm| vm.is_protected() && vm.repairer().may_rest());
        if rests {
            return;
        }
    }
}

/// Feeds one event and does what comes of it. None when the VM or the host has
/// gone.
fn step(host: &Weak<Host>, weak: &Weak<PrimaryVm>, told: Told) -> Option<()> {
    let mut events = VecDeque::from([told]);
    while let Some(Told { mut event, of }) = events.pop_front() {
        let vm = weak.upgrade()?;
        strike("repair", vm.name());
        let under_way = vm.active_session().map(|session| session.id.to_string());
        if of.is_some_and(|of| is_history(&of, under_way.as_ref())) {
            event = RepairEvent::Tick;
        }
        if event == RepairEvent::Tick
            && vm.repair_state(|state| state.core.awaits_protection())
            && vm.is_protected()
        {
            event = RepairEvent::Protected;
        }
        let actions = vm.repairer().handle(event);
        vm.repairer().log_round();
        let name = vm.name().to_owned();
        drop(vm);
        for action in actions {
            let host = host.upgrade()?;
            match action {
                RepairAction::Survey => {
                    let needs = needs(&host, &*weak.upgrade()?);
                    let found = host.survey(&name, &needs);
                    events.push_back(RepairEvent::Surveyed(found).into());
                }
                RepairAction::Replace(reason) => host.give_backup_up(&*weak.upgrade()?, reason),
                RepairAction::Attempt(to) => {
                    info!(vm = %name, "looking for a backup: trying host {to}");
                    if let Err(error) = host.protect_again(&weak.upgrade()?, &to) {
                        info!(vm = %name, "{error}");
                        events.push_back(RepairEvent::Lost(error.to_string()).into());
                    }
                }
            }
        }
    }
    Some(())
}

impl Host {
    /// Has a VM give up its backup, which lives, if the arbiter would let this host go on alone.
    fn give_backup_up(&self, vm: &PrimaryVm, reason: String) {
        let (Some(arbiter), Some(session)) = (&self.arbiter, vm.active_session()) else { return };
        // What is given up is contested: an arbiter that can only be read would hold the output.
        match session.membership().prove(arbiter, &self.config.name) {
            Ok(()) => {
                info!(vm = %vm.name(), "its backup is given up: {reason}");
                session.event(Event::Replace(reason));
            }
            Err(error) => warn!(
                vm = %vm.name(),
                "its backup stays ({reason}): the arbiter might not let this host go on without it: {error}"
            ),
        }
    }
}

/// What a host must have to back the VM up, and its group. What else speaks against one of its
/// fellows shows when they are offered.
fn needs(host: &Host, vm: &PrimaryVm) -> Needs {
    let machine = vm.machine();
    let definition = machine.definition();
    let cpu = CpuNeeds::of(definition, machine.accelerator())
        .with_tsc(machine.tsc())
        .with_vendor(Vendor::seen_here(machine.accelerator()));
    let (memory, cards) = (definition.memory.bytes(), definition.cards.clone());
    let mut needs = Needs { memory, cpu, cards, offered: Some(Box::new(offered(host, vm))) };
    for fellow in host.wanted_fellows(vm) {
        let machine = fellow.machine();
        needs.memory += machine.definition().memory.bytes();
        needs.cards.extend(machine.definition().cards.iter().cloned());
    }
    needs
}

/// What an offer of a VM would say that a host may refuse.
fn offered(host: &Host, vm: &PrimaryVm) -> Offered {
    let machine = vm.machine();
    let mode = vm.repairer().wish().map_or(Mode::default(), |wish| wish.request.mode);
    let mode = if vm.repairer().distrusts_lockstep() { Mode::Checkpoint } else { mode };
    Offered {
        qemu: host.release_of(&machine),
        machine_type: machine.machine_type().to_owned(),
        processor: machine.definition().cpu.clone(),
        mode,
        // Of what cannot be read no host would follow the log.
        qemu_build: host.recording_build(&machine).ok().flatten(),
        disk_used: machine.disks().iter().map(|disk| used_bytes(disk)).sum(),
        cluster: host.cluster_offer(vm.name()),
    }
}
