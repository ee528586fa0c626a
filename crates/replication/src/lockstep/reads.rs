//! Disk reads in lockstep: from each host's own image, or with the log (VMware FT, 4.1 and 4.2).
//!
//! With the log, [`ReadTrail`] on the primary notes what a read gave *before* QEMU gets it. QEMU
//! logs that the read is done, and so all that comes of it, only afterwards; and a batch is cut
//! by reading the log first and the trail then ([`super::primary`]), and sent in the other
//! order. So when the backup acknowledges a batch it has the data of every read whose end that
//! batch, or an earlier one, tells. No frame that came of a read leaves before.
//!
//! On the backup [`Reads`] answers the same reads from these data. What has none when the log
//! ends was not done on the primary as far as anybody knows, and is read from the mirror.

use super::Rate;
use std::io;
use std::mem;
use std::sync::Arc;
use std::time::Duration;
use understudy_disk::{AwaitedRead, ReadFollower, ReadRecorder, Span};
use understudy_lockstep::{DiskRead, ReadDecoder, ReadOutcome, ReadScript};
use understudy_machine::Machine;
use understudy_protocol::DiskIndex;
use understudy_report::DiskReads;
use understudy_threads::Waitable;

/// Data that may wait for the next batch: over it the guest's reads wait.
const MOST_WAITING_BYTES: usize = 8 << 20;

/// The bytes with which a batch is cut at once.
const PRESSING_BYTES: usize = 1 << 20;

/// Data that may wait for the backup's QEMU as long as it has log to execute.
const ENOUGH_BYTES: u64 = 32 << 20;

/// The results of the guest's reads on the primary, on their way into the log.
pub struct ReadTrail {
    state: Waitable<Trail>,
    /// Tells the log's thread.
    wake: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct Trail {
    came: Vec<u64>,
    stream: Vec<u8>,
    total: u64,
    rate: Rate,
    passes: bool,
    closed: bool,
}

impl ReadTrail {
    /// Makes those of a guest with so many disks, at the beginning of its log. `wake` is called
    /// when a batch should be cut.
    pub fn new(disks: usize, wake: impl Fn() + Send + Sync + 'static) -> Arc<ReadTrail> {
        let state = Waitable::new(Trail { came: vec![0; disks], ..Default::default() });
        Arc::new(ReadTrail { state, wake: Box::new(wake) })
    }

    /// Whether a batch should be cut for the sake of reads that may soon wait.
    pub fn is_pressing(&self) -> bool {
        self.state.lock().stream.len() >= PRESSING_BYTES
    }

    /// Takes what came since the last call. To be called after the batch's log was read.
    pub fn take(&self) -> Vec<u8> {
        self.state.change(|state| {
            let stream = mem::take(&mut state.stream);
            state.total += stream.len() as u64;
            state.rate.note(state.total);
            stream
        })
    }

    /// The log is over: nothing is noted any more, and nobody waits.
    pub fn close(&self) {
        self.state.change(|state| {
            state.closed = true;
            state.stream = Vec::new();
        });
    }

    /// The data of the last seconds.
    pub fn mbit_s(&self) -> f64 {
        self.state.lock().rate.mbit_s()
    }
}

impl ReadRecorder for ReadTrail {
    fn came(&self, disk: DiskIndex) -> u64 {
        let full = |state: &mut Trail| {
            state.stream.len() > MOST_WAITING_BYTES && !state.passes && !state.closed
        };
        let mut state = self.state.wait_while(self.state.lock(), full);
        let number = &mut state.came[usize::from(disk.0)];
        *number += 1;
        *number - 1
    }

    fn gave(&self, disk: DiskIndex, number: u64, at: Span, outcome: Result<&[u8], u32>) {
        let Span { offset, length } = at;
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        let before = state.stream.len();
        DiskRead { disk, number, offset, length }.put(outcome, &mut state.stream);
        if before < PRESSING_BYTES && state.stream.len() >= PRESSING_BYTES {
            drop(state);
            (self.wake)();
        }
    }

    fn let_pass(&self) {
        self.state.change(|state| state.passes = true);
    }
}

impl std::fmt::Debug for ReadTrail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadTrail").finish_non_exhaustive()
    }
}

/// The reason why a backup cannot go on with its guest's reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadFailure {
    /// Its guest reads something else than the primary's.
    Diverged(String),
    /// Its mirror cannot be read, or cannot be written.
    Unusable(String),
}

/// The results of the guest's reads on the backup.
#[derive(Debug)]
pub struct Reads {
    source: DiskReads,
    state: Waitable<Followed>,
}

#[derive(Debug)]
struct Followed {
    decoder: ReadDecoder,
    script: ReadScript,
    /// Reads asked for, and not answered.
    parked: Vec<(DiskRead, AwaitedRead)>,
    total: u64,
    rate: Rate,
    ended: bool,
    failure: Option<ReadFailure>,
}

impl Followed {
    /// Finds what the read gives, once it has come. A failure is the end of all.
    fn find(&mut self, read: &DiskRead) -> Option<ReadOutcome> {
        if self.failure.is_some() {
            return None;
        }
        self.script.take(read).unwrap_or_else(|difference| {
            let words = format!("the backup has diverged: {difference}");
            self.failure = Some(ReadFailure::Diverged(words));
            None
        })
    }

    /// A read that can be answered, and with what; none: from the mirror.
    fn next(&mut self) -> Option<(AwaitedRead, Option<ReadOutcome>)> {
        for n in 0..self.parked.len() {
            let read = self.parked[n].0;
            let outcome = self.find(&read);
            if outcome.is_some() || (self.ended && self.failure.is_none()) {
                return Some((self.parked.swap_remove(n).1, outcome));
            }
        }
        None
    }

    fn is_over(&self) -> bool {
        self.ended && (self.parked.is_empty() || self.failure.is_some())
    }
}

impl Reads {
    /// Makes those of a guest with so many disks, at the beginning of its log.
    pub fn new(source: DiskReads, disks: usize) -> Arc<Reads> {
        let state = Followed {
            decoder: ReadDecoder::default(),
            script: ReadScript::new(disks),
            parked: Vec::new(),
            total: 0,
            rate: Rate::default(),
            ended: false,
            failure: None,
        };
        Arc::new(Reads { source, state: Waitable::new(state) })
    }

    /// The source that the reads come from.
    pub fn source(&self) -> DiskReads {
        self.source
    }

    /// The data of reads came, of a batch that comes behind them.
    pub fn take(&self, piece: &[u8]) -> anyhow::Result<()> {
        if self.source != DiskReads::Log {
            anyhow::bail!("the data of reads came, which was not agreed on");
        }
        let mut state = self.state.lock();
        if state.ended {
            return Ok(());
        }
        for (read, outcome) in state.decoder.push(piece)? {
            state.script.put(read, outcome)?;
        }
        state.total += piece.len() as u64;
        let total = state.total;
        state.rate.note(total);
        drop(state);
        self.state.wake();
        Ok(())
    }

    /// Whether more than enough data wait for QEMU.
    pub fn is_full(&self) -> bool {
        self.state.lock().script.bytes() > ENOUGH_BYTES
    }

    /// No batch is taken in any more: what has no data is read from the mirror.
    pub fn end(&self) {
        self.state.change(|state| state.ended = true);
    }

    /// The reason why this backup cannot go on, if it cannot.
    pub fn failure(&self) -> Option<ReadFailure> {
        self.state.lock().failure.clone()
    }

    /// A request of its guest failed on this backup's mirror: QEMU is left without an answer.
    fn mirror_failed(&self, disk: DiskIndex, error: &io::Error) {
        let words = format!(
            "a request to this backup's mirror of disk {disk} failed: {error}; look at the storage \
             of its images"
        );
        // A read that failed has said more already.
        self.state.lock().failure.get_or_insert(ReadFailure::Unusable(words));
    }

    /// Answers the reads that had to wait, until the end.
    pub fn run(&self) {
        if self.source == DiskReads::Backup {
            return;
        }
        let mut state = self.state.lock();
        while !state.is_over() {
            match state.next() {
                Some((read, outcome)) => {
                    drop(state);
                    match outcome {
                        Some(outcome) => answer(read, outcome),
                        None => read.read_here(),
                    }
                    state = self.state.lock();
                }
                None => {
                    // Looked at again: a failure ends no wait.
                    let wait = Duration::from_millis(500);
                    state = self.state.wait_for(state, wait);
                }
            }
        }
        // Whoever waits still is not answered: QEMU is about to be ended.
        state.parked.clear();
    }

    /// The data of the last seconds.
    pub fn mbit_s(&self) -> f64 {
        self.state.lock().rate.mbit_s()
    }
}

fn answer(read: AwaitedRead, outcome: ReadOutcome) {
    read.answer(outcome.as_deref().map_err(|&error| error));
}

impl ReadFollower for Reads {
    fn came(&self, read: AwaitedRead) -> Option<AwaitedRead> {
        if self.source == DiskReads::Backup {
            return Some(read);
        }
        let mut state = self.state.lock();
        let Span { offset, length } = read.span();
        let asked = state.script.ask(read.disk(), offset, length);
        if let Some(outcome) = state.find(&asked) {
            drop(state);
            answer(read, outcome);
            return None;
        }
        if state.ended && state.failure.is_none() {
            return Some(read);
        }
        state.parked.push((asked, read));
        None
    }

    fn failed(&self, disk: DiskIndex, at: Span, error: &io::Error) {
        let Span { offset, length } = at;
        let words = format!(
            "this backup cannot read {length} bytes at {offset} of its mirror of disk {disk}, again \
             and again: {error}"
        );
        self.state.lock().failure.get_or_insert(ReadFailure::Unusable(words));
    }
}

/// The primary's guest stands still, and its log begins: what it reads from here on is noted.
pub fn record(machine: &Machine, trail: &Arc<ReadTrail>) {
    machine.withhold_disk_errors();
    for disk in machine.disks() {
        disk.set_reads(understudy_disk::Reads::Recorded(trail.clone()));
    }
}

/// The same, and what it reads is not noted.
pub fn copy(machine: &Machine) {
    machine.withhold_disk_errors();
    for disk in machine.disks() {
        disk.set_reads(understudy_disk::Reads::Copied);
    }
}

/// The backup's guest stands still, and is about to execute its log. QEMU learns of no error of its
/// disks here either: it would stop where the primary's goes on.
pub fn follow(machine: &Machine, reads: &Arc<Reads>) {
    for disk in machine.disks() {
        let (told, index) = (reads.clone(), disk.index());
        disk.withhold_errors(Arc::new(move |error| told.mirror_failed(index, error)));
        disk.set_reads(understudy_disk::Reads::Followed(reads.clone()));
    }
}

/// The guest's requests are those of an ordinary machine.
pub fn forget(machine: &Machine) {
    for disk in machine.disks() {
        disk.set_reads(understudy_disk::Reads::Plain);
        disk.let_pass();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    const DISK: DiskIndex = DiskIndex(0);

    fn fill(trail: &ReadTrail, bytes: usize) {
        let number = trail.came(DISK);
        let at = Span { offset: 0, length: bytes as u32 };
        trail.gave(DISK, number, at, Ok(&vec![1; bytes]));
    }

    #[test]
    fn reads_wait_while_much_waits_for_a_batch() {
        let wakes = Arc::new(AtomicUsize::new(0));
        let count = wakes.clone();
        let trail = ReadTrail::new(1, move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        fill(&trail, PRESSING_BYTES);
        fill(&trail, MOST_WAITING_BYTES);
        assert!(trail.is_pressing() && wakes.load(Ordering::Relaxed) == 1);
        thread::scope(|scope| {
            let next = scope.spawn(|| trail.came(DISK));
            assert!(trail.take().len() > MOST_WAITING_BYTES);
            assert_eq!(next.join().unwrap(), 2);
        });
        fill(&trail, MOST_WAITING_BYTES + 1);
        // A QEMU that stops waits for its reads.
        trail.let_pass();
        fill(&trail, 1);
        trail.close();
        fill(&trail, 1);
        assert!(trail.take().is_empty(), "something was noted behind the end");
    }

    #[test]
    fn data_that_were_not_agreed_on_are_refused() {
        assert!(Reads::new(DiskReads::Backup, 1).take(&[]).is_err());
        assert!(Reads::new(DiskReads::Log, 1).take(&[0xff; 64]).is_err(), "malformed");
    }
}
