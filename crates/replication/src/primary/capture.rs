//! The checkpoint (Remus 2.2): pause, barrier, capture, resume. All else runs
//! beside the guest. The members of a group meet before the pause and in it.

use super::due::Step;
use super::keep::Closing;
use super::pace::{GuestPace, Outruns};
mod synchronisation;
mod turns;

use super::send::Outgoing;
use super::session::Session;
use super::stats::milliseconds;
use crate::clock;
use crate::lockstep::primary::Followed;
use crate::messages::{Piece, device_state};
use crate::moments::{stand_still, strike};
use std::sync::Arc;
use std::time::Duration;
use tracing::warn;
use understudy_machine::{Machine, Tracker};
use understudy_memory::{DirtySet, PageStaging, StagingPool, capture};
use understudy_protocol::{Allowance, Epoch, LastCheckpoint, PrimaryPhase, Time};
use understudy_qemu::Urgency;
use understudy_report::{CheckpointTiming, DiskReads};
use understudy_session::primary::{Event, MACHINE};

/// An epoch that wrote at least this many pages gets pre-copy rounds just
/// before the next pause: the guest then stands still only for what it wrote
/// during the last.
const PRECOPY_PAGES: u64 = 256;

/// A guest that writes as much again during a round gets another, up to so many.
const PRECOPY_ROUNDS: u32 = 3;

/// The largest piece in which what the guest says on its console travels.
const CONSOLE_PIECE_BYTES: usize = 1 << 20;

/// The further part that a checkpoint has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    /// No other part.
    Plain,
    /// The last one: the guest is left paused.
    Last,
    /// The log begins with its pause.
    LogBegins,
    /// The log ends with its pause.
    LogEnds,
}

/// Takes checkpoints, and sees to the log, until protection ends. An error says why it could not.
pub fn run(session: &Arc<Session>) -> anyhow::Result<()> {
    let mut begin = Begin::Synchronisation;
    loop {
        let machine = session.machine();
        let mut tracking = machine.track()?;
        let mut capturer = Capturer::new(session, &machine, tracking.tracker())?;
        match capturer.run(begin)? {
            End::Over => return Ok(()),
            End::Moved(moved) => begin = Begin::Moved(moved),
        }
    }
}

/// The way in which a machine's capture begins.
enum Begin {
    /// The backup has nothing.
    Synchronisation,
    /// The guest came from another machine in the midst of an epoch.
    Moved(Moved),
}

/// The way in which it ends.
enum End {
    /// Protection is over.
    Over,
    /// The guest goes on in another machine.
    Moved(Moved),
}

/// A guest that has just moved into a machine that records, for the sake of its log.
struct Moved {
    /// Pages that it wrote in the former machine since the last checkpoint.
    dirty: DirtySet,
    disk_reads: DiskReads,
}

struct Capturer<'a> {
    session: &'a Arc<Session>,
    machine: &'a Machine,
    tracker: &'a mut Tracker,
    staging: PageStaging,
    dirty: DirtySet,
    piece: DirtySet,
    /// Pages to be copied with the next checkpoint, whatever is found then.
    carried: DirtySet,
    device_state: Vec<u8>,
    /// Allowances of frames that go along with their epoch.
    allowances: Vec<Allowance>,
    last_pages: u64,
    /// Time of the last scan.
    scanned: Time,
    /// Closing of the epoch that is being closed, if a snapshot is made of it.
    closing: Option<Closing>,
    /// Bytes that the guest had sent and was given when the last epoch was closed.
    carried_bytes: u64,
    pace: GuestPace<'a>,
    /// Urgency of QEMU's threads; none where the system does not allow it.
    urgency: Option<Urgency>,
}

impl<'a> Capturer<'a> {
    fn new(
        session: &'a Arc<Session>,
        machine: &'a Machine,
        tracker: &'a mut Tracker,
    ) -> anyhow::Result<Capturer<'a>> {
        let pool = StagingPool::new(understudy_memory::warm_bytes(machine.ram().bytes()))?;
        Ok(Capturer {
            session,
            machine,
            tracker,
            staging: PageStaging::new(pool),
            dirty: DirtySet::new(),
            piece: DirtySet::new(),
            carried: DirtySet::new(),
            device_state: Vec::new(),
            allowances: super::outbound::allowances(machine),
            last_pages: 0,
            scanned: clock::now(),
            closing: None,
            carried_bytes: session.carried(),
            pace: GuestPace::new(&session.vm, machine.qemu_pid(), &session.stats),
            urgency: urgency(session, machine),
        })
    }

    fn run(&mut self, begin: Begin) -> anyhow::Result<End> {
        match (begin, self.session.recording()) {
            (Begin::Synchronisation, recording) => {
                if !self.first_synchronisation()? {
                    return Ok(End::Over);
                }
                match recording {
                    None => self.checkpoint(Cut::Plain)?,
                    Some(recording) => {
                        self.checkpoint(Cut::LogBegins)?;
                        if self.follow(&recording)? == Followed::ToTheEnd {
                            return Ok(End::Over);
                        }
                    }
                }
            }
            (Begin::Moved(moved), _) => {
                self.carried = moved.dirty;
                if self.turn_to_lockstep(moved.disk_reads)? == Followed::ToTheEnd {
                    return Ok(End::Over);
                }
            }
        }
        self.take_checkpoints()
    }

    fn take_checkpoints(&mut self) -> anyhow::Result<End> {
        loop {
            match self.session.next_step() {
                Step::Checkpoint => self.checkpoint(Cut::Plain)?,
                Step::Look => self.look()?,
                Step::LastCheckpoint => {
                    self.checkpoint(Cut::Last)?;
                    self.session.await_hand_over();
                    return Ok(End::Over);
                }
                Step::Turn => {
                    if let Some(end) = self.turn()? {
                        return Ok(end);
                    }
                }
                Step::End => return Ok(End::Over),
            }
        }
    }

    /// Takes one checkpoint.
    fn checkpoint(&mut self, cut: Cut) -> anyhow::Result<()> {
        stand_still("checkpoint-due");
        let epoch = self.session.running();
        let began = clock::now();
        // The end of a log must go before all pages.
        let precopied_pages = if cut == Cut::LogEnds { 0 } else { self.precopy(epoch)? };
        self.session.group.meet(self.session, || ())?;
        let vcpu_percent = self.pace.percent();
        let mut timing =
            CheckpointTiming { epoch, precopied_pages, vcpu_percent, ..Default::default() };
        // A medium that is changed meanwhile has nothing to flush.
        let disks = self.machine.disks();
        disks.iter().for_each(|disk| disk.begin_checkpoint());
        let lifted = self.pace.lift();
        let urgent = self.urgency.take();
        let guard = urgent.as_ref().map(Urgency::begin);
        self.session.inbound.begin_epoch(epoch.next());
        if cut == Cut::Last {
            self.machine.pass_on();
        }
        let mut watch = Stopwatch::start();
        timing.output_waited_ms = self.output_waited(watch.started).map(milliseconds);
        let captured = self.pause_and_copy(cut, &mut watch, &mut timing);
        // While this thread goes before all others: whoever sends finds the whole of the epoch when its turn comes.
        let queued = captured.map(|stopped| {
            // Of a log that ended others may have gone meanwhile.
            let epoch = timing.epoch;
            timing.total_ms = milliseconds(watch.now - watch.started);
            self.session.note_resumed();
            self.last_pages = timing.pages + timing.precopied_pages;
            self.session.stats.captured(timing, began, watch.now);
            self.queue(epoch, cut, stopped);
        });
        drop(guard);
        self.urgency = urgent;
        self.pace.restore(lifted);
        disks.iter().for_each(|disk| disk.end_checkpoint());
        queued?;
        // The kernel takes no thread into a limited group that goes before others.
        self.pace.set(self.session.stats.share(), Outruns::Link);
        let carried = self.session.carried();
        let checkpoint = LastCheckpoint {
            started: watch.started,
            resumed: watch.now,
            pages: self.last_pages,
            carried: carried.saturating_sub(std::mem::replace(&mut self.carried_bytes, carried)),
        };
        let policy = &self.session.policy;
        self.session.group.meeting(|rendezvous| rendezvous.resumed(checkpoint, policy));
        self.session.group.ring_others();
        Ok(())
    }

    /// The time that the first output of the epoch that runs has waited now, if there is any.
    fn output_waited(&self, now: Time) -> Option<Duration> {
        let last = self.session.group.rendezvous().last()?;
        self.session.output_since(last).map(|since| now - since)
    }

    /// Looks how much the guest has written, and cuts its epoch short if it is too much.
    fn look(&mut self) -> anyhow::Result<()> {
        let dirty = self.tracker.count()?;
        if self.session.stats.looked(dirty) {
            self.session.cut_short();
        }
        self.pace.set(self.session.stats.share(), Outruns::Link);
        Ok(())
    }

    fn precopy(&mut self, epoch: Epoch) -> anyhow::Result<u64> {
        // A guess, which spares a scan.
        if self.last_pages < PRECOPY_PAGES || !self.session.stats.may_precopy(0, &[]) {
            return Ok(0);
        }
        let mut sent = Vec::new();
        for _ in 0..PRECOPY_ROUNDS {
            let began = clock::now();
            let written_for = began - std::mem::replace(&mut self.scanned, began);
            self.tracker.scan_before(&mut self.dirty)?;
            let found = self.dirty.pages();
            if !self.session.stats.may_precopy(found, &sent) {
                // No scan will find them any more.
                self.carried.append(&self.dirty);
                break;
            }
            sent.push(found);
            self.send_dirty(epoch)?;
            if !pays_another_round(found, written_for, clock::now() - began) {
                break;
            }
        }
        Ok(sent.iter().sum())
    }

    /// Pauses the guest and copies while it stands still; gives when it stopped.
    fn pause_and_copy(
        &mut self,
        cut: Cut,
        watch: &mut Stopwatch,
        timing: &mut CheckpointTiming,
    ) -> anyhow::Result<Time> {
        let mut monitor = self.machine.monitor();
        let (mut pause, log) = self.stop(cut, &mut monitor)?;
        let stopped = clock::now();
        if log.is_some() {
            // Batches may have gone while it was ending.
            timing.epoch = self.session.running();
            self.session.inbound.begin_epoch(timing.epoch.next());
        }
        // Nobody runs on, or is copied, before all stand still.
        let group = &self.session.group;
        group.meet(self.session, || group.place_barrier(self.session, cut == Cut::Last))?;
        if cut == Cut::LogBegins {
            super::mirror::end(self.session);
        }
        if cut == Cut::Plain && self.session.phase() == PrimaryPhase::Protected {
            self.closing = self.session.keep_in_pause();
        }
        timing.stop_ms = watch.lap();
        // The answer to a TPM's command that runs is written into memory while the state is saved.
        let saved_first = self.machine.definition().tpm.is_some();
        if saved_first {
            pause.saved(&mut self.device_state)?;
        }
        self.scanned = clock::now();
        self.tracker.scan(&mut self.dirty)?;
        self.dirty.unite(&self.carried);
        timing.scan_ms = watch.lap();
        capture(self.machine.blocks(), &self.dirty, &mut self.staging)?;
        fail::fail_point!("while-paused");
        strike("capture", &self.session.vm);
        timing.pages = self.dirty.pages();
        timing.copy_ms = watch.lap();
        if !saved_first {
            let position = pause.saved(&mut self.device_state)?;
            self.bound_log(cut, log, timing.epoch, position)?;
        }
        self.pad_in_a_test();
        timing.blob_ms = watch.lap();
        if cut != Cut::Last {
            pause.resume()?;
        }
        self.carried.clear();
        timing.cont_ms = watch.lap();
        Ok(stopped)
    }

    /// A test makes the device state as large as a guest with many pictures in its graphics card has it:
    /// QEMU reads nothing behind its end.
    fn pad_in_a_test(&mut self) {
        fail::fail_point!("pad-device-state", |mib| {
            let mib: usize = mib.and_then(|mib| mib.parse().ok()).unwrap_or_default();
            self.device_state.resize(self.device_state.len() + (mib << 20), 0);
        });
    }

    fn queue(&mut self, epoch: Epoch, cut: Cut, stopped: Time) {
        let outbox = &self.session.outbox;
        let state = match device_state(&self.device_state, self.session.version) {
            Ok(state) => state,
            // The guest is sound, and runs; after a last checkpoint it does once the session is over.
            Err(error) => {
                let Session { peer, version, .. } = &**self.session;
                let reason = format!(
                    "the state of the VM's devices does not get to host {peer}, which speaks wire \
                     version {version} and takes it in one message ({error}): upgrade it"
                );
                return self.session.event(Event::PeerGone(reason));
            }
        };
        match cut {
            Cut::LogBegins if epoch > MACHINE => {
                outbox.put_now(Outgoing::Piece(epoch, Piece::LogBegins));
            }
            Cut::LogEnds => outbox.put_now(Outgoing::Forget),
            _ => {}
        }
        for chunk in self.staging.take().chunks {
            outbox.put_now(Outgoing::Pages(epoch, chunk));
        }
        super::outbound::queue(self.session, epoch, &mut self.allowances);
        if let Some(console) = &self.session.console {
            for piece in console.held_of(epoch).chunks(CONSOLE_PIECE_BYTES) {
                outbox.put_now(Outgoing::Piece(epoch, Piece::Console(piece.to_vec())));
            }
        }
        for piece in state {
            outbox.put_now(Outgoing::Piece(epoch, piece));
        }
        if let Some(closing) = self.closing.take() {
            closing.queue(self.session, epoch);
        }
        outbox.put_now(Outgoing::EpochEnd(epoch, stopped));
    }
}

/// Whether another round of pre-copy pays after one that took `round` and found so many pages, written in
/// `written_for`: one that finds few costs a scan more than it spares the pause.
fn pays_another_round(found: u64, written_for: Duration, round: Duration) -> bool {
    let again = found as f64 * round.as_secs_f64() / written_for.as_secs_f64().max(1e-9);
    again >= PRECOPY_PAGES as f64
}

fn urgency(session: &Session, machine: &Machine) -> Option<Urgency> {
    let disks = machine.disks();
    let threads = disks.iter().filter_map(|disk| disk.server_thread());
    let by_monitor = machine.pause_obstacle().is_some();
    let vcpus = machine.definition().vcpus;
    let urgency = Urgency::new(machine.qemu_pid(), vcpus, by_monitor, threads);
    let refused = |error: &std::io::Error| {
        warn!(
            vm = %session.vm,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_round_pays_only_if_much_was_written_during_the_last() {
        let pays = |found, written_for, round| {
            let micros = Duration::from_micros;
            pays_another_round(found, micros(written_for), micros(round))
        };
        assert!(!pays(450, 9_000, 600), "a database's epoch");
        assert!(!pays(0, 9_000, 600));
        assert!(!pays(0, 0, 0));
        assert!(pays(50_000, 200_000, 60_000), "much of it is written again meanwhile");
        assert!(!pays(2_000, 200_000, 4_000));
        // The second of these rounds found what was written during the first.
        assert!(pays(15_000, 60_000, 20_000));
        assert!(!pays(300, 20_000, 500));
    }
}
