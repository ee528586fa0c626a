//! The errands of the thread that applies, as `understudy_session` gives them out: whole epochs in
//! order, turns among them, until the VM is live here or forgotten.

use super::activation::{Readiness, replace_images};
use super::apply::{Checkpoint, apply_changes};
use super::session::Session;
use super::takeover::Outcome;
use super::turn::Other;
use crate::lockstep::backup::{self as lockstep, Following};
use crate::messages::{LogTurn, Piece, ToPrimary, WholeEpoch};
use crate::moments::strike;
use anyhow::Context;
use crossbeam_channel::Receiver;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tracing::error;
use understudy_cluster::kept::KeptJob;
use understudy_cluster::messages::KeepOrder;
use understudy_disk::{Mirror, Synced};
use understudy_machine::tpm::TpmMirror;
use understudy_memory::StillImage;
use understudy_protocol::Epoch;
use understudy_report::TakeoverReport;
use understudy_session::backup::{Errand, Event};
use understudy_snapshot::SnapshotNumber;
use understudy_threads::lock;

/// A member's part of an epoch that is committed, on its way to the apply thread.
pub(super) struct Committed {
    /// The part.
    pub part: WholeEpoch,
    /// Other machine, which a turn needs.
    pub other: Option<Other>,
}

/// The work that the apply thread has in its hands.
struct Work {
    /// Mirrors that are none yet.
    mirrors: Option<Vec<Mirror>>,
    /// Checkpoint at which the last epoch ends.
    checkpoint: Option<Checkpoint>,
    /// Readiness for a take-over, once there is something to take over with.
    ready: Option<Readiness>,
    /// Log that is executed behind it.
    log: Option<Arc<Following>>,
    /// The VM's TPM on this host's disk, if it has one.
    tpm: Option<TpmMirror>,
    /// Report of the time that a take-over took.
    takeover: Option<TakeoverReport>,
}

/// A test says which epochs cannot be applied.
fn fail_in_a_test() -> anyhow::Result<()> {
    fail::fail_point!("apply-epoch", |_| anyhow::bail!("a test says so"));
    Ok(())
}

impl Session {
    /// Does one errand after the other, and says how each ended, until the VM is live here or
    /// forgotten. What comes next is not decided here.
    pub(super) fn run_errands(
        self: &Arc<Self>,
        errands: &Receiver<Errand>,
        commits: &Receiver<Committed>,
        mirrors: Vec<Mirror>,
    ) -> Outcome {
        let mut work = Work {
            mirrors: Some(mirrors),
            checkpoint: None,
            ready: None,
            log: None,
            tpm: self.machine().definition().tpm.map(|_| TpmMirror::new(&self.directory)),
            takeover: None,
        };
        for errand in errands {
            if let Errand::End(ending) = errand {
                return self.outcome(ending, work.takeover);
            }
            let done = self.carry_out(&errand, commits, &mut work);
            if let Err(error) = &done {
                error!(vm = %self.vm, "{errand:?}: {error:#}");
                error.downcast_ref().inspect(|failure| self.heed(failure));
            }
            let result = done.map_err(|error| format!("{error:#}"));
            self.event(Event::Done(self.place, errand, result));
        }
        Outcome::Discarded
    }

    fn carry_out(
        self: &Arc<Self>,
        errand: &Errand,
        commits: &Receiver<Committed>,
        work: &mut Work,
    ) -> anyhow::Result<()> {
        let in_lockstep = work.log.is_some();
        let from = || work.checkpoint.as_ref().context("no epoch was applied");
        match errand {
            Errand::Apply(_) => {
                let Committed { part, other } = commits.recv()?;
                let bytes = part.bytes;
                let applied = self.extend(part, other, work);
                self.waiting.give_back(bytes);
                return applied;
            }
            Errand::Skip(_) => self.waiting.give_back(commits.recv()?.part.bytes),
            Errand::Settle => self.settle()?,
            Errand::Complete => self.complete(work.log.as_ref())?,
            Errand::Activate(leaders) => {
                let ready = work.ready.take().context("no epoch was applied")?;
                self.activate(self.group.generation(self, *leaders), ready)?;
            }
            Errand::Start => self.start(from()?, in_lockstep)?,
            Errand::Open => work.takeover = Some(self.go_live(from()?, in_lockstep)),
            Errand::Halt => self.halt(),
            Errand::Forget => self.forget(work.ready.take()),
            Errand::End(_) => {}
        }
        Ok(())
    }

    /// Applies one more epoch.
    fn extend(
        self: &Arc<Self>,
        part: WholeEpoch,
        other: Option<Other>,
        work: &mut Work,
    ) -> anyhow::Result<()> {
        let number = part.epoch;
        let checkpoint = self.apply_one(part, other, work)?;
        let ready = work.ready.as_ref();
        let following = self.follow_from(number, &checkpoint.device_state, ready)?;
        work.log = following.or(work.log.take());
        work.checkpoint = Some(checkpoint);
        Ok(())
    }

    fn apply_one(
        &self,
        epoch: WholeEpoch,
        other: Option<Other>,
        work: &mut Work,
    ) -> anyhow::Result<Checkpoint> {
        let mirrors = work.mirrors.take();
        let WholeEpoch { epoch, changes, device_state, turn, media, keep, taken, .. } = epoch;
        let ended_at = || Checkpoint { device_state: device_state.join(), taken };
        if turn == Some(LogTurn::Ends) {
            self.leave_log(&work.log.take().context("there is no log")?)?;
            // Its memory is the base of what comes.
            self.change_over(other)?;
            self.apply_whole(changes, None)?;
            return Ok(self.applied_turn(ended_at()));
        }
        fail_in_a_test()?;
        strike("apply", &self.vm);
        let kept = self.kept();
        self.apply_whole(changes, kept.as_deref().map(KeptJob::image))?;
        let checkpoint = ended_at();
        // With the first whole epoch the mirrors are images of their own, which its TPM's state belongs to: until
        // then this host may have others, with theirs.
        let are_new = mirrors.is_some();
        if let Some(mirrors) = mirrors {
            self.complete_mirrors(mirrors)?;
        }
        if let Some(tpm) = &mut work.tpm {
            let _awaited = self.vitals.applying.begin();
            tpm.apply(epoch, &checkpoint.device_state)?;
        }
        // Pages of the epoch may refer to the medium before.
        for medium in &media {
            self.change_medium(medium, work.ready.as_mut())?;
        }
        if turn == Some(LogTurn::Begins) {
            // The guest tells of none of its writes.
            self.end_kept();
            self.change_over(other)?;
            return Ok(self.applied_turn(checkpoint));
        }
        if are_new {
            work.ready = Some(self.make_ready()?);
        }
        if let Some(order) = keep {
            self.keep(order, &checkpoint.device_state);
        }
        Ok(checkpoint)
    }

    /// The epoch is acknowledged, and no copy to go on with until they are whole: what takes long here is told.
    fn complete_mirrors(&self, mirrors: Vec<Mirror>) -> anyhow::Result<()> {
        let awaited = self.vitals.applying.begin();
        let synced = Synced::of(mirrors, || awaited.again())?;
        awaited.again();
        replace_images(&self.records, &self.vm, self.position().0, synced)
    }

    /// A disk that hangs is noticed by how far this comes.
    fn apply_whole(
        &self,
        changes: Vec<Piece<'static>>,
        image: Option<&StillImage>,
    ) -> anyhow::Result<()> {
        let awaited = self.vitals.applying.begin();
        apply_changes(&self.machine(), changes, image, &|bytes| {
            awaited.again();
            self.worked.fetch_add(bytes, Ordering::Relaxed);
        })
    }

    /// Keeps what is there now for a snapshot: it is stored while later epochs are applied.
    fn keep(&self, order: KeepOrder, device_state: &[u8]) {
        let data = self.data.clone();
        let answer = move |kept| {
            // If it cannot be sent the reading thread finds out why.
            let _ = ToPrimary::Kept(kept).send(&data);
        };
        // The former ends before the next one begins.
        self.end_kept();
        let (machine, directory) = (self.machine(), &self.directory);
        let kept = self.keeper.keep(order, &machine, directory, device_state, answer);
        lock(&self.present).kept = kept;
    }

    /// What is kept now.
    fn kept(&self) -> Option<Arc<KeptJob>> {
        let mut present = lock(&self.present);
        let over = present.kept.take_if(|kept| kept.is_over());
        let kept = present.kept.clone();
        drop(present);
        drop(over);
        kept
    }

    /// Nothing is kept for this snapshot any more.
    pub(super) fn let_go(&self, number: SnapshotNumber) {
        let kept = lock(&self.present).kept.take_if(|kept| kept.number() == number);
        kept.inspect(|kept| kept.end());
    }

    /// Nothing is kept any more: the VM runs here, or is not followed any more.
    pub(super) fn end_kept(&self) {
        let kept = lock(&self.present).kept.take();
        kept.inspect(|kept| kept.end());
    }

    fn applied_turn(&self, checkpoint: Checkpoint) -> Checkpoint {
        fail::fail_point!("turn-applied");
        lock(&self.present).orders.turns.carried_out();
        checkpoint
    }

    /// Loads the machine and executes the log that begins behind this epoch, if one does.
    fn follow_from(
        self: &Arc<Self>,
        epoch: Epoch,
        state: &[u8],
        ready: Option<&Readiness>,
    ) -> anyhow::Result<Option<Arc<Following>>> {
        let following = self.following().filter(|following| following.machine() == epoch);
        if let Some(following) = &following {
            ready.inspect(|ready| self.note_changes(ready));
            super::follow(self, following)?;
            lockstep::begin(&self.machine(), following, state)?;
        }
        Ok(following)
    }
}
