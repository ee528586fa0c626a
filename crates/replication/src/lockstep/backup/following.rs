//! The log between the wire and QEMU: what every thread of the backup's side knows of it.

use super::LOOK_INTERVAL;
use super::reads::Reads;
use crate::clock;
use crate::lockstep::Rate;
use crate::lockstep::compare::Differing;
use crate::lockstep::compare::backup::Asked;
use crate::lockstep::writes::{Counts, Writes};
use std::collections::VecDeque;
use std::time::Duration;
use understudy_lockstep::{Comparison, Feed, LogPosition, Mark, Rest};
use understudy_protocol::Epoch;
use understudy_protocol::wire::LogProgress;
use understudy_qemu::lockstep::LogStatus;
use understudy_report::{DiskReads, LockstepReport};
use understudy_session::backup::LogSpan;
use understudy_threads::Waitable;

/// Log that waits for QEMU here, at most; over it nothing more is read from the wire.
const WAITING_BYTES: usize = 8 << 20;

/// Log is given to QEMU in pieces.
const PIECE_BYTES: usize = 64 << 10;

/// The bytes that are kept of the log that QEMU got: more than its socket holds.
const RECENT_BYTES: usize = 1 << 20;

/// The next thing that the feeding thread does.
pub(super) enum Turn {
    /// Gives QEMU a piece of the log.
    Piece(Vec<u8>),
    /// Lets QEMU come to the end of what it got, and compares.
    Compare(Comparison, Mark),
}

/// A log on its way to this host's QEMU.
#[derive(Debug)]
pub struct Following {
    pub(super) state: Waitable<State>,
    /// The source that its guest's reads come from.
    pub(super) disk_reads: DiskReads,
}

#[derive(Debug)]
pub(super) struct State {
    feed: Feed,
    rate: Rate,
    span: LogSpan,
    /// Rest of the log, once the epoch is on its way with which it ends.
    rest: Option<Rest>,
    /// The results of its guest's reads.
    pub reads: Reads,
    /// Counts of the writes that its disks have.
    writes: Counts,
    /// Comparisons at the marks of the feed.
    asked: Asked,
    /// QEMU has another place: there is nothing left to be watched.
    left: bool,
    /// Progress as of the last look.
    progress: LogProgress,
    blocked: bool,
    /// The machine is loaded, and runs on log.
    begun: bool,
    /// Bytes that QEMU got.
    given: u64,
    /// The end of what QEMU got.
    recent: VecDeque<u8>,
    /// Time by which QEMU was behind when the primary seemed lost first.
    lag_at_failure: Option<Duration>,
}

impl State {
    fn new(disks: usize, epoch: Epoch) -> State {
        State {
            feed: Feed::default(),
            rate: Rate::default(),
            span: LogSpan::new(epoch),
            rest: None,
            reads: Reads::new(disks),
            writes: Counts::default(),
            asked: Asked::default(),
            left: false,
            progress: LogProgress::default(),
            blocked: false,
            begun: false,
            given: 0,
            recent: VecDeque::new(),
            lag_at_failure: None,
        }
    }

    /// The time since the oldest log came that QEMU has not executed.
    fn lag(&self) -> Duration {
        self.feed.behind_since().map_or(Duration::ZERO, |since| clock::now() - since)
    }
}

/// A test has less wait.
fn most_waiting() -> usize {
    fail::fail_point!("little-room", |_| PIECE_BYTES);
    WAITING_BYTES
}

impl Following {
    /// A log that begins behind `epoch`, of a guest with so many disks.
    pub fn new(disk_reads: DiskReads, disks: usize, epoch: Epoch) -> Following {
        Following { state: Waitable::new(State::new(disks, epoch)), disk_reads }
    }

    /// The epoch behind which it begins.
    pub fn machine(&self) -> Epoch {
        self.state.lock().span.machine()
    }

    /// Takes a batch in; it may be acknowledged then. False if it is of no more use.
    pub fn take(&self, epoch: Epoch, log: &[u8]) -> anyhow::Result<bool> {
        let mut state = self.state.lock();
        if !state.span.take(epoch).map_err(anyhow::Error::msg)? {
            return Ok(false);
        }
        state.feed.receive(log, clock::now())?;
        let received = state.feed.received().0;
        state.rate.note(received);
        self.state.wake();
        Ok(true)
    }

    /// Waits while QEMU has too much before it, for so long at most; whether there is room: the
    /// connection's flow control tells the primary that there is none. Data of reads are too much only
    /// while it has log as well, which may ask for them.
    pub fn await_room(&self, longest: Duration) -> bool {
        let deadline = clock::now() + longest;
        let mut state = self.state.lock();
        let is_full = |state: &State| {
            let reads = state.begun && state.feed.pending() > 0 && state.reads.is_full();
            state.feed.waiting() > most_waiting() || reads
        };
        while !state.span.has_ended() && is_full(&state) {
            if clock::now() >= deadline {
                return false;
            }
            // Nobody tells that reads were asked for.
            state = self.state.wait_for(state, LOOK_INTERVAL);
        }
        true
    }

    /// Ends the log: nothing more will come, or is wanted, and QEMU comes to the end of what there
    /// is.
    pub fn end(&self) {
        let mut state = self.state.lock();
        if state.span.end() {
            state.feed.end();
            state.asked.clear();
            // With the span: no batch is acknowledged whose reads are not taken in.
            state.reads.end();
            self.state.wake();
        }
    }

    /// This epoch is on its way, a checkpoint again, with which the log ends, and this rest of it.
    pub fn expect_end(&self, epoch: Epoch, rest: Vec<u8>) -> anyhow::Result<()> {
        let mut state = self.state.lock();
        state.span.expect_end(epoch).map_err(anyhow::Error::msg)?;
        state.rest = Some(state.feed.last(rest)?);
        Ok(())
    }

    /// Whether messages of this epoch, a checkpoint, may come.
    pub fn may_come(&self, epoch: Epoch) -> bool {
        self.state.lock().span.may_come(epoch)
    }

    /// Ends the log with the rest of it, as the epoch is committed that came with it.
    pub fn end_at_checkpoint(&self) {
        let mut state = self.state.lock();
        if let Some(rest) = state.rest.take().filter(|_| !state.span.has_ended()) {
            state.feed.receive_last(rest, clock::now());
        }
        drop(state);
        self.end();
    }

    /// QEMU has executed all of it, and another one has its place.
    pub fn leave(&self) {
        self.state.lock().left = true;
    }

    pub(super) fn is_left(&self) -> bool {
        self.state.lock().left
    }

    /// Waits for the first of the log; false if it has ended before.
    pub(super) fn await_log(&self) -> bool {
        let none =
            |state: &mut State| !state.span.has_ended() && state.feed.received() == LogPosition(0);
        let state = self.state.wait_while(self.state.lock(), none);
        state.feed.received() > LogPosition(0)
    }

    /// The primary asks what this machine has at a place of the log.
    pub fn compare(&self, comparison: Comparison) -> anyhow::Result<()> {
        let mut state = self.state.lock();
        if !state.span.has_ended() {
            state.feed.mark(comparison.place.position)?;
            state.asked.push(comparison)?;
            self.state.wake();
        }
        Ok(())
    }

    /// QEMU may go on behind the place; something differed there.
    pub(super) fn compared(&self, differing: Differing) {
        let mut state = self.state.lock();
        state.asked.keep(differing);
        state.feed.pass_mark();
    }

    /// The spots that differed when something did last.
    pub fn differing(&self) -> Differing {
        self.state.lock().asked.differing().clone()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.state.lock().span.has_ended()
    }

    /// The next thing that QEMU is given; none after the end.
    pub(super) fn next_turn(&self) -> Option<Turn> {
        let mut state = self.state.lock();
        loop {
            if let Some(mark) = state.feed.at_mark() {
                match state.asked.pop() {
                    Some(comparison) => return Some(Turn::Compare(comparison, mark)),
                    None => state.feed.pass_mark(),
                }
            }
            let ready = state.feed.ready();
            if !ready.is_empty() {
                return Some(Turn::Piece(ready[..ready.len().min(PIECE_BYTES)].to_vec()));
            }
            if state.feed.is_over() {
                return None;
            }
            state = self.state.wait(state);
        }
    }

    pub(super) fn gave(&self, piece: &[u8]) {
        self.state.change(|state| {
            state.feed.gave(piece.len());
            state.given += piece.len() as u64;
            state.recent.extend(piece);
            let surplus = state.recent.len().saturating_sub(RECENT_BYTES);
            state.recent.drain(..surplus);
        });
    }

    /// The primary seems lost: how far QEMU is behind is part of the outage.
    pub fn note_failure(&self) {
        let mut state = self.state.lock();
        let lag = state.lag();
        state.lag_at_failure.get_or_insert(lag);
    }

    /// The time by which QEMU was behind when the primary seemed lost, in milliseconds.
    pub fn lag_at_failure_ms(&self) -> f64 {
        self.state.lock().lag_at_failure.unwrap_or_default().as_secs_f64() * 1e3
    }

    /// QEMU shows this of its work. Gives how much of the log it has before it.
    pub(super) fn note(&self, status: LogStatus) -> (LogProgress, u64) {
        let mut state = self.state.lock();
        state.feed.taken(LogPosition(status.position));
        let lag = state.lag();
        state.blocked = status.is_blocked;
        state.progress = LogProgress {
            position: status.position,
            instructions: status.instructions,
            lag_us: lag.as_micros() as u64,
            starved_ns: status.blocked,
        };
        // Before the machine is loaded nothing is executed: then others are waited for.
        let pending = if state.begun { state.feed.pending() } else { 0 };
        (state.progress, pending)
    }

    pub(super) fn is_over(&self) -> bool {
        self.state.lock().feed.is_over()
    }

    /// The machine is loaded, and QEMU executes the log.
    pub(super) fn begin(&self) {
        self.state.lock().begun = true;
    }

    /// Whether QEMU executes the log.
    pub fn has_begun(&self) -> bool {
        self.state.lock().begun
    }

    /// The end of what QEMU got, and the position in the log where it begins.
    pub fn recent(&self) -> (LogPosition, Vec<u8>) {
        let state = self.state.lock();
        let begins = state.given - state.recent.len() as u64;
        (LogPosition(begins), state.recent.iter().copied().collect())
    }

    /// The report that `status` shows.
    pub fn report(&self) -> LockstepReport {
        let state = self.state.lock();
        LockstepReport {
            lag_ms: state.progress.lag_us as f64 / 1e3,
            lag_instructions: 0,
            log_mbit_s: state.rate.mbit_s(),
            held_frames: 0,
            blocked: state.blocked,
            disk_reads: self.disk_reads,
            disk_read_mbit_s: state.reads.mbit_s(),
            comparison: None,
        }
    }
}

impl Writes for Following {
    fn counts<T>(&self, act: impl FnOnce(&mut Counts) -> T) -> T {
        act(&mut self.state.lock().writes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_room_hears_that_there_is_none_until_the_log_ends() {
        let following = Following::new(DiskReads::Backup, 1, Epoch(1));
        let at_once = Duration::ZERO;
        // Interrupts.
        assert!(following.take(Epoch(2), &vec![1; WAITING_BYTES]).unwrap());
        assert!(following.await_room(at_once));
        assert!(following.take(Epoch(3), &[1]).unwrap());
        assert!(!following.await_room(at_once));
        following.end();
        assert!(following.await_room(at_once));
    }
}
