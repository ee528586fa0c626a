//! The first synchronisation: disks and memory are copied while the guest runs.

use super::Capturer;
use crate::moments::pass;
use crate::primary::send::Outgoing;
use crate::primary::{inbound, mirror};
use tracing::warn;
use understudy_memory::capture;
use understudy_protocol::{Epoch, PAGE_SIZE};

/// Pages copied at once while the guest runs; bounds the memory of a round.
const PIECE_PAGES: u64 = 2048;

/// The first synchronisation ends when a round leaves this few pages …
const SYNC_LAST_PAGES: u64 = 2000;

/// … or after this many rounds, for guests that write faster than the link.
const SYNC_ROUNDS: u32 = 8;

impl Capturer<'_> {
    /// Copies disks and memory while the guest runs, until little is left for
    /// the first pause. False when protection ended meanwhile.
    pub(super) fn first_synchronisation(&mut self) -> anyhow::Result<bool> {
        let session = self.session;
        mirror::begin(session);
        if session.recording().is_none() {
            inbound::begin(session);
        }
        let shares = mirror::shares(session)?;
        self.tracker.arm()?;
        self.dirty.clear();
        for block in self.machine.blocks() {
            block.add_content_to(&mut self.dirty)?;
        }
        session.progress.expect(self.dirty.pages() * PAGE_SIZE as u64);
        mirror::copy_disks(session, &shares)?;
        self.copy_memory()?;
        if session.group.is_shared() {
            // Others may take longer; the guest has written meanwhile.
            session.group.meet(session, || ())?;
            self.tracker.scan(&mut self.dirty)?;
            self.copy_memory()?;
        }
        self.sync_disks();
        pass("synchronised");
        Ok(!session.is_over())
    }

    /// Leaves little to do for a flush in the first pause, which waits for it: nobody holds what the guest
    /// says before.
    fn sync_disks(&self) {
        for disk in self.machine.disks() {
            if let Err(error) = disk.sync() {
                // So will the guest's next flush, and what it is told then is its owner's to decide.
                warn!(vm = %self.session.vm, disk = %disk.index(), "cannot sync it: {error}");
            }
        }
    }

    /// Copies all of `dirty` and what is written meanwhile, until that is little.
    fn copy_memory(&mut self) -> anyhow::Result<()> {
        for _ in 0..SYNC_ROUNDS {
            self.send_dirty(Epoch(0))?;
            self.tracker.scan(&mut self.dirty)?;
            self.session.progress.expect(self.dirty.pages() * PAGE_SIZE as u64);
            if self.dirty.pages() < SYNC_LAST_PAGES || self.session.is_over() {
                break;
            }
        }
        self.send_dirty(Epoch(0))
    }

    /// Copies and queues all of `dirty`, piece by piece, while the guest runs.
    pub(super) fn send_dirty(&mut self, epoch: Epoch) -> anyhow::Result<()> {
        while !self.dirty.is_empty() && !self.session.is_over() {
            self.dirty.take(PIECE_PAGES, &mut self.piece);
            capture(self.machine.blocks(), &self.piece, &mut self.staging)?;
            for chunk in self.staging.take().chunks {
                self.session.outbox.put(Outgoing::Pages(epoch, chunk));
            }
            self.session.progress.advance(self.piece.pages() * PAGE_SIZE as u64);
        }
        Ok(())
    }
}
