//! The watch over writes to a guest's memory, and accesses: in one way at a time.

use crate::Machine;
use crate::tracking::{LogTracker, Tracker};
use anyhow::{bail, ensure};
use std::sync::Arc;
use std::thread;
use tracing::{info, warn};
use understudy_memory::{CaptureRequest, Cut, DirtySet, DirtyTracker, Guard, Reprotect, Sample};
use understudy_protocol::PageIndex;
use understudy_qemu::Accelerator;
use understudy_threads::{MutexGuard, Waitable};

/// The watcher of one machine's memory now. Who waits is woken when the tracker is given back.
#[derive(Default)]
pub(crate) struct Watching(Waitable<State>);

/// The tracker, and in its place the watchers for snapshots. The sample is a part of the guard, and
/// dropped before it.
#[derive(Default)]
struct State {
    /// Whether somebody protects the VM, who has the tracker.
    is_protected: bool,
    tracker: Option<Tracker>,
    /// Pages that are watched in normal running.
    sample: Option<Sample>,
    guard: Option<Arc<Guard>>,
    /// Tracker of all blocks but main memory, while a snapshot is being prepared.
    auxiliary: Option<DirtyTracker>,
}

impl State {
    fn drop_guard(&mut self) {
        self.sample = None;
        self.guard = None;
    }

    fn drop_all(&mut self) {
        self.drop_guard();
        (self.tracker, self.auxiliary) = (None, None);
    }
}

/// The tracker of a VM that is protected; given back when dropped.
pub struct Tracking<'a> {
    watching: &'a Watching,
    tracker: Option<Tracker>,
}

impl Tracking<'_> {
    /// The tracker.
    pub fn tracker(&mut self) -> &mut Tracker {
        self.tracker.as_mut().expect("there is one from the beginning to the end")
    }
}

impl Drop for Tracking<'_> {
    fn drop(&mut self) {
        // What a panic has left half done nobody goes on with.
        let tracker = self.tracker.take().filter(|_| !thread::panicking());
        self.watching.0.change(|state| {
            state.is_protected = false;
            state.tracker = tracker;
        });
    }
}

impl Machine {
    /// Has its writes tracked for whoever protects it; one at a time, the next waits. The tracker is attached at its
    /// first use.
    pub fn track(&self) -> anyhow::Result<Tracking<'_>> {
        let mut state = self.unwatched();
        let tracker = state.tracker.take();
        // What changed since the last snapshot is known no more: the next one saves all.
        state.drop_all();
        state.is_protected = true;
        drop(state);
        let mut tracking = Tracking { watching: &self.watching, tracker };
        if tracking.tracker.is_none() {
            tracking.tracker = Some(self.new_tracker()?);
        }
        Ok(tracking)
    }

    /// The watchers, once nobody protects it.
    fn unwatched(&self) -> MutexGuard<'_, State> {
        let watching = &self.watching.0;
        watching.wait_while(watching.lock(), |state| state.is_protected)
    }

    fn new_tracker(&self) -> anyhow::Result<Tracker> {
        let name = &self.definition().name;
        match (self.accelerator(), self.pauser.agent()) {
            (Accelerator::Tcg, _) => {}
            (Accelerator::Kvm, _) if self.definition().has_ahci_drives() => {
                info!(vm = %name, "written pages are found by scans, which cost a guest on KVM more: \
                      QEMU's log does not have what its AHCI controller writes");
            }
            (Accelerator::Kvm, None) => {
                warn!(vm = %name, "written pages are found by scans, which cost a guest on KVM \
                      more: pauses go through QMP");
            }
            (Accelerator::Kvm, Some(agent)) => {
                if let Some(log) = LogTracker::begin(name, agent, &self.agent, self.blocks())? {
                    return Ok(Tracker::Log(log));
                }
            }
        }
        let (pid, uffd) = (self.agent.pid(), self.agent.userfaultfd().clone());
        Ok(Tracker::Scans(DirtyTracker::attach(pid, uffd, self.blocks(), self.reprotect())?))
    }

    /// The way in which scans of its memory protect again: KVM is spared the loss of its mappings
    /// (docs/decisions/001-dirty-tracking-on-kvm.md).
    fn reprotect(&self) -> Reprotect {
        match self.accelerator() {
            Accelerator::Tcg => Reprotect::AtOnce,
            Accelerator::Kvm => Reprotect::Runs,
        }
    }

    /// The guard of main memory, attached at its first use; not while the VM is protected, since
    /// memory is watched in one way at a time.
    fn guard(&self) -> anyhow::Result<(MutexGuard<'_, State>, Arc<Guard>)> {
        let mut watching = self.unprotected()?;
        watching.tracker = None;
        if let Some(guard) = watching.guard.clone() {
            return Ok((watching, guard));
        }
        let (faults, mappings) = (self.agent.faults(), self.agent.mappings());
        let guard = Arc::new(Guard::attach(faults, mappings, self.main_memory())?);
        watching.guard = Some(guard.clone());
        Ok((watching, guard))
    }

    /// Has writes to all blocks but main memory seen by [`Machine::scan_auxiliary`] from now on.
    pub fn track_auxiliary(&self) -> anyhow::Result<()> {
        // Until it is there, protection cannot begin.
        let mut watching = self.unprotected()?;
        watching.tracker = None;
        let uffd = self.agent.userfaultfd().clone();
        let (pid, blocks) = (self.agent.pid(), &self.blocks()[1..]);
        let mut auxiliary = DirtyTracker::attach(pid, uffd, blocks, self.reprotect())?;
        auxiliary.arm()?;
        watching.auxiliary = Some(auxiliary);
        Ok(())
    }

    /// Adds what was written to them since.
    pub fn scan_auxiliary(&self, dirty: &mut DirtySet) -> anyhow::Result<()> {
        match &mut self.watching().auxiliary {
            Some(auxiliary) => Ok(auxiliary.scan(dirty)?),
            None => bail!("protection of {} has begun meanwhile", self.definition().name),
        }
    }

    /// Writes to them need not be seen any more.
    pub fn forget_auxiliary(&self) {
        self.watching().auxiliary = None;
    }

    /// The watchers of a VM that nobody protects; nobody begins to while they are locked.
    fn unprotected(&self) -> anyhow::Result<MutexGuard<'_, State>> {
        let watching = self.watching();
        ensure!(!watching.is_protected, "{} is protected by checkpoints", self.definition().name);
        Ok(watching)
    }

    fn watching(&self) -> MutexGuard<'_, State> {
        self.watching.0.lock()
    }

    /// Gets ready for a cut of main memory. Sampling ends before: one of them at a time.
    pub fn arm_cut(&self, request: CaptureRequest) -> anyhow::Result<Cut> {
        let (mut watching, guard) = self.guard()?;
        watching.sample = None;
        Ok(guard.arm(request)?)
    }

    /// Watches these pages of main memory until [`Machine::end_sample`]. False if nothing guards
    /// memory, or a snapshot does: sampling alone is no reason to have the guest wait at its
    /// writes.
    pub fn begin_sample(&self, pages: &[PageIndex]) -> bool {
        let mut watching = self.watching();
        let Some(guard) = watching.guard.clone() else { return false };
        watching.sample = guard.sample(pages).ok();
        watching.sample.is_some()
    }

    /// The watched pages that were accessed; none if something else has ended the watch.
    pub fn end_sample(&self) -> Option<Vec<PageIndex>> {
        self.watching().sample.take().map(Sample::end)
    }

    /// Watches all pages of main memory; [`Machine::drop_guard`] afterwards. Its guest waits at the
    /// first access to each.
    pub fn watch_all(&self) -> anyhow::Result<Sample> {
        let all: Vec<PageIndex> = (0..self.main_memory().pages()).map(PageIndex).collect();
        let guard = self.guard()?.1;
        Ok(guard.sample(&all)?)
    }

    /// Lets go of all memory: accesses that somebody else does not see would wait for this process, which ends. The VM
    /// is neither protected nor snapshotted.
    pub(crate) fn stop_watching(&self) {
        self.unwatched().drop_all();
    }

    /// Lets go of main memory, once nobody has the guard any more.
    pub fn drop_guard(&self) {
        self.watching().drop_guard();
    }
}
