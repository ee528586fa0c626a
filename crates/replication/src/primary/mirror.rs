//! Disk writes on their way to the backup.

use super::references::References;
use super::send::Outgoing;
use super::session::Session;
use crate::lockstep::reads;
use crate::lockstep::writes::Writes;
use crate::messages::{Piece, ToBackup};
use crate::resync::Basis;
use crate::sessions::Sessions;
use anyhow::Context;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_disk::{Disk, GRANULE_BYTES, Reads, Rounds, WriteSink, copy_changed, copy_out};
use understudy_protocol::wire::{DiskRange, DiskWrite};
use understudy_protocol::{DiskIndex, Epoch};
use understudy_threads::lock;

/// Streams a disk's writes into the session's queue, tagged with the epoch that
/// runs. A weak reference: the disks outlive the session.
struct Mirroring(std::sync::Weak<Session>);

impl WriteSink for Mirroring {
    fn begin(&self, disk: DiskIndex, offset: u64, length: u64) {
        self.references(|references| references.begin_write(disk, offset, length));
    }

    fn write(&self, disk: DiskIndex, offset: u64, data: &[u8]) {
        // A request may be larger than a message.
        for (i, part) in data.chunks(1 << 20).enumerate() {
            let write = DiskWrite::new(disk, offset + (i << 20) as u64, part);
            self.put(write.range(), Piece::DiskWrite(write));
        }
        self.references(|references| references.end_write(disk));
    }

    fn zero(&self, disk: DiskIndex, offset: u64, length: u64) {
        let range = DiskRange { disk, offset, length };
        self.put(range, Piece::DiskZero(range));
        self.references(|references| references.end_write(disk));
    }

    fn is_closed(&self) -> bool {
        self.0.upgrade().is_none_or(|session| session.outbox.is_closed())
    }
}

impl Mirroring {
    fn references(&self, tell: impl FnOnce(&References)) {
        if let Some(references) = self.0.upgrade().and_then(|session| session.references.clone()) {
            tell(&references);
        }
    }

    fn put(&self, range: DiskRange, piece: Piece<'static>) {
        let Some(session) = self.0.upgrade() else { return };
        let epoch = || Epoch(session.disk_epoch.load(Ordering::Acquire));
        // The first synchronisation is applied as it comes.
        if epoch() > Epoch(0) && session.outbox.room.take_of_epoch(piece.bytes()) {
            session.group.ring();
        }
        let epoch = epoch();
        if let Some(references) = &session.references {
            references.wrote(range.disk, range.offset, range.length, epoch);
        }
        session.outbox.put(Outgoing::Piece(epoch, piece));
    }
}

/// Has every write of every disk go to the backup, too, from here on.
pub fn begin(session: &Arc<Session>) {
    let rounds = *lock(&session.rounds);
    for disk in session.machine().disks() {
        disk.set_sink(Some(Arc::new(Mirroring(Arc::downgrade(session)))));
        // What changed until here goes over with the first synchronisation.
        disk.begin_rounds(rounds);
        disk.begin_round(rounds);
        // After the writes' sink: no write goes unnoticed that a remembered block meets.
        let references = session.references.clone();
        disk.set_reads(references.map_or(Reads::Plain, |references| Reads::Watched(references)));
    }
}

/// Ends mirroring for lockstep: the guest stands still, and nothing that it writes from here on
/// goes over. The backup's own guest writes it there. What it reads does, if that was asked for.
pub fn end(session: &Session) {
    for disk in session.machine().disks() {
        disk.set_sink(None);
    }
    let (machine, recording) = (session.machine(), session.recording());
    if let Some(recording) = &recording {
        recording.begin_writes(&machine.disks());
    }
    match recording.as_ref().and_then(|recording| recording.reads.as_ref()) {
        Some(trail) => reads::record(&machine, trail),
        None => reads::copy(&machine),
    }
}

/// The guest stands still at the end of its log: what it writes from here on goes over again.
pub fn resume(session: &Arc<Session>) {
    for disk in session.machine().disks() {
        disk.set_sink(Some(Arc::new(Mirroring(Arc::downgrade(session)))));
    }
}

/// The share of a disk that is to be copied.
pub enum Share {
    /// All data.
    Data,
    /// The data in these runs of blocks.
    Changes(Vec<Range<u64>>),
}

/// The share of each disk that is to be copied, counted into the progress. To be called after
/// [`begin`]: what changes from then on reaches the backup by itself.
pub fn shares(session: &Session) -> anyhow::Result<Vec<Share>> {
    let share = |disk: &Arc<Disk>| {
        if let Basis::Full(_) = session.basis {
            session.progress.expect(disk.data_bytes()?);
            return Ok(Share::Data);
        }
        let runs = disk.changes().context("changes are tracked before an offer")?.runs();
        session.progress.expect(runs.iter().map(|run| (run.end - run.start) * GRANULE_BYTES).sum());
        Ok(Share::Changes(runs))
    };
    session.machine().disks().iter().map(share).collect()
}

/// Copies disks while the guest runs; writes meanwhile are ordered with the
/// copies by each disk's lock.
pub fn copy_disks(session: &Arc<Session>, shares: &[Share]) -> anyhow::Result<()> {
    let sink = Mirroring(Arc::downgrade(session));
    let began = Instant::now();
    for (disk, share) in session.machine().disks().iter().zip(shares) {
        let cancel = AtomicBool::new(false);
        let mut reported = 0;
        let mut progress = |done: u64| {
            session.progress.advance(done - reported);
            reported = done;
            if session.is_over() {
                cancel.store(true, Ordering::Relaxed);
            }
        };
        let bytes = match share {
            Share::Data => copy_out(disk, &sink, &mut progress, &cancel)?,
            Share::Changes(runs) => copy_changed(disk, runs, &sink, &mut progress, &cancel)?,
        };
        session.progress.copied_of_disks(bytes, began.elapsed());
    }
    Ok(())
}

/// Time after which changes that are on the backup's disks are forgotten again.
const ROUND_INTERVAL: Duration = Duration::from_millis(500);

/// Forgets changes once they are on the backup's disks, until protection ends.
pub fn run_rounds(session: &Session) {
    if let Err(error) = rounds(session)
        && !session.is_over()
    {
        // What is not forgotten is copied once more after a failure.
        warn!(vm = %session.vm, "changes of the disks are not forgotten any more: {error}");
    }
}

fn rounds(session: &Session) -> anyhow::Result<()> {
    let (mut joined, mut told) = (false, (Epoch(0), None));
    // The epoch at whose end all that was set aside had gone to the backup.
    let mut closing = Epoch(0);
    loop {
        thread::sleep(ROUND_INTERVAL);
        if session.is_over() {
            return Ok(());
        }
        // Nothing that was set aside in the other way is forgotten in this one.
        let rounds = lock(&session.rounds);
        let settled = Epoch(session.settled.load(Ordering::Acquire));
        if settled < session.turned() || settled < closing {
            continue;
        }
        let machine = session.machine();
        if !joined {
            // From here on the maps know nothing of earlier sessions.
            let (disks, mut is_late) = (machine.disks(), false);
            session.records.change(&session.vm, |record| {
                is_late = disks.iter().any(|disk| has_other_rounds(disk, *rounds));
                if !is_late && !session.distrusts_mirrors.load(Ordering::Acquire) {
                    record.sessions = Sessions::since(session.id.to_string());
                }
            })?;
            if is_late {
                return Ok(());
            }
            joined = true;
        }
        if let Some(recording) = session.recording() {
            recording.strike_off(&machine.disks(), *rounds)?;
            let written = (recording.machine(), recording.writes_now(&machine.disks()));
            if let (_, Some(counts)) = &written
                && written != told
            {
                session.say(&ToBackup::Written(counts.clone()))?;
            }
            told = written;
            continue;
        }
        for disk in machine.disks() {
            let Some(changes) = disk.changes() else { continue };
            changes.end_round(*rounds)?;
            disk.begin_round(*rounds);
        }
        // Read last: no write before it has a later epoch.
        closing = Epoch(session.disk_epoch.load(Ordering::Acquire));
    }
}

/// Whether a later session has begun to forget changes of the disk.
fn has_other_rounds(disk: &Disk, rounds: Rounds) -> bool {
    disk.changes().is_some_and(|changes| changes.has_other_rounds(rounds))
}
