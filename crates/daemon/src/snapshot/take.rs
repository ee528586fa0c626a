//! One member of a group that is being snapshotted, on the host that runs it.

use super::capture::{Base, Capture};
use super::words::{Heard, Reply, TakeTask};
use crate::clock;
use crate::host::Host;
use crate::sync::lock;
use crossbeam_channel::{Receiver, Sender};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Duration;
use tracing::{info, warn};
use understudy_snapshot::{
    About, SnapshotNumber, TakeAction, TakeCohort, TakeEvent, TakeOrder, TakeReport,
};

/// How often a cohort looks whether its coordinator has been silent for too long.
const TICK: Duration = Duration::from_millis(500);

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
    /// Of the one that is being taken, once it is saved.
    saved: Option<Base>,
}

/// The thread that takes a snapshot.
struct Job {
    stop: Arc<AtomicBool>,
    /// Told when the VM is to be paused.
    now: Sender<()>,
}

impl Host {
    /// A coordinator says something about the snapshot of a member that runs here.
    pub(super) fn take_order(
        self: &Arc<Self>,
        task: TakeTask,
        order: About<TakeOrder>,
        reply: &Reply,
    ) {
        let taking = lock(&self.snapshots.takings)
            .entry(task.vm().to_owned())
            .or_insert_with(|| Taking::new(self, task.clone(), reply))
            .clone();
        taking.order(task, order, reply);
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
                return reply(Heard::Take(
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

    /// Under the lock, so that the order of actions is the order of events.
    fn handle(self: &Arc<Self>, state: &mut State, event: TakeEvent) {
        let mut actions = Vec::new();
        state.cohort.handle(clock::now(), event, &mut actions);
        for action in actions {
            match action {
                TakeAction::Prepare(number) => self.begin(state, number),
                TakeAction::Take(_) => {
                    if let Some(job) = &state.job {
                        // One that has failed says so itself.
                        let _ = job.now.send(());
                    }
                }
                TakeAction::Commit(number) => {
                    info!(vm = state.task.vm(), "snapshot {number} of {}", state.task.group.name);
                    state.base = state.saved.take();
                    state.job = None;
                }
                TakeAction::Discard(number) => {
                    warn!(vm = state.task.vm(), "snapshot {number} is given up");
                    state.end();
                    // What changed since the base is known no more.
                    (state.base, state.saved) = (None, None);
                }
                TakeAction::Report(report) => {
                    (state.reply)(Heard::Take(state.task.member, report));
                }
            }
        }
    }

    fn begin(self: &Arc<Self>, state: &mut State, number: SnapshotNumber) {
        let (now, told) = crossbeam_channel::bounded(1);
        let stop = Arc::new(AtomicBool::new(false));
        state.job = Some(Job { stop: stop.clone(), now });
        let (taking, task, base) = (self.clone(), state.task.clone(), state.base.take());
        thread::spawn(move || {
            if let Err(error) = taking.take(&task, number, base, &told, &stop) {
                taking.event(TakeEvent::Failed(number, format!("{error:#}")));
            }
        });
        let taking = self.clone();
        thread::spawn(move || {
            while lock(&taking.state).is_busy() {
                thread::sleep(TICK);
                taking.event(TakeEvent::Tick);
            }
        });
    }

    /// Prepares, waits to be told, takes, saves.
    fn take(
        self: &Arc<Self>,
        task: &TakeTask,
        number: SnapshotNumber,
        base: Option<Base>,
        told: &Receiver<()>,
        stop: &AtomicBool,
    ) -> anyhow::Result<()> {
        let Some(host) = self.host.upgrade() else { return Ok(()) };
        let mut capture = Capture::prepare(&host, task, base)?;
        fail::fail_point!("snapshot-prepared");
        self.event(TakeEvent::Prepared(number));
        if told.recv().is_err() {
            return Ok(());
        }
        capture.take()?;
        fail::fail_point!("snapshot-taken");
        self.event(TakeEvent::Taken(number));
        let (part, base) = capture.save(number, stop)?;
        fail::fail_point!("snapshot-saved");
        let mut state = lock(&self.state);
        state.saved = Some(base);
        self.handle(&mut state, TakeEvent::Saved(number, part));
        Ok(())
    }
}

impl State {
    fn is_busy(&self) -> bool {
        self.cohort.deadline().is_some()
    }

    fn end(&mut self) {
        if let Some(job) = self.job.take() {
            job.stop.store(true, Ordering::Release);
        }
    }
}

fn cohort() -> TakeCohort {
    TakeCohort::new(SnapshotNumber(0), clock::now())
}
