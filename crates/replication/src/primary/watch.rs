//! The thread that watches over a session. It looks whether the guest hangs; and it asks the arbiter,
//! which may take its time, and, while this host keeps a guest that another one has won, that one.
//!
//! Who asks has lost the backup: nobody could go on with a guest that hangs meanwhile.

use super::hang::HangWatch;
use super::session::Session;
use anyhow::Context;
use crossbeam_channel::Receiver;
use std::time::{Duration, Instant};
use tracing::{debug, error, info, warn};
use understudy_protocol::{Generation, PrimaryPhase, Verdict};
use understudy_session::hand_back::WinnersWord;
use understudy_session::primary::Event;

/// Time between two samples of the bandwidth.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(250);

/// Watches until protection is over. At ordinary urgency: where threads are starved, QEMU's main
/// loop is, too. `bound` is for how long that may be silent.
pub(super) fn run(session: &Session, contests: &Receiver<Generation>, bound: Duration) {
    let (mut hangs, mut sampled) = (HangWatch::new(bound), Instant::now());
    while !session.is_over() {
        match contests.recv_deadline(hangs.due().min(sampled + SAMPLE_INTERVAL)) {
            Ok(from) => contest(session, from),
            Err(_) if hangs.due() <= Instant::now() => hangs.look(session),
            Err(_) => {
                session.stats.sample();
                sampled = Instant::now();
            }
        }
    }
}

fn contest(session: &Session, from: Generation) {
    // Before the arbiter: see what comes of both.
    let word = session.ask_winner(from);
    let mut verdict = session.membership().acquire(&session.arbiter, from);
    if let Verdict::Returned(generation) = verdict
        && let Err(error) = session.note_return(generation)
    {
        verdict = Verdict::Unreachable(format!("the VM is back, and cannot be noted: {error:#}"));
    }
    match (&verdict, session.phase()) {
        (Verdict::Taken(_), PrimaryPhase::Frozen(_)) => {
            debug!(vm = %session.vm, "still another host's: {verdict:?}");
        }
        _ => info!(vm = %session.vm, "the arbiter's verdict: {verdict:?}"),
    }
    if let Verdict::Unreachable(reason) = &verdict {
        error!(vm = %session.vm, "output stays held: {reason}");
    }
    session.event(Event::Verdict(verdict, word));
}

impl Session {
    fn ask_winner(&self, from: Generation) -> WinnersWord {
        let winner = self.group.core().winner().cloned();
        let winner = winner.and_then(|owner| owner.host);
        let word = winner.and_then(|host| (self.ask_winner)(&host, self.membership(), from));
        word.unwrap_or_default()
    }

    /// The group's VMs were handed back: that is on stable storage before anything leaves them.
    fn note_return(&self, leaders: Generation) -> anyhow::Result<()> {
        for member in &self.membership().members {
            let generation = self.membership().generation_of(member, leaders);
            self.records
                .change(&member.vm, |record| record.image.generation = generation)
                .with_context(|| member.vm.to_string())?;
        }
        Ok(())
    }

    /// Lets a guest stand still that is kept. It is no matter of safety: nothing leaves it. In
    /// lockstep its log goes to nowhere by now, so that QEMU does not wait for room in it.
    pub(super) fn freeze(&self) {
        info!(vm = %self.vm, "this copy is kept, and stands still");
        if let Err(error) = self.machine().monitor().stop() {
            warn!(vm = %self.vm, "the guest does not stop: {error}");
        }
    }
}
