//! A guest that QEMU has stopped at an error of this host's disk. The request that failed is a part
//! of the machine's state: it is made again when the guest goes on, here or on its backup.

use crate::Machine;
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_protocol::{DISK_BOUND, DiskIndex};
use understudy_qemu::definition::{DiskBus, DiskDefinition};
use understudy_qemu::qmp::RunState;
use understudy_threads::{Mutex, lock};

/// Time between two tries of the request that failed: room on a full disk may be made meanwhile.
pub const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// The error at which the guest stands still, if it does.
#[derive(Debug, Default)]
pub(crate) struct DiskErrors(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    current: Option<DiskError>,
    told: Option<(DiskError, Instant)>,
}

/// An error of a disk, as QEMU tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DiskError {
    /// QEMU's name of the disk: `disk0`.
    pub node: String,
    pub reason: String,
}

impl std::fmt::Display for DiskError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "an error on {}: {}", self.node, self.reason)
    }
}

/// The notice about a disk that does not answer.
pub fn hung(disk: DiskIndex, silent: Duration) -> String {
    format!("disk{disk} has not answered for {} s", silent.as_secs())
}

impl DiskErrors {
    /// Notes that the guest was stopped. Whether to tell: the same again only after the next try.
    pub fn stopped(&self, error: DiskError, now: Instant) -> bool {
        let mut state = lock(&self.0);
        state.current = Some(error.clone());
        let known = |(told, at): &(DiskError, Instant)| {
            *told == error && now.saturating_duration_since(*at) < RETRY_INTERVAL
        };
        if state.told.as_ref().is_some_and(known) {
            return false;
        }
        state.told = Some((error, now));
        true
    }

    /// Notes that the guest goes on.
    pub fn resumed(&self) {
        lock(&self.0).current = None;
    }

    fn current(&self) -> Option<DiskError> {
        lock(&self.0).current.clone()
    }
}

impl Machine {
    /// The reason why the guest stands still, if an error of a disk has stopped it, and what
    /// becomes of it.
    pub fn disk_error(&self) -> Option<String> {
        let Some(error) = self.process.disk_errors.current() else {
            return self.hidden_disk_error().or_else(|| self.hung_disk());
        };
        let failed = |disk: &&std::sync::Arc<understudy_disk::Disk>| {
            disk.has_lost_writes() && error.node == format!("disk{}", disk.index())
        };
        let then = match self.disks().iter().find(failed) {
            None => format!("it is tried again every {} s", RETRY_INTERVAL.as_secs()),
            Some(_) => format!(
                "what the guest wrote is lost, and it stands still for good: `understudy vm stop \
                 {vm} --force`, then `understudy vm start {vm}`, starts it as after a power failure",
                vm = self.definition.name
            ),
        };
        Some(format!("{error}; {then}"))
    }

    /// An error on the firmware's variables, which QEMU keeps from the guest: that goes on as if they were
    /// on the disk. A backup's QEMU writes all of them anew.
    pub fn hidden_disk_error(&self) -> Option<String> {
        let definition = self.definition();
        let variables = |(disk, _): &(&DiskDefinition, _)| disk.bus == DiskBus::Pflash;
        let disks = self.disks();
        let (_, disk) = definition.disks.iter().zip(&disks).find(variables)?;
        let reason = disk.first_error()?;
        let error = DiskError { node: format!("disk{}", disk.index()), reason };
        Some(format!(
            "{error}; the guest was not told, and what it has changed of its firmware's variables is \
             lost at its next start here"
        ))
    }

    /// The disk that does not answer, if one has not for too long.
    fn hung_disk(&self) -> Option<String> {
        let hung = |disk: &std::sync::Arc<understudy_disk::Disk>| {
            let (_, silent) = disk.longest_wait()?;
            (silent > DISK_BOUND).then(|| hung(disk.index(), silent))
        };
        let words = self.disks().iter().find_map(hung)?;
        Some(format!("{words}; the guest goes on as soon as it does"))
    }

    /// Lets a guest go on that an error has stopped: QEMU makes the request again that failed.
    pub fn try_disks_again(&self) {
        if self.process.disk_errors.current().is_none() {
            return;
        }
        let mut monitor = self.monitor();
        let tried = monitor.status().and_then(|state| match state {
            RunState::io_error => monitor.cont(),
            _ => Ok(()),
        });
        if let Err(error) = tried {
            warn!(vm = %self.definition.name, "cannot try the disk again: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_told_once_for_each_try() {
        let (errors, begin) = (DiskErrors::default(), Instant::now());
        let error = || DiskError { node: "disk0".into(), reason: "full".into() };
        let other = DiskError { node: "disk1".into(), reason: "full".into() };
        assert_eq!(errors.current(), None);
        assert!(errors.stopped(error(), begin));
        assert!(!errors.stopped(error(), begin + RETRY_INTERVAL / 2), "of many requests");
        assert_eq!(errors.current(), Some(error()));
        errors.resumed();
        assert_eq!(errors.current(), None);
        assert!(errors.stopped(error(), begin + RETRY_INTERVAL), "tried in vain");
        assert!(errors.stopped(other, begin + RETRY_INTERVAL), "another one");
    }
}
