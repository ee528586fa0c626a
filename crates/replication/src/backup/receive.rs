//! What comes from the primary: each message in its turn, epochs staged until they are whole, then
//! acknowledged.

use super::apply::{apply, validate};
use super::session::Session;
use crate::clock;
use crate::lockstep::backup::Following;
use crate::lockstep::be_urgent;
use crate::moments::strike;
use crate::primary::{EPOCH_DISK_BYTES, PLANNED};
use anyhow::{Context, ensure};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use understudy_lockstep::Comparison;
use understudy_machine::Machine;
use understudy_protocol::wire::{Kind, Message};
use understudy_protocol::{BackupEvent, Epoch, Staging};
use understudy_snapshot::SnapshotNumber;

/// What a guest writes to its disks at most while the primary stops it, and what is sent of the
/// machine beside its memory: far more than either.
const BESIDE_MEMORY: u64 = 512 << 20;

/// How often a primary whose data is not read hears that this host works.
const WORD_INTERVAL: Duration = Duration::from_millis(100);

/// The most that epochs which are not whole yet have: all of the guest's memory, plain, and what
/// it wrote to its disks (`EPOCH_DISK_BYTES`, over which its primary ends an epoch).
fn staging_limit(machine: &Machine) -> u64 {
    let memory: u64 = machine.blocks().iter().map(|block| block.bytes()).sum();
    memory + memory / 16 + EPOCH_DISK_BYTES + BESIDE_MEMORY
}

/// What the primary sent could not be applied here, which is neither its fault nor the
/// connection's.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct OwnFailure(String);

impl Session {
    /// Receive, stage whole, acknowledge: until the connection ends.
    pub fn receive(self: &Arc<Self>) {
        let mut staging = Staging::with_limit(staging_limit(&self.machine()));
        let reason = loop {
            match self.receive_one(&mut staging) {
                Ok(()) => {}
                // The primary is told why, and what it still sends is read: a connection that is
                // closed with unread bytes is reset, and takes what was said along.
                Err(error) if error.is::<OwnFailure>() => {
                    self.give_up(&error.to_string());
                    while self.data.receive().is_ok() {}
                    break error.to_string();
                }
                Err(error) => break format!("{error:#}"),
            }
        };
        self.data.refuse(&reason);
        self.data.close();
        self.parting.hung_up();
        self.event(BackupEvent::PeerGone(reason), None);
    }

    fn receive_one(self: &Arc<Self>, staging: &mut Staging) -> anyhow::Result<()> {
        let message = self.data.receive()?;
        strike("stage", &self.vm);
        self.received.fetch_add(message.payload.len() as u64, Ordering::Relaxed);
        match message.header.kind {
            Kind::TakeOver => {
                let planned = message.header.epoch == PLANNED;
                self.group.each(|member| member.planned.store(planned, Ordering::Release));
                self.event(BackupEvent::TakeOver, None);
            }
            Kind::StandDown => self.event(BackupEvent::StandDown, None),
            Kind::Refuse => {
                anyhow::bail!("the primary gave up: {}", String::from_utf8_lossy(&message.payload))
            }
            Kind::Log => self.take_log(&message, staging)?,
            Kind::Written => {
                let following = self.following().context("counts came, but no log")?;
                following.writes().told(&message, self.machine().disks().len())?;
            }
            Kind::Compare => {
                let following = self.following().context("a place came, but no log")?;
                following.compare(Comparison::decode(&message.payload)?)?;
            }
            Kind::Condemn => self.diverged(&String::from_utf8_lossy(&message.payload)),
            Kind::DiskReads => {
                let following = self.following();
                following.context("reads came, but there is no log")?.reads().take(&message)?;
            }
            Kind::Turn => self.take_order(&message)?,
            Kind::MediumAsked => self.look_for_medium(&message)?,
            Kind::LogBegins => {
                self.expect_log(message.header.epoch)?;
                self.stage(staging, message)?;
            }
            Kind::LogEnds => {
                self.expect_end_of_log(&message)?;
                self.stage(staging, message)?;
            }
            Kind::EpochEnd => self.stage(staging, message)?,
            Kind::LetGo => self.keeper.let_go(SnapshotNumber(message.header.epoch.0)),
            _ => {
                validate(&self.machine(), &message)?;
                // The first synchronisation: nothing to be kept whole yet.
                if message.header.epoch == Epoch(0) {
                    apply(&self.machine(), message, None)
                        .map_err(|error| OwnFailure(format!("{error:#}")))?;
                } else {
                    self.stage(staging, message)?;
                }
            }
        }
        Ok(())
    }

    /// Lockstep: the batch is acknowledged, and executed when QEMU comes to it.
    fn take_log(&self, message: &Message, staging: &mut Staging) -> anyhow::Result<()> {
        let epoch = message.header.epoch;
        let following = self.following().context("a log came, which was not agreed on")?;
        if epoch == following.machine().next() {
            // Output waits for this thread from here on, and for nothing else.
            be_urgent();
        }
        if following.take(message)? {
            staging.pass(epoch);
            self.event(BackupEvent::Staged(epoch), None);
        }
        following.await_room();
        Ok(())
    }

    /// While this host reads nothing, its primary hears whether it works.
    fn await_room(&self) {
        let mut told = self.worked.load(Ordering::Relaxed);
        while !self.waiting.await_room(WORD_INTERVAL) {
            let worked = self.worked.load(Ordering::Relaxed);
            if worked > told {
                told = worked;
                self.tell_work(worked);
            }
        }
    }

    fn stage(&self, staging: &mut Staging, message: Message) -> anyhow::Result<()> {
        let (kind, epoch) = (message.header.kind, message.header.epoch);
        let may_come =
            |following: Arc<Following>| epoch <= following.machine() || following.is_ending();
        ensure!(self.following().is_none_or(may_come), "{kind:?} came after the log had begun");
        if let Some(epoch) = staging.take(message, clock::now())? {
            // Before the apply thread has it, which gives its bytes back.
            self.waiting.force(epoch.bytes);
            self.group.staged(self, epoch);
            // Acknowledged whatever waits; the next one is read when there is room.
            self.await_room();
        }
        Ok(())
    }
}
