//! The primary's side: log leaves QEMU, is cut into batches and sent.
//!
//! One thread waits for log and for output, cuts and sends, so that nothing is handed over on
//! the way of a frame's log to the wire. Acknowledgements come on the receiving thread, which
//! releases the frames. QEMU waits while its socket is full.

mod batches;

pub use batches::Batches;

use super::compare::comparer::{Comparer, Comparing};
use super::reads::{self, ReadTrail};
use super::writes::{Counts, Writes};
use super::{Rate, be_urgent};
use crate::clock;
use crate::primary::Session;
use crate::primary::pace::{GuestPace, Outruns};
use anyhow::Context;
use batches::{fill_in_a_test, send_reads};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tracing::info;
use understudy_lockstep::{Batcher, LogEnd, MOST_LAG, Pace};
use understudy_machine::Machine;
use understudy_machine::doorbell::Ringing;
use understudy_machine::pause::Pause;
use understudy_protocol::wire::LogProgress;
use understudy_protocol::{Epoch, PrimaryPhase};
use understudy_qemu::Monitor;
use understudy_qemu::lockstep::LogChannel;
use understudy_report::{DiskReads, LockstepReport};
use understudy_threads::Waitable;

/// Batches that may be on their way; their bytes are bounded by [`UNACKNOWLEDGED_BYTES`].
pub const PIPELINE: u64 = 4096;

/// Log that may be sent and not acknowledged.
const UNACKNOWLEDGED_BYTES: u64 = 4 << 20;

/// Log that no output waits for is sent so much later, for the sake of fewer batches.
const GATHER: Duration = Duration::from_millis(3);

/// A batch costs both hosts some 0.2 ms of a processor: output in quick succession shares one.
const SPACING: Duration = Duration::from_millis(1);

/// The longest time that anything waits without looking again.
const LONGEST_WAIT: Duration = Duration::from_millis(500);

/// Output that was committed and could not be released waits for another batch's commit, as do
/// words on the console that were read just after their log.
const RETRY: Duration = Duration::from_millis(10);

/// A session's log, for its threads.
#[derive(Debug)]
pub struct Recording {
    /// The log begins behind this epoch.
    machine: Epoch,
    pub(super) state: Waitable<State>,
    /// The channel is full, or the backup too far behind.
    blocked: AtomicBool,
    /// Trail of what its disk reads gave, if that goes to the backup.
    pub reads: Option<Arc<ReadTrail>>,
}

/// The state of a log that a session's threads share. Who has it locked waits for nothing: acknowledgements
/// come through here.
#[derive(Debug)]
pub(super) struct State {
    flow: Flow,
    /// Counts of the writes that its disks have.
    writes: Counts,
    /// Whether its backup has the same.
    pub comparing: Comparing,
}

impl State {
    /// At the beginning of a log behind `epoch`.
    fn new(epoch: Epoch) -> State {
        let flow = Flow {
            begins: 0,
            batcher: Batcher::new(epoch, UNACKNOWLEDGED_BYTES),
            rate: Rate::default(),
            progress: LogProgress::default(),
            pace: Pace::new(clock::now()),
        };
        State { flow, writes: Counts::default(), comparing: Comparing::default() }
    }
}

/// The flow of the log: how far it has got.
#[derive(Debug)]
struct Flow {
    /// Bytes of log that had passed QEMU where this one begins.
    begins: u64,
    batcher: Batcher,
    rate: Rate,
    /// Progress of the backup's QEMU.
    progress: LogProgress,
    pace: Pace,
}

impl Recording {
    /// The log of this machine, which begins behind `epoch`.
    pub fn new(machine: &Arc<Machine>, disk_reads: DiskReads, epoch: Epoch) -> Recording {
        let weak = Arc::downgrade(machine);
        let wake = move || {
            if let Some(machine) = weak.upgrade() {
                machine.doorbell().ring();
            }
        };
        let logged = disk_reads == DiskReads::Log;
        Recording::of(logged.then(|| ReadTrail::new(machine.disks().len(), wake)), epoch)
    }

    pub(super) fn of(reads: Option<Arc<ReadTrail>>, epoch: Epoch) -> Recording {
        let (state, blocked) = (Waitable::new(State::new(epoch)), AtomicBool::new(false));
        Recording { machine: epoch, state, blocked, reads }
    }

    /// The epoch behind which it begins.
    pub fn machine(&self) -> Epoch {
        self.machine
    }

    /// The comparisons with its backup.
    pub fn comparer(&self) -> Comparer<'_> {
        Comparer(self)
    }

    /// The backup has this epoch and all before it.
    pub fn acknowledged(&self, epoch: Epoch) {
        self.state.lock().flow.batcher.acknowledged(epoch);
    }

    /// Whether another batch may be on its way.
    fn has_room(&self) -> bool {
        self.state.lock().flow.batcher.room() > 0
    }

    /// Whether reads of the guest may soon wait for a batch.
    fn reads_press(&self) -> bool {
        self.reads.as_ref().is_some_and(|reads| reads.is_pressing())
    }

    /// The log begins.
    fn begin(&self) {
        self.state.lock().flow.pace = Pace::new(clock::now());
    }

    /// Whether a fail-over would take too long.
    fn is_far_behind(&self) -> bool {
        self.lag() > MOST_LAG
    }

    /// The time by which the backup is behind.
    pub fn lag(&self) -> Duration {
        Duration::from_micros(self.state.lock().flow.progress.lag_us)
    }

    /// The backup has executed so much. True if the guest may use another part of its processor from now on.
    pub fn progressed(&self, progress: LogProgress) -> bool {
        let flow = &mut self.state.lock().flow;
        flow.progress = progress;
        let lag = Duration::from_micros(progress.lag_us);
        flow.pace.reported(lag, clock::now())
    }

    /// The part of its processor that the guest may use, so that its backup keeps up.
    fn share(&self) -> f64 {
        self.state.lock().flow.pace.share()
    }

    /// Whether somebody waits for an acknowledgement, or for the backup.
    pub fn is_blocked(&self) -> bool {
        self.blocked.load(Ordering::Acquire)
    }

    /// The report that `status` shows.
    pub fn report(&self, log: &LogChannel, held_frames: u64) -> LockstepReport {
        let (progress, log_mbit_s) = {
            let flow = &self.state.lock().flow;
            (flow.progress, flow.rate.mbit_s())
        };
        let status = log.status();
        LockstepReport {
            lag_ms: progress.lag_us as f64 / 1e3,
            lag_instructions: status.instructions.saturating_sub(progress.instructions),
            log_mbit_s,
            held_frames,
            blocked: self.is_blocked() || status.is_blocked,
            disk_reads: self.reads.as_ref().map_or(DiskReads::Backup, |_| DiskReads::Log),
            disk_read_mbit_s: self.reads.as_ref().map_or(0.0, |reads| reads.mbit_s()),
            comparison: self.comparer().report(),
        }
    }
}

impl Writes for Recording {
    fn counts<T>(&self, act: impl FnOnce(&mut Counts) -> T) -> T {
        act(&mut self.state.lock().writes)
    }
}

/// The way in which the thread of a log comes to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Followed {
    /// Protection is over.
    ToTheEnd,
    /// The log is to end with the next epoch, a checkpoint.
    UntilTurn,
}

/// Sends the log until protection ends, or turns to checkpoints; the guest runs, and its log
/// began in the last pause.
pub fn run(
    session: &Session,
    machine: &Machine,
    recording: &Arc<Recording>,
    pace: &mut GuestPace<'_>,
) -> anyhow::Result<Followed> {
    let batches = Batches::new(session, machine, recording)?;
    let ringing = machine.doorbell().listen().context("cannot make an eventfd")?;
    be_urgent();
    recording.begin();
    // What the first synchronisation asked for has ended with it.
    pace.set(1.0, Outruns::Backup);
    let cutter = Cutter {
        session,
        machine,
        recording,
        pace,
        batches,
        ringing,
        log_since: None,
        cut_at: Instant::now(),
    };
    let followed = cutter.follow();
    if let Ok(Followed::UntilTurn) = followed {
        return followed;
    }
    if let Some(reads) = &recording.reads {
        reads.close();
    }
    // Output may have been opened before the log began, and what that forgot withheld again.
    reads::forget(machine);
    // Before QEMU is asked anything else: it may be waiting for room in the log.
    let freed = release(machine);
    if followed.is_ok() && machine.is_alive() {
        freed.context("cannot end the log")?;
    }
    followed
}

/// The guest stands still, and its log begins behind the bytes that have passed QEMU.
pub fn begin(machine: &Machine, recording: &Recording, position: u64) -> anyhow::Result<()> {
    let log = machine.log().context("this QEMU does not record")?;
    fail::fail_point!("log-begins", |_| anyhow::bail!("a test says so"));
    log.begin_log(position).context("the log does not begin where the machine was copied")?;
    recording.state.lock().flow.begins = position;
    Ok(())
}

/// Stops the guest where its log ends. What comes of it meanwhile is read, and goes in batches if it is
/// much: there may be no room for the last of it before.
pub fn pause_at_end<'m>(
    machine: &'m Machine,
    monitor: &'m mut Monitor,
    batches: &mut Batches<'_>,
) -> anyhow::Result<Pause<'m>> {
    fill_in_a_test(batches)?;
    let mut read = Ok(());
    let mut read_more = || {
        if read.is_ok() {
            read = batches.take_in();
        }
    };
    let pause = machine.pause_at_end(monitor, &mut read_more)?;
    read?;
    Ok(pause)
}

/// The guest stands still, and its log has ended with this epoch, of which the rest of the log is
/// a part. Sends what disk reads gave, and gives that rest.
pub fn end(mut batches: Batches<'_>, epoch: Epoch, position: u64) -> anyhow::Result<LogEnd> {
    let rest = batches.end(position)?;
    let Batches { session, machine, recording, .. } = batches;
    if let Some(reads) = &recording.reads {
        send_reads(session, epoch, &reads.take());
        reads.close();
    }
    reads::forget(machine);
    Ok(rest)
}

/// Sends QEMU's log to nowhere, since nobody follows any more.
pub fn release(machine: &Machine) -> anyhow::Result<()> {
    let log = machine.log().context("this QEMU does not record")?;
    Ok(log.release()?)
}

/// The next thing that the log's thread does.
enum Turn {
    Batch,
    HandOver,
    Checkpoints,
    End,
}

/// Decides when a batch is cut.
struct Cutter<'a, 'p> {
    session: &'a Session,
    machine: &'a Machine,
    recording: &'a Recording,
    pace: &'a mut GuestPace<'p>,
    batches: Batches<'a>,
    ringing: Ringing<'a>,
    /// Time since which there has been log that nobody has read.
    log_since: Option<Instant>,
    /// Time at which the last batch was cut.
    cut_at: Instant,
}

impl Cutter<'_, '_> {
    fn follow(mut self) -> anyhow::Result<Followed> {
        loop {
            match self.next()? {
                Turn::Batch => self.cut()?,
                Turn::HandOver => {
                    self.hand_over()?;
                    return Ok(Followed::ToTheEnd);
                }
                Turn::Checkpoints => {
                    // So that there is room for what stopping logs.
                    self.cut()?;
                    return Ok(Followed::UntilTurn);
                }
                Turn::End => return Ok(Followed::ToTheEnd),
            }
        }
    }

    /// Waits until there is something to do.
    fn next(&mut self) -> anyhow::Result<Turn> {
        loop {
            self.ringing.clear();
            if !matches!(self.session.phase(), PrimaryPhase::Syncing | PrimaryPhase::Protected) {
                return Ok(Turn::End);
            }
            self.pace.set(self.recording.share(), Outruns::Backup);
            let must_wait = self.must_wait();
            self.recording.blocked.store(must_wait, Ordering::Release);
            if must_wait {
                // Looked at again: an acknowledgement may have come just before.
                if self.must_wait() {
                    self.wait(false, LONGEST_WAIT)?;
                }
                continue;
            }
            if self.session.was_handed_over() {
                return Ok(Turn::HandOver);
            }
            if self.session.may_turn() {
                return Ok(Turn::Checkpoints);
            }
            let ports = self.machine.ports();
            if ports.iter().any(|port| port.has_new_output()) || self.recording.reads_press() {
                // What follows close on the last batch shares the next one.
                thread::sleep(SPACING.saturating_sub(self.cut_at.elapsed()));
                return Ok(Turn::Batch);
            }
            let left = match self.log_since {
                Some(since) => GATHER.saturating_sub(since.elapsed()),
                None if self.session.in_flight() == 0 && self.session.output_waits() => RETRY,
                None => LONGEST_WAIT,
            };
            if left.is_zero() {
                return Ok(Turn::Batch);
            }
            let came = self.wait(self.log_since.is_none(), left)?;
            match came {
                Came::Log => self.log_since = Some(Instant::now()),
                Came::Nothing if left == RETRY => return Ok(Turn::Batch),
                Came::Nothing | Came::Ring => {}
            }
        }
    }

    /// No log is read: the guest will stand still. What it begins behind is on its way, which nothing may
    /// overtake. The backup of a planned fail-over executes the rest in any case.
    fn must_wait(&self) -> bool {
        if !self.session.may_send_log() {
            return true;
        }
        let far = self.recording.is_far_behind() && !self.session.was_handed_over();
        far || !self.recording.has_room() || !self.session.may_capture()
    }

    /// Waits for a ring, and for log if that is asked for.
    fn wait(&self, for_log: bool, longest: Duration) -> anyhow::Result<Came> {
        let readable = PollFlags::POLLIN;
        let mut both = [
            PollFd::new(self.ringing.as_fd(), readable),
            PollFd::new(self.batches.log.log.as_fd(), readable),
        ];
        let fds = if for_log { &mut both[..] } else { &mut both[..1] };
        match ppoll(fds, Some(TimeSpec::from_duration(longest)), None) {
            Ok(0) => Ok(Came::Nothing),
            Ok(_) if for_log && both[1].any().unwrap_or(true) => Ok(Came::Log),
            Ok(_) | Err(Errno::EINTR) => Ok(Came::Ring),
            Err(error) => Err(error).context("cannot wait for log"),
        }
    }

    fn cut(&mut self) -> anyhow::Result<()> {
        self.log_since = None;
        self.cut_at = Instant::now();
        self.batches.cut()
    }

    /// A planned fail-over: the guest stands still, the last of its log goes over, and the
    /// backup runs it.
    fn hand_over(&mut self) -> anyhow::Result<()> {
        // So that there is room for what stopping logs.
        self.cut()?;
        // The guest does not run on here; on an error it has no limit any more.
        let lifted = self.pace.lift();
        self.machine.pass_on();
        let position = {
            let mut monitor = self.machine.monitor();
            let mut pause = pause_at_end(self.machine, &mut monitor, &mut self.batches)?;
            // The backup has a state of its own; but the log ends where this one was saved.
            pause.saved(&mut Vec::new())?
        };
        self.pace.restore(lifted);
        self.batches.cut_last(position)?;
        info!(vm = %self.session.vm, "the last of the log is on its way");
        self.session.await_hand_over();
        Ok(())
    }
}

/// The cause that ended a wait.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Came {
    Log,
    Ring,
    Nothing,
}
