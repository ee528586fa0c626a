//! Disk reads of the backup's guest, answered with what the primary's gave: see [`crate::lockstep::reads`]. Their data are
//! a part of the log, and behind the same lock.

use super::following::Following;
use crate::lockstep::Rate;
use std::io;
use std::mem;
use std::sync::Arc;
use std::time::Duration;
use understudy_disk::{AwaitedRead, ReadFollower, Span};
use understudy_lockstep::{DiskRead, ReadDecoder, ReadOutcome, ReadScript};
use understudy_machine::Machine;
use understudy_protocol::DiskIndex;
use understudy_report::DiskReads;

/// Data that may wait for QEMU as long as it has log to execute.
const ENOUGH_BYTES: u64 = 32 << 20;

/// Time after which the reads that wait are looked at again: a failure ends no wait.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// The reason why a backup cannot go on with its guest's reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadFailure {
    /// Its guest reads something else than the primary's.
    Diverged(String),
    /// Its mirror cannot be read, or cannot be written.
    Unusable(String),
}

/// The results of the guest's reads.
#[derive(Debug)]
pub(super) struct Reads {
    decoder: ReadDecoder,
    script: ReadScript,
    /// Reads asked for, and not answered.
    parked: Vec<(DiskRead, AwaitedRead)>,
    total: u64,
    rate: Rate,
    ended: bool,
    failure: Option<ReadFailure>,
}

impl Reads {
    /// Those of a guest with so many disks, at the beginning of its log.
    pub fn new(disks: usize) -> Reads {
        Reads {
            decoder: ReadDecoder::default(),
            script: ReadScript::new(disks),
            parked: Vec::new(),
            total: 0,
            rate: Rate::default(),
            ended: false,
            failure: None,
        }
    }

    /// Takes data in, unless the log has ended.
    fn take(&mut self, piece: &[u8]) -> anyhow::Result<()> {
        if self.ended {
            return Ok(());
        }
        for (read, outcome) in self.decoder.push(piece)? {
            self.script.put(read, outcome)?;
        }
        self.total += piece.len() as u64;
        self.rate.note(self.total);
        Ok(())
    }

    /// Whether more than enough data wait for QEMU.
    pub fn is_full(&self) -> bool {
        self.script.bytes() > ENOUGH_BYTES
    }

    /// No batch is taken in any more: what has no data is read from the mirror.
    pub fn end(&mut self) {
        self.ended = true;
    }

    /// The data of the last seconds.
    pub fn mbit_s(&self) -> f64 {
        self.rate.mbit_s()
    }

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

impl Following {
    /// The data of reads came, of a batch that comes behind them.
    pub fn take_reads(&self, piece: &[u8]) -> anyhow::Result<()> {
        if self.disk_reads != DiskReads::Log {
            anyhow::bail!("the data of reads came, which was not agreed on");
        }
        self.state.change(|state| state.reads.take(piece))
    }

    /// The reason why this backup cannot go on with its guest's reads, if it cannot.
    pub fn read_failure(&self) -> Option<ReadFailure> {
        self.state.lock().reads.failure.clone()
    }

    /// Answers the reads that had to wait, until the end.
    pub fn answer_reads(&self) {
        if self.disk_reads == DiskReads::Backup {
            return;
        }
        let mut state = self.state.lock();
        while !state.reads.is_over() {
            match state.reads.next() {
                Some((read, outcome)) => {
                    drop(state);
                    match outcome {
                        Some(outcome) => answer(read, outcome),
                        None => read.read_here(),
                    }
                    state = self.state.lock();
                }
                None => state = self.state.wait_for(state, LOOK_AGAIN),
            }
        }
        // Whoever waits still is not answered: QEMU is about to be ended.
        let parked = mem::take(&mut state.reads.parked);
        drop(state);
        drop(parked);
    }

    fn cannot_read(&self, words: String) {
        // The first has said more.
        self.state.lock().reads.failure.get_or_insert(ReadFailure::Unusable(words));
    }

    /// A request of its guest failed on this backup's mirror: QEMU is left without an answer.
    fn mirror_failed(&self, disk: DiskIndex, error: &io::Error) {
        self.cannot_read(format!(
            "a request to this backup's mirror of disk {disk} failed: {error}; look at the storage \
             of its images"
        ));
    }
}

fn answer(read: AwaitedRead, outcome: ReadOutcome) {
    read.answer(outcome.as_deref().map_err(|&error| error));
}

impl ReadFollower for Following {
    fn came(&self, read: AwaitedRead) -> Option<AwaitedRead> {
        if self.disk_reads == DiskReads::Backup {
            return Some(read);
        }
        let mut state = self.state.lock();
        let Span { offset, length } = read.span();
        let asked = state.reads.script.ask(read.disk(), offset, length);
        if let Some(outcome) = state.reads.find(&asked) {
            drop(state);
            answer(read, outcome);
            return None;
        }
        if state.reads.ended && state.reads.failure.is_none() {
            return Some(read);
        }
        state.reads.parked.push((asked, read));
        None
    }

    fn failed(&self, disk: DiskIndex, at: Span, error: &io::Error) {
        let Span { offset, length } = at;
        self.cannot_read(format!(
            "this backup cannot read {length} bytes at {offset} of its mirror of disk {disk}, again \
             and again: {error}"
        ));
    }
}

/// The backup's guest stands still, and is about to execute its log. QEMU learns of no error of its
/// disks here either: it would stop where the primary's goes on.
pub(super) fn follow(machine: &Machine, following: &Arc<Following>) {
    for disk in machine.disks() {
        let (told, index) = (following.clone(), disk.index());
        disk.withhold_errors(Arc::new(move |error| told.mirror_failed(index, error)));
        disk.set_reads(understudy_disk::Reads::Followed(following.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::Epoch;

    #[test]
    fn data_that_were_not_agreed_on_are_refused() {
        let following = |source| Following::new(source, 1, Epoch(1));
        assert!(following(DiskReads::Backup).take_reads(&[]).is_err());
        let agreed = following(DiskReads::Log);
        assert!(agreed.take_reads(&[0xff; 64]).is_err(), "malformed");
        agreed.end();
        assert!(agreed.take_reads(&[0xff; 64]).is_ok(), "nobody reads it any more");
    }
}
