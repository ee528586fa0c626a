//! Leases of sole owners, carried out: `understudy_protocol::Lease` decides.
//!
//! Three threads for all VMs. `lease` looks at the clock, and never waits, for no VM's session either: what it
//! finds due it has done elsewhere. `lease-arbiter` goes to the arbiter, and waits as long as that takes; `lease-peers`
//! compares clocks with other hosts. What must not leave a VM does not, whatever they do: each port
//! has its limit.

mod contender;
mod former;
mod peers;
mod resumed;
mod settling;
mod tending;
mod watchdog;

pub(crate) use contender::{Awaited, Contender, Tenures};
pub(crate) use former::{Busy, FormerLease};
pub(crate) use watchdog::{Petting, Watchdog};

use crate::containment;
use crate::host::Host;
use crate::vm::PrimaryVm;
use crossbeam_channel::Sender;
use settling::Settling;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;
use tracing::{error, info, warn};
use understudy_machine::Machine;
use understudy_network::boot_time;
use understudy_protocol::validity::ImageRole;
use understudy_protocol::{Lease, LeaseAction, Stake, Stillness, Time, VmName};
use understudy_report::events::EventKind;
use understudy_session::primary::Event;
use watchdog::Petter;

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(100);
/// The same while no VM has a lease, as one that is protected has none. The output of a VM that becomes a sole owner leaves
/// at once, lease or not: so the thread is told of that, and of each VM that comes.
const IDLE: Duration = Duration::from_secs(1);
/// Pause before a guest whose QEMU has not answered is told again to stand still, or to go on.
const AGAIN: Duration = Duration::from_secs(1);

/// A VM that is to be tended at the arbiter.
type Errands = Sender<tending::Errand>;

/// What has been made of the lease of one VM that runs here.
#[derive(Default)]
pub(crate) struct Tenure {
    /// Whether the log knows of one.
    told: AtomicBool,
    /// Whether the guest stands still, or goes on, as the lease says.
    settling: Settling,
}

impl Tenure {
    fn tell(&self, vm: &VmName, is_held: bool) {
        if self.told.swap(is_held, Ordering::AcqRel) != is_held {
            match is_held {
                true => info!(%vm, "another host has a copy: the arbiter has the lease of it"),
                false => info!(%vm, "no lease of it any more"),
            }
        }
    }
}

/// Keeps the leases for as long as the host lives.
pub(crate) fn start(host: &Arc<Host>) -> std::io::Result<()> {
    let (errands, inbox) = crossbeam_channel::unbounded();
    let weak = Arc::downgrade(host);
    let tender = weak.clone();
    let tend = move || tending::run(&tender, &inbox);
    thread::Builder::new().name("lease-arbiter".to_owned()).spawn(tend)?;
    let compared = weak.clone();
    thread::Builder::new().name("lease-peers".to_owned()).spawn(move || peers::run(&compared))?;
    let watchdog = host.watchdog.inbox();
    thread::Builder::new()
        .name("lease".to_owned())
        .spawn(move || keep(&weak, &errands, watchdog))?;
    Ok(())
}

fn keep(host: &Weak<Host>, errands: &Errands, mut watchdog: Petter) {
    let mut stillness = Stillness::new(boot_time(), LOOK);
    while let Some(host) = host.upgrade() {
        let now = boot_time();
        if let Some(still) = stillness.look(now) {
            host.stood_still(still, false);
        }
        let vms = host.primaries();
        for vm in &vms {
            host.look_at_lease(vm, now, errands);
        }
        let has_lease = |vm: &Arc<PrimaryVm>| vm.lease(|it| it.is_held() || it.has_run_out());
        let is_due = watchdog.is_armed() || vms.iter().any(has_lease);
        let pause = if is_due { LOOK } else { IDLE };
        drop((vms, host));
        stillness.expect_within(pause);
        watchdog.pet(pause);
    }
}

impl Host {
    fn look_at_lease(self: &Arc<Self>, vm: &Arc<PrimaryVm>, now: Time, errands: &Errands) {
        let stake = self.stake(vm);
        vm.tend_lease(
            |lease| lease.tick(now, stake),
            |machine, actions| self.carry_out(vm, machine, actions, Some(errands)),
        );
        if vm.tenure.settling.begin_again() {
            self.settle_in_thread(vm);
        }
    }

    /// Notes that this host did nothing for so long: sole owners ask the arbiter before anything
    /// leaves them. `clocks_too`: only others can tell.
    fn stood_still(self: &Arc<Self>, still: Duration, clocks_too: bool) {
        for vm in self.primaries() {
            vm.tend_lease(
                |lease| match clocks_too || still > lease.longest_still() {
                    true => lease.stood_still(boot_time()),
                    false => Vec::new(),
                },
                |machine, actions| self.carry_out(&vm, machine, actions, None),
            );
        }
        let kind = EventKind::StoodStill { seconds: still.as_secs_f64(), clocks_too };
        match clocks_too {
            // By their own clocks the daemon beside keepers notices it, too.
            false => self.events.record(kind),
            true => self.tell_of_host(kind),
        }
    }

    fn keeps_leases(&self) -> bool {
        self.primaries().iter().any(|vm| vm.lease(Lease::is_held))
    }

    fn stake(&self, vm: &PrimaryVm) -> Stake {
        if self.arbiter.is_none() {
            return Stake::Nothing;
        }
        let guards = vm.stance().map(|stance| stance.guards_output);
        Stake::of(guards, vm.has_copies.load(Ordering::Acquire))
    }

    /// Carries out actions on the VM's machine, under its lock. Nothing here waits for QEMU or the arbiter, nor asks the
    /// VM for anything.
    fn carry_out(
        self: &Arc<Self>,
        vm: &Arc<PrimaryVm>,
        machine: &Machine,
        actions: Vec<LeaseAction>,
        errands: Option<&Errands>,
    ) {
        for action in actions {
            match action {
                LeaseAction::Limit(until) => {
                    for port in machine.ports() {
                        port.limit_output(until);
                    }
                }
                LeaseAction::Ask(errand) => {
                    // The other thread lives as long as the host.
                    let _ = errands.map(|errands| errands.send((Arc::downgrade(vm), errand)));
                }
                LeaseAction::Freeze(reason) => {
                    vm.events.record(EventKind::LeaseRanOut { reason });
                    self.settle_aside(vm);
                }
                LeaseAction::GoOn => {
                    vm.events.record(EventKind::LeaseRenewed);
                    self.settle_aside(vm);
                }
                LeaseAction::Halt(reason) => self.halt_aside(vm, reason),
            }
        }
    }

    fn settle_aside(&self, vm: &Arc<PrimaryVm>) {
        if vm.tenure.settling.begin() {
            self.settle_in_thread(vm);
        }
    }

    /// A thread that cannot be started is at the next look.
    fn settle_in_thread(&self, vm: &Arc<PrimaryVm>) {
        let settled = vm.clone();
        let name = vm.name();
        if let Err(error) = containment::spawn_for(self, name, "settle", move || settle(&settled)) {
            error!(vm = %name, "its guest does not do yet what its lease says: no thread: {error}");
            vm.tenure.settling.has_no_thread();
        }
    }

    fn halt_aside(self: &Arc<Self>, vm: &Arc<PrimaryVm>, reason: String) {
        let (host, lost) = (self.clone(), vm.clone());
        let name = vm.name();
        let end = move || host.lose(&lost, reason);
        if let Err(error) = containment::spawn_for(self, name, "lose", end) {
            error!(vm = %name, "its copy is not ended, and nothing leaves it: no thread: {error}");
        }
    }

    /// Another host has the VM: this copy ends.
    fn lose(self: &Arc<Self>, vm: &Arc<PrimaryVm>, reason: String) {
        if vm.machine().is_halted() {
            // It was stopped, and given up, while it was asked for.
            return;
        }
        if let Some(session) = vm.active_session() {
            return session.event(Event::GuestDied(reason));
        }
        self.note_role(vm, ImageRole::Stale);
        vm.events.record(EventKind::Fenced { reason: reason.clone() });
        self.fence_as(vm, reason, true);
    }
}

/// Has the guest stand still, or go on, as the lease says by now.
fn settle(vm: &PrimaryVm) {
    while vm.tenure.settling.goes_on() {
        let stands = vm.standstill().is_some();
        let machine = vm.machine();
        let settled = match stands {
            true => machine.hold(),
            false => let_go(&machine),
        };
        let has_ended = || machine.is_halted() || machine.is_powered_off() || !machine.is_alive();
        if let Err(error) = settled
            && !has_ended()
        {
            let what = if stands { "stand still" } else { "go on" };
            warn!(vm = %vm.name(), "the guest does not {what}, and is told again: {error:#}");
            vm.tenure.settling.failed();
            drop(machine);
            thread::sleep(AGAIN);
        }
    }
}

fn let_go(machine: &Machine) -> anyhow::Result<()> {
    fail::fail_point!("let-go", |_| anyhow::bail!("a test says so"));
    machine.let_go()
}
