//! A QEMU that lives and does nothing is a failed guest, and so is one whose disk does not answer:
//! its backup goes on with it.

use super::session::Session;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_disk::WaitId;
use understudy_machine::Machine;
use understudy_machine::attention::HangDetector;
use understudy_machine::disk_error;
use understudy_protocol::{DISK_BOUND, Silence};
use understudy_session::primary::{Effect, Event};

/// Looks at the guest's QEMU and disks, again and again.
pub(super) struct HangWatch {
    /// Time for which QEMU may be silent.
    bound: Duration,
    detector: HangDetector,
    watched: Weak<Machine>,
    disks: Disks,
    told: bool,
    looked: Instant,
}

impl HangWatch {
    pub fn new(bound: Duration) -> HangWatch {
        HangWatch {
            bound,
            detector: HangDetector::new(bound),
            watched: Weak::new(),
            disks: Disks(Vec::new()),
            told: false,
            looked: Instant::now(),
        }
    }

    /// The time at which to look again.
    pub fn due(&self) -> Instant {
        self.looked + self.detector.interval()
    }

    /// Looks once.
    pub fn look(&mut self, session: &Session) {
        let machine = session.machine();
        if !std::ptr::eq(self.watched.as_ptr(), Arc::as_ptr(&machine)) {
            // The first, or the one that it goes on in.
            self.watched = Arc::downgrade(&machine);
            self.detector = HangDetector::new(self.bound);
            self.disks = Disks::of(&machine, self.detector.interval());
        }
        let passed = self.looked.elapsed();
        self.looked = Instant::now();
        // A whole comparison stops QEMU again and again, and keeps its main loop from its turns.
        let recording = session.recording();
        let waits = recording.is_some_and(|log| log.is_blocked() || log.comparer().is_wanted());
        let silent = machine.look(&mut self.detector, passed, waits);
        let hangs = self.detector.is_over();
        let qemu =
            hangs.then(|| format!("QEMU has not answered for {:.1} s", silent.as_secs_f64()));
        let disk = self.disks.look(&machine, passed).or_else(|| machine.hidden_disk_error());
        match disk.or(qemu) {
            Some(reason) => hand_over(session, &reason, &mut self.told),
            None => self.told = false,
        }
    }
}

/// The silence of each disk of one machine.
struct Disks(Vec<Silence<WaitId>>);

impl Disks {
    fn of(machine: &Machine, interval: Duration) -> Disks {
        Disks(machine.disks().iter().map(|_| Silence::new(DISK_BOUND, interval)).collect())
    }

    /// The notice about the first that hangs.
    fn look(&mut self, machine: &Machine, passed: Duration) -> Option<String> {
        let mut hung = None;
        for (disk, silence) in machine.disks().iter().zip(&mut self.0) {
            let oldest = disk.longest_wait().map(|(call, _)| call);
            if let Some(silent) = silence.look(oldest, passed) {
                hung.get_or_insert_with(|| disk_error::hung(disk.index(), silent));
            }
        }
        hung
    }
}

/// Gives the guest up to the backup; where none could go on it is best to wait.
fn hand_over(session: &Session, reason: &str, told: &mut bool) {
    if let Err(obstacle) = session.give_guest_up(reason)
        && !std::mem::replace(told, true)
    {
        warn!(vm = %session.vm, "{reason}; {obstacle}");
    }
}

impl Session {
    /// Has the backup go on with the last epoch that it has, since the guest cannot go on here; the
    /// reason if it could not.
    pub fn give_guest_up(&self, reason: &str) -> Result<(), String> {
        let effects = self.event_told(Event::GuestSick(reason.to_owned()));
        effects.into_iter().find_map(Effect::into_held_back).map_or(Ok(()), Err)
    }
}
