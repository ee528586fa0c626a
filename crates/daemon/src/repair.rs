//! Redundancy restored by itself: drives `understudy_protocol::repair`, one
//! thread for each VM that runs here and is not protected.
//!
//! What is wanted is the operator's last `protect` or `unprotect`. It travels to
//! the backup with every offer, so that a survivor knows it too. A group is protected again
//! as a whole: its first VM does what is to be done for all.

use crate::containment;
use crate::host::Host;
use crate::survey::Needs;
use crate::vm::PrimaryVm;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use std::collections::VecDeque;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tracing::{error, info, warn};
use understudy_protocol::repair::{Repair, RepairAction, RepairEvent, RepairPhase, is_history};
use understudy_protocol::{HostName, Time, VmName};
use understudy_qemu::{CpuNeeds, Vendor};
use understudy_replication::clock;
use understudy_replication::handshake::Offered;
use understudy_replication::membership::GroupMembers;
use understudy_replication::moments::strike;
use understudy_replication::primary::{TellSick, used_bytes};
use understudy_report::events::{EventKind, VmEvents};
use understudy_report::{Mode, ProtectRequest, WantedReport};
use understudy_session::primary::Event;
use understudy_threads::{Mutex, spawn};
use understudy_threads::{lock, within};

/// Time between two looks at a synchronisation.
const SYNC_INTERVAL: Duration = Duration::from_millis(100);
/// A next try that is so near is worth waiting for.
const SOON: Duration = Duration::from_secs(5);
/// A divergence so long after another is not the second in a row.
const HEALTHY: Duration = Duration::from_secs(600);
/// The thread looks up at least this often: its VM may have gone.
const LONGEST_SLEEP: Duration = Duration::from_secs(2);

/// Wish for how a VM is to be protected, as its operator wants it.
#[derive(Clone, Debug, PartialEq)]
pub struct Wish {
    /// Request with which it is to be protected.
    pub request: ProtectRequest,
    /// Group with whose VMs it is protected, if not by itself.
    pub group: Option<GroupMembers>,
}

impl Wish {
    /// Wish for a VM by itself.
    pub fn alone(request: ProtectRequest) -> Wish {
        Wish { request, group: None }
    }

    /// The command that asks for it, of a VM and its group.
    pub fn command(&self, vm: &VmName) -> String {
        let options = self.request.options();
        match &self.group {
            None => format!("understudy protect {vm} {options}"),
            Some(GroupMembers { name, vms }) => {
                let vms: Vec<&str> = vms.iter().map(VmName::as_str).collect();
                format!("understudy protect {} --group {name} {options}", vms.join(" "))
            }
        }
    }

    /// The wish for people.
    pub fn report(&self) -> WantedReport {
        WantedReport {
            to: self.request.to.clone(),
            group: self.group.as_ref().map(|group| group.name.clone()),
            mode: self.request.mode,
            hold_console: self.request.hold_console,
        }
    }

    /// The group whose first VM restores the protection of `vm`, if that is another one.
    fn followed_by(&self, vm: &VmName) -> Option<&GroupMembers> {
        self.group.as_ref().filter(|group| group.vms.first() != Some(vm))
    }
}

/// The repair of one VM's protection.
pub struct Repairer {
    vm: VmName,
    /// Whether this host restores protection at all.
    enabled: bool,
    state: Mutex<State>,
    events: Sender<Told>,
    inbox: Receiver<Told>,
}

/// What happens to a VM's protection.
#[derive(Debug, PartialEq)]
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

#[derive(Default)]
struct State {
    core: Repair,
    wish: Option<Wish>,
    /// The end of the last wait that the log knows of.
    logged: Option<Time>,
    /// Number of times in a row that a backup diverged, and when last.
    divergences: (u32, Time),
    /// Whether there is a thread that sees to it.
    has_thread: bool,
}

impl Repairer {
    /// A VM that should be protected as `wish` says, on a host that restores protection or not.
    pub fn new(vm: &VmName, wish: Option<Wish>, enabled: bool) -> Repairer {
        let (events, inbox) = crossbeam_channel::unbounded();
        Repairer {
            vm: vm.to_owned(),
            enabled,
            state: Mutex::new(State { wish, ..State::default() }),
            events,
            inbox,
        }
    }

    /// Wish for how the VM should be protected; none if it should not.
    pub fn wish(&self) -> Option<Wish> {
        lock(&self.state).wish.clone()
    }

    /// The group that it should be protected in.
    pub fn group(&self) -> Option<GroupMembers> {
        self.wish()?.group
    }

    /// The operator wants this from now on.
    pub fn set_wish(&self, wish: Option<Wish>) {
        lock(&self.state).wish = wish;
    }

    /// The operator wants what was wanted before: nothing came of the last wish.
    pub fn take_back(&self, former: Option<Wish>) {
        let is_wanted = former.is_some();
        self.set_wish(former);
        if !is_wanted {
            self.ended();
        }
    }

    /// Protection is lost, by the end `of` a session, or could not be set up; whether it shall be restored.
    pub fn lost(&self, reason: &str, of: Option<&str>) -> bool {
        let Some(wish) = self.wanted() else { return false };
        if wish.followed_by(&self.vm).is_none() {
            let (event, of) = (RepairEvent::Lost(reason.to_owned()), of.map(str::to_owned));
            self.tell(Told { event, of });
        }
        true
    }

    /// The backup has not been able to take over for long; whether another one is to be looked for.
    fn sick(&self, peer: &HostName, reason: &str, times: u32) -> bool {
        let wanted = self.wanted().is_some_and(|wish| wish.followed_by(&self.vm).is_none());
        if wanted {
            let (host, reason) = (peer.clone(), reason.to_owned());
            self.tell(RepairEvent::Sick { host, reason, times }.into());
        }
        wanted
    }

    /// What is to be restored, if anything is.
    fn wanted(&self) -> Option<Wish> {
        self.wish().filter(|wish| self.enabled && wish.request.repair)
    }

    /// A backup did not follow the log.
    pub fn diverged(&self) {
        let now = clock::now();
        let mut state = lock(&self.state);
        let (count, last) = state.divergences;
        let in_a_row = now - last < HEALTHY;
        state.divergences = (if in_a_row { count + 1 } else { 1 }, now);
    }

    /// Whether backups have diverged so often that lockstep is not tried again.
    pub fn distrusts_lockstep(&self) -> bool {
        lock(&self.state).divergences.0 > 1
    }

    /// The operator asks for it again.
    pub fn trust_lockstep(&self) {
        lock(&self.state).divergences = Default::default();
    }

    /// Ends the repair: the operator decided.
    pub fn ended(&self) {
        self.tell(RepairEvent::Ended.into());
    }

    fn tell(&self, told: Told) {
        // The inbox is this value's own.
        let _ = self.events.send(told);
    }

    /// Words on what is being done about lost protection, for people.
    pub fn describe(&self) -> Option<String> {
        if let Some(wish) = self.wanted()
            && let Some(group) = wish.followed_by(&self.vm)
        {
            let (group, leader) = (&group.name, group.vms.first()?);
            return Some(format!("unprotected: group {group} is protected again with {leader}"));
        }
        let core = &lock(&self.state).core;
        let detail = match core.phase() {
            RepairPhase::Idle | RepairPhase::Replacing(_) => return None,
            RepairPhase::Surveying => "asking the hosts".to_owned(),
            RepairPhase::Attempting(host) => format!("trying {host}"),
            RepairPhase::Waiting(until) => {
                let seconds = (*until - clock::now()).as_secs_f64();
                format!("{}, next try in {seconds:.1} s", core.reason())
            }
        };
        Some(format!("unprotected: looking for a backup ({detail})"))
    }

    fn sleep(&self) -> Duration {
        let core = &lock(&self.state).core;
        match (core.phase(), core.deadline()) {
            (RepairPhase::Attempting(_), _) => SYNC_INTERVAL,
            (_, Some(until)) => (until - clock::now()).min(LONGEST_SLEEP),
            _ => LONGEST_SLEEP,
        }
    }

    fn handle(&self, event: RepairEvent) -> Vec<RepairAction> {
        let mut actions = Vec::new();
        lock(&self.state).core.handle(clock::now(), jitter(), event, &mut actions);
        actions
    }

    /// Says once for each round why no host took the VM.
    fn log_round(&self, events: &VmEvents) {
        let mut state = lock(&self.state);
        if let &RepairPhase::Waiting(until) = state.core.phase()
            && state.logged != Some(until)
        {
            events.record_new(EventKind::NoBackup { reason: state.core.reason().to_owned() });
            state.logged = Some(until);
        }
    }

    /// Whether protection that was lost may be back soon: a host is asked or tried, or will be in no time. A
    /// group is its first VM's affair.
    pub fn is_restoring(&self) -> bool {
        let own = self.wanted().is_some_and(|wish| wish.followed_by(&self.vm).is_none());
        own && match lock(&self.state).core.phase() {
            // It is wanted, and not protected: the loss is about to be heard of.
            RepairPhase::Idle | RepairPhase::Surveying | RepairPhase::Attempting(_) => true,
            RepairPhase::Replacing(_) => false,
            RepairPhase::Waiting(until) => *until - clock::now() < SOON,
        }
    }

    /// Whether its thread, which asks, has nothing more to do; it is none any more then.
    fn may_rest(&self) -> bool {
        let mut state = lock(&self.state);
        // What comes from here on finds no thread.
        let rests = *state.core.phase() == RepairPhase::Idle && self.inbox.is_empty();
        state.has_thread &= !rests;
        rests
    }

    fn awaits_protection(&self) -> bool {
        lock(&self.state).core.awaits_protection()
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
    let wanted = vm.repairer.lost(reason, of);
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
        if vm.repairer.sick(peer, reason, times) {
            start(&host, &vm);
        }
    })
}

/// Sees to a VM's protection until it is protected, unless somebody does.
pub(crate) fn start(host: &Arc<Host>, vm: &Arc<PrimaryVm>) {
    if std::mem::replace(&mut lock(&vm.repairer.state).has_thread, true) {
        return;
    }
    let (alive, host, weak) = (host, Arc::downgrade(host), Arc::downgrade(vm));
    let inbox = vm.repairer.inbox.clone();
    let name = vm.name().to_owned();
    let scope = containment::of_vm(alive, &name);
    let watch = move || watch(&host, &weak, &inbox);
    let started = within(&scope, || spawn(format!("repair-{name}"), watch));
    if let Err(error) = started {
        lock(&vm.repairer.state).has_thread = false;
        error!(vm = %name, "lost protection will not be restored: {error}");
    }
}

/// Watches a VM; never holds it while it waits or asks other hosts.
fn watch(host: &Weak<Host>, vm: &Weak<PrimaryVm>, inbox: &Receiver<Told>) {
    loop {
        let Some(sleep) = vm.upgrade().map(|vm| vm.repairer.sleep()) else { return };
        let told = match inbox.recv_timeout(sleep) {
            Ok(told) => told,
            Err(RecvTimeoutError::Timeout) => RepairEvent::Tick.into(),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        if step(host, vm, told).is_none() {
            return;
        }
        let rests = vm.upgrade().is_none_or(|vm| vm.is_protected() && vm.repairer.may_rest());
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
        if event == RepairEvent::Tick && vm.repairer.awaits_protection() && vm.is_protected() {
            event = RepairEvent::Protected;
        }
        let actions = vm.repairer.handle(event);
        vm.repairer.log_round(&vm.events);
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
    let mode = vm.repairer.wish().map_or(Mode::default(), |wish| wish.request.mode);
    let mode = if vm.repairer.distrusts_lockstep() { Mode::Checkpoint } else { mode };
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

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::{Policy, literal};

    fn repairer(vm: &'static str, repair: bool, enabled: bool) -> Repairer {
        let group =
            GroupMembers { name: literal("shop"), vms: vec![literal("db"), literal("web")] };
        let request = ProtectRequest { to: "b".into(), repair, ..Default::default() };
        Repairer::new(&literal(vm), Some(Wish { request, group: Some(group) }), enabled)
    }

    /// Whoever gave the command lost his group, and what he had asked for.
    #[test]
    fn the_command_of_a_wish_asks_for_all_of_it() {
        let command = |wish: Wish| wish.command(&literal("db"));
        let plain = ProtectRequest { to: "b".into(), repair: true, ..Default::default() };
        assert_eq!(command(Wish::alone(plain.clone())), "understudy protect db --to b");
        let group =
            GroupMembers { name: literal("shop"), vms: vec![literal("db"), literal("web")] };
        // A group's policy is in its wish, whoever said it: these numbers only its members' definitions can have.
        let own = Policy::Adaptive { max_epoch_ms: 50, pause_budget_percent: 20 };
        let request =
            ProtectRequest { hold_console: true, repair: false, policy: Some(own), ..plain };
        let wish = Wish { request: request.clone(), group: Some(group) };
        assert_eq!(
            command(wish),
            "understudy protect db web --group shop --to b --hold-console --no-repair"
        );
        let lockstep = ProtectRequest { mode: Mode::Lockstep, ..request };
        assert!(command(Wish::alone(lockstep)).contains("--mode lockstep"));
    }

    #[test]
    fn a_group_is_repaired_by_its_first_vm_alone() {
        let (leader, follower) = (repairer("db", true, true), repairer("web", true, true));
        let lost = |vm: &Repairer| vm.lost("b is silent", Some("session"));
        assert!(lost(&leader) && lost(&follower));
        let told =
            Told { event: RepairEvent::Lost("b is silent".into()), of: Some("session".to_owned()) };
        assert_eq!(leader.inbox.try_recv(), Ok(told));
        assert!(follower.inbox.try_recv().is_err());
        let words = follower.describe().unwrap();
        assert!(words.contains("group shop") && words.contains("db"), "{words}");
    }

    #[test]
    fn nobody_repairs_what_nobody_wants() {
        for unwanted in [repairer("web", false, true), repairer("web", true, false)] {
            assert!(!unwanted.lost("b is silent", None));
            assert_eq!(unwanted.describe(), None);
        }
        let ended = repairer("db", true, true);
        ended.set_wish(None);
        assert!(!ended.lost("b is silent", None) && ended.inbox.try_recv().is_err());
    }
}
