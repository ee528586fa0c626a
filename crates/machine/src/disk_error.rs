//! A guest that QEMU has stopped at an error of this host's disk. The request that failed is a part
//! of the machine's state: it is made again when the guest goes on, here or on its backup.

use crate::Machine;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_protocol::{DISK_BOUND, DiskIndex};
use understudy_qemu::definition::{DiskBus, DiskDefinition};
use understudy_qemu::qmp::RunState;

/// Time between two tries of the request that failed: room on a full disk may be made meanwhile.
pub const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// QEMU's words for the errors that a server of disks answers.
const REASONS: [&str; 8] = [
    "Operation not permitted",
    "Input/output error",
    "Cannot allocate memory",
    "Invalid argument",
    "No space left on device",
    "Value too large for defined data type",
    "Operation not supported",
    "Cannot send after transport endpoint shutdown",
];

/// The error at which the guest stands still, if it does, in one word, which QEMU's events write and anybody
/// reads: the number of the disk and one more below, the place among [`REASONS`] above; 0 if it does not.
#[derive(Debug, Default)]
pub(crate) struct CurrentError(AtomicU32);

/// The last error that was told.
#[derive(Debug, Default)]
pub(crate) struct Told(Option<(DiskError, Instant)>);

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

impl CurrentError {
    /// Notes that the guest was stopped.
    pub fn stopped(&self, error: &DiskError) {
        let number = error.node.strip_prefix("disk").and_then(|number| number.parse().ok());
        let disk = number.and_then(|number: u16| number.checked_add(1)).unwrap_or(u16::MAX);
        let reason = REASONS.iter().position(|reason| *reason == error.reason);
        let reason = reason.unwrap_or(REASONS.len()) as u32;
        self.0.store(u32::from(disk) | reason << u16::BITS, Ordering::Release);
    }

    /// Notes that the guest goes on.
    pub fn resumed(&self) {
        self.0.store(0, Ordering::Release);
    }

    fn get(&self) -> Option<DiskError> {
        let word = self.0.load(Ordering::Acquire);
        let node = match word as u16 {
            0 => return None,
            u16::MAX => "a disk".to_owned(),
            number => format!("disk{}", number - 1),
        };
        let reason = REASONS.get((word >> u16::BITS) as usize);
        let reason = reason.unwrap_or(&"one that its event names").to_string();
        Some(DiskError { node, reason })
    }
}

impl Told {
    /// Whether to tell this one: the same again only after the next try.
    pub fn is_to_tell(&mut self, error: DiskError, now: Instant) -> bool {
        let known = |(told, at): &(DiskError, Instant)| {
            *told == error && now.saturating_duration_since(*at) < RETRY_INTERVAL
        };
        if self.0.as_ref().is_some_and(known) {
            return false;
        }
        self.0 = Some((error, now));
        true
    }
}

impl Machine {
    /// The reason why the guest stands still, if an error of a disk has stopped it, and what
    /// becomes of it.
    pub fn disk_error(&self) -> Option<String> {
        let Some(error) = self.process.disk_error.get() else {
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
        if self.process.disk_error.get().is_none() {
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

    fn error(node: &str, reason: &str) -> DiskError {
        DiskError { node: node.into(), reason: reason.into() }
    }

    #[test]
    fn an_error_is_told_once_for_each_try() {
        let (mut told, begin) = (Told::default(), Instant::now());
        let full = || error("disk0", "full");
        assert!(told.is_to_tell(full(), begin));
        assert!(!told.is_to_tell(full(), begin + RETRY_INTERVAL / 2), "of many requests");
        assert!(told.is_to_tell(full(), begin + RETRY_INTERVAL), "tried in vain");
        assert!(told.is_to_tell(error("disk1", "full"), begin + RETRY_INTERVAL), "another one");
    }

    #[test]
    fn the_error_at_which_a_guest_stands_is_known_until_it_goes_on() {
        let current = CurrentError::default();
        assert_eq!(current.get(), None);
        for (number, reason) in (0..).zip(REASONS) {
            let error = error(&format!("disk{number}"), reason);
            current.stopped(&error);
            assert_eq!(current.get(), Some(error));
        }
        current.resumed();
        assert_eq!(current.get(), None);
        current.stopped(&error("", "Broken"));
        assert_eq!(current.get(), Some(error("a disk", "one that its event names")));
    }
}
