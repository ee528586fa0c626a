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
use super::primary::MACHINE;
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
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use tracing::info;
use understudy_encoding::decode_log;
use understudy_lockstep::{END, Feed, LogPosition, Signs, Stuck, Watchdog};
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
    /// Nothing more is taken in.
    ended: bool,
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
    /// A log that has not begun, of a guest with so many disks.
    pub fn new(disk_reads: DiskReads, disks: usize) -> Following {
        Following {
            state: Mutex::new(State { last: MACHINE, ..Default::default() }),
            changed: Condvar::new(),
            rate: Rate::default(),
            reads: Reads::new(disk_reads, disks),
            writes: Writes::default(),
        }
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
            self.changed.notify_all();
            // In this order: no batch is acknowledged whose reads are not taken in.
            self.reads.end();
        }
    }

    /// Waits for the first of the log; false if it has ended before.
    fn await_log(&self) -> bool {
        let state = lock(&self.state);
        let none = |state: &mut State| !state.ended && state.feed.received() == LogPosition(0);
        let state = self.changed.wait_while(state, none).expect("see lock");
        state.feed.received() > LogPosition(0)
    }

    /// The next piece for QEMU; none after the end.
    fn next_piece(&self) -> Option<Vec<u8>> {
        let mut state = lock(&self.state);
        loop {
            let ready = state.feed.ready();
            if !ready.is_empty() {
                return Some(ready[..ready.len().min(PIECE_BYTES)].to_vec());
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
        }
    }
}

/// Gives QEMU the log until its end.
pub fn feed(session: &Session, following: &Following) {
    let Some(log) = session.machine.log() else { return };
    while let Some(mut piece) = following.next_piece() {
        spoil(&mut piece);
        if (&log.log).write_all(&piece).is_err() {
            // QEMU has ended, which others notice.
            return;
        }
        following.gave(&piece);
    }
}

/// A test makes the log another one here.
fn spoil(_piece: &mut [u8]) {
    // No kind of event: QEMU ends, whatever stood there.
    fail::fail_point!("spoil-log", |_| _piece[0] = 0xff);
}

/// Watches QEMU follow until the session is over.
pub fn watch(session: &Session, following: &Following) {
    let Some(log) = session.machine.log() else { return };
    let mut dog = watchdog();
    let (mut told, mut told_at) = (LogProgress::default(), Instant::now());
    while !session.is_over() {
        thread::sleep(LOOK_INTERVAL);
        match following.reads.failure() {
            Some(ReadFailure::Diverged(reason)) => return session.diverged(&reason),
            Some(ReadFailure::Unreadable(reason)) => return session.give_up(&reason),
            None => {}
        }
        let (progress, pending) = following.note(log.status());
        match dog.look(signs(&session.machine, &progress), pending, clock::now()) {
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
    while !(following.is_over() && log.status().event == u64::from(END)) {
        let (progress, pending) = following.note(log.status());
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
    let log: &LogChannel = machine.log().context("this QEMU does not replay")?;
    let mut monitor = machine.monitor();
    monitor.stop()?;
    log.ask(Request::GoLive)?;
    reads::forget(machine);
    monitor.cont()?;
    drop(monitor);
    machine.open_network(&[])
}
