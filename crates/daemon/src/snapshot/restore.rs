//! One member of a group that is being restored, on the host that will run it.

use super::adopt::entrust;
use super::prepare::{Prepared, prepare};
use super::succeed;
use crate::containment;
use crate::host::Host;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;
use tracing::error;
use tracing::warn;
use understudy_cluster::disk_fill::DiskFiller;
use understudy_cluster::fill::Filler;
use understudy_cluster::messages::{Reply, RestoreTask, ToCoordinator};
use understudy_replication::clock;
use understudy_replication::moments::pass;
use understudy_report::cluster::FillReport;
use understudy_report::events::EventKind;
use understudy_snapshot::{
    Cohort, CohortAction, CohortEvent, CohortPhase, Decision, Former, Order,
};
use understudy_threads::Waitable;

/// Time after which a cohort looks again whether its coordinator has been silent for too long, and
/// says how far it is.
const TICK: Duration = Duration::from_millis(500);

/// Pause before what could not be put on record is tried again.
const AGAIN: Duration = Duration::from_secs(1);

/// A member that is being restored, or was.
pub struct Restoring {
    host: Weak<Host>,
    task: RestoreTask,
    stop: Arc<AtomicBool>,
    /// State of the restore; woken when a worker has ended.
    state: Waitable<State>,
}

struct State {
    cohort: Cohort,
    reply: Reply,
    /// Member that is loaded, and not started yet.
    prepared: Option<Prepared>,
    filler: Option<Arc<Filler>>,
    /// Fillers of its disks.
    disks: Arc<Vec<DiskFiller>>,
    /// Threads that load or start it.
    workers: usize,
}

impl Host {
    /// A coordinator says something about the restore of a member to this host.
    pub(super) fn restore_order(self: &Arc<Self>, task: RestoreTask, order: Order, reply: &Reply) {
        self.snapshots.note_number(&task.group.name, task.number);
        let Some((task, order)) = self.hand_on(task, order, reply) else { return };
        let failed = |why: &str| {
            let report = understudy_snapshot::Report::Failed { why: why.to_owned() };
            reply(ToCoordinator::Restore(task.member, report));
        };
        let restoring = match self.restoring(&task, &order, reply) {
            Ok(Some(restoring)) => restoring,
            // It is not known yet what becomes of it.
            Ok(None) if self.orphans.why(task.vm()).is_some() => return,
            Ok(None) => {
                return failed("its host knows nothing of the restore: was its daemon restarted?");
            }
            Err(why) => return failed(why),
        };
        let mut state = restoring.state.lock();
        state.reply = reply.clone();
        restoring.handle(&mut state, CohortEvent::Order(order));
    }

    /// The restore that an order is about. One that another must not give way to is refused.
    fn restoring(
        self: &Arc<Self>,
        task: &RestoreTask,
        order: &Order,
        reply: &Reply,
    ) -> Result<Option<Arc<Restoring>>, &'static str> {
        loop {
            let former = self.snapshots.look(|known| known.restorings.get(task.vm()).cloned());
            match (&former, order) {
                (Some(known), _) if known.task.id == task.id => return Ok(former),
                (_, order) if order.begins() => {}
                _ => return Ok(None),
            }
            if let Some(former) = &former {
                former.give_way(self, task)?;
            }
            let begun = Restoring::new(self, task.clone(), reply);
            // Whoever has the former one here drops it, without the lock.
            let is_first = self
                .snapshots
                .note(|known| succeed(&mut known.restorings, task.vm(), former.as_ref(), &begun));
            if is_first {
                return Ok(Some(begun));
            }
        }
    }
}

impl Restoring {
    fn new(host: &Arc<Host>, task: RestoreTask, reply: &Reply) -> Arc<Restoring> {
        let cohort = Cohort::new(clock::now());
        let state = State {
            cohort,
            reply: reply.clone(),
            prepared: None,
            filler: None,
            disks: Arc::default(),
            workers: 0,
        };
        Restoring::of(host, task, state)
    }

    /// Makes that of a VM that runs, and whose daemon has died before all of it was there.
    pub(super) fn resumed(
        host: &Arc<Host>,
        task: &RestoreTask,
        filler: &Arc<Filler>,
        disks: Arc<Vec<DiskFiller>>,
    ) -> Arc<Restoring> {
        let state = State {
            cohort: Cohort::resumed(clock::now()),
            // A coordinator that still asks says where reports go.
            reply: Arc::new(|_| ()),
            prepared: None,
            filler: Some(filler.clone()),
            disks,
            workers: 0,
        };
        Restoring::of(host, task.clone(), state)
    }

    fn of(host: &Arc<Host>, task: RestoreTask, state: State) -> Arc<Restoring> {
        Arc::new(Restoring {
            host: Arc::downgrade(host),
            task,
            stop: Arc::default(),
            state: Waitable::new(state),
        })
    }

    /// Progress: how far it is there; none if nothing was begun, or all is given up.
    pub fn fill_state(&self) -> Option<FillReport> {
        let (filler, disks) = {
            let state = self.state.lock();
            (state.filler.clone(), state.disks.clone())
        };
        let mut report = FillReport { memory: filler?.state(), ..FillReport::default() };
        for disk in disks.iter() {
            let (there, all) = disk.blocks();
            report.disk_blocks += there;
            report.all_disk_blocks += all;
            report.memory.stalled = report.memory.stalled.or_else(|| disk.stalled());
            report.memory.complete &= disk.is_complete();
        }
        Some(report)
    }

    /// Whether not all of it is there yet, or the next snapshot cannot build on it yet.
    pub fn is_loading(&self) -> bool {
        let state = self.state.lock();
        state.filler.is_some() || !state.disks.is_empty()
    }

    /// Whether it may still fail, or has and is not gone yet.
    pub fn is_under_way(&self) -> bool {
        !self.state.lock().cohort.is_over()
    }

    /// Ends, as another restore of the VM begins; refuses that one if it must not.
    fn give_way(self: &Arc<Self>, host: &Host, other: &RestoreTask) -> Result<(), &'static str> {
        let started = matches!(
            self.state.lock().cohort.phase(),
            CohortPhase::Running | CohortPhase::Restored
        );
        // Asked with nothing locked. One that had not started then has its VM if it has now.
        let has_vm = !started || self.has_vm(host);
        let mut state = self.state.lock();
        let former = Former {
            group: &self.task.group.name,
            incarnation: self.task.incarnation,
            phase: state.cohort.phase(),
            has_vm,
        };
        former.check_replaceable(&other.group.name, other.incarnation)?;
        self.handle(&mut state, CohortEvent::Failed("another restore of the VM has begun".into()));
        self.stop.store(true, Ordering::Release);
        let disks = std::mem::take(&mut state.disks);
        state.filler = None;
        drop(state);
        // Ending its threads takes a moment.
        drop(disks);
        Ok(())
    }

    /// Whether the VM that it started runs here.
    fn has_vm(&self, host: &Host) -> bool {
        let Ok(vm) = host.primary(self.task.vm()) else { return false };
        vm.restored_by().as_ref() == Some(&self.task.id) && vm.machine().is_alive()
    }

    fn event(self: &Arc<Self>, event: CohortEvent) {
        self.handle(&mut self.state.lock(), event);
    }

    /// Handles an event under the lock, so that the order of actions is the order of events.
    fn handle(self: &Arc<Self>, state: &mut State, event: CohortEvent) {
        let mut actions = Vec::new();
        state.cohort.handle(clock::now(), event, &mut actions);
        for action in actions {
            match action {
                CohortAction::Load { pages } => {
                    self.work(state, move |restoring| restoring.load(pages));
                    self.spawn(Restoring::watch);
                }
                CohortAction::Start => match state.prepared.take() {
                    Some(prepared) => self.work(state, |restoring| restoring.start(prepared)),
                    None => warn!(vm = %self.task.vm(), "told to start without being loaded"),
                },
                CohortAction::Settle => self.spawn(Restoring::entrust),
                CohortAction::Conclude => self.spawn(Restoring::conclude),
                CohortAction::Ask => self.spawn(Restoring::ask),
                CohortAction::Discard => {
                    self.stop.store(true, Ordering::Release);
                    let (prepared, filler) = (state.prepared.take(), state.filler.take());
                    let disks = std::mem::take(&mut state.disks);
                    // Ending QEMU takes a moment: not under the lock.
                    self.spawn(move |restoring| {
                        drop((prepared, filler));
                        restoring.end_vm();
                        drop(disks);
                        restoring.await_workers();
                        restoring.end_restore();
                        restoring.event(CohortEvent::Discarded);
                    });
                }
                CohortAction::Report(report) => {
                    (state.reply)(ToCoordinator::Restore(self.task.member, report));
                }
            }
        }
    }

    fn spawn(self: &Arc<Self>, run: impl FnOnce(&Arc<Restoring>) + Send + 'static) {
        let (restoring, vm) = (self.clone(), self.task.vm());
        let started = self
            .host
            .upgrade()
            .map(|host| containment::spawn_for(&host, vm, "restore", move || run(&restoring)));
        if let Some(Err(error)) = started {
            error!(%vm, "its restore does not go on: cannot start a thread: {error}");
        }
    }

    /// Works in a thread whose end is waited for when it is given up: a QEMU may be its own.
    fn work(
        self: &Arc<Self>,
        state: &mut State,
        work: impl FnOnce(&Arc<Restoring>) -> anyhow::Result<()> + Send + 'static,
    ) {
        state.workers += 1;
        self.spawn(move |restoring| {
            let done = work(restoring);
            restoring.state.change(|state| state.workers -= 1);
            if let Err(error) = done {
                restoring.event(CohortEvent::Failed(format!("{error:#}")));
            }
        });
    }

    fn await_workers(&self) {
        drop(self.state.wait_while(self.state.lock(), |state| state.workers > 0));
    }

    /// Looks at the time, until nothing is expected of the coordinator any more.
    fn watch(self: &Arc<Self>) {
        while self.is_under_way() {
            thread::sleep(TICK);
            if let Some(fill) = self.fill_state() {
                self.event(CohortEvent::Progress(fill.memory.pages));
            }
            self.event(CohortEvent::Tick);
        }
    }

    fn load(self: &Arc<Self>, pages: u64) -> anyhow::Result<()> {
        let Some(host) = self.host.upgrade() else { return Ok(()) };
        let prepared = prepare(&host, &self.task, pages, &self.stop, |filler, disks| {
            let mut state = self.state.lock();
            // Who gave up has looked for them already, and found none.
            if !self.stop.load(Ordering::Acquire) {
                (state.filler, state.disks) = (Some(filler.clone()), disks.clone());
            }
        })?;
        pass("restore-loaded");
        let mut state = self.state.lock();
        if self.stop.load(Ordering::Acquire) {
            // Given up meanwhile.
            drop(state);
            drop(prepared);
            return Ok(());
        }
        state.prepared = Some(prepared);
        self.handle(&mut state, CohortEvent::Loaded);
        Ok(())
    }

    fn start(self: &Arc<Self>, prepared: Prepared) -> anyhow::Result<()> {
        let Some(host) = self.host.upgrade() else { return Ok(()) };
        let (filler, disks, base) = (prepared.filler(), prepared.disks(), prepared.base());
        prepared.start(&host, &self.task)?;
        pass("restore-started");
        if self.stop.load(Ordering::Acquire) {
            // Given up meanwhile: whoever gave up may have come before the VM was there.
            self.end_vm();
            return Ok(());
        }
        let (group, number) = (self.task.group.name.clone(), self.task.number);
        host.events.of(self.task.vm()).record(EventKind::Restored { group, number });
        self.event(CohortEvent::Started);
        self.complete(filler, &disks)?;
        pass("restore-whole");
        if let Ok(vm) = host.primary(self.task.vm()) {
            host.note_base(&self.task, base, &vm.machine());
        }
        self.finish(&host);
        Ok(())
    }

    /// Goes on with what a former daemon has begun. What the disks changed since is not known,
    /// so that the next snapshot saves all of them.
    pub(super) fn go_on(self: &Arc<Self>) {
        self.work(&mut self.state.lock(), |restoring| {
            let (filler, disks) = {
                let state = restoring.state.lock();
                (state.filler.clone(), state.disks.clone())
            };
            let (Some(filler), Some(host)) = (filler, restoring.host.upgrade()) else {
                return Ok(());
            };
            restoring.complete(filler, &disks)?;
            restoring.finish(&host);
            Ok(())
        });
    }

    fn complete(&self, filler: Arc<Filler>, disks: &[DiskFiller]) -> anyhow::Result<()> {
        if !filler.complete(&self.stop)? {
            // The machine may go, and the guest be started on the disks once they are there.
            self.state.lock().filler = None;
            drop(filler);
        }
        disks.iter().try_for_each(|disk| disk.complete(&self.stop))
    }

    /// All of it is there.
    fn finish(self: &Arc<Self>, host: &Arc<Host>) {
        {
            // The store is done with.
            let mut state = self.state.lock();
            (state.filler, state.disks) = (None, Arc::default());
        }
        if let Ok(vm) = host.primary(self.task.vm()) {
            vm.machine().end_custody();
        }
        host.end_reading(&self.task);
        self.event(CohortEvent::Complete);
    }

    /// Nothing of it runs here, and nobody is about to start it.
    fn end_restore(&self) {
        if let Some(host) = self.host.upgrade() {
            host.end_restore(self.task.vm(), &self.task.id);
            host.end_reading(&self.task);
        }
    }

    /// The coordinator is silent: does the VM stay?
    fn ask(self: &Arc<Self>) {
        let Some(host) = self.host.upgrade() else { return };
        let (vm, group) = (self.task.vm(), &self.task.group.name);
        match host.give_up_restore(group, self.task.incarnation) {
            Ok(Some(decision)) => {
                warn!(%vm, "no message from the coordinator that restores {group}: {decision:?}");
                self.event(CohortEvent::Decided(decision));
            }
            // Without an arbiter the coordinator was in the daemon of this keeper, which has ended, and
            // no other member waits for this one.
            Ok(None) if host.keeps.is_some() => {
                self.event(CohortEvent::Decided(Decision::Settled));
            }
            // The coordinator is in this daemon, and will say.
            Ok(None) => {}
            // Asked again.
            Err(error) => warn!(%vm, "whether its restore was given up is not known: {error}"),
        }
    }

    /// All members of the group run, so it may outlive this daemon. A keeper's end is its own.
    fn entrust(self: &Arc<Self>) {
        let Some(host) = self.host.upgrade() else { return };
        host.note_settled(self.task.vm(), &self.task.id);
        if host.keeps.is_some() {
            return;
        }
        let Ok(vm) = host.primary(self.task.vm()) else { return };
        entrust(&host, &self.task, &vm);
        // Meanwhile the rest may have come.
        if self.state.lock().filler.is_none() {
            vm.machine().end_custody();
        }
    }

    /// Concludes the restore: the VM stays, and needs the store no more; what it was before goes.
    /// Until that is on record, it would be what counts after this daemon.
    fn conclude(self: &Arc<Self>) {
        let mut told = String::new();
        while let Some(host) = self.host.upgrade() {
            let Err(error) = host.conclude_restore(self.task.vm(), &self.task.id) else { return };
            let why = format!("{error:#}");
            if why != told {
                warn!(
                    vm = %self.task.vm(),
                    "what it was before its restore is kept, and would count after this daemon, until this is mended: {why}"
                );
                told = why;
            }
            drop(host);
            thread::sleep(AGAIN);
        }
    }

    /// Ends the VM, if this restore has started it. It is what it was before then.
    fn end_vm(&self) {
        let Some(host) = self.host.upgrade() else { return };
        let Ok(vm) = host.primary(self.task.vm()) else { return };
        if vm.restored_by().as_ref() == Some(&self.task.id) {
            host.remove_restored(&vm, &self.task.id);
        }
    }
}
