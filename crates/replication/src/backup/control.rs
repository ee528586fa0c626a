//! The questions to the arbiter, which may take its time.

use super::session::Session;
use crate::moments::pass;
use crossbeam_channel::Receiver;
use std::time::Duration;
use tracing::{info, warn};
use understudy_protocol::{BackupPhase, Generation, Verdict};
use understudy_session::backup::Event;

/// A question to the arbiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// This host wants the generation after this one.
    Win(Generation),
    /// The former primary is to have the VM back, which this host won at this generation.
    HandBack(Generation),
}

/// Asks until it is certain that nothing more is to be asked: not before the guest runs here, or
/// the VM is forgotten.
pub(super) fn run(session: &Session, questions: &Receiver<Ask>) {
    loop {
        match questions.recv_timeout(Duration::from_millis(250)) {
            Ok(question) => ask(session, question),
            Err(_) => match session.phase() {
                BackupPhase::Discarded => return,
                BackupPhase::Live if session.has_ended() => return,
                // The heartbeats, which tell the time else, have ended.
                BackupPhase::HandingBack(_) => session.event(Event::Tick),
                _ => {}
            },
        }
    }
}

fn ask(session: &Session, question: Ask) {
    let (membership, arbiter) = (session.membership(), &session.arbiter);
    let verdict = match question {
        Ask::Win(from) => membership.acquire(arbiter, from),
        Ask::HandBack(from) => membership.hand_back(arbiter, from, &session.primary),
    };
    pass("before-verdict");
    info!(vm = %session.vm, "{question:?}, the arbiter's verdict: {verdict:?}");
    if let Verdict::Unreachable(reason) = &verdict {
        match question {
            Ask::Win(_) => warn!(vm = %session.vm, "waiting to take over: {reason}"),
            Ask::HandBack(_) => warn!(vm = %session.vm, "waiting to hand it back: {reason}"),
        }
    }
    session.event(Event::Verdict(verdict));
}
