//! The log of a guest's inputs, as it goes to the backup: in batches, each with what it needs beside it.

use super::Recording;
use crate::messages::ToBackup;
use crate::primary::Session;
use anyhow::{Context, ensure};
use std::borrow::Cow;
use std::io::ErrorKind;
use std::sync::Arc;
use understudy_encoding::MOST_LOG_BYTES;
use understudy_lockstep::{LogEnd, LogPosition};
use understudy_machine::Machine;
use understudy_protocol::Epoch;
use understudy_qemu::lockstep::LogChannel;
use understudy_session::primary::Event;

/// The largest piece in which what disk reads gave travels.
const READS_PIECE_BYTES: usize = 1 << 20;

/// The log is read in pieces.
const PIECE_BYTES: usize = 64 << 10;

/// The most that is kept of a log while its guest is being stopped; what comes then finds room in a
/// batch beside it, as all that QEMU's socket holds does.
const KEPT_BYTES: usize = 1 << 20;

/// Reads QEMU's log, cuts it into batches and sends them.
pub struct Batches<'a> {
    pub(super) session: &'a Session,
    pub(super) machine: &'a Machine,
    pub(super) recording: Arc<Recording>,
    pub(super) log: &'a LogChannel,
    /// Log that was read and is in no batch yet.
    batch: Vec<u8>,
}

impl<'a> Batches<'a> {
    /// Those of a machine that records.
    pub fn new(
        session: &'a Session,
        machine: &'a Machine,
        recording: &Arc<Recording>,
    ) -> anyhow::Result<Batches<'a>> {
        let log = machine.log().context("this QEMU does not record")?;
        Ok(Batches { session, machine, recording: recording.clone(), log, batch: Vec::new() })
    }

    /// Cuts a batch, in this order: what was sent so far belongs to the batch; all the log that led
    /// to it has left QEMU; so has the data of all reads whose ends that log tells, and goes first;
    /// the batch goes.
    pub(super) fn cut(&mut self) -> anyhow::Result<()> {
        let Some(epoch) = self.session.cut_batch(false) else { return Ok(()) };
        read_on(self.log, &mut self.batch, MOST_LOG_BYTES)?;
        self.send(epoch, &self.batch)?;
        self.batch.clear();
        Ok(())
    }

    /// Cuts the last batch of a log that has ended at this position: what the guest sent has its log
    /// there, or before.
    pub(super) fn cut_last(&mut self, position: u64) -> anyhow::Result<()> {
        let rest = self.end(position)?;
        match self.session.cut_batch(true) {
            Some(epoch) => self.send(epoch, rest.log()),
            None => Ok(()),
        }
    }

    fn send(&self, epoch: Epoch, log: &[u8]) -> anyhow::Result<()> {
        let Batches { session, recording, .. } = self;
        {
            let flow = &mut recording.state.lock().flow;
            let number = flow.batcher.cut(log.len());
            ensure!(number == epoch, "batch {number} of the log is epoch {epoch}");
            let end = flow.batcher.end();
            flow.rate.note(end.0);
        }
        if let Some(reads) = &recording.reads {
            send_reads(session, epoch, &reads.take());
        }
        // After the log was read: none from behind the places has been.
        for comparison in recording.comparer().take() {
            send(session, &ToBackup::Compare { epoch, comparison });
        }
        fail::fail_point!("before-log");
        send(session, &ToBackup::Log { epoch, log: Cow::Borrowed(log) });
        session.data.note_end(epoch);
        Ok(())
    }

    /// Reads what there is of a log that is about to end; much of it goes as a batch like others.
    pub(super) fn take_in(&mut self) -> anyhow::Result<()> {
        read_on(self.log, &mut self.batch, KEPT_BYTES)?;
        if self.batch.len() + PIECE_BYTES > KEPT_BYTES { self.cut() } else { Ok(()) }
    }

    /// The rest of the log, which has ended at this position and has left QEMU.
    pub(super) fn end(&mut self, position: u64) -> anyhow::Result<LogEnd> {
        read_on(self.log, &mut self.batch, MOST_LOG_BYTES)?;
        let flow = &self.recording.state.lock().flow;
        let ends = LogPosition(position.saturating_sub(flow.begins));
        Ok(flow.batcher.end_of_log(std::mem::take(&mut self.batch), ends)?)
    }
}

pub(super) fn send_reads(session: &Session, epoch: Epoch, stream: &[u8]) {
    for piece in stream.chunks(READS_PIECE_BYTES) {
        send(session, &ToBackup::DiskReads { epoch, stream: Cow::Borrowed(piece) });
    }
}

fn send(session: &Session, message: &ToBackup<'_>) {
    if let Err(error) = session.say(message) {
        session.event(Event::LostAside(format!("cannot send to the backup: {error}")));
    }
}

/// A test has the log's socket fill before the guest is stopped, behind so many MiB of log.
pub(super) fn fill_in_a_test(_batches: &mut Batches<'_>) -> anyhow::Result<()> {
    fail::fail_point!("log-fills", |mib| {
        let mib: u64 = mib.and_then(|mib| mib.parse().ok()).unwrap_or_default();
        let goal = _batches.log.status().position + (mib << 20);
        while _batches.log.status().position < goal {
            _batches.take_in()?;
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        while !_batches.log.status().is_blocked {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        Ok(())
    });
    Ok(())
}

/// Reads all the log that is there now, until `most` bytes have been read, which must leave room for
/// all that the socket holds if none of it may stay there. What comes while it reads may be part of it.
fn read_on(log: &LogChannel, batch: &mut Vec<u8>, most: usize) -> anyhow::Result<()> {
    let mut piece = vec![0; PIECE_BYTES];
    while batch.len() + PIECE_BYTES <= most {
        match log.read_now(&mut piece) {
            Ok(0) => anyhow::bail!("QEMU closed its log"),
            Ok(read) => batch.extend_from_slice(&piece[..read]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error).context("cannot read QEMU's log"),
        }
    }
    Ok(())
}
