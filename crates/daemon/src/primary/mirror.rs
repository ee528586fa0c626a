//! Disk writes on their way to the backup.

use super::send::Outgoing;
use super::session::Session;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use understudy_disk::WriteSink;
use understudy_protocol::wire::{DiskRange, Kind};
use understudy_protocol::{DiskIndex, Epoch};

/// Streams a disk's writes into the session's queue, tagged with the epoch that
/// runs. A weak reference: the disks outlive the session.
struct Mirroring(std::sync::Weak<Session>);

impl WriteSink for Mirroring {
    fn write(&self, disk: DiskIndex, offset: u64, data: &[u8]) {
        // A request may be larger than a message.
        for (i, part) in data.chunks(1 << 20).enumerate() {
            let offset = offset + (i << 20) as u64;
            let range = DiskRange { disk, offset, length: part.len() as u64 };
            self.put(Kind::DiskWrite, range, part);
        }
    }

    fn zero(&self, disk: DiskIndex, offset: u64, length: u64) {
        self.put(Kind::DiskZero, DiskRange { disk, offset, length }, &[]);
    }
}

impl Mirroring {
    fn put(&self, kind: Kind, range: DiskRange, data: &[u8]) {
        let Some(session) = self.0.upgrade() else { return };
        let mut payload = Vec::with_capacity(DiskRange::BYTES + data.len());
        payload.extend_from_slice(&range.encode());
        payload.extend_from_slice(data);
        let epoch = Epoch(session.disk_epoch.load(Ordering::Acquire));
        session.outbox.put(Outgoing::Data(kind, epoch, payload));
    }
}

/// From here on, every write of every disk goes to the backup too.
pub fn begin(session: &Arc<Session>) {
    for disk in session.machine.disks() {
        disk.set_sink(Some(Arc::new(Mirroring(Arc::downgrade(session)))));
    }
}

/// Copies what the disks hold while the guest runs; writes meanwhile are
/// ordered with the copies by each disk's lock.
pub fn copy_disks(session: &Arc<Session>) -> anyhow::Result<()> {
    let sink = Mirroring(Arc::downgrade(session));
    for disk in session.machine.disks() {
        let cancel = AtomicBool::new(false);
        let mut reported = 0;
        let mut progress = |done: u64| {
            session.progress.advance(done - reported);
            reported = done;
            if session.is_over() {
                cancel.store(true, Ordering::Relaxed);
            }
        };
        understudy_disk::copy_out(disk, &sink, &mut progress, &cancel)?;
    }
    Ok(())
}
