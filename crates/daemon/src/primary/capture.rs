//! The checkpoint (Remus 2.2): pause, barrier, capture, resume. All else runs
//! beside the guest. The members of a group meet before the pause and in it.

use super::send::Outgoing;
use super::session::{Session, Step};
use super::stats::milliseconds;
use crate::clock;
use crate::lockstep;
use crate::machine::Machine;
use crate::report::CheckpointTiming;
use anyhow::Context;
use std::sync::Arc;
use tracing::warn;
use understudy_memory::{DirtySet, DirtyTracker, PageStaging, StagingPool, capture};
use understudy_protocol::wire::Kind;
use understudy_protocol::{Epoch, LastCheckpoint, PAGE_SIZE, Time};
use understudy_qemu::Urgency;
use understudy_qemu::lockstep::LogErrand;

/// An epoch that wrote at least this many pages gets pre-copy rounds just
/// before the next pause: the guest then stands still only for what it wrote
/// during the last.
const PRECOPY_PAGES: u64 = 256;

/// A guest that writes as much again during a round gets another, up to so many.
const PRECOPY_ROUNDS: u32 = 3;

/// Pages copied at once while the guest runs; bounds the memory of a round.
const PIECE_PAGES: u64 = 2048;

/// The first synchronisation ends when a round leaves this few pages …
const SYNC_LAST_PAGES: u64 = 2000;

/// … or after this many rounds, for guests that write faster than the link.
const SYNC_ROUNDS: u32 = 8;

/// Takes checkpoints until protection ends. An error says why it could not.
pub fn run(session: &Arc<Session>) -> anyhow::Result<()> {
    let mut tracker = session.machine.tracker()?;
    let tracker = tracker.as_mut().context("the tracker was attached")?;
    let mut capturer = Capturer::new(session, tracker)?;
    if !capturer.first_synchronisation()? {
        return Ok(());
    }
    capturer.checkpoint(false)?;
    if let Some(recording) = &session.recording {
        return lockstep::primary::run(session, recording);
    }
    loop {
        match session.next_step() {
            Step::Checkpoint => capturer.checkpoint(false)?,
            Step::Look => capturer.look()?,
            Step::LastCheckpoint => {
                capturer.checkpoint(true)?;
                session.await_hand_over();
                return Ok(());
            }
            Step::End => return Ok(()),
        }
    }
}

struct Capturer<'a> {
    session: &'a Arc<Session>,
    machine: &'a Machine,
    tracker: &'a mut DirtyTracker,
    staging: PageStaging,
    dirty: DirtySet,
    piece: DirtySet,
    device_state: Vec<u8>,
    last_pages: u64,
    /// None where the system does not allow it.
    urgency: Option<Urgency>,
}

impl<'a> Capturer<'a> {
    fn new(
        session: &'a Arc<Session>,
        tracker: &'a mut DirtyTracker,
    ) -> anyhow::Result<Capturer<'a>> {
        let pool = StagingPool::new(understudy_memory::DEFAULT_WARM_BYTES)?;
        Ok(Capturer {
            session,
            machine: &session.machine,
            tracker,
            staging: PageStaging::new(pool),
            dirty: DirtySet::new(),
            piece: DirtySet::new(),
            device_state: Vec::new(),
            last_pages: 0,
            urgency: urgency(session),
        })
    }

    /// Copies disks and memory while the guest runs, until little is left for
    /// the first pause. False when protection ended meanwhile.
    fn first_synchronisation(&mut self) -> anyhow::Result<bool> {
        let session = self.session;
        super::mirror::begin(session);
        if session.recording.is_none() {
            super::inbound::begin(session);
        }
        let shares = super::mirror::shares(session)?;
        self.tracker.arm()?;
        self.dirty.clear();
        for block in self.machine.blocks() {
            block.add_content_to(&mut self.dirty)?;
        }
        session.progress.expect(self.dirty.pages() * PAGE_SIZE as u64);
        super::mirror::copy_disks(session, &shares)?;
        self.copy_memory()?;
        if session.group.is_shared() {
            // Others may take longer; the guest has written meanwhile.
            session.group.meet(session, || ())?;
            self.tracker.scan(&mut self.dirty)?;
            self.copy_memory()?;
        }
        Ok(!session.is_over())
    }

    /// Copies all of `dirty` and what is written meanwhile, until that is little.
    fn copy_memory(&mut self) -> anyhow::Result<()> {
        for _ in 0..SYNC_ROUNDS {
            self.send_dirty(Epoch(0))?;
            self.tracker.scan(&mut self.dirty)?;
            self.session.progress.expect(self.dirty.pages() * PAGE_SIZE as u64);
            if self.dirty.pages() < SYNC_LAST_PAGES || self.session.is_over() {
                break;
            }
        }
        self.send_dirty(Epoch(0))
    }

    /// Copies and queues all of `dirty`, piece by piece, while the guest runs.
    fn send_dirty(&mut self, epoch: Epoch) -> anyhow::Result<()> {
        while !self.dirty.is_empty() && !self.session.is_over() {
            self.dirty.take(PIECE_PAGES, &mut self.piece);
            capture(self.machine.blocks(), &self.piece, &mut self.staging)?;
            for chunk in self.staging.take().chunks {
                self.session.outbox.put(Outgoing::Pages(epoch, chunk));
            }
            self.session.progress.advance(self.piece.pages() * PAGE_SIZE as u64);
        }
        Ok(())
    }

    /// One checkpoint. With `last`, the guest is left paused.
    fn checkpoint(&mut self, last: bool) -> anyhow::Result<()> {
        let epoch = self.session.running();
        let began = clock::now();
        let precopied_pages = self.precopy(epoch)?;
        self.session.group.meet(self.session, || ())?;
        let vcpu_percent = self.session.pace.report().vcpu_percent;
        let mut timing =
            CheckpointTiming { epoch, precopied_pages, vcpu_percent, ..Default::default() };
        for disk in self.machine.disks() {
            disk.begin_checkpoint();
        }
        let unlimited = self.session.pace.lift();
        let urgent = self.urgency.take();
        let guard = urgent.as_ref().map(Urgency::begin);
        self.session.inbound.begin_epoch(epoch.next());
        let mut watch = Stopwatch::start();
        let captured = self.pause_and_copy(last, &mut watch, &mut timing);
        drop(guard);
        self.urgency = urgent;
        drop(unlimited);
        for disk in self.machine.disks() {
            disk.end_checkpoint();
        }
        captured?;
        timing.total_ms = milliseconds(watch.now - watch.started);
        self.session.watch.resumed();
        self.last_pages = timing.pages + timing.precopied_pages;
        self.session.stats.captured(timing, watch.now);
        self.session.pace.captured(epoch, self.last_pages, began);
        self.queue(epoch);
        let checkpoint =
            LastCheckpoint { started: watch.started, resumed: watch.now, pages: self.last_pages };
        self.session.group.rendezvous().resumed(checkpoint);
        self.session.group.ring();
        Ok(())
    }

    /// Looks how much the guest has written, and cuts its epoch short if it is too much.
    fn look(&mut self) -> anyhow::Result<()> {
        let dirty = self.tracker.count()?;
        if self.session.pace.looked(dirty) {
            self.session.cut_short();
        }
        Ok(())
    }

    fn precopy(&mut self, epoch: Epoch) -> anyhow::Result<u64> {
        // Where the link is the limit, what is sent twice costs more than a pause.
        if self.last_pages < PRECOPY_PAGES || self.session.pace.is_limiting() {
            return Ok(0);
        }
        let mut pages = 0;
        for _ in 0..PRECOPY_ROUNDS {
            self.tracker.scan(&mut self.dirty)?;
            let found = self.dirty.pages();
            pages += found;
            self.send_dirty(epoch)?;
            // So few are written in the time of a round that another gains nothing.
            if found < PRECOPY_PAGES {
                break;
            }
        }
        Ok(pages)
    }

    /// What happens while the guest stands still.
    fn pause_and_copy(
        &mut self,
        last: bool,
        watch: &mut Stopwatch,
        timing: &mut CheckpointTiming,
    ) -> anyhow::Result<()> {
        let mut monitor = self.machine.monitor();
        let errand = match self.session.recording {
            Some(_) => LogErrand::Attach,
            None => LogErrand::None,
        };
        let mut pause = self.machine.pause(&mut monitor, errand)?;
        // Nobody runs on, or is copied, before all stand still.
        let group = &self.session.group;
        group.meet(self.session, || group.place_barrier(self.session, last))?;
        if self.session.recording.is_some() {
            super::mirror::end(self.session);
        }
        timing.stop_ms = watch.lap();
        self.tracker.scan(&mut self.dirty)?;
        timing.scan_ms = watch.lap();
        capture(self.machine.blocks(), &self.dirty, &mut self.staging)?;
        fail::fail_point!("while-paused");
        timing.pages = self.dirty.pages();
        timing.copy_ms = watch.lap();
        pause.saved(&mut self.device_state)?;
        timing.blob_ms = watch.lap();
        if !last {
            pause.resume()?;
        }
        timing.cont_ms = watch.lap();
        Ok(())
    }

    fn queue(&mut self, epoch: Epoch) {
        let outbox = &self.session.outbox;
        for chunk in self.staging.take().chunks {
            outbox.put_now(Outgoing::Pages(epoch, chunk));
        }
        super::outbound::queue(self.session, epoch);
        let state = self.device_state.clone();
        outbox.put_now(Outgoing::Data(Kind::DeviceState, epoch, state));
        outbox.put_now(Outgoing::EpochEnd(epoch));
    }
}

fn urgency(session: &Session) -> Option<Urgency> {
    let machine = &session.machine;
    let disks = machine.disks().iter().filter_map(|disk| disk.server_thread());
    let urgency = Urgency::new(machine.qemu_pid(), disks);
    let refused = |error: &std::io::Error| {
        warn!(
            vm = session.vm,
            "no real-time priority for checkpoints ({error}): pauses will be longer; run the \
             daemon as root or with CAP_SYS_NICE"
        );
    };
    urgency.inspect_err(refused).ok()
}

/// Laps of one checkpoint.
struct Stopwatch {
    started: Time,
    now: Time,
}

impl Stopwatch {
    fn start() -> Stopwatch {
        let now = clock::now();
        Stopwatch { started: now, now }
    }

    /// Milliseconds since the last lap.
    fn lap(&mut self) -> f64 {
        let before = std::mem::replace(&mut self.now, clock::now());
        milliseconds(self.now - before)
    }
}
