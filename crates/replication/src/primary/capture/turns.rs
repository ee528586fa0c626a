//! Turns between checkpoints and a log, as the capture thread carries them out: each is the end of
//! an epoch.

use super::{Capturer, Cut, End, Moved};
use crate::lockstep;
use crate::lockstep::primary::{Batches, Followed, Recording};
use crate::messages::Piece;
use crate::primary::pace::Outruns;
use crate::primary::send::Outgoing;
use crate::primary::{Next, inbound, mirror};
use anyhow::Context;
use std::sync::Arc;
use understudy_machine::Machine;
use understudy_machine::pause::Pause;
use understudy_machine::succession::hand_over;
use understudy_memory::DirtySet;
use understudy_protocol::Epoch;
use understudy_qemu::Monitor;
use understudy_qemu::lockstep::LogErrand;
use understudy_report::{DiskReads, Mode};
use understudy_threads::{lock, spawn};

impl Capturer<'_> {
    /// Checkpoints are being taken, and lockstep is due.
    pub(super) fn turn(&mut self) -> anyhow::Result<Option<End>> {
        let session = self.session;
        let begun = session.present.lock().turning.begin();
        let Some(prepared) = begun else { return Ok(None) };
        if prepared.mode != Mode::Lockstep {
            let already = "it gets checkpoints already".to_owned();
            session.present.change(|present| present.turning.failed(already));
            return Ok(None);
        }
        if let Some(next) = prepared.next {
            match self.move_into(next) {
                Ok(dirty) => {
                    let moved = Moved { dirty, disk_reads: prepared.disk_reads };
                    return Ok(Some(End::Moved(moved)));
                }
                Err(error) if self.machine.is_retired() => return Err(error),
                Err(error) => {
                    let why = format!("{error:#}");
                    session.present.change(|present| present.turning.failed(why));
                    return Ok(None);
                }
            }
        }
        let followed = self.turn_to_lockstep(prepared.disk_reads)?;
        Ok((followed == Followed::ToTheEnd).then_some(End::Over))
    }

    /// The epoch that runs goes on in another machine; gives what the guest has written in it.
    fn move_into(&mut self, next: Next) -> anyhow::Result<DirtySet> {
        let session = self.session;
        next.machine.track()?.tracker().arm()?;
        let lifted = self.pace.lift();
        let (tracker, dirty) = (&mut self.tracker, &mut self.dirty);
        let moved = hand_over(self.machine, &next.machine, || tracker.scan(dirty));
        self.pace.restore(lifted);
        if let Err(error) = moved {
            // Nobody else will find them any more.
            self.carried.append(&self.dirty);
            return Err(error);
        }
        session.moved(&next.machine)?;
        (next.adopt)(&next.machine);
        if let Err(error) = next.machine.ensure_running() {
            // The backup takes over what died.
            next.machine.halt();
            return Err(error.context("its new QEMU does not run it"));
        }
        fail::fail_point!("turn-moved");
        let mut written = std::mem::take(&mut self.carried);
        written.append(&self.dirty);
        Ok(written)
    }

    /// The next checkpoint is the last: from its pause on the backup gets the log. Returns when
    /// that has ended, and checkpoints go on if it did so for their sake.
    pub(super) fn turn_to_lockstep(&mut self, disk_reads: DiskReads) -> anyhow::Result<Followed> {
        let session = self.session;
        let recording = {
            let _rounds = lock(&session.rounds);
            let recording = session.begin_log(disk_reads);
            self.checkpoint(Cut::LogBegins)?;
            recording
        };
        fail::fail_point!("turn-captured");
        session.turn_captured();
        self.follow(&recording)
    }

    /// Sends the log until its end; checkpoints go on if it ended for their sake.
    pub(super) fn follow(&mut self, recording: &Arc<Recording>) -> anyhow::Result<Followed> {
        self.compare(recording)?;
        loop {
            let followed =
                lockstep::primary::run(self.session, self.machine, recording, &mut self.pace)?;
            if followed == Followed::ToTheEnd || self.turn_to_checkpoints()? {
                return Ok(followed);
            }
        }
    }

    /// Compares both machines as long as the backup follows this log.
    fn compare(&self, recording: &Arc<Recording>) -> anyhow::Result<()> {
        let (session, recording) = (self.session.clone(), recording.clone());
        let compare = move || {
            lockstep::compare::primary::run(&session, &session.machine(), &recording);
        };
        spawn(format!("compare-{}", self.session.vm), compare)
            .map(drop)
            .context("cannot start a thread")
    }

    /// The log ends with a checkpoint, and others follow. False if that is wanted no more.
    fn turn_to_checkpoints(&mut self) -> anyhow::Result<bool> {
        let session = self.session;
        let begun = session.present.lock().turning.begin();
        if begun.is_none() {
            return Ok(false);
        }
        self.pace.set(1.0, Outruns::Backup);
        // What the backup's guest has written too.
        self.tracker.scan(&mut self.dirty)?;
        self.carried.clear();
        {
            let _rounds = lock(&session.rounds);
            self.checkpoint(Cut::LogEnds)?;
            session.end_log();
            lockstep::primary::release(self.machine)?;
        }
        inbound::begin(session);
        fail::fail_point!("turn-captured");
        session.turn_captured();
        Ok(true)
    }
}

impl<'a> Capturer<'a> {
    /// Stops the guest; gives the log that ends there, too.
    pub(super) fn stop<'m>(
        &self,
        cut: Cut,
        monitor: &'m mut Monitor,
    ) -> anyhow::Result<(Pause<'m>, Option<Batches<'a>>)>
    where
        'a: 'm,
    {
        let machine: &'a Machine = self.machine;
        let errand = match cut {
            Cut::LogEnds => {
                let recording = self.session.recording().context("there is no log")?;
                let mut log = Batches::new(self.session, machine, &recording)?;
                let pause = lockstep::primary::pause_at_end(machine, monitor, &mut log)?;
                return Ok((pause, Some(log)));
            }
            Cut::LogBegins => LogErrand::Attach,
            Cut::Plain | Cut::Last => LogErrand::None,
        };
        Ok((machine.pause(monitor, errand)?, None))
    }

    /// The log begins, or ends, at this position, if it does with this pause.
    pub(super) fn bound_log(
        &self,
        cut: Cut,
        log: Option<Batches<'_>>,
        epoch: Epoch,
        position: u64,
    ) -> anyhow::Result<()> {
        if cut == Cut::LogBegins {
            let recording = self.session.recording().context("there is no log")?;
            lockstep::primary::begin(self.machine, &recording, position)?;
        }
        if let Some(log) = log {
            let rest = lockstep::primary::end(log, epoch, position)?;
            // Before the guest runs, whose disk writes are refused until the log has ended.
            let outbox = &self.session.outbox;
            outbox.put_now(Outgoing::Piece(epoch, Piece::LogEnds(rest.into_log())));
            mirror::resume(self.session);
        }
        Ok(())
    }
}
