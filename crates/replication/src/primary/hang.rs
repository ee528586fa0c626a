//! A QEMU that lives and does nothing is a failed guest: its backup goes on with it.

use super::session::Session;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_machine::Machine;
use understudy_machine::attention::HangDetector;
use understudy_protocol::{PrimaryEvent, PrimaryPhase};

/// Looks until protection is over. `bound` is for how long QEMU may be silent.
pub(super) fn watch(session: &Weak<Session>, bound: Duration) {
    let mut detector = HangDetector::new(bound);
    let mut watched: Weak<Machine> = Weak::new();
    let mut told = false;
    let mut looked = Instant::now();
    loop {
        // At ordinary urgency: where threads are starved, QEMU's main loop is, too.
        thread::sleep(detector.interval());
        let Some(session) = session.upgrade().filter(|session| !session.is_over()) else { return };
        let machine = session.machine();
        if !std::ptr::eq(watched.as_ptr(), Arc::as_ptr(&machine)) {
            // The first, or the one that it goes on in.
            watched = Arc::downgrade(&machine);
            detector = HangDetector::new(bound);
        }
        let passed = looked.elapsed();
        looked = Instant::now();
        // A whole comparison stops QEMU again and again, and keeps its main loop from its turns.
        let recording = session.recording();
        let waits = recording.is_some_and(|log| log.is_blocked() || log.comparer.is_wanted());
        let silent = machine.look(&mut detector, passed, waits);
        if !detector.is_over() {
            told = false;
            continue;
        }
        hand_over(&session, silent, &mut told);
    }
}

/// There is nothing better than to wait where no backup could go on.
fn hand_over(session: &Session, silent: Duration, told: &mut bool) {
    let reason = format!("QEMU has not answered for {:.1} s", silent.as_secs_f64());
    if let Err(obstacle) = session.give_guest_up(&reason)
        && !std::mem::replace(told, true)
    {
        warn!(vm = %session.vm, "{reason}; {obstacle}");
    }
}

impl Session {
    /// Has the backup go on with the last epoch that it has, since the guest cannot go on here; the
    /// reason if it could not.
    pub fn give_guest_up(&self, reason: &str) -> Result<(), String> {
        let obstacle = match self.phase() {
            PrimaryPhase::Protected => self.group().obstacle(),
            PrimaryPhase::HandingOver => return Ok(()),
            phase => Some(format!("it is {phase:?}")),
        };
        match obstacle {
            None => {
                warn!(vm = %self.vm, "{reason}: host {} is to take over", self.peer);
                self.event(PrimaryEvent::GuestHangs(reason.to_owned()));
                Ok(())
            }
            Some(obstacle) => Err(format!("host {} could not take over: {obstacle}", self.peer)),
        }
    }
}
