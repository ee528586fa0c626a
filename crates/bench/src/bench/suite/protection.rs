//! A guest's protection, from one variant to the next, and what it does meanwhile.

use super::statistics::quantile;
use super::store::ProtectionFigures;
use crate::bench::words;
use anyhow::{Result, bail, ensure};
use std::thread;
use std::time::{Duration, Instant};
use understudy_client::{Client, FailureKind};
use understudy_lab::scene::VM;
use understudy_lab::wait_for;
use understudy_report::ErrorKind;
use understudy_report::{CheckpointTiming, ProtectRequest, Protection, VmStatus};

/// Time for the first synchronisation of a guest, on a busy machine.
const SYNC_LIMIT: Duration = Duration::from_secs(180);
/// Time for the backup to have forgotten a guest.
const FORGET_LIMIT: Duration = Duration::from_secs(60);
/// Time between two looks at the daemons while the guest is not measured.
const GLANCE: Duration = Duration::from_millis(50);
/// The first checkpoints after a synchronisation are larger than those to come.
const SETTLE: Duration = Duration::from_secs(1);
/// A guest with less than this in a workload may have had no checkpoint in it.
const SURELY_A_CHECKPOINT: Duration = Duration::from_secs(2);

/// Protects the guest as asked, and returns once it is and has settled.
pub fn begin(primary: &Client, vm: &str, request: &ProtectRequest) -> Result<()> {
    primary.protect(vm, request).map_err(words)?;
    let begun = Instant::now();
    loop {
        let status = primary.vm_status(vm).map_err(words)?;
        match status.protection {
            Protection::Syncing { .. } => {}
            _ if follows(&status) => break,
            other => bail!("the guest could not be protected: {other:?}"),
        }
        ensure!(begun.elapsed() < SYNC_LIMIT, "not protected after {SYNC_LIMIT:?}");
        thread::sleep(GLANCE);
    }
    thread::sleep(SETTLE);
    Ok(())
}

/// Ends the protection, and returns once the backup has forgotten the guest: nothing of
/// one variant falls into the next.
pub fn end(primary: &Client, backup: &Client, vm: &str) -> Result<()> {
    primary.unprotect(vm).map_err(words)?;
    wait_for("host b to forget the guest", FORGET_LIMIT, || match backup.vm_status(vm) {
        Err(failure) if failure.kind == FailureKind::Host(ErrorKind::NotFound) => Ok(Some(())),
        Err(failure) => Err(words(failure)),
        Ok(_) => Ok(None),
    })
}

/// Whether a backup follows the guest.
fn follows(status: &VmStatus) -> bool {
    matches!(status.protection, Protection::Protected { .. } | Protection::Unheld { .. })
}

/// The daemon's counters at the beginning of a workload.
pub struct Watch {
    before: VmStatus,
    begun: Instant,
}

impl Watch {
    /// Begins to watch; the guest is protected.
    pub fn begin(primary: &Client) -> Result<Watch> {
        Ok(Watch { before: primary.vm_status(VM).map_err(words)?, begun: Instant::now() })
    }

    /// Work that the daemon did since. An error if the guest was not protected all the time: the
    /// workload's figure would be of something else.
    pub fn end(self, primary: &Client) -> Result<Stretch> {
        let (after, took) = (primary.vm_status(VM).map_err(words)?, self.begun.elapsed());
        let (checkpoints, sent) = between(&self.before, &after, took)?;
        let mut timings = primary.timings(VM).map_err(words)?;
        timings.retain(|timing| timing.epoch > self.before.epoch && timing.epoch <= after.epoch);
        Ok(Stretch { checkpoints, sent, took, timings })
    }
}

/// Work that the daemon did while the guest was protected, from one moment to another.
#[derive(Debug)]
pub struct Stretch {
    /// Checkpoints that were committed.
    pub checkpoints: u64,
    /// Bytes to the backup.
    pub sent: u64,
    /// Time that it took.
    pub took: Duration,
    /// Timings of those checkpoints, the last ones at least.
    pub timings: Vec<CheckpointTiming>,
}

/// Checkpoints, and bytes to the backup, from the one to the other.
fn between(before: &VmStatus, after: &VmStatus, took: Duration) -> Result<(u64, u64)> {
    ensure!(follows(after), "protection was lost: {:?}; {:?}", after.protection, after.events);
    let checkpoints = after.checkpoints.checked_sub(before.checkpoints);
    let sent = after.bytes_sent.checked_sub(before.bytes_sent);
    let (Some(checkpoints), Some(sent)) = (checkpoints, sent) else {
        bail!("protection began anew in between: {:?}", after.events)
    };
    ensure!(
        checkpoints > 0 || took < SURELY_A_CHECKPOINT,
        "there was no checkpoint in {took:?}: this was no protection"
    );
    Ok((checkpoints, sent))
}

impl Stretch {
    /// The report's figures.
    pub fn figures(&self) -> ProtectionFigures {
        let Stretch { checkpoints, sent, took, timings } = self;
        let pauses: Vec<f64> = timings.iter().map(|timing| timing.total_ms).collect();
        ProtectionFigures {
            replication_mbit_s: *sent as f64 * 8.0 / 1e6 / took.as_secs_f64(),
            checkpoints_per_s: *checkpoints as f64 / took.as_secs_f64(),
            pause_p50_ms: quantile(&pauses, 0.5),
            pause_p99_ms: quantile(&pauses, 0.99),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;
    use understudy_report::Role;

    #[test]
    fn counters_become_rates() {
        let timing = |total_ms| CheckpointTiming { total_ms, ..Default::default() };
        let timings = [timing(1.0), timing(9.0), timing(2.0)];
        let (took, timings) = (Duration::from_secs(2), timings.to_vec());
        let figures = Stretch { checkpoints: 30, sent: 2_500_000, took, timings }.figures();
        assert_eq!((figures.replication_mbit_s, figures.checkpoints_per_s), (10.0, 15.0));
        assert_eq!((figures.pause_p50_ms, figures.pause_p99_ms), (Some(2.0), Some(9.0)));
    }
    #[test]
    fn what_was_not_protected_all_the_time_has_no_figure() {
        let protected = Protection::Protected { peer: literal("b") };
        let status = |checkpoints, bytes_sent| VmStatus {
            protection: protected.clone(),
            checkpoints,
            bytes_sent,
            ..VmStatus::new(&literal("vm"), Role::Primary)
        };
        let before = status(100, 5000);
        let long = SURELY_A_CHECKPOINT;
        let error = |after| between(&before, &after, long).unwrap_err().to_string();
        assert_eq!(between(&before, &status(130, 7000), long).unwrap(), (30, 2000));
        assert_eq!(between(&before, &before, long / 2).unwrap(), (0, 0));
        assert!(error(before.clone()).contains("no checkpoint"));
        assert!(error(status(7, 9000)).contains("began anew"));
        assert!(error(status(700, 9)).contains("began anew"));
        let lost = VmStatus { protection: Protection::Off, ..status(130, 7000) };
        assert!(error(lost).contains("lost"));
    }
}
