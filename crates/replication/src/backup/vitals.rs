//! The answers that this standby awaits of its host: of its disks, and its QEMU. What has not
//! answered for too long is told from it (`understudy_session`).

use super::session::Session;
use crate::clock;
use crate::heartbeat::Pulse;
use anyhow::Context;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use understudy_protocol::{BackupPhase, Time};
use understudy_session::backup::{self, Event};

/// Time since which something has been awaited, in nanoseconds of [`clock`]; 0 if it is not.
#[derive(Debug, Default)]
pub(super) struct Awaited(AtomicU64);

impl Awaited {
    /// Begins to await it, until the guard is dropped.
    pub fn begin(&self) -> Await<'_> {
        let guard = Await(self);
        guard.again();
        guard
    }

    fn since(&self) -> Option<Time> {
        let nanos = self.0.load(Ordering::Acquire);
        (nanos > 0).then(|| Time(Duration::from_nanos(nanos)))
    }
}

/// A guard while something is awaited.
pub(super) struct Await<'a>(&'a Awaited);

impl Await<'_> {
    /// Notes that it has answered, and is awaited again.
    pub fn again(&self) {
        self.0.0.store(clock::now().0.as_nanos() as u64, Ordering::Release);
    }
}

impl Drop for Await<'_> {
    fn drop(&mut self) {
        self.0.0.store(0, Ordering::Release);
    }
}

/// The vitals that a standby needs of its host.
#[derive(Debug, Default)]
pub(super) struct Vitals {
    /// Its mirrors take what is applied.
    pub applying: Awaited,
    /// The mirrors bring it to stable storage.
    pub settling: Awaited,
    /// The mirrors, and the activation record, take a write that changes nothing.
    pub proving: Awaited,
    /// Its QEMU answers.
    pub qemu: Awaited,
}

impl Vitals {
    fn awaited(&self) -> backup::Awaited {
        let disks = [&self.settling, &self.applying, &self.proving];
        let disk = disks.into_iter().filter_map(Awaited::since).min();
        backup::Awaited { disk, qemu: self.qemu.since() }
    }
}

impl Session {
    /// Looks at all members' vitals.
    pub(super) fn look_at_vitals(&self) {
        let mut awaited = Vec::new();
        self.group.each(|member| awaited.push(member.vitals.awaited()));
        self.event(Event::Look(awaited));
    }

    /// Finds out whether this host's disks still take what a take-over writes: while the guest writes
    /// nothing, nothing else does. A copy that could not be started is none, as after any failed write.
    pub(super) fn prove_disks(&self) {
        let awaited = self.vitals.proving.begin();
        let proven = self.try_disks(&awaited);
        drop(awaited);
        if let Err(error) = proven
            && self.follows()
        {
            self.give_up(&format!("the backup cannot write what a take-over needs: {error:#}"));
        }
    }

    fn try_disks(&self, awaited: &Await<'_>) -> anyhow::Result<()> {
        self.records.prove_activation(&self.vm)?;
        for disk in self.machine().disks() {
            awaited.again();
            disk.prove_writable().with_context(|| disk.path().display().to_string())?;
        }
        Ok(())
    }

    fn follows(&self) -> bool {
        matches!(self.phase(), BackupPhase::Syncing | BackupPhase::Standing) && !self.is_over()
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
            && self.follows()
            && machine.is_alive()
            && Arc::ptr_eq(&machine, &self.machine())
        {
            self.give_up(&format!("the standby's QEMU does not answer: {error}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_been_awaited_since_the_oldest_call_that_is_not_answered() {
        let vitals = Vitals::default();
        assert_eq!(vitals.awaited(), backup::Awaited::default());
        let settling = vitals.settling.begin();
        let since = vitals.awaited().disk.unwrap();
        std::thread::sleep(Duration::from_millis(2));
        let applying = vitals.applying.begin();
        drop(vitals.proving.begin());
        assert_eq!(vitals.awaited().disk, Some(since));
        settling.again();
        assert!(vitals.awaited().disk > Some(since), "it has answered");
        drop((settling, applying));
        assert_eq!(vitals.awaited(), backup::Awaited::default());
    }
}
