//! The changed blocks that need not be copied after a failure: those that both hosts have.
//!
//! In lockstep nothing is sent of a write, each guest writes its own image. So each host counts
//! what its image has, and tells the other twice a second; the backup what is on stable storage.
//! A block is struck off a host's list once the other host has the writes up to that moment:
//!
//! - the primary's list holds what the backup's mirror may lack;
//! - the backup's, which counts after a take-over, what the lost primary's image may lack: writes
//!   that its QEMU had begun and its daemon had not carried out.
//!
//! After a write that failed, on either host, that host strikes nothing off any more, and tells
//! the other nothing.

use anyhow::ensure;
use understudy_disk::{GuestWrites, Rounds};
use understudy_lockstep::{self as lockstep, Written};
use understudy_machine::Machine;
use understudy_threads::{Mutex, lock};

/// A session's counts on one host.
#[derive(Debug, Default)]
pub struct Writes {
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    /// Counts at the beginning of the log.
    bases: Option<Vec<GuestWrites>>,
    rounds: lockstep::Rounds,
}

impl Counts {
    fn since_begin(&self, counts: impl Iterator<Item = GuestWrites>) -> Option<Written> {
        let since = |(now, base): (GuestWrites, &GuestWrites)| {
            (now.failed == base.failed).then_some(now.count - base.count)
        };
        counts.zip(self.bases.as_ref()?).map(since).collect::<Option<_>>().map(Written)
    }
}

impl Writes {
    /// The guest stands still, and its log begins.
    pub fn begin(&self, machine: &Machine) {
        let bases = machine.disks().iter().map(|disk| disk.guest_writes()).collect();
        lock(&self.counts).bases = Some(bases);
    }

    /// The writes that this host's images have now; none if that cannot be told.
    pub fn now(&self, machine: &Machine) -> Option<Written> {
        let disks = machine.disks();
        lock(&self.counts).since_begin(disks.iter().map(|disk| disk.guest_writes()))
    }

    /// The other host says what it has.
    pub fn told(&self, written: Written, disks: usize) -> anyhow::Result<()> {
        let counts = written.0.len();
        ensure!(counts == disks, "counts came of {counts} disks, where there are {disks}");
        lock(&self.counts).rounds.told(written);
        Ok(())
    }

    /// Strikes off what both hosts have, as the session's rounds. The log has begun.
    pub fn strike_off(&self, machine: &Machine, rounds: Rounds) -> anyhow::Result<()> {
        let mut counts = lock(&self.counts);
        if !counts.rounds.may_forget() {
            return Ok(());
        }
        let mut now = Vec::new();
        for disk in machine.disks() {
            // The log may have just ended.
            let Some(changes) = disk.changes() else { return Ok(()) };
            changes.end_round(rounds)?;
            now.push(disk.begin_round(rounds));
        }
        let written = counts.since_begin(now.into_iter());
        counts.rounds.set_aside(written);
        Ok(())
    }
}
