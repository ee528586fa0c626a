//! One member of a group that is being snapshotted, on the host that runs it.

use super::Snapshots;
use super::capture::{Base, Capture, Saved};
use super::member::MemberSeat;
use super::mirrored::MirroredCapture;
use crate::containment;
use crate::containment::spawn_for_request;
use crate::host::Host;
use anyhow::{Context, bail};
use crossbeam_channel::{Receiver, Sender};
use std::io;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tracing::error;
use tracing::{info, warn};
use understudy_cluster::Stop;
use understudy_cluster::messages::{Reply, RestoreTask, TakeTask, ToCoordinator};
use understudy_machine::Machine;
use understudy_protocol::{BaseId, VmName};
use understudy_qemu::{CheckedDefinition, VmDefinition};
use understudy_replication::clock;
use understudy_replication::moments::pass;
use understudy_snapshot::{
    About, Compression, Part, SnapshotNumber, TakeAction, TakeCohort, TakeEvent, TakeOrder,
    TakeReport, TraceTime,
};
use understudy_threads::{Mutex, spawn};
use understudy_threads::{lock, within};

/// Time after which a cohort looks again whether its coordinator has been silent for too long.
const TICK: Duration = Duration::from_millis(500);

/// Time that a thread that was told to stop may go on.
const ENDING: Duration = Duration::from_secs(4);
/// Time for a restored VM to be noted as the base of the next snapshot, once all of it is there.
const NOTED: Duration = Duration::from_secs(3);
const LOOK: Duration = Duration::from_millis(20);

/// A member, for one snapshot after the other.
pub struct Taking {
    host: Weak<Host>,
    state: Mutex<State>,
}

struct State {
    task: TakeTask,
    cohort: TakeCohort,
    reply: Reply,
    job: Option<Job>,
    /// The last snapshot that exists.
    base: Option<Base>,
    /// Content of the one that is being taken, once it is saved.
    saved: Option<Saved>,
    /// The thread that took the one before.
    thread: Option<JoinHandle<()>>,
}

/// The thread that takes a snapshot.
struct Job {
    stop: Arc<Stop>,
    now: Now,
}

/// Instruction to the thread that pauses the VM.
enum Now {
    /// The coordinator.
    Order(Sender<()>),
    /// The cut, by the coordinator's word or another member's frame.
    Cut(Arc<MemberSeat>),
}

/// Start: what a snapshot begins with.
pub struct Start<'a> {
    /// Task that is to be done.
    pub task: &'a TakeTask,
    /// Number of the snapshot.
    pub number: SnapshotNumber,
    /// Base, which need not be saved again.
    pub base: Option<Base>,
    /// The member's seat at its group's network; none without other members.
    pub seat: Option<Arc<MemberSeat>>,
}

/// Source of a member's image.
enum Image {
    /// The guest, which is paused.
    Own(Box<Capture>),
    /// Its backup.
    Mirrored(Box<MirroredCapture>),
}

impl Image {
    fn prepare(host: &Arc<Host>, start: Start<'_>) -> anyhow::Result<Image> {
        let vm = host.going_primary(start.task.vm())?;
        check_restorable(&vm.machine().definition_now())?;
        await_whole(host, start.task.vm())?;
        Ok(match vm.active_session() {
            Some(session) => {
                let prepared = MirroredCapture::prepare(host, start, vm.machine(), session);
                Image::Mirrored(Box::new(prepared?))
            }
            None => Image::Own(Box::new(Capture::prepare(host, start)?)),
        })
    }

    fn take(&mut self) -> anyhow::Result<()> {
        match self {
            Image::Own(capture) => capture.take(),
            Image::Mirrored(capture) => capture.take(),
        }
    }

    /// The part, and what makes it the base of the next one.
    fn save(self, stop: &Stop) -> anyhow::Result<(Part, Option<Saved>)> {
        Ok(match self {
            Image::Own(capture) => capture.save(stop).map(|(part, saved)| (part, Some(saved)))?,
            Image::Mirrored(capture) => (capture.save(stop)?, None),
        })
    }
}

/// Waits a moment for the end of what has loaded all of a restored VM; one that is still being loaded is refused.
fn await_whole(host: &Host, vm: &VmName) -> anyhow::Result<()> {
    let deadline = Instant::now() + NOTED;
    while host.snapshots.is_loading(vm) {
        if host.snapshots.filling(vm).is_some() || Instant::now() > deadline {
            bail!(
                "{vm} is still being loaded from a snapshot: try again when that has ended (`understudy status {vm}`)"
            );
        }
        thread::sleep(LOOK);
    }
    Ok(())
}

/// A version that checked less may have started it.
fn check_restorable(definition: &VmDefinition) -> anyhow::Result<()> {
    let checked = CheckedDefinition::try_from(definition.clone());
    checked.map(drop).context("no host would restore it: its definition is wrong")
}

impl Host {
    /// A coordinator says something about the snapshot of a member that runs here.
    pub(super) fn take_order(
        self: &Arc<Self>,
        task: TakeTask,
        order: About<TakeOrder>,
        reply: &Reply,
    ) {
        self.snapshots.note_number(&task.group.name, order.number);
        let taking = self.taking(&task, reply);
        taking.order(task, order, reply);
    }

    fn taking(self: &Arc<Self>, task: &TakeTask, reply: &Reply) -> Arc<Taking> {
        self.snapshots.note(|known| {
            let taking = known.takings.entry(task.vm().to_owned());
            taking.or_insert_with(|| Taking::new(self, task.clone(), reply)).clone()
        })
    }
}

impl Snapshots {
    /// Lets go of what was kept for the next snapshots of VMs that are gone.
    pub(super) fn forget_gone(&self) {
        let takings: Vec<Arc<Taking>> =
            self.look(|known| known.takings.values().cloned().collect());
        for taking in takings {
            let gone = lock(&taking.state).forget_gone();
            // Not under the lock: it is large.
            drop(gone);
        }
    }
}

impl Host {
    /// A VM was restored from a snapshot, and all of it is there: the next one need not save
    /// again what its disks have kept.
    pub(super) fn note_base(
        self: &Arc<Self>,
        restored: &RestoreTask,
        id: BaseId,
        machine: &Machine,
    ) {
        let base = match Base::of_restored(restored, id, machine, &self.config.store_keys) {
            Ok(base) => base,
            Err(error) => {
                warn!(vm = %restored.vm(), "its next snapshot saves everything: {error:#}");
                return;
            }
        };
        let task = TakeTask {
            group: restored.group.clone(),
            member: restored.member,
            store: restored.store.clone(),
            compression: Compression::default(),
            trace_ms: TraceTime::NONE,
            recency: false,
        };
        // Whoever orders a snapshot says where reports go.
        let nobody: Reply = Arc::new(|_| ());
        let taking = self.taking(&task, &nobody);
        lock(&taking.state).base = Some(base);
    }
}

impl Taking {
    fn new(host: &Arc<Host>, task: TakeTask, reply: &Reply) -> Arc<Taking> {
        let state = State {
            task,
            cohort: cohort(),
            reply: reply.clone(),
            job: None,
            base: None,
            saved: None,
            thread: None,
        };
        Arc::new(Taking { host: Arc::downgrade(host), state: Mutex::new(state) })
    }

    /// Whether a snapshot is being taken.
    pub fn is_under_way(&self) -> bool {
        lock(&self.state).is_busy()
    }

    fn order(self: &Arc<Self>, task: TakeTask, order: About<TakeOrder>, reply: &Reply) {
        let mut state = lock(&self.state);
        if (&task.group.name, &task.store) != (&state.task.group.name, &state.task.store) {
            if state.is_busy() {
                let why = format!("{} is in a snapshot of {}", task.vm(), state.task.group.name);
                let failed = TakeReport::Failed { why };
                return reply(ToCoordinator::Take(
                    task.member,
                    About { number: order.number, said: failed },
                ));
            }
            // Numbers are a group's own, in its store.
            state.cohort = cohort();
        }
        (state.task, state.reply) = (task, reply.clone());
        self.handle(&mut state, TakeEvent::Order(order));
    }

    fn event(self: &Arc<Self>, event: TakeEvent) {
        self.handle(&mut lock(&self.state), event);
    }

    /// Handles an event under the lock, so that the order of actions is the order of events.
    fn handle(self: &Arc<Self>, state: &mut State, event: TakeEvent) {
        let mut actions = Vec::new();
        state.cohort.handle(clock::now(), event, &mut actions);
        for action in actions {
            match action {
                TakeAction::Prepare(number) => self.begin(state, number),
                TakeAction::Take(number) => self.take_now(state, number),
                TakeAction::Commit(number) => {
                    info!(vm = %state.task.vm(), "snapshot {number} of {}", state.task.group.name);
                    // Of a protected VM nothing is noted that the next one could leave out.
                    if let Some(saved) = state.saved.take() {
                        state.base = Some(saved.commit());
                    }
                    if let Some(job) = state.job.take() {
                        job.end_cut(number);
                    }
                }
                TakeAction::Discard(number) => {
                    warn!(vm = %state.task.vm(), "snapshot {number} is given up");
                    state.end(number);
                    // It counts as changed since the base again.
                    let saved = state.saved.take().is_some();
                    if let Some(base) = state.base.as_mut().filter(|_| saved) {
                        base.doubt();
                    }
                }
                TakeAction::Report(report) => {
                    (state.reply)(ToCoordinator::Take(state.task.member, report));
                }
            }
        }
    }

    fn begin(self: &Arc<Self>, state: &mut State, number: SnapshotNumber) {
        let host = self.host.upgrade();
        let seat = host.and_then(|host| host.seat_of(state.task.vm(), &state.task.group.name));
        let (now, told) = match &seat {
            Some(seat) => (Now::Cut(seat.clone()), seat.await_take(number)),
            None => {
                let (now, told) = crossbeam_channel::bounded(1);
                (Now::Order(now), told)
            }
        };
        let stop = Arc::new(Stop::default());
        state.job = Some(Job { stop: stop.clone(), now });
        let (taking, task, base) = (self.clone(), state.task.clone(), state.base.clone());
        let former = state.thread.take();
        let (ticking, work) = (self.clone(), stop.clone());
        let tick = move || {
            while lock(&ticking.state).is_busy() {
                thread::sleep(TICK);
                ticking.event(TakeEvent::Tick);
                ticking.event(TakeEvent::Working(number, work.looks()));
            }
        };
        let take = move || {
            let start = Start { task: &task, number, base, seat };
            let taken = await_end(former).and_then(|()| taking.take(start, &told, &stop));
            if let Err(error) = taken {
                taking.event(TakeEvent::Failed(number, format!("{error:#}")));
            }
        };
        let (vm, Some(host)) = (state.task.vm(), self.host.upgrade()) else { return };
        let start = || -> io::Result<JoinHandle<()>> {
            spawn(format!("tick-{vm}"), tick)?;
            spawn(format!("take-{vm}"), take)
        };
        match within(&containment::of_vm(&host, vm), start) {
            Ok(thread) => state.thread = Some(thread),
            Err(error) => error!(%vm, "it is not snapshotted: cannot start a thread: {error}"),
        }
    }

    fn take_now(self: &Arc<Self>, state: &State, number: SnapshotNumber) {
        match state.job.as_ref().map(|job| &job.now) {
            // A thread that has failed says so itself.
            Some(Now::Order(now)) => drop(now.send(())),
            Some(Now::Cut(seat)) if !seat.take_now(number) => {
                let why = "the members have seen a later snapshot of the cluster: try again";
                let taking = self.clone();
                // Not under the lock.
                let failed = move || taking.event(TakeEvent::Failed(number, why.to_owned()));
                spawn_for_request("too-late", failed);
            }
            Some(Now::Cut(_)) | None => {}
        }
    }

    /// Prepares, waits to be told, takes, saves.
    fn take(
        self: &Arc<Self>,
        start: Start<'_>,
        told: &Receiver<()>,
        stop: &Stop,
    ) -> anyhow::Result<()> {
        let Some(host) = self.host.upgrade() else { return Ok(()) };
        let number = start.number;
        let mut image = Image::prepare(&host, start)?;
        pass("snapshot-prepared");
        self.event(TakeEvent::Prepared(number));
        if told.recv().is_err() {
            return Ok(());
        }
        image.take()?;
        pass("snapshot-taken");
        self.event(TakeEvent::Taken(number));
        let (part, saved) = image.save(stop)?;
        pass("snapshot-saved");
        let mut state = lock(&self.state);
        self.handle(&mut state, TakeEvent::Saved(number, part));
        // Of one that was given up meanwhile nobody else would ever let go: what it has taken of the
        // memory, and the machine.
        let given_up = match state.cohort.has_saved(number) {
            true => std::mem::replace(&mut state.saved, saved),
            false => saved,
        };
        drop(state);
        drop(given_up);
        Ok(())
    }
}

impl State {
    fn is_busy(&self) -> bool {
        self.cohort.deadline().is_some()
    }

    /// What the next one would begin with, if its machine is gone. Its number stays known: the coordinator may ask again.
    fn forget_gone(&mut self) -> Option<Base> {
        if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
            self.thread = None;
        }
        self.base.take_if(|base| base.is_of_gone())
    }

    fn end(&mut self, number: SnapshotNumber) {
        let Some(job) = self.job.take() else { return };
        job.stop.say();
        job.end_cut(number);
    }
}

impl Job {
    fn end_cut(&self, number: SnapshotNumber) {
        if let Now::Cut(seat) = &self.now {
            seat.end(number);
        }
    }
}

/// Waits for the thread before, which gives back what it took of memory and disks when it ends.
fn await_end(former: Option<JoinHandle<()>>) -> anyhow::Result<()> {
    let deadline = Instant::now() + ENDING;
    while former.as_ref().is_some_and(|former| !former.is_finished()) {
        if Instant::now() > deadline {
            bail!("what was begun of the snapshot before still waits for its store: try again");
        }
        thread::sleep(LOOK);
    }
    Ok(())
}

fn cohort() -> TakeCohort {
    TakeCohort::new(SnapshotNumber(0), clock::now())
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_cluster::messages::GroupPlaces;
    use understudy_protocol::literal;
    use understudy_snapshot::Member;

    /// Regression: it stayed for as long as the daemon ran, a hundred megabytes of it.
    #[test]
    fn what_the_next_snapshot_would_begin_with_goes_with_its_machine() {
        let (machine, nobody) = (Arc::new(()), Arc::new(|_| ()) as Reply);
        let task = TakeTask {
            group: GroupPlaces {
                name: literal("shop"),
                vms: vec![literal("db")],
                hosts: vec![literal("a")],
            },
            member: Member(0),
            store: "/srv".parse().unwrap(),
            compression: Compression::default(),
            trace_ms: TraceTime::NONE,
            recency: false,
        };
        let base = Base::of_nothing(&task, Arc::downgrade(&machine));
        let taking = Arc::new(Taking {
            host: Weak::new(),
            state: Mutex::new(State {
                cohort: cohort(),
                reply: nobody,
                job: None,
                base: Some(base),
                saved: None,
                thread: Some(thread::spawn(|| ())),
                task,
            }),
        });
        let snapshots = Snapshots::default();
        snapshots.note(|known| known.takings.insert(literal("db"), taking.clone()));
        snapshots.forget_gone();
        assert!(lock(&taking.state).base.is_some(), "its machine runs");
        drop(machine);
        snapshots.forget_gone();
        assert!(lock(&taking.state).base.is_none());
        while lock(&taking.state).thread.is_some() {
            snapshots.forget_gone();
        }
    }

    /// It was snapshotted, and every restore refused it.
    #[test]
    fn what_no_host_would_restore_is_not_snapshotted() {
        let definition = |cpu: &str| -> VmDefinition {
            let text = "name = 'db'\nmemory = '64M'\nvcpus = 1\nkernel = '/boot/vmlinuz'\n";
            toml::from_str(&format!("{text}cpu = '{cpu}'")).unwrap()
        };
        assert!(check_restorable(&definition("Westmere")).is_ok());
        let refused = format!("{:#}", check_restorable(&definition("host")).unwrap_err());
        assert!(refused.contains("definition is wrong: cpu: \"host\" means"), "{refused}");
    }
}
