//! The end of a daemon: its protected VMs are handed to their backups, every other guest is asked to
//! power off, and what still runs after the bound of the configuration is cut. Nothing is left
//! behind, and the records say what happened to whom.
//!
//! A VM whose protection is being restored at that moment is waited for, as long as a guest may take to
//! power off: it would be off otherwise because a backup's daemon was restarted a moment before.

use crate::host::Host;
use crate::keeper::ending;
use crate::lifecycle::RELEASED_WITHIN;
use crate::vm::{EndAsked, PrimaryVm, Vm};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};
use tracing::{error, info, warn};
use understudy_protocol::VmName;
use understudy_protocol::validity::ImageRole;
use understudy_report::HostError;

/// Time between two looks at whether a guest has powered off.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Time for backups that follow, and could not take over at the moment, to be some again.
const LAPSE_PATIENCE: Duration = Duration::from_secs(15);

/// A guest that has not reacted is asked again: one that boots has nobody yet who hears it.
const PRESS_INTERVAL: Duration = Duration::from_secs(10);

/// Time for the guests of the last daemon to end, when all others have.
const ORPHAN_PATIENCE: Duration = Duration::from_secs(5);

/// Time for a guest that has ended to be forgotten, that for the arbiter included.
const FORGOTTEN_WITHIN: Duration = RELEASED_WITHIN.saturating_mul(2);

/// Reason why a guest that was asked to power off still runs.
pub(crate) enum StillOn {
    /// Its time is over.
    TimeIsOver,
    /// The operator does not want to wait for it.
    Hurried,
    /// The guest could not be asked.
    NotAsked(String),
}

impl Host {
    /// Ends the daemon's work. Protected VMs are handed to their backups; what cannot be handed
    /// over, and every unprotected VM, is shut down through ACPI; backups end.
    pub fn shutdown(self: &Arc<Self>) {
        self.closing.store(true, Ordering::Release);
        if let Some(kept) = &self.keeps {
            kept.note_ending();
        }
        self.tell_primaries();
        self.await_boot();
        self.orphans.give_up_all();
        let alone = self.without_a_wish();
        thread::scope(|scope| {
            // A hand-over may take long, and is none of their affair.
            scope.spawn(|| self.power_all_off(&alone));
            let in_vain = self.hand_all_over(&[]);
            self.await_protection();
            self.powering_off.store(true, Ordering::Release);
            self.hand_all_over(&in_vain);
            self.end_all_but_primaries();
            self.power_all_off(&self.running_beside(&alone));
        });
        self.await_orphans();
        // What was taken back all the same.
        self.power_all_off(&self.running());
        self.membership.leave();
        self.watchdog.end();
        self.events.close();
    }

    /// Has the primaries of those that this host backs up told that it ends.
    fn tell_primaries(&self) {
        for vm in self.vms.all().values() {
            if let Vm::Backup(session) = vm {
                session.end_soon();
            }
        }
    }

    /// Waits for the guests of the last daemon, which end; what holds one, a store say, does not hold this daemon.
    fn await_orphans(&self) {
        self.orphans.give_up_all();
        for vm in self.orphans.await_given_up(Instant::now() + ORPHAN_PATIENCE) {
            warn!(%vm, "stands still, and is left to its custodian: its store, or the arbiter, does not answer");
        }
    }

    /// Waits for what is being started in a keeper, which ends as the others do; what comes later
    /// is refused.
    fn await_boot(&self) {
        if self.keeps.is_some() {
            drop(self.adding.lock());
        }
    }

    /// Waits no longer for guests that power off: [`Host::shutdown`] cuts them now.
    pub fn hurry(&self) {
        self.hurried.store(true, Ordering::Release);
    }

    /// Waits until VMs are protected; what restores protection goes on meanwhile.
    fn await_protection(&self) {
        let bound = self.config.power_off_timeout;
        let deadline = Instant::now() + bound;
        let mut awaited = self.being_protected();
        if !awaited.is_empty() {
            let (names, seconds) = (awaited.join(", "), bound.as_secs());
            info!("waiting for the protection of {names}, to hand it over: {seconds} s at most");
        }
        while !awaited.is_empty() && !self.is_hurried() && Instant::now() < deadline {
            thread::sleep(LOOK_INTERVAL);
            awaited = self.being_protected();
        }
    }

    /// The VMs that have a backup soon, and none yet.
    fn being_protected(&self) -> Vec<String> {
        let soon = |vm: &PrimaryVm| vm.active_session().is_some() || vm.repairer().is_restoring();
        let running = self.running().into_iter();
        let awaited = running.filter(|vm| !vm.is_protected() && soon(vm));
        awaited.map(|vm| vm.name().to_string()).collect()
    }

    /// Hands those over that are protected; returns those whose backups were waited for in vain. One that ends itself,
    /// say, is not waited for twice.
    fn hand_all_over(&self, tried: &[VmName]) -> Vec<VmName> {
        let (deadline, mut in_vain) = (Instant::now() + LAPSE_PATIENCE, Vec::new());
        for vm in self.running() {
            if !vm.is_protected() {
                continue;
            }
            let began = Instant::now();
            let deadline = if tried.contains(vm.name()) { began } else { deadline };
            // The hand-over of another member of its group may have taken it along.
            if let Err(error) = self.hand_over_by(deadline, &vm)
                && self.still_runs(&vm)
            {
                warn!(vm = %vm.name(), "not handed over: {error}");
                in_vain.extend((began < deadline).then(|| vm.name().clone()));
            }
        }
        in_vain
    }

    /// Hands a VM over; if its backup follows, but could not take over at the moment, when it can.
    fn hand_over_by(&self, deadline: Instant, vm: &PrimaryVm) -> Result<(), HostError> {
        let lapses =
            || vm.active_session().is_some_and(|session| session.group().obstacle().is_some());
        loop {
            let outcome = self.failover(vm.name());
            let goes_on = !self.is_hurried() && Instant::now() < deadline;
            if outcome.is_ok() || !goes_on || !lapses() || !self.still_runs(vm) {
                return outcome;
            }
            thread::sleep(LOOK_INTERVAL);
        }
    }

    fn end_all_but_primaries(self: &Arc<Self>) {
        fail::fail_point!("end-backups");
        let names: Vec<VmName> = self.vms.look_at_all(|vms| vms.keys().cloned().collect());
        for name in names {
            let ends = match self.vm(&name) {
                Ok(Vm::Primary(vm)) => vm.kept().is_some(),
                there => there.is_ok(),
            };
            if ends && let Err(error) = self.vm_stop(&name, true) {
                warn!(vm = %name, "{error}");
            }
        }
    }

    /// The VMs that nobody is to take over.
    fn without_a_wish(&self) -> Vec<Arc<PrimaryVm>> {
        let mut alone = self.running();
        alone.retain(|vm| vm.active_session().is_none() && vm.repairer().wish().is_none());
        alone
    }

    fn running_beside(&self, others: &[Arc<PrimaryVm>]) -> Vec<Arc<PrimaryVm>> {
        let mut running = self.running();
        running.retain(|vm| !others.iter().any(|other| Arc::ptr_eq(vm, other)));
        running
    }

    /// The number of VMs that run here.
    pub fn still_running(&self) -> usize {
        self.primaries().len()
    }

    /// All at once, so that a guest that does not react delays nobody but itself.
    fn power_all_off(&self, running: &[Arc<PrimaryVm>]) {
        if running.is_empty() {
            return;
        }
        let names: Vec<&str> = running.iter().map(|vm| vm.name().as_str()).collect();
        let bound = self.config.power_off_timeout;
        info!("shutting down {}: {} s at most", names.join(", "), bound.as_secs());
        thread::scope(|scope| {
            for vm in running {
                scope.spawn(move || self.power_off_or_cut(vm, bound));
            }
        });
    }

    fn power_off_or_cut(&self, vm: &PrimaryVm, bound: Duration) {
        let name = vm.name();
        vm.ask_for_end(EndAsked::ByDaemon);
        // A backup must not take over from a guest that powers off.
        if let Err(error) = self.end_protection(vm) {
            warn!(vm = %name, "{error}");
        }
        let why = match self.press_and_wait(vm, bound) {
            Ok(()) => return info!(vm = %name, "ended here"),
            Err(StillOn::TimeIsOver) => {
                format!("it did not power off within {} s", bound.as_secs())
            }
            Err(StillOn::Hurried) => "a second signal asked for it".to_owned(),
            Err(StillOn::NotAsked(error)) => format!("it cannot be asked to power off: {error}"),
        };
        error!(
            vm = %name,
            "its power was cut: {why}; its next start finds what a power failure leaves"
        );
        self.remove_primary(vm, ImageRole::Cut);
    }

    /// Presses the power button, again and again, until the guest has powered off.
    pub(crate) fn press_and_wait(&self, vm: &PrimaryVm, bound: Duration) -> Result<(), StillOn> {
        let deadline = Instant::now() + bound;
        let mut asked = None;
        while self.still_runs(vm) {
            if self.is_hurried() {
                return Err(StillOn::Hurried);
            }
            // One that has ended in time is still to be forgotten.
            let has_ended = vm.machine().is_halted();
            let end = deadline + if has_ended { FORGOTTEN_WITHIN } else { Duration::ZERO };
            if bound.is_zero() || Instant::now() > end {
                return Err(StillOn::TimeIsOver);
            }
            let is_due = asked.is_none_or(|asked: Instant| asked.elapsed() > PRESS_INTERVAL);
            if is_due && !has_ended {
                vm.machine()
                    .press_power_button()
                    .map_err(|error| StillOn::NotAsked(format!("{error:#}")))?;
                asked = Some(Instant::now());
            }
            thread::sleep(LOOK_INTERVAL);
        }
        Ok(())
    }

    /// Whether the VM is still this host's to end. The guest's power-off removes it.
    pub(crate) fn still_runs(&self, vm: &PrimaryVm) -> bool {
        let current = self.vms.get(vm.name());
        matches!(current, Some(Vm::Primary(current)) if std::ptr::eq(&*current, vm))
    }

    fn is_hurried(&self) -> bool {
        self.hurried.load(Ordering::Acquire)
    }

    /// Whether nobody is protected any more.
    pub(crate) fn is_powering_off(&self) -> bool {
        self.powering_off.load(Ordering::Acquire)
    }

    /// Whether the host takes no new backups: its daemon is about to end, or will be once its keepers have.
    pub(crate) fn is_going_down(&self) -> bool {
        self.is_closing() || ending::is_under_way(&self.config.state_dir)
    }

    /// Whether the daemon is about to end.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }
}
