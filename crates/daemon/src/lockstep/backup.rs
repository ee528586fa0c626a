//! The backup's side: what came is acknowledged, then executed.
//!
//! | thread | does |
//! |---|---|
//! | `receive` | takes batches in; they are acknowledged before they are executed |
//! | `feed` | gives QEMU the log, as it takes it |
//! | `follow` | sees how far QEMU is, tells the primary, notices one that has diverged |
//! | `reads` | answers disk reads that wait for their data |
//! | `apply` | loads the machine, lets it follow; at the end of the log, goes live |

use super::Rate;
use super::compare::Differing;
use super::compare::backup::{self as compare, Asked};
use super::reads::{self, ReadFailure, Reads};
use super::writes::Writes;
use crate::backup::Session;
use crate::clock;
use crate::heartbeat::Pulse;
use crate::machine::Machine;
use crate::report::{DiskReads, LockstepReport};
use crate::sync::lock;
use anyhow::{Context, bail, ensure};
use std::collections::VecDeque;
use std::io::Write;
use std::net::Shutdown;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};
use understudy_encoding::decode_log;
use understudy_lockstep::{
    Comparison, END, Feed, Findings, LogPosition, Mark, Signs, Stuck, Watchdog,
};
use understudy_protocol::Epoch;
use understudy_protocol::wire::{LogProgress, Message};
use understudy_qemu::lockstep::{LogChannel, LogStatus, Request};

/// Log that waits for QEMU here, at most; over it nothing more is read from the wire.
const WAITING_BYTES: usize = 8 << 20;

/// Log is given to QEMU in pieces.
const PIECE_BYTES: usize = 64 << 10;

/// What is kept of the log that QEMU got: more than its socket holds.
const RECENT_BYTES: usize = 1 << 20;

/// How often QEMU's progress is looked at, and how often the primary hears of it.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
const TELL_INTERVAL: Duration = Duration::from_millis(50);

/// A QEMU that has log and does nothing for so long has diverged.
const PATIENCE: Duration = Duration::from_secs(10);

/// So long its disks have to answer it: a busy host's may take many seconds to write.
const DISK_PATIENCE: Duration = Duration::from_secs(60);

/// How often a take-over looks whether QEMU has come to the log's end.
const END_INTERVAL: Duration = Duration::from_micros(250);

/// A log on its way to this host's QEMU.
#[derive(Debug)]
pub struct Following {
    /// The log begins behind this epoch.
    machine: Epoch,
    state: Mutex<State>,
    changed: Condvar,
    rate: Rate,
    reads: Arc<Reads>,
    writes: Writes,
}

#[derive(Debug, Default)]
struct State {
    feed: Feed,
    last: Epoch,
    /// What is compared at the marks of the feed.
    asked: Asked,
    /// An epoch is on its way that is a checkpoint again.
    ending: bool,
    /// Nothing more is taken in.
    ended: bool,
    /// QEMU has another place: there is nothing left to be watched.
    left: bool,
    /// As of the last look.
    progress: LogProgress,
    blocked: bool,
    /// The machine is loaded, and runs on log.
    begun: bool,
    /// Bytes that QEMU got.
    given: u64,
    /// The end of what QEMU got.
    recent: VecDeque<u8>,
    /// How far behind QEMU was when the primary seemed lost first.
    lag_at_failure: Option<Duration>,
}

impl State {
    /// How long ago the oldest log came that QEMU has not executed.
    fn lag(&self) -> Duration {
        self.feed.behind_since().map_or(Duration::ZERO, |since| clock::now() - since)
    }
}

impl Following {
    /// A log that begins behind `epoch`, of a guest with so many disks.
    pub fn new(disk_reads: DiskReads, disks: usize, epoch: Epoch) -> Following {
        Following {
            machine: epoch,
            state: Mutex::new(State { last: epoch, ..Default::default() }),
            changed: Condvar::new(),
            rate: Rate::default(),
            reads: Reads::new(disk_reads, disks),
            writes: Writes::default(),
        }
    }

    /// The epoch behind which it begins.
    pub fn machine(&self) -> Epoch {
        self.machine
    }

    /// What its guest reads.
    pub fn reads(&self) -> &Arc<Reads> {
        &self.reads
    }

    /// What its disks have.
    pub fn writes(&self) -> &Writes {
        &self.writes
    }

    /// Takes a batch in; it may be acknowledged then. False if it is of no more use.
    pub fn take(&self, message: &Message) -> anyhow::Result<bool> {
        let epoch = message.header.epoch;
        let log = decode_log(&message.payload)?;
        let mut state = lock(&self.state);
        if state.ended {
            return Ok(false);
        }
        ensure!(epoch == state.last.next(), "batch {epoch} of the log came after {}", state.last);
        state.feed.receive(&log, clock::now())?;
        state.last = epoch;
        self.rate.note(state.feed.received().0);
        self.changed.notify_all();
        Ok(true)
    }

    /// Waits while QEMU has too much before it: the connection's flow control then tells the
    /// primary. Data of reads are too much only while it has log as well, which may ask for
    /// them.
    pub fn await_room(&self) {
        let mut state = lock(&self.state);
        let is_full = |state: &State| {
            let reads = state.begun && state.feed.pending() > 0 && self.reads.is_full();
            state.feed.waiting() > WAITING_BYTES || reads
        };
        while !state.ended && is_full(&state) {
            // Nobody tells that reads were asked for.
            state = self.changed.wait_timeout(state, LOOK_INTERVAL).expect("see lock").0;
        }
    }

    /// Nothing more will come, or is wanted: QEMU comes to the end of what there is.
    pub fn end(&self) {
        let mut state = lock(&self.state);
        if !state.ended {
            state.ended = true;
            state.feed.end();
            state.asked.clear();
            self.changed.notify_all();
            // In this order: no batch is acknowledged whose reads are not taken in.
            self.reads.end();
        }
    }

    /// An epoch is on its way that is a checkpoint again, with which the log ends.
    pub fn expect_end(&self) {
        lock(&self.state).ending = true;
    }

    /// Whether checkpoints may come.
    pub fn is_ending(&self) -> bool {
        lock(&self.state).ending
    }

    /// That epoch is committed: this is the rest of the log.
    pub fn end_with(&self, rest: &[u8]) -> anyhow::Result<()> {
        let mut state = lock(&self.state);
        if !state.ended {
            state.feed.receive(rest, clock::now())?;
        }
        drop(state);
        self.end();
        Ok(())
    }

    /// QEMU has executed all of it, and another one has its place.
    pub fn leave(&self) {
        lock(&self.state).left = true;
    }

    fn is_left(&self) -> bool {
        lock(&self.state).left
    }

    /// Waits for the first of the log; false if it has ended before.
    fn await_log(&self) -> bool {
        let state = lock(&self.state);
        let none = |state: &mut State| !state.ended && state.feed.received() == LogPosition(0);
        let state = self.changed.wait_while(state, none).expect("see lock");
        state.feed.received() > LogPosition(0)
    }

    /// The primary asks what this machine has at a place of the log.
    pub fn compare(&self, comparison: Comparison) -> anyhow::Result<()> {
        let mut state = lock(&self.state);
        if !state.ended {
            state.feed.mark(comparison.place.position)?;
            state.asked.push(comparison)?;
            self.changed.notify_all();
        }
        Ok(())
    }

    /// QEMU may go on behind the place; something differed there.
    fn compared(&self, differing: Differing) {
        let mut state = lock(&self.state);
        state.asked.keep(differing);
        state.feed.pass_mark();
    }

    /// What differed when something did last.
    pub fn differing(&self) -> Differing {
        lock(&self.state).asked.differing().clone()
    }

    fn has_ended(&self) -> bool {
        lock(&self.state).ended
    }

    /// What QEMU is given next; none after the end.
    fn next_turn(&self) -> Option<Turn> {
        let mut state = lock(&self.state);
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
            state = self.changed.wait(state).expect("see lock");
        }
    }

    fn gave(&self, piece: &[u8]) {
        let mut state = lock(&self.state);
        state.feed.gave(piece.len());
        state.given += piece.len() as u64;
        state.recent.extend(piece);
        let surplus = state.recent.len().saturating_sub(RECENT_BYTES);
        state.recent.drain(..surplus);
        drop(state);
        self.changed.notify_all();
    }

    /// The primary seems lost: how far QEMU is behind is part of the outage.
    pub fn note_failure(&self) {
        let mut state = lock(&self.state);
        let lag = state.lag();
        state.lag_at_failure.get_or_insert(lag);
    }

    /// How far QEMU was behind when the primary seemed lost, in milliseconds.
    pub fn lag_at_failure_ms(&self) -> f64 {
        lock(&self.state).lag_at_failure.unwrap_or_default().as_secs_f64() * 1e3
    }

    /// QEMU shows this of its work. Gives how much of the log it has before it.
    fn note(&self, status: LogStatus) -> (LogProgress, u64) {
        let mut state = lock(&self.state);
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

    fn is_over(&self) -> bool {
        lock(&self.state).feed.is_over()
    }

    /// Whether QEMU executes the log.
    pub fn has_begun(&self) -> bool {
        lock(&self.state).begun
    }

    /// The end of what QEMU got, and the position in the log where it begins.
    pub fn recent(&self) -> (LogPosition, Vec<u8>) {
        let state = lock(&self.state);
        let begins = state.given - state.recent.len() as u64;
        (LogPosition(begins), state.recent.iter().copied().collect())
    }

    /// What `status` shows.
    pub fn report(&self) -> LockstepReport {
        let state = lock(&self.state);
        LockstepReport {
            lag_ms: state.progress.lag_us as f64 / 1e3,
            lag_instructions: 0,
            log_mbit_s: self.rate.mbit_s(),
            held_frames: 0,
            blocked: state.blocked,
            disk_reads: self.reads.source(),
            disk_read_mbit_s: self.reads.mbit_s(),
            comparison: None,
        }
    }
}

/// Gives QEMU the log until its end.
pub fn feed(session: &Session, machine: &Machine, following: &Following) {
    let Some(log) = machine.log() else { return };
    while let Some(turn) = following.next_turn() {
        match turn {
            Turn::Piece(mut piece) => {
                spoil(&mut piece);
                if (&log.log).write_all(&piece).is_err() {
                    // QEMU has ended, which others notice.
                    return;
                }
                following.gave(&piece);
            }
            Turn::Compare(comparison, mark) => {
                let differing = compare_at(session, (machine, log), following, &comparison, &mark);
                following.compared(differing);
            }
        }
    }
    // So that QEMU finds the end. If it has ended itself, others notice that.
    let _ = log.log.shutdown(Shutdown::Write);
}

/// What the feeding thread does next.
enum Turn {
    /// Gives QEMU a piece of the log.
    Piece(Vec<u8>),
    /// Lets QEMU come to the end of what it got, and compares.
    Compare(Comparison, Mark),
}

/// Compares at a place up to which QEMU has got the log, and tells the primary.
fn compare_at(
    session: &Session,
    (machine, log): (&Machine, &LogChannel),
    following: &Following,
    comparison: &Comparison,
    mark: &Mark,
) -> Differing {
    let is_over = || following.has_ended() || session.is_over();
    let place = &comparison.place;
    let compared = match compare::await_place(log, place, is_over) {
        None => return Vec::new(),
        Some(true) => compare::compare(machine, comparison, mark),
        Some(false) => Ok((Findings { number: place.number, ..Default::default() }, Vec::new())),
    };
    match compared {
        Ok((findings, differing)) => {
            session.tell_findings(&findings);
            differing
        }
        Err(error) => {
            warn!(vm = session.vm, "cannot compare: {error:#}");
            session.tell_findings(&Findings { number: place.number, ..Default::default() });
            Vec::new()
        }
    }
}

/// A test makes the log another one here.
fn spoil(_piece: &mut [u8]) {
    // No kind of event: QEMU ends, whatever stood there.
    fail::fail_point!("spoil-log", |_| _piece[0] = 0xff);
}

/// Watches QEMU follow until the session is over, or follows no more.
pub fn watch(session: &Session, machine: &Machine, following: &Following) {
    let Some(log) = machine.log() else { return };
    let mut dog = watchdog();
    let (mut told, mut told_at) = (LogProgress::default(), Instant::now());
    while !session.is_over() && !following.is_left() {
        thread::sleep(LOOK_INTERVAL);
        match following.reads.failure() {
            Some(ReadFailure::Diverged(reason)) => return session.diverged(&reason),
            Some(ReadFailure::Unreadable(reason)) => return session.give_up(&reason),
            None => {}
        }
        let (progress, pending) = following.note(log.status());
        match dog.look(signs(machine, &progress), pending, clock::now()) {
            Some(Stuck::Diverged(time)) => {
                return session.diverged(&format!(
                    "the backup has diverged: it has executed nothing for {:.0} s with {pending} \
                     bytes of log before it; {:?}",
                    time.as_secs_f64(),
                    log.status()
                ));
            }
            Some(Stuck::Disk(time)) => return session.give_up(&silent_disk(time)),
            None => {}
        }
        let still = LogProgress { starved_ns: told.starved_ns, ..progress } == told;
        if told_at.elapsed() >= TELL_INTERVAL && !still {
            session.tell_progress(&progress);
            (told, told_at) = (progress, Instant::now());
        }
    }
}

fn watchdog() -> Watchdog {
    Watchdog::new(PATIENCE, DISK_PATIENCE, clock::now())
}

fn signs(machine: &Machine, progress: &LogProgress) -> Signs {
    Signs {
        taken: LogPosition(progress.position),
        instructions: progress.instructions,
        awaits_disk: machine.disks().iter().any(|disk| disk.has_requests()),
    }
}

fn silent_disk(time: Duration) -> String {
    format!(
        "the backup's QEMU has waited for its disk for {:.0} s: look at the storage of this host's \
         mirrors",
        time.as_secs_f64()
    )
}

/// Loads the machine and lets it execute its log, as soon as there is any.
pub fn begin(machine: &Machine, following: &Following, device_state: &[u8]) -> anyhow::Result<()> {
    let log = machine.log().context("this QEMU does not replay")?;
    machine.load(device_state).context("cannot load the machine's state")?;
    if following.await_log() {
        following.writes.begin(machine);
        reads::follow(machine, &following.reads);
        log.ask(Request::Follow)?;
        machine.monitor().cont()?;
        lock(&following.state).begun = true;
    }
    Ok(())
}

/// Waits until QEMU has executed all of the log, which has ended.
pub fn await_end(machine: &Machine, following: &Following) -> anyhow::Result<()> {
    let log = machine.log().context("this QEMU does not replay")?;
    if !following.await_log() {
        return Ok(());
    }
    let began = Instant::now();
    let mut dog = watchdog();
    loop {
        let status = log.status();
        let (progress, pending) = following.note(status);
        if following.is_over() && pending == 0 && status.event == u64::from(END) {
            break;
        }
        match dog.look(signs(machine, &progress), pending, clock::now()) {
            Some(Stuck::Diverged(_)) => bail!(
                "this copy has diverged: {pending} bytes of its log are not executed; {:?}",
                log.status()
            ),
            Some(Stuck::Disk(time)) => bail!("{}", silent_disk(time)),
            None => {}
        }
        ensure!(machine.is_alive(), "QEMU ended: {}", machine.last_words());
        if let Some(failure) = following.reads.failure() {
            bail!("{}", failure.words());
        }
        thread::sleep(END_INTERVAL);
    }
    info!(
        vm = machine.definition().name,
        "executed the rest of the log in {:.1} ms",
        began.elapsed().as_secs_f64() * 1e3
    );
    Ok(())
}

/// A QEMU at the end of its log becomes an ordinary one; its guest runs on.
pub fn go_live(machine: &Machine) -> anyhow::Result<u64> {
    stop(machine)?;
    machine.monitor().cont()?;
    machine.open_network(&[])
}

/// A QEMU at the end of its log becomes an ordinary one, whose guest stands still: its disks
/// have all that it wrote.
pub fn stop(machine: &Machine) -> anyhow::Result<()> {
    let log: &LogChannel = machine.log().context("this QEMU does not replay")?;
    machine.monitor().stop()?;
    log.ask(Request::GoLive)?;
    reads::forget(machine);
    Ok(())
}
