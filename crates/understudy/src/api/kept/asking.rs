//! How a keeper is asked what it knows, and told what to do, and what its answer means.

use std::path::Path;
use std::time::Duration;
use understudy_client::{Client, Failure, FailureKind};
use understudy_daemon::config::LONGEST_LEASE;
use understudy_protocol::VmName;
use understudy_report::{ErrorKind, HostError};

/// Time for a keeper to say what it knows: one that hangs must not hide the others.
const PATIENCE: Duration = Duration::from_secs(2);
/// The longest for which one that does what it was told says nothing at all: it hangs then.
const SILENCE: Duration = Duration::from_secs(30);
/// Time for a keeper to start a VM, beside the lease of a silent host that it may wait for.
const START_PATIENCE: Duration = LONGEST_LEASE.saturating_add(Duration::from_secs(60));

/// Asks a keeper, or tells it what to do: that may take as long as it takes, while the keeper says how its VM is.
pub fn ask<T>(
    vm: &VmName,
    socket: &Path,
    question: impl FnOnce(&Client) -> Result<T, Failure>,
) -> Result<T, HostError> {
    let client =
        Client::new(socket).map(|client| client.patient(PATIENCE).while_heard(vm, SILENCE));
    understood(vm, client.and_then(|client| question(&client)))
}

/// Has a keeper start a VM.
pub fn start<T>(
    vm: &VmName,
    socket: &Path,
    order: impl FnOnce(&Client) -> Result<T, Failure>,
) -> Result<T, HostError> {
    let client = Client::new(socket);
    let client = client.map(|client| client.bounded(START_PATIENCE).while_heard(vm, SILENCE));
    understood(vm, client.and_then(|client| order(&client)))
}

/// What a keeper's answer means.
pub fn understood<T>(vm: &VmName, answer: Result<T, Failure>) -> Result<T, HostError> {
    answer.map_err(|failure| match failure.kind {
        FailureKind::Host(kind) => HostError::new(kind, failure.message),
        FailureKind::Usage | FailureKind::Degraded | FailureKind::DaemonUnreachable => {
            let message = format!("the keeper of {vm} does not answer: {}", failure.message);
            HostError::new(ErrorKind::Unreachable, message)
        }
        FailureKind::DaemonSilent => HostError::new(ErrorKind::Unreachable, silent(vm)),
    })
}

fn silent(vm: &VmName) -> String {
    format!(
        "the keeper of {vm} does not answer: it hangs, or waits, and may yet do what it was told; if that lasts \
         `understudy vm stop {vm} --force` ends it, and what it runs or backs up here (`understudy status {vm}` has its \
         process)"
    )
}
