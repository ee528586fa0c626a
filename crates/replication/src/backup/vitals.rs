//! Whether this standby could be started now, as far as this host alone is concerned: its disks
//! answer, and its QEMU. One that could not contests nothing, and its primary hears why.

use super::session::Session;
use crate::heartbeat::Pulse;
use std::time::{Duration, Instant};
use tracing::{info, warn};
use understudy_protocol::{BackupEvent, BackupPhase};
use understudy_threads::{Mutex, lock};

/// A disk or a QEMU that has not answered for so long hangs. Twice what the settling of an epoch
/// takes on a disk that is merely busy, and far less than what a primary waits for a proof.
const PATIENCE: Duration = Duration::from_secs(3);

/// Since when something has been awaited, if it is.
#[derive(Debug, Default)]
pub(super) struct Awaited(Mutex<Option<Instant>>);

impl Awaited {
    /// It is awaited from now on, until the guard is dropped.
    pub fn begin(&self) -> Await<'_> {
        let guard = Await(self);
        guard.again();
        guard
    }

    fn overdue(&self, now: Instant) -> Option<Duration> {
        let since = (*lock(&self.0))?;
        Some(now.saturating_duration_since(since)).filter(|silence| *silence > PATIENCE)
    }
}

/// Something is awaited.
pub(super) struct Await<'a>(&'a Awaited);

impl Await<'_> {
    /// It has answered, and is awaited again.
    pub fn again(&self) {
        *lock(&self.0.0) = Some(Instant::now());
    }
}

impl Drop for Await<'_> {
    fn drop(&mut self) {
        *lock(&self.0.0) = None;
    }
}

/// What a standby needs of its host.
#[derive(Debug, Default)]
pub(super) struct Vitals {
    /// Its mirrors take what is applied.
    pub applying: Awaited,
    /// They bring it to stable storage.
    pub settling: Awaited,
    /// Its QEMU answers.
    pub qemu: Awaited,
    ailment: Mutex<Option<String>>,
}

impl Vitals {
    fn look(&self, now: Instant) -> Option<String> {
        let says = |what: &'static str| {
            move |silence: Duration| format!("{what} has not answered for {} s", silence.as_secs())
        };
        let disk = self.settling.overdue(now).or_else(|| self.applying.overdue(now));
        disk.map(says("its disk")).or_else(|| self.qemu.overdue(now).map(says("its QEMU")))
    }

    /// Why the standby could not be started, as it was last seen.
    pub fn ailment(&self) -> Option<String> {
        lock(&self.ailment).clone()
    }
}

impl Session {
    /// Looks at all members' vitals; what changes is told at once.
    pub(super) fn look_at_vitals(&self) {
        let now = Instant::now();
        let mut found = None;
        self.group.each(|member| {
            found = found.take().or_else(|| member.vitals.look(now));
        });
        let before = std::mem::replace(&mut *lock(&self.vitals.ailment), found.clone());
        if before.is_some() == found.is_some() {
            return;
        }
        match &found {
            Some(ailment) => warn!(vm = %self.vm, "could not be started now: {ailment}"),
            None => info!(vm = %self.vm, "could be started again"),
        }
        self.event(BackupEvent::Fitness(found), None);
        self.tell_obstacle();
    }

    /// Asks the standby's QEMU for a sign of life. In lockstep it executes its log, and is watched
    /// for that.
    pub(super) fn probe_qemu(&self) {
        if self.following().is_some() {
            return;
        }
        let machine = self.machine();
        let awaited = self.vitals.qemu.begin();
        let answered = machine.monitor().status();
        drop(awaited);
        if let Err(error) = answered
            && matches!(self.phase(), BackupPhase::Syncing | BackupPhase::Standing)
            && !self.is_over()
            && machine.is_alive()
            && std::sync::Arc::ptr_eq(&machine, &self.machine())
        {
            self.give_up(&format!("the standby's QEMU does not answer: {error}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_awaited_for_too_long_is_an_ailment_until_it_comes() {
        let vitals = Vitals::default();
        let later = |seconds| Instant::now() + Duration::from_secs(seconds);
        assert_eq!(vitals.look(later(60)), None, "nothing is awaited");
        let settling = vitals.settling.begin();
        let qemu = vitals.qemu.begin();
        assert_eq!(vitals.look(later(2)), None);
        assert_eq!(vitals.look(later(9)).unwrap(), "its disk has not answered for 9 s");
        drop(settling);
        assert_eq!(vitals.look(later(9)).unwrap(), "its QEMU has not answered for 9 s");
        drop(qemu);
        assert_eq!(vitals.look(later(9)), None);
    }
}
