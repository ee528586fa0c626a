//! The messages from the primary: each message in its turn, epochs staged until they are whole,
//! then acknowledged.

use super::apply::{apply, validate};
use super::failure::OwnFailure;
use super::session::Session;
use crate::clock;
use crate::lockstep::backup::Following;
use crate::lockstep::be_urgent;
use crate::lockstep::writes::Writes;
use crate::messages::{Piece, ToBackup, ToPrimary, WholeEpoch};
use crate::moments::strike;
use crate::primary::EPOCH_DISK_BYTES;
use anyhow::{Context, bail, ensure};
use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use understudy_machine::Machine;
use understudy_protocol::wire::{Header, Kind};
use understudy_protocol::{Epoch, EpochEnd, MOST_PRECOPIED_PAGES, PAGE_SIZE, Staging};
use understudy_session::backup::Event;

/// Epochs that are not whole yet.
type PieceStaging = Staging<Piece<'static>>;

/// The bytes beside memory: what a guest writes to its disks at most while the primary stops it,
/// and what is sent of the machine beside its memory; far more than either.
const BESIDE_MEMORY: u64 = 224 << 20;

/// The bytes of pages that are sent before a pause, which may find all of memory.
const PRECOPIED: u64 = MOST_PRECOPIED_PAGES * PAGE_SIZE as u64;

/// Time after which a primary whose data is not read hears again that this host works.
const WORD_INTERVAL: Duration = Duration::from_millis(100);

/// The most that epochs which are not whole yet have: all of the guest's memory, plain, what was
/// sent of it before the pause, and what it wrote to its disks (`EPOCH_DISK_BYTES`, over which its
/// primary ends an epoch).
fn staging_limit(machine: &Machine) -> u64 {
    let pages = PRECOPIED + machine.blocks().iter().map(|block| block.bytes()).sum::<u64>();
    pages + pages / 16 + EPOCH_DISK_BYTES + BESIDE_MEMORY
}

impl Session {
    /// Receive, stage whole, acknowledge: until the connection ends.
    pub fn receive(self: &Arc<Self>) {
        let mut staging = Staging::with_limit(staging_limit(&self.machine()));
        let reason = loop {
            let Err(error) = self.receive_one(&mut staging) else { continue };
            let failure: OwnFailure = match error.downcast() {
                Ok(failure) => failure,
                Err(error) => break format!("{error:#}"),
            };
            // The primary is told why, and what it still sends is read: a connection that is
            // closed with unread bytes is reset, and takes what was said along.
            self.heed(&failure);
            self.event(failure.event());
            while self.data.receive().is_ok() {}
            break failure.to_string();
        };
        self.say(&self.refusal(reason.clone()));
        self.data.close();
        self.event(Event::DataEnded(self.place, reason));
    }

    fn receive_one(self: &Arc<Self>, staging: &mut PieceStaging) -> anyhow::Result<()> {
        let message = self.data.receive()?;
        strike("stage", &self.vm);
        self.received.fetch_add(message.payload.len() as u64, Ordering::Relaxed);
        let header = message.header;
        match ToBackup::decode(message)? {
            ToBackup::Piece(_, piece) => self.take_piece(piece, &header, staging)?,
            ToBackup::EpochEnd(end) => self.end_epoch(&end, staging)?,
            ToBackup::TakeOver { planned } => self.event(Event::TakeOver { planned }),
            ToBackup::StandDown => {
                fail::fail_point!("stand-down", |_| bail!("a test says so"));
                self.event(Event::StandDown);
            }
            ToBackup::Refuse(reason) => bail!("the primary gave up: {reason}"),
            ToBackup::Log { epoch, log } => self.take_log(epoch, &log, staging)?,
            ToBackup::Written(written) => {
                let following = self.following().context("counts came, but no log")?;
                following.told_writes(written, self.machine().disks().len())?;
            }
            ToBackup::Compare { comparison, .. } => {
                let following = self.following().context("a place came, but no log")?;
                following.compare(comparison)?;
            }
            ToBackup::Condemn(reason) => self.diverged(&reason),
            ToBackup::DiskReads { stream, .. } => {
                let following = self.following();
                following.context("reads came, but there is no log")?.take_reads(&stream)?;
            }
            ToBackup::Turn(order) => self.take_order(order)?,
            ToBackup::MediumAsked(medium) => self.look_for_medium(medium)?,
            ToBackup::LetGo(number) => self.let_go(number),
        }
        Ok(())
    }

    /// A piece of an epoch came, in the message with this header.
    fn take_piece(
        &self,
        mut piece: Piece<'static>,
        header: &Header,
        staging: &mut PieceStaging,
    ) -> anyhow::Result<()> {
        validate(&self.machine(), &piece)?;
        let bytes = piece.bytes();
        match &mut piece {
            // The first synchronisation: nothing to be kept whole yet.
            Piece::Pages(_) | Piece::DiskWrite(_) | Piece::DiskZero(_)
                if header.epoch == Epoch(0) =>
            {
                return Ok(apply(&self.machine(), piece, None).map_err(OwnFailure::of)?);
            }
            Piece::LogBegins => self.expect_log(header.epoch)?,
            Piece::LogEnds(rest) => self.expect_end_of_log(header.epoch, mem::take(rest))?,
            Piece::Medium(medium) => self.take_medium(header.epoch, medium)?,
            _ => {}
        }
        self.check_may_come(header.kind, header.epoch)?;
        Ok(staging.take(header, bytes, piece)?)
    }

    /// An epoch is whole.
    fn end_epoch(&self, end: &EpochEnd, staging: &mut PieceStaging) -> anyhow::Result<()> {
        self.check_may_come(Kind::EpochEnd, end.epoch)?;
        let epoch = WholeEpoch::try_from(staging.end(end, clock::now())?)?;
        // Before the apply thread has it, which gives its bytes back.
        self.waiting.force(epoch.bytes);
        self.stage(epoch);
        // Acknowledged whatever waits; the next one is read when there is room.
        self.await_room();
        Ok(())
    }

    /// Checkpoints come before the log, and when that ends.
    fn check_may_come(&self, kind: Kind, epoch: Epoch) -> anyhow::Result<()> {
        let may_come = |following: Arc<Following>| following.may_come(epoch);
        ensure!(self.following().is_none_or(may_come), "{kind:?} came after the log had begun");
        Ok(())
    }

    /// Lockstep: the batch is acknowledged, and executed when QEMU comes to it.
    fn take_log(&self, epoch: Epoch, log: &[u8], staging: &mut PieceStaging) -> anyhow::Result<()> {
        let following = self.following().context("a log came, which was not agreed on")?;
        if epoch == following.machine().next() {
            // Output waits for this thread from here on, and for nothing else.
            be_urgent();
        }
        if following.take(epoch, log)? {
            staging.pass(epoch);
            self.event(Event::Logged(epoch));
        }
        self.await_room_behind(&following);
        Ok(())
    }

    /// Waits until QEMU has less log before it. Its primary hears that this host works: whether QEMU
    /// and its disks do is watched (`watch`), and for how long they may not.
    fn await_room_behind(&self, following: &Following) {
        while !following.await_room(WORD_INTERVAL) {
            let worked = self.worked.fetch_add(1, Ordering::Relaxed) + 1;
            self.say(&ToPrimary::Works(worked));
        }
    }

    /// Waits for room. While this host reads nothing, its primary hears whether it works.
    fn await_room(&self) {
        let mut told = self.worked.load(Ordering::Relaxed);
        while !self.waiting.await_room(WORD_INTERVAL) {
            let worked = self.worked.load(Ordering::Relaxed);
            if worked > told {
                told = worked;
                self.say(&ToPrimary::Works(worked));
            }
        }
    }
}
