//! The messages of the backup: acknowledgements, which release output, how far it is with the rest,
//! and its last word.

use super::session::Session;
use crate::lockstep::be_urgent;
use crate::lockstep::primary::Recording;
use crate::lockstep::writes::Writes;
use crate::messages::ToPrimary;
use crate::moments::strike;
use anyhow::bail;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tracing::info;
use understudy_protocol::Epoch;
use understudy_protocol::wire::{Kind, LogProgress};
use understudy_session::primary::{Event, MACHINE};

/// Receives until the connection ends, or the backup has said its last word.
pub fn run(session: &Session) {
    let reason = loop {
        match receive_one(session) {
            Ok(ControlFlow::Continue(())) => {}
            Ok(ControlFlow::Break(())) => return,
            Err(error) => break format!("{error:#}"),
        }
    };
    session.event(Event::PeerGone(reason));
}

fn receive_one(session: &Session) -> anyhow::Result<ControlFlow<()>> {
    match ToPrimary::decode(session.data.receive()?)? {
        ToPrimary::Acknowledge(epoch) => {
            strike("receive", &session.vm);
            acknowledged(session, epoch);
        }
        ToPrimary::Progress(progress) => {
            if let Some(recording) = log_of(session, Kind::Progress)? {
                progressed(session, &recording, progress);
            }
        }
        ToPrimary::MayTakeOver(obstacle) => session.event(Event::MayTakeOver(obstacle)),
        ToPrimary::Works(bytes) => session.work.applied(bytes),
        ToPrimary::Settled(epoch) => settled(session, epoch),
        ToPrimary::Written(written) => {
            if let Some(recording) = log_of(session, Kind::Written)? {
                recording.told_writes(written, session.machine().disks().len())?;
            }
        }
        ToPrimary::Kept(kept) => session.kept(kept),
        ToPrimary::Compared(findings) => {
            if let Some(recording) = log_of(session, Kind::Compared)? {
                recording.comparer().heard(findings);
            }
        }
        ToPrimary::MediumAnswer(answer) => session.medium_answered(answer),
        ToPrimary::TurnAnswer(answer) => session.turn_answered(answer),
        ToPrimary::StoodDown => {
            session.event(Event::StoodDown(session.place));
            return Ok(ControlFlow::Break(()));
        }
        ToPrimary::Live(generation) => session.event(Event::LiveElsewhere(generation)),
        ToPrimary::Diverged(reason) => {
            fail::fail_point!("before-diverged");
            session.diverge();
            bail!(reason);
        }
        ToPrimary::Refuse { reason, mirrors_failed } => {
            if mirrors_failed {
                session.distrust_mirrors();
            }
            bail!(reason);
        }
    }
    Ok(ControlFlow::Continue(()))
}

fn acknowledged(session: &Session, epoch: Epoch) {
    if let Some(recording) = session.recording() {
        recording.acknowledged(epoch);
        // Output waits for this thread from here on, and for nothing else.
        if epoch == recording.machine() {
            be_urgent();
        }
    }
    session.event(Event::Acknowledged(epoch));
}

/// The log that the backup speaks of; none if that has ended, which the backup may not know yet.
fn log_of(session: &Session, said: Kind) -> anyhow::Result<Option<Arc<Recording>>> {
    let recording = session.recording();
    if recording.is_none() && session.turned() <= MACHINE {
        bail!("the backup sent {said:?}, but follows no log");
    }
    Ok(recording)
}

fn progressed(session: &Session, recording: &Recording, progress: LogProgress) {
    session.work.executed(progress.position);
    let other_pace = recording.progressed(progress);
    if other_pace || recording.is_blocked() {
        session.group.ring();
    }
}

fn settled(session: &Session, epoch: Epoch) {
    if session.settled.fetch_max(epoch.0, Ordering::AcqRel) == 0 && epoch.0 > 0 {
        info!(vm = %session.vm, "the first copy is on the disks of host {}", session.peer);
        session.event(Event::Whole(session.place));
    }
    if let Some(references) = &session.references {
        references.settle(epoch);
    }
}
