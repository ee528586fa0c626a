//! The errands of the thread that applies: whole epochs in order, turns among them, until the VM is
//! live here or forgotten.

use super::apply::{Applied, Checkpoint, apply_epoch};
use super::copy::Copy;
use super::medium::media_of;
use super::session::Session;
use super::takeover::Outcome;
use super::turn::Other;
use crate::lockstep::backup::{self as lockstep, Following};
use crate::messages::{Piece, ToPrimary, WholeEpoch};
use crate::moments::strike;
use anyhow::{Context, ensure};
use crossbeam_channel::Receiver;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use understudy_cluster::messages::KeepOrder;
use understudy_disk::Mirror;
use understudy_memory::StillImage;
use understudy_protocol::{Epoch, Generation};

/// What the apply thread does, in order.
pub enum Errand {
    /// Apply a committed epoch; a turn, with what it needs.
    Apply(WholeEpoch, Option<Other>),
    /// Bring what was applied to stable storage.
    Settle,
    /// Start the guest.
    GoLive {
        /// The generation won.
        generation: Generation,
        /// Why, for people.
        reason: String,
    },
    /// Forget the VM.
    Discard,
}

/// A test says which epochs cannot be applied.
fn fail_in_a_test() -> anyhow::Result<()> {
    fail::fail_point!("apply-epoch", |_| anyhow::bail!("a test says so"));
    Ok(())
}

impl Session {
    /// Applies epochs in order until the VM is live here or forgotten.
    pub fn apply_all(
        self: &Arc<Self>,
        errands: &Receiver<Errand>,
        mirrors: Vec<Mirror>,
    ) -> Outcome {
        let mut log = None;
        let mut copy = Copy::Filling(mirrors);
        for errand in errands {
            match errand {
                Errand::Apply(epoch, other) => {
                    let bytes = epoch.bytes;
                    copy = self.extend(copy, epoch, other, &mut log);
                    self.waiting.give_back(bytes);
                }
                Errand::Settle => {
                    if let Err(error) = self.settle() {
                        self.give_up(&format!("{error:#}"));
                        copy = Copy::Failed(error);
                    }
                }
                Errand::GoLive { generation, reason } => {
                    let checkpoint = copy.into_checkpoint();
                    match self.take_over(checkpoint, log.as_ref(), generation, reason) {
                        Ok(outcome) => return outcome,
                        // What comes next is that it is to be forgotten.
                        Err(error) => copy = self.not_started(error),
                    }
                }
                Errand::Discard => return self.forget(&copy),
            }
        }
        Outcome::Discarded
    }

    /// The copy with one more epoch.
    fn extend(
        self: &Arc<Self>,
        copy: Copy<Vec<Mirror>>,
        epoch: WholeEpoch,
        other: Option<Other>,
        log: &mut Option<Arc<Following>>,
    ) -> Copy<Vec<Mirror>> {
        copy.extended(|mirrors| {
            let number = epoch.epoch;
            let applied = self.apply_one(epoch, mirrors, other, log).and_then(|checkpoint| {
                let following = self.follow_from(number, &checkpoint.device_state)?;
                *log = following.or(log.take());
                Ok(checkpoint)
            });
            applied
                .with_context(|| format!("epoch {number} could not be applied"))
                .inspect_err(|error| self.give_up(&format!("{error:#}")))
        })
    }

    fn apply_one(
        &self,
        epoch: WholeEpoch,
        mirrors: Option<Vec<Mirror>>,
        other: Option<Other>,
        log: &mut Option<Arc<Following>>,
    ) -> anyhow::Result<Checkpoint> {
        let number = epoch.epoch;
        let has = |turn: fn(&Piece<'static>) -> bool| epoch.pieces.iter().any(turn);
        let begins = has(|piece| matches!(piece, Piece::LogBegins));
        let ends = has(|piece| matches!(piece, Piece::LogEnds(_)));
        if ends {
            self.leave_log(&log.take().context("there is no log")?)?;
            // Its memory is the base of what comes.
            self.change_over(other)?;
            let applied = self.apply_whole(epoch, None)?;
            return Ok(self.applied_turn(number, applied.checkpoint));
        }
        let in_turn = begins && mirrors.is_some();
        ensure!(!in_turn, "a log begins before the first synchronisation has ended");
        fail_in_a_test()?;
        strike("apply", &self.vm);
        let image = self.keeper.image();
        let media = media_of(&epoch);
        let applied = self.apply_whole(epoch, image.as_deref())?;
        // Pages of the epoch may refer to the medium before.
        media.iter().try_for_each(|medium| self.change_medium(medium))?;
        let Applied { checkpoint, keep } = applied;
        if begins {
            // The guest tells of none of its writes.
            self.keeper.end();
            self.change_over(other)?;
            return Ok(self.applied_turn(number, checkpoint));
        }
        // With the first whole epoch the mirrors are images of their own.
        if let Some(filled) = mirrors {
            for mirror in filled {
                mirror.complete()?;
            }
            self.make_ready()?;
        }
        self.applied.store(number.0, Ordering::Release);
        if let Some(order) = keep {
            self.keep(order, &checkpoint.device_state);
        }
        Ok(checkpoint)
    }

    /// A disk that hangs is noticed by how far this comes.
    fn apply_whole(
        &self,
        epoch: WholeEpoch,
        image: Option<&StillImage>,
    ) -> anyhow::Result<Applied> {
        let awaited = self.vitals.applying.begin();
        apply_epoch(&self.machine(), epoch, image, &|bytes| {
            awaited.again();
            self.worked.fetch_add(bytes, Ordering::Relaxed);
        })
    }

    /// What is there now is a snapshot's: it is stored while later epochs are applied.
    fn keep(&self, order: KeepOrder, device_state: &[u8]) {
        let data = self.data.clone();
        let answer = move |kept| {
            // If it cannot be sent the reading thread finds out why.
            let _ = ToPrimary::Kept(kept).send(&data);
        };
        self.keeper.keep(order, &self.machine(), &self.directory, device_state, answer);
    }

    fn applied_turn(&self, number: Epoch, checkpoint: Checkpoint) -> Checkpoint {
        fail::fail_point!("turn-applied");
        self.turns.fetch_sub(1, Ordering::AcqRel);
        self.applied.store(number.0, Ordering::Release);
        checkpoint
    }

    /// Loads the machine and executes the log that begins behind this epoch, if one does.
    fn follow_from(
        self: &Arc<Self>,
        epoch: Epoch,
        state: &[u8],
    ) -> anyhow::Result<Option<Arc<Following>>> {
        let following = self.following().filter(|following| following.machine() == epoch);
        if let Some(following) = &following {
            self.note_changes();
            super::follow(self, following)?;
            lockstep::begin(&self.machine(), following, state)?;
        }
        Ok(following)
    }
}
